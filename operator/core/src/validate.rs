//! The spec as typed becomes a [`ValidatedService`], the only input of everything below.
//!
//! The API server has enforced most of this by schema and CEL; it is checked again where a wrong value would make a
//! wrong child, because an older definition may be installed. Whether referenced objects exist is no question of
//! validity: a missing one is reported while children wait for it.

mod device;
mod engine;
mod pods;
mod refusal;
mod resources;
mod spot;

use k8s_openapi::api::networking::v1::NetworkPolicyPeer;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use windlass_operator_api::accelerator::Resources;
use windlass_operator_api::scheduling::Scheduling;
use windlass_operator_api::{GROUP, InferenceService, InferenceServiceSpec, MAX_NAME_CHARS};

pub use device::{Device, GpuAllocation};
pub use engine::EngineSettings;
pub use pods::of_pods;
pub use refusal::Refusal;
pub use spot::SpotPolicy;

use crate::autoscale::policy::{Policy, Scaling};
use crate::digest::fingerprint;
use crate::rollout::RolloutPolicy;
use crate::source::ModelSource;

/// A service that can be built.
#[derive(Clone, Debug)]
pub struct ValidatedService {
    /// Its name.
    pub name: String,
    /// Its namespace.
    pub namespace: String,
    /// Its UID: children belong to this and not to a namesake.
    pub uid: String,
    /// Reference that makes it the owner of a child.
    pub owner: OwnerReference,
    /// Where the weights are.
    pub source: ModelSource,
    /// The user's version marker.
    pub revision: Option<String>,
    /// Names that requests may use; never empty.
    pub served_names: Vec<String>,
    /// The engine's settings.
    pub engine: EngineSettings,
    /// What a replica runs on.
    pub device: Device,
    /// Nodes over which its layers are divided.
    pub nodes: u32,
    /// Requests and limits besides GPUs.
    pub resources: Resources,
    /// Where pods may run.
    pub scheduling: Scheduling,
    /// ServiceAccount that the user brings; `None`: we make one.
    pub service_account_name: Option<String>,
    /// Secrets for the image's registry.
    pub image_pull_secrets: Vec<String>,
    /// Secret with API keys.
    pub api_keys_secret: Option<String>,
    /// Peers of the API port; empty: the namespace.
    pub allow_from: Vec<NetworkPolicyPeer>,
    /// Who decides the number of replicas.
    pub scaling: Scaling,
    /// Use of spot nodes.
    pub spot: SpotPolicy,
    /// How pods are replaced.
    pub rollout: RolloutPolicy,
    /// How long a stream may take to finish once its pod has to go.
    pub drain_timeout_seconds: u32,
    /// Fingerprint of the part of the spec from which pod templates are made.
    pub spec_hash: String,
    /// Fingerprint of what names the model's content.
    pub source_hash: String,
    /// The spec leaves it open over how many GPUs a replica is split.
    pub is_tensor_open: bool,
}

impl ValidatedService {
    /// Whether replicas are kept to spare.
    pub fn has_standby(&self) -> bool {
        matches!(&self.scaling, Scaling::Builtin(policy) if policy.standby > 0)
    }
}

/// Checks the spec. On failure every refusal is told, not only the first.
///
/// # Errors
/// The refusals, at least one.
pub fn validate(service: &InferenceService) -> Result<ValidatedService, Vec<Refusal>> {
    let spec = &service.spec;
    let mut refusals = Refusals::default();
    let name = service.metadata.name.clone().unwrap_or_default();
    refusals.check(is_service_name(&name), || Refusal::Name { name: name.clone() });
    let source = refusals.take(ModelSource::validate(&spec.model));
    let device = refusals.take(Device::validate(spec));
    let nodes = refusals.take(device::nodes(spec));
    let engine = refusals.take(EngineSettings::validate(spec.engine.as_ref()));
    let scaling = refusals.take(Policy::validate(spec));
    let drain = refusals.take(bounded("spec.drainTimeoutSeconds", spec.drain_timeout_seconds, 0, 86_400));
    refusals.all(resources::gpus_in_resources(spec));
    refusals.all(resources::requests_beyond_limits(spec));
    let (Some(source), Some(device), Some(nodes), Some(engine), Some(scaling), Some(drain_timeout_seconds), true) =
        (source, device, nodes, engine, scaling, drain, refusals.0.is_empty())
    else {
        return Err(refusals.0);
    };
    Ok(ValidatedService {
        namespace: service.metadata.namespace.clone().unwrap_or_default(),
        uid: service.metadata.uid.clone().unwrap_or_default(),
        owner: owner(service, &name),
        source,
        revision: spec.model.revision.clone(),
        served_names: served_names(spec, &name),
        engine,
        device,
        nodes,
        resources: spec.resources.clone().unwrap_or_default(),
        scheduling: spec.scheduling.clone().unwrap_or_default(),
        service_account_name: spec.service_account_name.clone(),
        image_pull_secrets: spec.image_pull_secrets.iter().map(|secret| secret.name.clone()).collect(),
        api_keys_secret: spec.auth.as_ref().and_then(|auth| Some(auth.api_keys_secret_ref.as_ref()?.name.clone())),
        allow_from: spec.network.as_ref().map(|network| network.allow_from.clone()).unwrap_or_default(),
        scaling,
        spot: SpotPolicy::of(spec.spot.as_ref()),
        rollout: RolloutPolicy::of(spec.rollout.as_ref()),
        drain_timeout_seconds,
        spec_hash: fingerprint(&of_pods(spec)),
        source_hash: fingerprint(&(&spec.model.source, &spec.model.revision, &spec.model.sha256)),
        is_tensor_open: device::is_tensor_open(spec),
        name,
    })
}

