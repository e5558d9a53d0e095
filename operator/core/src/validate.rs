//! The spec as typed becomes a [`ValidatedService`], the only input of everything below.
//!
//! The API server has enforced most of this by schema and CEL; it is checked again where a wrong value would make a
//! wrong child, because an older definition may be installed. Whether referenced objects exist is no question of
//! validity: a missing one is reported while children wait for it.

use std::collections::BTreeMap;
use std::time::Duration;

use k8s_openapi::api::core::v1::Toleration;
use k8s_openapi::api::networking::v1::NetworkPolicyPeer;
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use thiserror::Error;
use windlass_engine_contract::flags;
use windlass_operator_api::accelerator::{AcceleratorType, Resources};
use windlass_operator_api::autoscaling::{Autoscaling, AutoscalingMode};
use windlass_operator_api::engine::{KvCacheDataType, Quantization};
use windlass_operator_api::rollout::Rollout;
use windlass_operator_api::scheduling::Scheduling;
use windlass_operator_api::spot::{Spot, SpotMode};
use windlass_operator_api::{GROUP, InferenceService, InferenceServiceSpec, MAX_NAME_CHARS};

use crate::autoscale::policy::{Policy, Scaling};
use crate::digest::fingerprint;
use crate::mig::MigProfile;
use crate::quantity::{self, mebibytes};
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

/// What the engine is told.
#[derive(Clone, Debug, PartialEq)]
pub struct EngineSettings {
    /// Image; `None`: the operator's default.
    pub image: Option<String>,
    /// Format of the weights.
    pub quantization: Quantization,
    /// Format of the KV cache.
    pub kv_cache_data_type: KvCacheDataType,
    /// Longest sequence.
    pub max_model_tokens: Option<u32>,
    /// Most sequences at once.
    pub max_sequences: Option<u32>,
    /// Further flags, none of them managed.
    pub extra_args: Vec<String>,
    /// These ask for the simulator, which loads no weights.
    pub is_simulated: bool,
}

/// What a replica runs on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Device {
    /// The processor.
    Cpu,
    /// NVIDIA GPUs.
    NvidiaGpu {
        /// How many in a pod: the tensor-parallel size.
        count: u32,
        /// Products that will do; empty: any.
        products: Vec<String>,
        /// Least memory of one, MiB.
        min_memory_mebibytes: Option<u64>,
        /// How a pod gets them.
        allocation: GpuAllocation,
    },
}

/// How a pod gets its GPUs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum GpuAllocation {
    /// The device plugin counts them.
    Whole,
    /// The device plugin counts slices of this profile, of which a pod gets one.
    Slice(MigProfile),
    /// A pod claims them by this ResourceClaimTemplate.
    Claim(String),
}

impl Device {
    /// Tensor-parallel size.
    pub fn tensor(&self) -> u32 {
        match self {
            Device::Cpu => 1,
            Device::NvidiaGpu { count, .. } => *count,
        }
    }
}

/// Use of spot nodes.
#[derive(Clone, Debug, PartialEq)]
pub struct SpotPolicy {
    /// `None`: no opinion.
    pub mode: Option<SpotMode>,
    /// Replicas that stay off spot nodes.
    pub on_demand_base: i32,
    /// Most of the rest that may be spot, percent.
    pub max_percent_above_base: i32,
    /// After so long without a spot node, replicas run on demand; `None`: the scheduler decides at once.
    pub fallback_after: Option<Duration>,
    /// Labels of spot nodes; empty: the well-known ones.
    pub node_selector: BTreeMap<String, String>,
    /// Taints of spot nodes; empty: the well-known ones.
    pub tolerations: Vec<Toleration>,
}

impl SpotPolicy {
    /// Whether there is a spot workload.
    pub fn has_workload(&self) -> bool {
        matches!(self.mode, Some(SpotMode::Prefer | SpotMode::Require))
    }
}

