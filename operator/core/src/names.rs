//! Names, labels and annotations of children, and references to objects that users bring.

use std::collections::BTreeMap;

use windlass_operator_api::InferenceService;

/// What our labels and annotations have in common.
pub const PREFIX: &str = "windlass.dev/";
/// The label of every child: the service's name.
pub const SERVICE_LABEL: &str = "windlass.dev/inference-service";
/// The label that tells workloads of one service apart: [`WorkloadKind::label`].
pub const WORKLOAD_LABEL: &str = "windlass.dev/workload";
/// On a Deployment: fingerprint of the part of the spec from which its template was made.
pub const SPEC_HASH: &str = "windlass.dev/spec-hash";
/// On a Deployment and on its pods: fingerprint of the template.
pub const TEMPLATE_HASH: &str = "windlass.dev/template-hash";
/// On a Deployment: its template does not start, and pods of the one before were brought back: [`crate::rollout`].
pub const GIVEN_UP: &str = "windlass.dev/given-up";
/// On a Deployment: the engine image that was chosen when its template was made.
pub const ENGINE_IMAGE: &str = "windlass.dev/engine-image";
/// On a Deployment and its template: the split that was chosen, where the spec leaves it open.
pub const CHOSEN_TENSOR: &str = "windlass.dev/tensor";
/// On a Deployment and its template: the format that was chosen, where the spec leaves it open.
pub const CHOSEN_QUANTIZATION: &str = "windlass.dev/quantization";
/// On a Deployment and its template: the commit that is fetched, where the spec names a branch, a tag or nothing.
pub const CHOSEN_COMMIT: &str = "windlass.dev/commit";
/// On a Deployment: why these were chosen.
pub const CHOICE_REASON: &str = "windlass.dev/choice-reason";
/// On the pod that reads a model's header: fingerprint of the source.
pub const INSPECTION: &str = "windlass.dev/inspection";
/// On pods: the user's version marker, `model.revision`.
pub const MODEL_REVISION: &str = "windlass.dev/model-revision";
/// The label of a pod that tells what its engine serves: [`crate::served`].
pub const FINGERPRINT: &str = "windlass.dev/fingerprint";
/// The label of a pod that tells whether requests reach it, in a service with standby: [`crate::standby`].
pub const ROUTED: &str = "windlass.dev/routed";
/// On pods that lead others: the nodes of their replica, their own included: [`crate::workers`].
pub const NODES: &str = "windlass.dev/nodes";
/// The label of workers: the pod that leads them.
pub const LEADER: &str = "windlass.dev/leader";
/// On the StatefulSet of workers: the address of the pod that leads them.
pub const LEADER_ADDRESS: &str = "windlass.dev/leader-address";
/// On pods: `rollout.restartedAt`.
pub const RESTARTED_AT: &str = "windlass.dev/restarted-at";
/// Kubernetes' hint to a ReplicaSet: of ready pods, that with the lowest cost goes first.
pub const DELETION_COST: &str = "controller.kubernetes.io/pod-deletion-cost";

/// What the spot workload's name adds to the service's.
pub const SPOT_SUFFIX: &str = "-spot";

/// Name of the engine's container.
pub const ENGINE_CONTAINER: &str = "engine";
/// Name of the container that fetches an https source.
pub const FETCH_CONTAINER: &str = "fetch";

/// Workloads of a service.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum WorkloadKind {
    /// The only one, or with spot the one that stays off spot nodes.
    OnDemand,
    /// On spot nodes.
    Spot,
}

impl WorkloadKind {
    /// In the order in which they roll.
    pub const ALL: [WorkloadKind; 2] = [WorkloadKind::OnDemand, WorkloadKind::Spot];

    /// Value of [`WORKLOAD_LABEL`].
    pub fn label(self) -> &'static str {
        match self {
            WorkloadKind::OnDemand => "on-demand",
            WorkloadKind::Spot => "spot",
        }
    }

    /// Name of the Deployment.
    pub fn deployment(self, service: &str) -> String {
        match self {
            WorkloadKind::OnDemand => service.to_owned(),
            WorkloadKind::Spot => format!("{service}{SPOT_SUFFIX}"),
        }
    }
}

/// Labels that every child of a service carries.
pub fn labels(service: &str) -> BTreeMap<String, String> {
    let mut labels = selector_labels(service);
    labels.extend(instance_labels(service));
    labels.insert("app.kubernetes.io/name".into(), "windlass-engine".into());
    labels
}

/// Labels that every pod made for a service carries, whether it serves or not.
pub fn instance_labels(service: &str) -> BTreeMap<String, String> {
    let managed = ("app.kubernetes.io/managed-by".to_owned(), "windlass-operator".to_owned());
    BTreeMap::from([managed, ("app.kubernetes.io/instance".to_owned(), service.to_owned())])
}

