//! The resource itself: `windlass.dev/v1alpha1`, kind `InferenceService`.

use kube_derive::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::accelerator::{Accelerator, Parallelism, Resources};
use crate::access::{Auth, LocalReference, Network};
use crate::autoscaling::Autoscaling;
use crate::engine::Engine;
use crate::model::Model;
use crate::rollout::Rollout;
use crate::scheduling::Scheduling;
use crate::spot::Spot;
use crate::status::InferenceServiceStatus;

/// What to serve, on what, and how it scales.
#[derive(CustomResource, Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[kube(
    group = "windlass.dev",
    version = "v1alpha1",
    kind = "InferenceService",
    namespaced,
    shortname = "infsvc",
    category = "windlass",
    category = "all",
    status = "InferenceServiceStatus",
    derive = "PartialEq",
    doc = "A large language model served by engine pods behind one OpenAI-compatible endpoint.",
    crates(kube_core = "kube_core"),
    scale(
        spec_replicas_path = ".spec.replicas",
        status_replicas_path = ".status.replicas",
        label_selector_path = ".status.selector"
    )
)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("x-kubernetes-validations" = [
    {
        "rule": "!has(self.parallelism) || !has(self.parallelism.tensor) || self.parallelism.tensor == 1 || (has(self.accelerator) && self.accelerator.type == 'NvidiaGPU')",
        "message": "spec.parallelism.tensor: more than 1 needs spec.accelerator.type NvidiaGPU; a CPU replica is one rank"
    },
    {
        "rule": "!has(self.accelerator) || !has(self.accelerator.nvidiaGPU) || !has(self.accelerator.nvidiaGPU.migProfile) || !has(self.parallelism) || !has(self.parallelism.tensor) || self.parallelism.tensor == 1",
        "message": "spec.parallelism.tensor: 1 or absent with migProfile; slices of a GPU do not compute one model together"
    },
    {
        "rule": "!has(self.accelerator) || !has(self.accelerator.nvidiaGPU) || !has(self.accelerator.nvidiaGPU.resourceClaimTemplateName) || (has(self.parallelism) && has(self.parallelism.tensor))",
        "message": "spec.parallelism.tensor: required with resourceClaimTemplateName; as many as its template asks for"
    }
]))]
pub struct InferenceServiceSpec {
    /// Replicas to run in autoscaling mode Manual, and in mode Builtin while `autoscaling.shadow` is on. This is what
    /// `kubectl scale` writes. Mode Builtin does not use it otherwise: leave it out of Git there.
    #[serde(default = "one")]
    #[schemars(range(min = 0, max = 1000))]
    pub replicas: i32,
    /// What to serve.
    pub model: Model,
    /// How the engine runs it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub engine: Option<Engine>,
    /// What it runs on. Absent: CPU.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub accelerator: Option<Accelerator>,
    /// How one replica is split over accelerators or nodes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parallelism: Option<Parallelism>,
    /// CPU, memory and other resources of one engine container. GPUs follow from `parallelism` and are refused here.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub resources: Option<Resources>,
    /// Where pods may run.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scheduling: Option<Scheduling>,
    /// ServiceAccount of the pods, which must exist. Absent: one without any rights is made. Its token is never mounted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 253))]
    pub service_account_name: Option<String>,
    /// Secrets with credentials for the engine's image.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 8), extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["name"]))]
    pub image_pull_secrets: Vec<LocalReference>,
    /// Who may call the API.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub auth: Option<Auth>,
    /// From where the API can be reached.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network: Option<Network>,
    /// How the number of replicas follows the load. Absent: Manual.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub autoscaling: Option<Autoscaling>,
    /// Use of spot (preemptible) nodes. Absent: no opinion, only `scheduling` places pods.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub spot: Option<Spot>,
    /// How pods of a new revision take the place of the old ones. Absent: by what room there is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rollout: Option<Rollout>,
    /// How long a pod that goes away may finish its streams, seconds. A pod's termination grace period is this plus 30.
    #[serde(default = "default_drain_timeout_seconds")]
    #[schemars(range(min = 0, max = 86_400))]
    pub drain_timeout_seconds: i32,
}

fn one() -> i32 {
    1
}

fn default_drain_timeout_seconds() -> i32 {
    300
}