/// Why a spec cannot be served. Display is the user's message and names the field.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum Refusal {
    /// A Service could not have this name.
    #[error(
        "metadata.name: {name:?} must be at most {MAX_NAME_CHARS} lower-case letters, digits and -, beginning with a letter"
    )]
    Name {
        /// The name.
        name: String,
    },
    /// The source is of no kind we read, or malformed.
    #[error("spec.model.source: {source_text:?} {problem}")]
    Source {
        /// As written.
        source_text: String,
        /// What is wrong and what would be right.
        problem: &'static str,
    },
    /// A field that the source's kind needs.
    #[error("{field}: required with an https:// source")]
    MissingForHttps {
        /// The field.
        field: &'static str,
    },
    /// A field that does nothing with this source.
    #[error("{field}: acts only on an https:// source")]
    ActsOnlyOnHttps {
        /// The field.
        field: &'static str,
    },
    /// A field that does nothing where nothing is fetched.
    #[error("{field}: acts only on a source that is fetched; a pvc:// source is read in place")]
    NothingIsFetched {
        /// The field.
        field: &'static str,
    },
    /// A union's member does not go with its type.
    #[error("{field}: {problem}")]
    Union {
        /// The field.
        field: &'static str,
        /// What is wrong.
        problem: &'static str,
    },
    /// A flag that a field owns.
    #[error("spec.engine.extraArgs: {problem}")]
    ManagedFlag {
        /// Which, and the field that owns it.
        problem: String,
    },
    /// A CPU replica cannot be split.
    #[error("spec.parallelism.tensor: {tensor} needs spec.accelerator.type NvidiaGPU; a CPU replica is one rank")]
    TensorOnCpu {
        /// As written.
        tensor: i32,
    },
    /// GPUs are derived.
    #[error("{field}: {resource} follows from spec.accelerator and spec.parallelism.tensor; leave it out")]
    GpuInResources {
        /// requests or limits.
        field: &'static str,
        /// The resource's name.
        resource: String,
    },
    /// Kubernetes would refuse the pods.
    #[error("spec.resources.requests: {resource} is {request}, more than the {limit} of spec.resources.limits")]
    BeyondLimit {
        /// The resource's name.
        resource: String,
        /// As written.
        request: String,
        /// As written.
        limit: String,
    },
    /// A number outside its bounds.
    #[error("{field}: {value} is not between {min} and {max}")]
    OutOfRange {
        /// The field.
        field: &'static str,
        /// As written.
        value: i64,
        /// Least allowed.
        min: i64,
        /// Most allowed.
        max: i64,
    },
    /// A revision that is not, or no longer, kept.
    #[error("spec.rollout.pinnedRevision: there is no revision {name:?}; there are: {}", known.join(", "))]
    NoSuchRevision {
        /// As written.
        name: String,
        /// Those that there are.
        known: Vec<String>,
    },
    /// A text that is no quantity.
    #[error("{field}: {value:?} is not a positive quantity such as 80Gi")]
    Quantity {
        /// The field.
        field: &'static str,
        /// As written.
        value: String,
    },
    /// Autoscaling fields that contradict each other.
    #[error("{field}: {problem}")]
    Autoscaling {
        /// The field.
        field: &'static str,
        /// What is wrong.
        problem: String,
    },
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
    let device = refusals.take(device(spec));
    let nodes = refusals.take(nodes(spec));
    let engine = refusals.take(engine(spec));
    let scaling = refusals.take(Policy::validate(spec));
    let drain = refusals.take(bounded("spec.drainTimeoutSeconds", spec.drain_timeout_seconds, 0, 86_400));
    refusals.all(gpus_in_resources(spec));
    refusals.all(requests_beyond_limits(spec));
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
        spot: spot(spec),
        rollout: RolloutPolicy::of(spec.rollout.as_ref()),
        drain_timeout_seconds,
        spec_hash: fingerprint(&of_pods(spec)),
        source_hash: fingerprint(&(&spec.model.source, &spec.model.revision, &spec.model.sha256)),
        is_tensor_open: is_tensor_open(spec),
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