#[derive(Default)]
struct Refusals(Vec<Refusal>);

impl Refusals {
    fn check(&mut self, holds: bool, refusal: impl FnOnce() -> Refusal) {
        if !holds {
            self.0.push(refusal());
        }
    }

    fn take<T>(&mut self, result: Result<T, Refusal>) -> Option<T> {
        result.map_err(|refusal| self.0.push(refusal)).ok()
    }

    fn all(&mut self, refusals: impl Iterator<Item = Refusal>) {
        self.0.extend(refusals);
    }
}

fn is_service_name(name: &str) -> bool {
    let plain = |character: char| character.is_ascii_lowercase() || character.is_ascii_digit() || character == '-';
    name.len() <= MAX_NAME_CHARS
        && name.starts_with(|first: char| first.is_ascii_lowercase())
        && !name.ends_with('-')
        && name.chars().all(plain)
}

fn owner(service: &InferenceService, name: &str) -> OwnerReference {
    OwnerReference {
        api_version: format!("{GROUP}/v1alpha1"),
        kind: "InferenceService".into(),
        name: name.to_owned(),
        uid: service.metadata.uid.clone().unwrap_or_default(),
        controller: Some(true),
        block_owner_deletion: Some(true),
    }
}

fn served_names(spec: &InferenceServiceSpec, name: &str) -> Vec<String> {
    if spec.model.served_names.is_empty() { vec![name.to_owned()] } else { spec.model.served_names.clone() }
}

/// `value` when it lies within the bounds, both included.
pub(crate) fn bounded(field: &'static str, value: i32, min: i32, max: i32) -> Result<u32, Refusal> {
    let refusal = || Refusal::OutOfRange { field, value: value.into(), min: min.into(), max: max.into() };
    if (min..=max).contains(&value) { u32::try_from(value).map_err(|_| refusal()) } else { Err(refusal()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{ServiceBuilder, service};
    use serde_json::json;

    fn is_valid(spec: ServiceBuilder) -> bool {
        validate(&spec.build()).is_ok()
    }

    #[test]
    fn a_name_is_one_that_a_kubernetes_service_can_have() {
        for name in ["a", "a1", "llama-3-8b", &"a".repeat(50)] {
            assert!(is_valid(service().named(name)), "{name}");
        }
        for name in ["", "-a", "a-", "1a", "A", "aB", "a.b", "a_b", "a b", "ä", &"a".repeat(51)] {
            assert!(!is_valid(service().named(name)), "{name}");
        }
    }

    #[test]
    fn a_service_is_served_by_its_own_name_unless_others_are_given() {
        assert_eq!(service().valid().served_names, ["llama"]);
        assert_eq!(service().model("servedNames", json!(["a", "b"])).valid().served_names, ["a", "b"]);
    }

    #[test]
    fn the_service_owns_its_children() {
        let expected = json!({
            "apiVersion": "windlass.dev/v1alpha1", "kind": "InferenceService", "name": "llama",
            "uid": crate::testing::UID, "controller": true, "blockOwnerDeletion": true,
        });
        assert_eq!(serde_json::to_value(service().valid().owner).expect("json"), expected);
    }

    #[test]
    fn the_fingerprint_of_the_source_follows_what_names_its_content() {
        let hash = |spec: ServiceBuilder| spec.valid().source_hash;
        let first = hash(service());
        assert_eq!(hash(service().with("replicas", json!(3)).with("engine", json!({"maxSequences": 4}))), first);
        assert_ne!(hash(service().model("revision", json!("v2"))), first);
        assert_ne!(hash(service().model("source", json!("pvc://models/other.gguf"))), first);
    }
}
