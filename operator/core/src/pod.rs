//! A pod as the operator holds it: what plans and readings look at, under the names that Kubernetes gives to it.
//!
//! Of ten thousand pods, the rest would be tens of megabytes. It is left out while an answer is parsed, so that it costs
//! no time either.

use std::collections::BTreeMap;

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference, Time};
use k8s_openapi::{Metadata, NamespaceResourceScope, Resource};
use serde::{Deserialize, Deserializer};

use crate::names::{self, DELETION_COST};

/// A pod.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
pub struct Pod {
    /// Without who owns which field; with those annotations alone that the operator reads, and of owners kind and name.
    #[serde(default, deserialize_with = "metadata")]
    pub metadata: ObjectMeta,
    /// Where and as whom it runs.
    #[serde(default)]
    pub spec: Spec,
    /// How it is.
    #[serde(default)]
    pub status: Status,
}

/// Where and as whom a pod runs.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Spec {
    /// Its node, once it has one.
    pub node_name: Option<Box<str>>,
    /// Its ServiceAccount.
    pub service_account_name: Option<Box<str>>,
}

/// How a pod is.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(from = "Told")]
pub struct Status {
    /// As `Running`.
    pub phase: Option<Box<str>>,
    /// Its address.
    pub pod_ip: Option<Box<str>>,
    /// Whether it takes requests.
    pub ready: Option<Condition>,
    /// Whether a node was found for it.
    pub scheduled: Option<Condition>,
    /// Its containers, those that run before the others first.
    pub containers: Box<[Container]>,
}

/// A condition of a pod.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Condition {
    /// `None`: it is not known.
    pub holds: Option<bool>,
    /// A stable CamelCase word.
    pub reason: Option<Box<str>>,
    /// In words.
    pub message: Option<Box<str>>,
    /// Since when.
    pub since: Option<Timestamp>,
}

/// A container of a pod.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Container {
    /// Its name.
    #[serde(default)]
    pub name: Box<str>,
    /// Its image.
    #[serde(default)]
    pub image: Box<str>,
    /// How often it was started again.
    #[serde(default)]
    pub restart_count: i32,
    /// Its startup probe has succeeded since it was started last.
    #[serde(default)]
    pub started: bool,
    /// What it does.
    #[serde(default)]
    pub state: State,
    /// What it did before it was started again.
    #[serde(default)]
    pub last_state: State,
}

/// What a container does: at most one of these.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
pub struct State {
    /// It is not started yet.
    pub waiting: Option<Box<Waiting>>,
    /// It runs.
    pub running: Option<Running>,
    /// It has ended.
    pub terminated: Option<Box<Terminated>>,
}

/// Why a container is not started yet.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
pub struct Waiting {
    /// A stable CamelCase word.
    pub reason: Option<Box<str>>,
    /// In words.
    pub message: Option<Box<str>>,
}

/// A container that runs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Running {
    /// Since when.
    pub started_at: Option<Timestamp>,
}

/// How a container ended.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Terminated {
    /// 0: as it should.
    #[serde(default)]
    pub exit_code: i32,
    /// As `OOMKilled`.
    pub reason: Option<Box<str>>,
    /// Its last words.
    pub message: Option<Box<str>>,
    /// When it was started.
    pub started_at: Option<Timestamp>,
}

impl Pod {
    /// Whether the kubelet reports it ready.
    pub fn is_ready(&self) -> bool {
        self.status.ready.as_ref().is_some_and(|ready| ready.holds == Some(true))
    }

    /// Whether it was told to end.
    pub fn is_leaving(&self) -> bool {
        self.metadata.deletion_timestamp.is_some()
    }

    /// When it was made.
    pub fn created(&self) -> Option<Timestamp> {
        self.metadata.creation_timestamp.as_ref().map(|time| time.0)
    }

    /// The value of a label.
    pub fn label(&self, key: &str) -> Option<&str> {
        self.metadata.labels.as_ref()?.get(key).map(String::as_str)
    }

    /// The value of an annotation.
    pub fn annotation(&self, key: &str) -> Option<&str> {
        self.metadata.annotations.as_ref()?.get(key).map(String::as_str)
    }
}