fn engine(spec: &InferenceServiceSpec) -> Result<EngineSettings, Refusal> {
    let engine = spec.engine.clone().unwrap_or_default();
    if let Some(managed) = engine.extra_args.iter().find_map(|argument| flags::managed(argument)) {
        return Err(Refusal::ManagedFlag { problem: managed.refusal() });
    }
    let limit = |field, value: Option<i32>, max| value.map(|value| bounded(field, value, 1, max)).transpose();
    Ok(EngineSettings {
        image: engine.image,
        quantization: engine.quantization.unwrap_or_default(),
        kv_cache_data_type: engine.kv_cache_data_type.unwrap_or_default(),
        max_model_tokens: limit("spec.engine.maxModelTokens", engine.max_model_tokens, 16_777_216)?,
        max_sequences: limit("spec.engine.maxSequences", engine.max_sequences, 65_536)?,
        is_simulated: is_simulated(&engine.extra_args),
        extra_args: engine.extra_args,
    })
}

fn is_simulated(arguments: &[String]) -> bool {
    let follows = arguments.windows(2).any(|pair| pair[0] == EXECUTOR && pair[1] == SIMULATOR);
    follows || arguments.iter().any(|one| one.strip_prefix(EXECUTOR) == Some("=sim"))
}

/// The flag that chooses the executor, and its value for the simulator.
const EXECUTOR: &str = "--executor";
const SIMULATOR: &str = "sim";

fn is_tensor_open(spec: &InferenceServiceSpec) -> bool {
    let is_given = spec.parallelism.as_ref().is_some_and(|parallelism| parallelism.tensor.is_some());
    let kind = spec.accelerator.as_ref().map(|accelerator| accelerator.kind).unwrap_or_default();
    kind == AcceleratorType::NvidiaGpu && !is_given && !is_told(spec)
}

/// Whether how GPUs are allocated tells how many they are: as many as a claim's template says, or one slice.
fn is_told(spec: &InferenceServiceSpec) -> bool {
    let gpu = spec.accelerator.as_ref().and_then(|accelerator| accelerator.nvidia_gpu.as_ref());
    gpu.is_some_and(|gpu| gpu.resource_claim_template_name.is_some() || gpu.mig_profile.is_some())
}

fn device(spec: &InferenceServiceSpec) -> Result<Device, Refusal> {
    let tensor = spec.parallelism.as_ref().and_then(|parallelism| parallelism.tensor).unwrap_or(1);
    let count = bounded("spec.parallelism.tensor", tensor, 1, 16)?;
    let accelerator = spec.accelerator.as_ref();
    let kind = accelerator.map(|accelerator| accelerator.kind).unwrap_or_default();
    let wish = accelerator.and_then(|accelerator| accelerator.nvidia_gpu.clone());
    match (kind, wish) {
        (AcceleratorType::Cpu, Some(_)) => {
            Err(Refusal::Union { field: "spec.accelerator.nvidiaGPU", problem: "only with type NvidiaGPU" })
        }
        (AcceleratorType::Cpu, None) if count > 1 => Err(Refusal::TensorOnCpu { tensor }),
        (AcceleratorType::Cpu, None) => Ok(Device::Cpu),
        (AcceleratorType::NvidiaGpu, wish) => {
            let wish = wish.unwrap_or_default();
            let min_memory_mebibytes = wish.min_memory.as_ref().map(gpu_memory).transpose()?;
            let allocation = allocation(wish.mig_profile, wish.resource_claim_template_name, count)?;
            Ok(Device::NvidiaGpu { count, products: wish.products, min_memory_mebibytes, allocation })
        }
    }
}

fn allocation(profile: Option<String>, template: Option<String>, count: u32) -> Result<GpuAllocation, Refusal> {
    let field = "spec.accelerator.nvidiaGPU.migProfile";
    match (profile, template) {
        (None, None) => Ok(GpuAllocation::Whole),
        (None, Some(template)) => Ok(GpuAllocation::Claim(template)),
        (Some(_), Some(_)) => Err(Refusal::Union { field, problem: "not together with resourceClaimTemplateName" }),
        (Some(_), None) if count > 1 => {
            Err(Refusal::Union { field, problem: "not with spec.parallelism.tensor above 1: a replica has one slice" })
        }
        (Some(name), None) => MigProfile::parse(&name)
            .map(GpuAllocation::Slice)
            .ok_or(Refusal::Union { field, problem: "a profile such as 1g.10gb" }),
    }
}

