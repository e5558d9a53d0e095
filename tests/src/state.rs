//! What a namespace holds that the operator answers for, without what differs from run to run: what faults must not
//! change.

use anyhow::{Result, ensure};
use serde_json::{Map, Value, json};
use std::collections::BTreeSet;

use crate::service;

/// Objects by kind and name.
#[derive(Clone, Debug, PartialEq)]
pub struct State(Value);

impl State {
    /// Of objects, each with the plural of its kind.
    pub fn of(objects: impl IntoIterator<Item = (&'static str, Value)>) -> State {
        // A ReplicaSet without replicas is a revision that was rolled away, kept as history.
        let is_history = |kind: &str, object: &Value| kind == "replicasets" && object["spec"]["replicas"] == 0;
        let objects = objects.into_iter().filter(|(kind, object)| !is_history(kind, object));
        State(objects.map(|(kind, object)| (name(kind, &object), lasting(kind, object))).collect())
    }

    /// What was made of the service, without the service itself.
    pub fn children(&self) -> State {
        let objects = self.0.as_object().into_iter().flatten();
        let children = objects.filter(|(name, _)| !name.starts_with(service::PLURAL));
        State(children.map(|(name, object)| (name.clone(), object.clone())).collect())
    }

    /// Whether there is one of this kind.
    pub fn has(&self, kind: &str) -> bool {
        self.0.as_object().is_some_and(|objects| objects.keys().any(|name| name.starts_with(kind)))
    }

    /// Whether it is as `wanted`.
    ///
    /// # Errors
    /// Every place in which it is not.
    pub fn ensure_is(&self, wanted: &State) -> Result<()> {
        let mut places = Vec::new();
        differences("", &self.0, &wanted.0, &mut places);
        ensure!(places.is_empty(), "{}", places.join("\n"));
        Ok(())
    }
}

/// The name of an object of that kind.
pub fn name(kind: &str, object: &Value) -> String {
    format!("{kind}/{}", object["metadata"]["name"].as_str().unwrap_or_default())
}

fn lasting(kind: &str, mut object: Value) -> Value {
    let metadata = object["metadata"].take();
    let owners = metadata["ownerReferences"].as_array().map_or(0, Vec::len);
    let annotations = metadata["annotations"].as_object().cloned().unwrap_or_default();
    let ours = annotations.into_iter().filter(|(name, _)| name.contains("windlass.dev/")).collect::<Map<_, _>>();
    let spec = without_addresses(object["spec"].take());
    let status = if kind == service::PLURAL { essential(&object["status"]) } else { Value::Null };
    json!({"labels": metadata["labels"], "annotations": ours, "owners": owners, "spec": spec, "status": status})
}

fn without_addresses(mut spec: Value) -> Value {
    if let Some(fields) = spec.as_object_mut() {
        fields.retain(|name, _| !["clusterIP", "clusterIPs"].contains(&name.as_str()));
    }
    spec
}

fn essential(status: &Value) -> Value {
    let conditions = status["conditions"].as_array().cloned().unwrap_or_default();
    let conditions: Vec<Value> =
        conditions.iter().map(|found| json!([found["type"], found["status"], found["reason"]])).collect();
    let counts =
        ["replicas", "readyReplicas", "updatedReplicas", "availableReplicas", "desiredReplicas", "spotReplicas"];
    let counts: Map<String, Value> = counts.iter().map(|name| ((*name).to_owned(), status[*name].clone())).collect();
    json!({"conditions": conditions, "counts": counts})
}

fn differences(path: &str, found: &Value, wanted: &Value, places: &mut Vec<String>) {
    let (Some(left), Some(right)) = (found.as_object(), wanted.as_object()) else {
        places.extend((found != wanted).then(|| format!("{path}: {found} instead of {wanted}")));
        return;
    };
    for name in left.keys().chain(right.keys()).collect::<BTreeSet<_>>() {
        differences(&format!("{path}.{name}"), &found[name], &wanted[name], places);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn deployment(replicas: u32, address: &str) -> (&'static str, Value) {
        let (metadata, spec) =
            (json!({"name": "a", "uid": address}), json!({"replicas": replicas, "clusterIP": address}));
        ("deployments", json!({"metadata": metadata, "spec": spec, "status": {"observedGeneration": replicas}}))
    }

    #[test]
    fn states_differ_in_what_was_asked_for_alone() {
        let state = State::of([deployment(1, "10.0.0.1")]);
        state.ensure_is(&State::of([deployment(1, "10.0.0.2")])).expect("the same");
        let error = state.ensure_is(&State::of([deployment(2, "10.0.0.1")])).expect_err("another");
        assert_eq!(error.to_string(), ".deployments/a.spec.replicas: 1 instead of 2");
        let error = State::of([]).ensure_is(&state).expect_err("nothing");
        assert!(error.to_string().starts_with(".deployments/a: null instead of {"), "{error}");
    }

    #[test]
    fn a_service_is_none_of_its_children() {
        let own = (service::PLURAL, json!({"metadata": {"name": "a"}}));
        let state = State::of([own, deployment(1, "10.0.0.1")]);
        assert_eq!(state.children(), State::of([deployment(1, "10.0.0.1")]));
        assert!(state.has("deployments") && !state.children().has(service::PLURAL));
    }

    #[test]
    fn a_revision_that_was_rolled_away_is_history() {
        let set = |replicas: u32| ("replicasets", json!({"metadata": {"name": "a"}, "spec": {"replicas": replicas}}));
        assert_eq!(State::of([set(0)]), State::of([]));
        assert_ne!(State::of([set(1)]), State::of([]));
    }
}