impl Condition {
    /// Whether it is known not to hold.
    pub fn fails(&self) -> bool {
        self.holds == Some(false)
    }
}

impl Resource for Pod {
    const API_VERSION: &'static str = "v1";
    const GROUP: &'static str = "";
    const KIND: &'static str = "Pod";
    const VERSION: &'static str = "v1";
    const URL_PATH_SEGMENT: &'static str = "pods";
    type Scope = NamespaceResourceScope;
}

impl Metadata for Pod {
    type Ty = ObjectMeta;

    fn metadata(&self) -> &ObjectMeta {
        &self.metadata
    }

    fn metadata_mut(&mut self) -> &mut ObjectMeta {
        &mut self.metadata
    }
}

/// A status as the API server tells it.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase", default)]
#[derive(Default)]
struct Told {
    phase: Option<Box<str>>,
    #[serde(rename = "podIP")]
    pod_ip: Option<Box<str>>,
    conditions: Option<Vec<ToldCondition>>,
    init_container_statuses: Option<Vec<Container>>,
    container_statuses: Option<Vec<Container>>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct ToldCondition {
    #[serde(rename = "type")]
    kind: Box<str>,
    status: Box<str>,
    reason: Option<Box<str>>,
    message: Option<Box<str>>,
    last_transition_time: Option<Timestamp>,
}

impl From<Told> for Status {
    fn from(told: Told) -> Self {
        let mut status = Status { phase: told.phase, pod_ip: told.pod_ip, ..Status::default() };
        for condition in told.conditions.into_iter().flatten() {
            match &*condition.kind {
                "Ready" => status.ready = Some(condition.into()),
                "PodScheduled" => status.scheduled = Some(condition.into()),
                _ => {}
            }
        }
        let (first, then) = (told.init_container_statuses, told.container_statuses);
        status.containers = first.into_iter().chain(then).flatten().collect();
        status
    }
}

impl From<ToldCondition> for Condition {
    fn from(told: ToldCondition) -> Self {
        let holds = match &*told.status {
            "True" => Some(true),
            "False" => Some(false),
            _ => None,
        };
        Condition { holds, reason: told.reason, message: told.message, since: told.last_transition_time }
    }
}

/// Metadata without what is left out.
fn metadata<'de, D: Deserializer<'de>>(from: D) -> Result<ObjectMeta, D::Error> {
    let told = ToldMetadata::deserialize(from)?;
    let mut annotations = told.annotations;
    annotations.iter_mut().for_each(|annotations| {
        annotations.retain(|key, _| key.starts_with(names::PREFIX) || key == DELETION_COST);
    });
    Ok(ObjectMeta {
        name: told.name,
        namespace: told.namespace,
        uid: told.uid,
        resource_version: told.resource_version,
        labels: told.labels,
        annotations: annotations.filter(|annotations| !annotations.is_empty()),
        creation_timestamp: told.creation_timestamp,
        deletion_timestamp: told.deletion_timestamp,
        owner_references: told.owner_references.map(|owners| owners.into_iter().map(OwnerReference::from).collect()),
        ..ObjectMeta::default()
    })
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct ToldMetadata {
    name: Option<String>,
    namespace: Option<String>,
    uid: Option<String>,
    resource_version: Option<String>,
    labels: Option<BTreeMap<String, String>>,
    annotations: Option<BTreeMap<String, String>>,
    creation_timestamp: Option<Time>,
    deletion_timestamp: Option<Time>,
    owner_references: Option<Vec<Owner>>,
}

#[derive(Deserialize)]
struct Owner {
    kind: String,
    name: String,
}

impl From<Owner> for OwnerReference {
    fn from(Owner { kind, name }: Owner) -> Self {
        OwnerReference { kind, name, ..OwnerReference::default() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn read(pod: Value) -> Pod {
        serde_json::from_value(pod).expect("a pod")
    }

    #[test]
    fn of_what_nobody_looks_at_nothing_is_held() {
        let plain = json!({
            "metadata": {
                "name": "p", "namespace": "n", "uid": "u", "resourceVersion": "7",
                "creationTimestamp": "1970-01-01T00:00:30Z", "deletionTimestamp": "1970-01-01T00:01:00Z",
                "labels": {"windlass.dev/workload": "spot", "theirs": "1"},
                "annotations": {"windlass.dev/template-hash": "h", DELETION_COST: "7"},
                "ownerReferences": [{"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "r", "uid": "v"}],
            },
            "spec": {"nodeName": "node-1", "serviceAccountName": "s"},
            "status": {
                "phase": "Running", "podIP": "10.0.0.1",
                "conditions": [{"type": "Ready", "status": "True", "lastTransitionTime": "1970-01-01T00:00:40Z"}],
                "containerStatuses": [{
                    "name": "engine", "image": "i", "restartCount": 3, "started": true, "state": {"running": {"startedAt": null}},
                    "lastState": {"terminated": {"exitCode": 7, "message": "m"}},
                }],
            },
        });
        let mut whole = plain.clone();
        whole["metadata"]["managedFields"] = json!([{"manager": "kubelet", "fieldsV1": {"f:status": {}}}]);
        whole["metadata"]["annotations"]["k8s.v1.cni.cncf.io/network-status"] = json!("[]");
        whole["spec"]["containers"] = json!([{"name": "engine", "args": ["serve"]}]);
        whole["status"]["hostIP"] = json!("10.0.0.9");
        let conditions = whole["status"]["conditions"].as_array_mut().expect("a list");
        conditions.push(json!({"type": "Initialized", "status": "True"}));
        whole["status"]["containerStatuses"][0]["imageID"] = json!("sha256:7");
        assert_eq!(read(whole), read(plain.clone()));
        let pod = read(plain);
        assert_eq!(pod.annotation(DELETION_COST), Some("7"));
        assert_eq!(pod.annotation("windlass.dev/template-hash"), Some("h"));
        assert_eq!(pod.label("theirs"), Some("1"), "a selector of somebody's autoscaler may name it");
        assert_eq!((pod.created(), pod.is_leaving()), (Timestamp::from_second(30).ok(), true));
        assert!(pod.status.containers[0].started);
        assert_eq!(pod.status.containers[0].last_state.terminated.as_ref().map(|ended| ended.exit_code), Some(7));
        assert_eq!((pod.status.phase.as_deref(), pod.status.pod_ip.as_deref()), (Some("Running"), Some("10.0.0.1")));
        let own = Metadata::metadata(&pod);
        let named = [&own.name, &own.namespace, &own.uid, &own.resource_version].map(Option::as_deref);
        assert_eq!(named, [Some("p"), Some("n"), Some("u"), Some("7")]);
        let owners: Vec<_> = own.owner_references.iter().flatten().map(|owner| (&*owner.kind, &*owner.name)).collect();
        assert_eq!(owners, [("ReplicaSet", "r")]);
    }

    #[test]
    fn a_pod_may_be_given_another_name() {
        let mut pod = read(json!({"metadata": {"name": "p"}}));
        pod.metadata_mut().name = Some("q".into());
        assert_eq!(pod.metadata.name.as_deref(), Some("q"));
    }

    #[test]
    fn a_condition_holds_fails_or_is_not_known() {
        for (status, holds) in [("True", Some(true)), ("False", Some(false)), ("Unknown", None)] {
            let told = |kind: &str| json!({"status": {"conditions": [{"type": kind, "status": status}]}});
            let (ready, scheduled) = (read(told("Ready")), read(told("PodScheduled")));
            assert_eq!(ready.status.ready.as_ref().map(|ready| ready.holds), Some(holds), "{status}");
            assert_eq!((ready.is_ready(), ready.status.scheduled), (holds == Some(true), None), "{status}");
            assert_eq!(scheduled.status.scheduled.map(|found| found.fails()), Some(status == "False"));
            assert_eq!(scheduled.status.ready, None);
        }
    }

    #[test]
    fn containers_that_run_first_come_first() {
        let named = |name: &str| json!([{"name": name}]);
        let status = json!({"containerStatuses": named("engine"), "initContainerStatuses": named("fetch")});
        let pod = read(json!({"status": status}));
        let names: Vec<&str> = pod.status.containers.iter().map(|container| &*container.name).collect();
        assert_eq!(names, ["fetch", "engine"]);
    }
}
