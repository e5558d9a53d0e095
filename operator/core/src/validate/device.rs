//! What a replica runs on: the processor or GPUs, of one node or of several.

use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use windlass_operator_api::InferenceServiceSpec;
use windlass_operator_api::accelerator::{AcceleratorType, NvidiaGpu};

use super::{Refusal, bounded};
use crate::mig::MigProfile;
use crate::quantity::mebibytes;

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
    pub(crate) fn validate(spec: &InferenceServiceSpec) -> Result<Self, Refusal> {
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
            (AcceleratorType::NvidiaGpu, wish) => Self::gpus(wish.unwrap_or_default(), count),
        }
    }

    fn gpus(wish: NvidiaGpu, count: u32) -> Result<Self, Refusal> {
        let min_memory_mebibytes = wish.min_memory.as_ref().map(gpu_memory).transpose()?;
        let allocation = GpuAllocation::validate(wish.mig_profile, wish.resource_claim_template_name, count)?;
        Ok(Device::NvidiaGpu { count, products: wish.products, min_memory_mebibytes, allocation })
    }

    /// Tensor-parallel size.
    pub fn tensor(&self) -> u32 {
        match self {
            Device::Cpu => 1,
            Device::NvidiaGpu { count, .. } => *count,
        }
    }
}

impl GpuAllocation {
    fn validate(profile: Option<String>, template: Option<String>, count: u32) -> Result<Self, Refusal> {
        let field = "spec.accelerator.nvidiaGPU.migProfile";
        match (profile, template) {
            (None, None) => Ok(GpuAllocation::Whole),
            (None, Some(template)) => Ok(GpuAllocation::Claim(template)),
            (Some(_), Some(_)) => Err(Refusal::Union { field, problem: "not together with resourceClaimTemplateName" }),
            (Some(_), None) if count > 1 => Err(Refusal::Union {
                field,
                problem: "not with spec.parallelism.tensor above 1: a replica has one slice",
            }),
            (Some(name), None) => MigProfile::parse(&name)
                .map(GpuAllocation::Slice)
                .ok_or(Refusal::Union { field, problem: "a profile such as 1g.10gb" }),
        }
    }
}

/// Nodes over which a replica's layers are divided.
pub fn nodes(spec: &InferenceServiceSpec) -> Result<u32, Refusal> {
    let pipeline = spec.parallelism.as_ref().and_then(|parallelism| parallelism.pipeline).unwrap_or(1);
    bounded("spec.parallelism.pipeline", pipeline, 1, 16)
}

/// Whether the spec leaves it open over how many GPUs a replica is split.
pub fn is_tensor_open(spec: &InferenceServiceSpec) -> bool {
    let is_given = spec.parallelism.as_ref().is_some_and(|parallelism| parallelism.tensor.is_some());
    let kind = spec.accelerator.as_ref().map(|accelerator| accelerator.kind).unwrap_or_default();
    kind == AcceleratorType::NvidiaGpu && !is_given && !is_told(spec)
}

/// Whether how GPUs are allocated tells how many they are: as many as a claim's template says, or one slice.
fn is_told(spec: &InferenceServiceSpec) -> bool {
    let gpu = spec.accelerator.as_ref().and_then(|accelerator| accelerator.nvidia_gpu.as_ref());
    gpu.is_some_and(|gpu| gpu.resource_claim_template_name.is_some() || gpu.mig_profile.is_some())
}

fn gpu_memory(quantity: &Quantity) -> Result<u64, Refusal> {
    let field = "spec.accelerator.nvidiaGPU.minMemory";
    mebibytes(quantity).ok_or_else(|| Refusal::Quantity { field, value: quantity.0.clone() })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::service;
    use crate::validate::validate;
    use serde_json::{Value, json};

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
            assert_eq!(spec.valid().is_tensor_open, is_open, "{told}");
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
}
