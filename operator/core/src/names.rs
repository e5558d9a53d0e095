//! Names, labels and annotations of children, and references to objects that users bring.

use std::collections::BTreeMap;

use windlass_operator_api::InferenceService;

/// The label of every child: the service's name.
pub const SERVICE_LABEL: &str = "windlass.dev/inference-service";
/// The label that tells workloads of one service apart: `on-demand` or `spot`.
pub const WORKLOAD_LABEL: &str = "windlass.dev/workload";

/// Labels that every child of a service carries.
pub fn labels(service: &str) -> BTreeMap<String, String> {
    BTreeMap::from([
        ("app.kubernetes.io/managed-by".to_owned(), "windlass-operator".to_owned()),
        ("app.kubernetes.io/name".to_owned(), "windlass-engine".to_owned()),
        (SERVICE_LABEL.to_owned(), service.to_owned()),
    ])
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
/// Secrets are not looked up: the operator has no right to read them. A missing one shows as a FailedMount warning.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum ReferenceKind {
    /// core/v1
    PersistentVolumeClaim,
    /// core/v1
    ConfigMap,
    /// core/v1
    ServiceAccount,
}

/// The objects to look up before planning.
pub fn references(service: &InferenceService) -> Vec<Reference> {
    let spec = &service.spec;
    let claim = spec.model.source.strip_prefix("pvc://").map(|rest| rest.split('/').next().unwrap_or(rest));
    let cache = spec.model.cache.as_ref().and_then(|cache| cache.claim_name.as_deref());
    let authority = spec.model.ca_config_map_ref.as_ref().map(|reference| reference.name.as_str());
    let found = [
        (ReferenceKind::PersistentVolumeClaim, claim, "spec.model.source"),
        (ReferenceKind::PersistentVolumeClaim, cache, "spec.model.cache.claimName"),
        (ReferenceKind::ConfigMap, authority, "spec.model.caConfigMapRef.name"),
        (ReferenceKind::ServiceAccount, spec.service_account_name.as_deref(), "spec.serviceAccountName"),
    ];
    let named = found.into_iter().filter_map(|(kind, name, field)| name.map(|name| (kind, name, field)));
    named.map(|(kind, name, field)| Reference { kind, name: name.to_owned(), field }).collect()
}