/// The labels by which a Service, a budget and a policy know a service's pods.
pub fn selector_labels(service: &str) -> BTreeMap<String, String> {
    BTreeMap::from([(SERVICE_LABEL.to_owned(), service.to_owned())])
}

/// The labels by which a Deployment knows its pods. Never changed: a Deployment's selector is immutable.
pub fn workload_labels(service: &str, kind: WorkloadKind) -> BTreeMap<String, String> {
    let mut labels = selector_labels(service);
    labels.insert(WORKLOAD_LABEL.to_owned(), kind.label().to_owned());
    labels
}

/// Label selector of a service's children, as a list request takes it; also `status.selector`.
pub fn selector(service: &str) -> String {
    format!("{SERVICE_LABEL}={service}")
}

/// An object that the spec names and a user brings.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Reference {
    /// What it is.
    pub kind: ReferenceKind,
    /// Its name, in the service's namespace.
    pub name: String,
    /// The field that names it.
    pub field: &'static str,
}

/// Kinds of objects that a spec can name.
///
/// Secrets and ConfigMaps are not looked up: the operator has no right to read them. A missing one shows as a
/// FailedMount warning.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum ReferenceKind {
    /// core/v1
    PersistentVolumeClaim,
    /// core/v1
    ServiceAccount,
}

impl ReferenceKind {
    /// As Kubernetes spells it.
    pub fn name(self) -> &'static str {
        match self {
            ReferenceKind::PersistentVolumeClaim => "PersistentVolumeClaim",
            ReferenceKind::ServiceAccount => "ServiceAccount",
        }
    }
}

/// The objects to look up before planning.
pub fn references(service: &InferenceService) -> Vec<Reference> {
    let spec = &service.spec;
    let claim = spec.model.source.strip_prefix("pvc://").map(|rest| rest.split('/').next().unwrap_or(rest));
    let cache = spec.model.cache.as_ref().and_then(|cache| cache.claim_name.as_deref());
    let found = [
        (ReferenceKind::PersistentVolumeClaim, claim, "spec.model.source"),
        (ReferenceKind::PersistentVolumeClaim, cache, "spec.model.cache.claimName"),
        (ReferenceKind::ServiceAccount, spec.service_account_name.as_deref(), "spec.serviceAccountName"),
    ];
    let named = found.into_iter().filter_map(|(kind, name, field)| name.map(|name| (kind, name, field)));
    named.map(|(kind, name, field)| Reference { kind, name: name.to_owned(), field }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::service;
    use serde_json::json;

    fn pairs(labels: &BTreeMap<String, String>) -> Vec<(&str, &str)> {
        labels.iter().map(|(key, value)| (key.as_str(), value.as_str())).collect()
    }

    #[test]
    fn children_are_found_by_their_service_and_pods_by_their_workload_too() {
        let own = (SERVICE_LABEL, "llama");
        assert_eq!(selector("llama"), "windlass.dev/inference-service=llama");
        assert_eq!(pairs(&selector_labels("llama")), [own]);
        assert_eq!(
            pairs(&labels("llama")),
            [
                ("app.kubernetes.io/instance", "llama"),
                ("app.kubernetes.io/managed-by", "windlass-operator"),
                ("app.kubernetes.io/name", "windlass-engine"),
                own,
            ]
        );
        for (kind, label) in [(WorkloadKind::OnDemand, "on-demand"), (WorkloadKind::Spot, "spot")] {
            assert_eq!(pairs(&workload_labels("llama", kind)), [own, (WORKLOAD_LABEL, label)]);
        }
    }

    #[test]
    fn each_object_that_a_user_brings_is_looked_up_by_the_field_that_names_it() {
        let told = |spec: crate::testing::ServiceBuilder| -> Vec<String> {
            let told = |found: Reference| format!("{}: {} {}", found.field, found.kind.name(), found.name);
            references(&spec.build()).into_iter().map(told).collect()
        };
        assert_eq!(told(service()), ["spec.model.source: PersistentVolumeClaim models"]);
        let whole = service().model("source", json!("pvc://whole")).with("serviceAccountName", json!("theirs"));
        assert_eq!(
            told(whole),
            ["spec.model.source: PersistentVolumeClaim whole", "spec.serviceAccountName: ServiceAccount theirs"]
        );
        assert_eq!(told(service().https()), Vec::<String>::new());
        let cached = service().https().model("cache", json!({"type": "PersistentVolumeClaim", "claimName": "cache"}));
        assert_eq!(told(cached), ["spec.model.cache.claimName: PersistentVolumeClaim cache"]);
    }
}
