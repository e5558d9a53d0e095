//! `spec.accelerator`, `spec.parallelism`, `spec.resources`: what one replica runs on.

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// A union of device kinds.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("x-kubernetes-validations" = [
    {
        "rule": "self.type == 'NvidiaGPU' || !has(self.nvidiaGPU)",
        "message": "spec.accelerator.nvidiaGPU: only with type NvidiaGPU"
    }
]))]
pub struct Accelerator {
    /// CPU, or NVIDIA GPUs, offered as the resource nvidia.com/gpu where `nvidiaGPU` says nothing else.
    #[serde(rename = "type")]
    pub kind: AcceleratorType,
    /// Which GPUs will do. Absent: any.
    #[serde(default, rename = "nvidiaGPU", skip_serializing_if = "Option::is_none")]
    pub nvidia_gpu: Option<NvidiaGpu>,
}

/// Kinds of device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum AcceleratorType {
    /// The node's processor.
    #[default]
    #[serde(rename = "CPU")]
    Cpu,
    /// NVIDIA GPUs, as many in a pod as `parallelism.tensor` says.
    #[serde(rename = "NvidiaGPU")]
    NvidiaGpu,
}

/// Which GPUs will do, by the labels of NVIDIA's GPU feature discovery; or a claim template by which they are allocated.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("x-kubernetes-validations" = [
    {
        "rule": "!has(self.migProfile) || (!has(self.resourceClaimTemplateName) && !has(self.minMemory))",
        "message": "spec.accelerator.nvidiaGPU.migProfile: it says what memory a slice has, and the device plugin counts it; leave minMemory and resourceClaimTemplateName out"
    },
    {
        "rule": "!has(self.resourceClaimTemplateName) || (!has(self.products) && !has(self.minMemory))",
        "message": "spec.accelerator.nvidiaGPU.resourceClaimTemplateName: its selectors choose the GPUs; leave products and minMemory out"
    }
]))]
pub struct NvidiaGpu {
    /// Values of the node label nvidia.com/gpu.product, any of which will do. Absent: any product.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(
        length(max = 32),
        inner(length(min = 1, max = 63), regex(pattern = r"^[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$")),
        extend("x-kubernetes-list-type" = "set")
    )]
    pub products: Vec<String>,
    /// Least memory of one GPU, by the node label nvidia.com/gpu.memory. Absent: any size.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "crate::schema::positive_quantity")]
    pub min_memory: Option<Quantity>,
    /// A profile of MIG slices, as 1g.10gb: a pod asks for one slice, nvidia.com/mig-1g.10gb, instead of nvidia.com/gpu. For
    /// GPUs that are split with strategy mixed; with strategy single, slices are GPUs, of products of their own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 63), regex(pattern = r"^[1-7]g\.[1-9][0-9]{0,2}gb(\.me)?$"))]
    pub mig_profile: Option<String>,
    /// A ResourceClaimTemplate (resource.k8s.io/v1) of the namespace, by which each pod claims its GPUs from a DRA driver
    /// instead of asking for nvidia.com/gpu. It asks for as many devices as `parallelism.tensor` says.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 253), regex(pattern = r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$"))]
    pub resource_claim_template_name: Option<String>,
}

/// How one replica is split.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Parallelism {
    /// GPUs over which every layer is split; the pod asks for as many. Absent: the fewest on which the model fits, by its
    /// header and the nodes' labels, or 1 where these cannot be read; the choice stays until the spec changes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 16))]
    pub tensor: Option<i32>,
    /// Nodes over which the layers of a replica are divided, each a pod with `resources` of its own, where one has not the
    /// memory. Each computes a step of its own: prompts and many answers gain speed, one answer does not. Of GPUs, each has
    /// as many as `tensor` says. Absent: 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 16))]
    pub pipeline: Option<i32>,
}

/// Requests and limits of the engine container.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("x-kubernetes-validations" = [
    {
        "rule": "!has(self.requests) || self.requests.all(name, !name.startsWith('nvidia.com/'))",
        "message": "spec.resources.requests: GPUs follow from spec.accelerator and spec.parallelism.tensor; leave nvidia.com/ resources out"
    },
    {
        "rule": "!has(self.limits) || self.limits.all(name, !name.startsWith('nvidia.com/'))",
        "message": "spec.resources.limits: GPUs follow from spec.accelerator and spec.parallelism.tensor; leave nvidia.com/ resources out"
    }
]))]
pub struct Resources {
    /// What the scheduler sets aside for a pod.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[schemars(schema_with = "crate::schema::quantities")]
    pub requests: BTreeMap<String, Quantity>,
    /// What a pod may use at most.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[schemars(schema_with = "crate::schema::quantities")]
    pub limits: BTreeMap<String, Quantity>,
}