fn nodes(spec: &InferenceServiceSpec) -> Result<u32, Refusal> {
    let pipeline = spec.parallelism.as_ref().and_then(|parallelism| parallelism.pipeline).unwrap_or(1);
    bounded("spec.parallelism.pipeline", pipeline, 1, 16)
}

fn gpu_memory(quantity: &Quantity) -> Result<u64, Refusal> {
    let field = "spec.accelerator.nvidiaGPU.minMemory";
    mebibytes(quantity).ok_or_else(|| Refusal::Quantity { field, value: quantity.0.clone() })
}

fn gpus_in_resources(spec: &InferenceServiceSpec) -> impl Iterator<Item = Refusal> {
    let resources = spec.resources.clone().unwrap_or_default();
    let named = [("spec.resources.requests", resources.requests), ("spec.resources.limits", resources.limits)];
    named.into_iter().flat_map(|(field, amounts)| {
        let gpus = amounts.into_keys().filter(|name| name.starts_with("nvidia.com/"));
        gpus.map(move |resource| Refusal::GpuInResources { field, resource })
    })
}

fn requests_beyond_limits(spec: &InferenceServiceSpec) -> impl Iterator<Item = Refusal> {
    let Resources { requests, limits } = spec.resources.clone().unwrap_or_default();
    requests.into_iter().filter_map(move |(resource, request)| {
        let limit = limits.get(&resource)?;
        let is_beyond = quantity::milli(&request.0)? > quantity::milli(&limit.0)?;
        is_beyond.then(|| Refusal::BeyondLimit { resource, request: request.0, limit: limit.0.clone() })
    })
}

fn spot(spec: &InferenceServiceSpec) -> SpotPolicy {
    let spot = spec.spot.clone();
    let given = spot.clone().unwrap_or_default();
    SpotPolicy {
        mode: spot.map(|spot| spot.mode),
        on_demand_base: given.on_demand_base.unwrap_or(0).max(0),
        max_percent_above_base: given.max_percent_above_base.unwrap_or(100).clamp(0, 100),
        fallback_after: fallback_after(&given),
        node_selector: given.node_selector,
        tolerations: given.tolerations,
    }
}

fn fallback_after(spot: &Spot) -> Option<Duration> {
    let seconds = spot.fallback_after_seconds.filter(|_| spot.mode == SpotMode::Prefer)?;
    Some(Duration::from_secs(seconds.max(1).unsigned_abs().into()))
}

/// `value` when it lies within the bounds, both included.
pub(crate) fn bounded(field: &'static str, value: i32, min: i32, max: i32) -> Result<u32, Refusal> {
    let refusal = || Refusal::OutOfRange { field, value: value.into(), min: min.into(), max: max.into() };
    if (min..=max).contains(&value) { u32::try_from(value).map_err(|_| refusal()) } else { Err(refusal()) }
}

/// The spec without the fields that no pod template is made from.
pub fn of_pods(spec: &InferenceServiceSpec) -> InferenceServiceSpec {
    let mut pods = spec.clone();
    pods.replicas = 0;
    // Pods of a service with standby have a label of their own; how many there are does not change them.
    pods.autoscaling = spec.autoscaling.as_ref().filter(|scaling| has_standby(scaling)).map(|_| Autoscaling {
        mode: AutoscalingMode::Builtin,
        standby_replicas: Some(1),
        ..Autoscaling::default()
    });
    pods.network = None;
    pods.rollout = spec.rollout.as_ref().and_then(|rollout| {
        let restarted_at = rollout.restarted_at.clone()?;
        Some(Rollout { restarted_at: Some(restarted_at), ..Rollout::default() })
    });
    if let Some(spot) = pods.spot.as_mut() {
        spot.on_demand_base = None;
        spot.max_percent_above_base = None;
        // That there is a fallback keeps pods on spot nodes; how long it waits does not change them.
        spot.fallback_after_seconds = spot.fallback_after_seconds.map(|_| 1);
    }
    pods
}

