//! A service's life, told in steps, and the state of a namespace that it leaves: what faults must not change.

use anyhow::{Context, Result, bail};
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::time::Duration;

use crate::namespace::Namespace;
use crate::service::{RESOURCE, Service, is_ready};
use crate::wait::{self, Look};

/// How long a step may take, faults included.
const PATIENCE: Duration = Duration::from_secs(60);
const NAME: &str = "life";
/// Kinds that the operator makes, and those that follow from them.
const KINDS: &str = "deployments,replicasets,services,serviceaccounts,networkpolicies,poddisruptionbudgets,jobs,\
                     horizontalpodautoscalers,configmaps";
/// What else nothing of a service may be left of: how it came to be so, and what others make.
const TRACES: &str = "controllerrevisions,pods,endpointslices";

/// One step: a change of the spec, and how many pods of each workload serve when it has come to its end.
#[derive(Clone, Debug)]
pub struct Step {
    /// Its name.
    pub name: &'static str,
    /// Merged into the spec.
    pub patch: Value,
    /// Pods on demand and on spot.
    pub pods: (usize, usize),
}

/// Create, scale out, roll, inspect the model and roll, move to spot and back, scale in, by load, by the cluster's own
/// autoscaler, and by hand again.
pub fn steps() -> Vec<Step> {
    let step = |name, patch, pods| Step { name, patch, pods };
    vec![
        step("create", json!({}), (1, 0)),
        step("scale out", json!({"replicas": 3}), (3, 0)),
        step("roll", json!({"drainTimeoutSeconds": 61}), (3, 0)),
        // An engine that is not simulated: a Job reads its model's header before its pods are made.
        step("inspect the model", json!({"engine": {"extraArgs": null}}), (3, 0)),
        step("move to spot", json!({"spot": {"mode": "Prefer", "onDemandBase": 1}}), (1, 2)),
        step("lose spot", json!({"spot": {"mode": "Never", "onDemandBase": null}}), (3, 0)),
        step("scale in", json!({"replicas": 1}), (1, 0)),
        step("scale by load", json!({"autoscaling": autoscaled("Builtin", 2)}), (2, 0)),
        // No metrics API is there: it keeps what it finds.
        step("scale by the cluster", json!({"replicas": 2, "autoscaling": autoscaled("HPA", 1)}), (2, 0)),
        step("scale by hand", json!({"replicas": 1, "autoscaling": null}), (1, 0)),
    ]
}

fn autoscaled(mode: &str, least: u32) -> Value {
    let target = json!({"metric": "TimeToFirstToken", "percentile": 95, "milliseconds": 500});
    json!({"mode": mode, "minReplicas": least, "maxReplicas": 3, "targets": [target]})
}

/// Leads a service of `spec` through `steps` and returns the state at the end; then deletes it, and nothing is left.
///
/// # Errors
/// When a step does not come to its end, with its name, or something is left.
pub fn lead(namespace: &Namespace, spec: &Value, steps: &[Step]) -> Result<Value> {
    let before = names(namespace)?;
    let service = Service::apply(namespace, NAME, spec)?;
    for step in steps {
        service.patch(&json!({"spec": step.patch}))?;
        settle(&service, step).with_context(|| format!("step `{}`", step.name))?;
    }
    let end = state(namespace)?;
    service.delete()?;
    wait::until("nothing of the service is left", PATIENCE, || {
        let left: Vec<_> = names(namespace)?.into_iter().filter(|name| !before.contains(name)).collect();
        Ok(Look::when(left.is_empty(), (), format!("{left:?}")))
    })?;
    Ok(end)
}

fn settle(service: &Service<'_>, step: &Step) -> Result<()> {
    wait::until("the service has settled", PATIENCE, || {
        let found = service.read()?;
        let status = found.status.unwrap_or_default();
        let holds = |kind: &str, value: &str| {
            status.conditions.iter().any(|condition| {
                condition.type_ == kind
                    && condition.status == value
                    && condition.observed_generation == found.metadata.generation
            })
        };
        let pods = service.pods()?;
        let of = |workload: &str| {
            let is_it = |labels: &BTreeMap<String, String>| {
                labels.get("windlass.dev/workload").is_some_and(|found| found == workload)
            };
            pods.iter().filter(|pod| pod.metadata.labels.as_ref().is_some_and(is_it)).count()
        };
        let counted = (of("on-demand"), of("spot"));
        let ready = pods.iter().filter(|pod| is_ready(pod)).count();
        let is_settled = holds("Ready", "True") && holds("Reconciling", "False") && ready == pods.len();
        let seen = format!("pods {counted:?}, {ready} ready, {:?}", status.conditions);
        Ok(Look::when(is_settled && counted == step.pods, (), seen))
    })
}

/// Everything in the namespace that the operator answers for, without what differs from run to run.
///
/// # Errors
/// kubectl's own words.
pub fn state(namespace: &Namespace) -> Result<Value> {
    let objects: Vec<Value> = namespace.list(&["get", &format!("{KINDS},{RESOURCE}")])?;
    let mut named = Map::new();
    for mut object in objects {
        // A revision that was rolled away, kept as history.
        if object["kind"] == "ReplicaSet" && object["spec"]["replicas"] == 0 {
            continue;
        }
        let metadata = object["metadata"].take();
        let key =
            format!("{}/{}", object["kind"].as_str().context("no kind")?, metadata["name"].as_str().unwrap_or(""));
        let spec = without_addresses(object["spec"].take());
        let owners = metadata["ownerReferences"].as_array().map(|owners| owners.len()).unwrap_or(0);
        let annotations: Map<String, Value> = metadata["annotations"].as_object().cloned().unwrap_or_default();
        let ours = annotations.into_iter().filter(|(name, _)| name.contains("windlass.dev/")).collect::<Map<_, _>>();
        let status = if key.starts_with("InferenceService/") { essential(&object["status"]) } else { Value::Null };
        let kept = json!({"labels": metadata["labels"], "annotations": ours, "owners": owners, "spec": spec, "status": status});
        named.insert(key, kept);
    }
    if named.is_empty() {
        bail!("the namespace is empty");
    }
    Ok(Value::Object(named))
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

fn names(namespace: &Namespace) -> Result<Vec<String>> {
    let kinds = format!("{KINDS},{TRACES},{RESOURCE}");
    Ok(namespace.run(&["get", &kinds, "-o", "name"])?.lines().map(str::to_owned).collect())
}