fn has_standby(scaling: &Autoscaling) -> bool {
    let is_asked = scaling.standby_replicas.is_some_and(|replicas| replicas > 0);
    is_asked && scaling.mode == AutoscalingMode::Builtin && scaling.shadow != Some(true)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{ServiceBuilder, service};
    use serde_json::{Value, json};

    fn valid(spec: ServiceBuilder) -> ValidatedService {
        validate(&spec.build()).expect("valid")
    }

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
        assert_eq!(valid(service()).served_names, ["llama"]);
        assert_eq!(valid(service().model("servedNames", json!(["a", "b"]))).served_names, ["a", "b"]);
    }

    #[test]
    fn what_pods_are_made_from_is_made_from_itself() {
        let spec = service().builtin(1, 4, 500).standby(2).build().spec;
        assert_eq!(of_pods(&of_pods(&spec)), of_pods(&spec));
    }

    #[test]
    fn the_service_owns_its_children() {
        let expected = json!({
            "apiVersion": "windlass.dev/v1alpha1", "kind": "InferenceService", "name": "llama",
            "uid": crate::testing::UID, "controller": true, "blockOwnerDeletion": true,
        });
        assert_eq!(serde_json::to_value(valid(service()).owner).expect("json"), expected);
    }

    #[test]
    fn the_simulator_is_asked_for_by_a_flag_and_its_value() {
        for (arguments, is_simulated) in [
            (json!(["--executor", "sim"]), true),
            (json!(["--executor=sim"]), true),
            (json!(["--verbose", "--executor=sim"]), true),
            (json!([]), false),
            (json!(["--executor", "real"]), false),
            (json!(["--executor=real"]), false),
            (json!(["--name", "sim"]), false),
            (json!(["--name=sim"]), false),
            (json!(["sim", "--executor"]), false),
            (json!(["--executor"]), false),
        ] {
            let engine = valid(service().with("engine", json!({"extraArgs": arguments}))).engine;
            assert_eq!(engine.is_simulated, is_simulated, "{arguments}");
        }
    }

    #[test]
    fn the_split_is_open_where_neither_a_number_nor_how_gpus_are_allocated_tells_it() {
        let gpus = |wish: Value| service().with("accelerator", json!({"type": "NvidiaGPU", "nvidiaGPU": wish}));
        let pipeline = json!({"pipeline": 1});
        for (spec, is_open) in [
            (gpus(json!({})), true),
            (gpus(json!({"products": ["NVIDIA-L40S"]})), true),
            (gpus(json!({})).with("parallelism", pipeline), true),
            (gpus(json!({})).with("parallelism", json!({"tensor": 1})), false),
            (gpus(json!({"resourceClaimTemplateName": "two"})), false),
            (gpus(json!({"migProfile": "1g.10gb"})), false),
            (service(), false),
        ] {
            let told = format!("{spec:?}");
            assert_eq!(valid(spec).is_tensor_open, is_open, "{told}");
        }
    }

    #[test]
    fn a_replica_is_split_over_gpus_of_a_node_and_over_nodes() {
        let parallel = |kind: &str, tensor: i32, pipeline: i32| {
            let spec = service().with("accelerator", json!({"type": kind}));
            let spec = spec.with("parallelism", json!({"tensor": tensor, "pipeline": pipeline}));
            validate(&spec.build()).ok().map(|valid| (valid.device.tensor(), valid.nodes))
        };
        for (kind, tensor, pipeline, expected) in [
            ("NvidiaGPU", 1, 1, Some((1, 1))),
            ("NvidiaGPU", 16, 1, Some((16, 1))),
            ("NvidiaGPU", 17, 1, None),
            ("NvidiaGPU", 0, 1, None),
            ("NvidiaGPU", 1, 2, Some((1, 2))),
            ("NvidiaGPU", 4, 2, Some((4, 2))),
            ("NvidiaGPU", 1, 17, None),
            ("CPU", 1, 1, Some((1, 1))),
            ("CPU", 1, 16, Some((1, 16))),
            ("CPU", 1, 17, None),
            ("CPU", 1, 0, None),
            ("CPU", 2, 1, None),
        ] {
            assert_eq!(parallel(kind, tensor, pipeline), expected, "{kind} {tensor} {pipeline}");
        }
    }

    #[test]
    fn a_slice_is_one_and_goes_with_no_claim() {
        let allocated = |wish: Value, tensor: i32| {
            let spec = service().with("accelerator", json!({"type": "NvidiaGPU", "nvidiaGPU": wish}));
            match validate(&spec.with("parallelism", json!({"tensor": tensor})).build()).ok()?.device {
                Device::NvidiaGpu { allocation, .. } => Some(allocation),
                Device::Cpu => None,
            }
        };
        let profile = MigProfile::parse("1g.10gb").expect("a profile");
        assert_eq!(allocated(json!({"migProfile": "1g.10gb"}), 1), Some(GpuAllocation::Slice(profile)));
        assert_eq!(allocated(json!({"migProfile": "1g.10gb"}), 2), None);
        let claim = GpuAllocation::Claim("two".into());
        assert_eq!(allocated(json!({"resourceClaimTemplateName": "two"}), 2), Some(claim));
        assert_eq!(allocated(json!({"migProfile": "1g.10gb", "resourceClaimTemplateName": "two"}), 1), None);
        assert_eq!(allocated(json!({}), 2), Some(GpuAllocation::Whole));
    }

    #[test]
    fn shares_of_spot_are_as_given_and_only_a_preference_falls_back() {
        let spot = |spot: Value| valid(service().with("spot", spot)).spot;
        for (mode, has_workload, after) in [("Prefer", true, Some(60)), ("Require", true, None), ("Never", false, None)]
        {
            let found = spot(json!({"mode": mode, "fallbackAfterSeconds": 60}));
            assert_eq!(found.has_workload(), has_workload, "{mode}");
            assert_eq!(found.fallback_after, after.map(Duration::from_secs), "{mode}");
        }
        let given =
            spot(json!({"mode": "Prefer", "onDemandBase": 2, "maxPercentAboveBase": 30, "nodeSelector": {"a": "b"}}));
        assert_eq!((given.on_demand_base, given.max_percent_above_base), (2, 30));
        assert_eq!(given.node_selector, [("a".to_owned(), "b".to_owned())].into());
        let open = spot(json!({"mode": "Prefer"}));
        assert_eq!((open.on_demand_base, open.max_percent_above_base, open.fallback_after), (0, 100, None));
    }

    #[test]
    fn pods_know_whether_there_are_spares_and_not_how_many() {
        let hash = |spec: ServiceBuilder| valid(spec).spec_hash;
        let standby = |replicas: i32| service().builtin(1, 4, 500).standby(replicas);
        let mut shadow = standby(1).build();
        shadow.spec.autoscaling.as_mut().expect("autoscaling").shadow = Some(true);
        let plain = hash(service());
        assert_eq!(validate(&shadow).expect("valid").spec_hash, plain, "in shadow nothing is spared");
        for (spec, has_standby) in [
            (service(), false),
            (service().builtin(1, 4, 500), false),
            (standby(0), false),
            (standby(1), true),
            (standby(2), true),
        ] {
            let found = valid(spec);
            assert_eq!((found.has_standby(), found.spec_hash != plain), (has_standby, has_standby));
        }
        assert_eq!(hash(standby(1)), hash(standby(2)));
    }

    #[test]
    fn each_restart_is_of_other_pods_and_nothing_else_of_a_rollout_is() {
        let hash = |rollout: Value| valid(service().with("rollout", rollout)).spec_hash;
        let plain = hash(json!({}));
        assert_eq!(hash(json!({"strategy": "Drain", "paused": true, "progressDeadlineSeconds": 9})), plain);
        let [first, second] =
            [30, 31].map(|minute| hash(json!({"restartedAt": format!("2026-11-21T19:{minute}:00Z")})));
        assert!(first != plain && second != plain && first != second);
    }

    #[test]
    fn the_fingerprint_of_the_source_follows_what_names_its_content() {
        let hash = |spec: ServiceBuilder| valid(spec).source_hash;
        let first = hash(service());
        assert_eq!(hash(service().with("replicas", json!(3)).with("engine", json!({"maxSequences": 4}))), first);
        assert_ne!(hash(service().model("revision", json!("v2"))), first);
        assert_ne!(hash(service().model("source", json!("pvc://models/other.gguf"))), first);
    }
}
