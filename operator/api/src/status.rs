//! `status`: what the operator answers. Condition types and their reasons are words that scripts rely on.

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::autoscaling::LatencyMetric;

/// What is there, and why.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct InferenceServiceStatus {
    /// The generation of the spec that this status speaks about.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0))]
    pub observed_generation: Option<i64>,
    /// Ready, Fits, Progressing, Reconciling, Stalled and ScalingActive.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "crate::schema::conditions")]
    pub conditions: Vec<Condition>,
    /// Replicas that exist, in all workloads, those that drain left out.
    #[serde(default)]
    #[schemars(range(min = 0, max = 1_000_000))]
    pub replicas: i32,
    /// Replicas that serve.
    #[serde(default)]
    #[schemars(range(min = 0, max = 1_000_000))]
    pub ready_replicas: i32,
    /// Replicas made from the current spec.
    #[serde(default)]
    #[schemars(range(min = 0, max = 1_000_000))]
    pub updated_replicas: i32,
    /// Replicas that serve and were made from the current spec, with the configuration that the spec asks for.
    #[serde(default)]
    #[schemars(range(min = 0, max = 1_000_000))]
    pub available_replicas: i32,
    /// Replicas wanted now.
    #[serde(default)]
    #[schemars(range(min = 0, max = 1_000_000))]
    pub desired_replicas: i32,
    /// Of the replicas, those in the spot workload.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 1_000_000))]
    pub spot_replicas: Option<i32>,
    /// Replicas to spare: loaded, reached by no request, and in none of the other numbers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 1_000_000))]
    pub standby_replicas: Option<i32>,
    /// Label selector of the serving pods, for `/scale`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 512))]
    pub selector: Option<String>,
    /// Base URL of the OpenAI API inside the cluster.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 512))]
    pub url: Option<String>,
    /// Nodes with replicas that are being taken back, each with the notice.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16), inner(length(max = 400)), extend("x-kubernetes-list-type" = "set"))]
    pub interrupted_nodes: Vec<String>,
    /// Replicas that run on demand because no spot node came. Absent: none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 1_000_000))]
    pub spot_fallback_replicas: Option<i32>,
    /// Replicas for spot that are on no spot node: each waits for one, or runs on another node because that had room. Those
    /// of spotFallbackReplicas left out. Absent: none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 1_000_000))]
    pub spot_missing_replicas: Option<i32>,
    /// The first name to put in a request's `model` field.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 128))]
    pub served_name: Option<String>,
    /// The model, as its header tells. Absent: it was not read yet, or cannot be.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub model: Option<ModelStatus>,
    /// Name of the revision that pods are to be of: the spec's own, or the pinned one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 63))]
    pub revision: Option<String>,
    /// Revisions that `spec.rollout.pinnedRevision` can name, newest first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64), extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["name"]))]
    pub revisions: Vec<RevisionStatus>,
    /// What was chosen where the spec leaves a choice.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub choices: Option<Choices>,
    /// What serves, as `system_fingerprint` of answers and the label `windlass.dev/fingerprint` of pods tell it: a word for
    /// weights, tokenizer, flags, engine version and device. More than one while a rollout goes on.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 8), inner(length(max = 63)), extend("x-kubernetes-list-type" = "set"))]
    pub fingerprints: Vec<String>,
    /// Cold start of the slowest replica that serves.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cold_start: Option<ColdStart>,
    /// Load over all replicas, as last published: with a decision or a change of condition, else once a minute at most.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub load: Option<Load>,
    /// The autoscaler's last decision. Absent in mode Manual.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub autoscaling: Option<AutoscalingStatus>,
}

/// A model, as its header tells.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ModelStatus {
    /// Fingerprint of the source and revision that were read.
    #[schemars(length(max = 64))]
    pub source_hash: String,
    /// Architecture, as the checkpoint names it.
    #[schemars(length(max = 64))]
    pub architecture: String,
    /// Format of most of the weights.
    #[schemars(length(max = 64))]
    pub weight_type: String,
    /// Bytes of the weights.
    #[schemars(range(min = 0))]
    pub weight_bytes: i64,
    /// Longest sequence that the model was trained for, tokens.
    #[schemars(range(min = 0))]
    pub context_tokens: i64,
    /// Which version of the source was read: a server's entity tag. Absent: the source tells none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 512))]
    pub revision: Option<String>,
    /// All that the header told, as `windlass-engine inspect --summary` prints it.
    #[schemars(length(max = 4096))]
    pub inspection: String,
}

/// A revision that can be gone back to.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct RevisionStatus {
    /// Its name, as `spec.rollout.pinnedRevision` takes it.
    #[schemars(length(max = 63))]
    pub name: String,
    /// Its number: later revisions have higher ones.
    #[schemars(range(min = 0))]
    pub number: i64,
    /// Image of the engine.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 512))]
    pub engine_image: Option<String>,
    /// When it came about.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "crate::schema::time")]
    pub created_time: Option<Time>,
}

/// What was chosen where the spec leaves a choice; held by the pods' template, mirrored here.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Choices {
    /// Image of the engine.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 512))]
    pub engine_image: Option<String>,
    /// GPUs over which a replica is split, or 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 64))]
    pub tensor: Option<i32>,
    /// Format of the weights as the engine reports it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 64))]
    pub quantization: Option<String>,
    /// Why tensor and quantization were chosen so. Absent: the spec leaves no choice, or nothing was known to choose by.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 1024))]
    pub reason: Option<String>,
}

/// Phases of a cold start, milliseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ColdStart {
    /// Until the scheduler had found a node. Absent: not known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 1_000_000_000))]
    pub schedule_milliseconds: Option<i64>,
    /// Until the first container ran, its image pulled and its volumes mounted. Absent: not known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 1_000_000_000))]
    pub pull_milliseconds: Option<i64>,
    /// Fetching the model; 0 where it was present.
    #[schemars(range(min = 0, max = 1_000_000_000))]
    pub download_milliseconds: i64,
    /// Reading and repacking weights.
    #[schemars(range(min = 0, max = 1_000_000_000))]
    pub load_milliseconds: i64,
    /// Until the first generated token.
    #[schemars(range(min = 0, max = 1_000_000_000))]
    pub warm_milliseconds: i64,
}

/// Load over all replicas.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Load {
    /// When these values were measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "crate::schema::time")]
    pub measured_time: Option<Time>,
    /// Requests being computed.
    #[schemars(range(min = 0))]
    pub running_requests: i64,
    /// Requests waiting for a place in a batch.
    #[schemars(range(min = 0))]
    pub waiting_requests: i64,
    /// Mean utilization of the replicas over a minute, percent. Absent: not measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 100))]
    pub utilization_percent: Option<i32>,
    /// 95th percentile of the time to first token. Absent: fewer than 20 requests in the window.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 1_000_000_000))]
    pub time_to_first_token_p95_milliseconds: Option<i64>,
    /// 95th percentile of the time between tokens. Absent: fewer than 20 in the window.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 1_000_000_000))]
    pub inter_token_p95_milliseconds: Option<i64>,
}

/// The autoscaler's last decision.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct AutoscalingStatus {
    /// What was decided.
    pub decision: ScalingDecision,
    /// A stable word for the term that won.
    #[schemars(length(min = 1, max = 64))]
    pub reason: String,
    /// The decision in words, with its numbers.
    #[schemars(length(max = 1024))]
    pub message: String,
    /// Replicas recommended; with `shadow` on they are not applied.
    #[schemars(range(min = 0, max = 1_000_000))]
    pub recommended_replicas: i32,
    /// The recommendation was not applied because `shadow` is on.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub shadow: bool,
    /// What the decision was made from, one entry per target.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 9), extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["metric", "percentile"]))]
    pub inputs: Vec<TargetReading>,
    /// What the tokens that arrive ask for. Absent while it is not known what tokens cost a replica.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub need: Option<TokenNeed>,
    /// What keeps a further step from being taken now.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16), inner(length(max = 256)), extend("x-kubernetes-list-type" = "atomic"))]
    pub blockers: Vec<String>,
    /// When the change that the load asks for can be made at the earliest. Absent: it asks for none, or the change waits for
    /// something else than time, which `blockers` names.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "crate::schema::time")]
    pub next_change_time: Option<Time>,
    /// When the number of replicas was last changed by the autoscaler.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "crate::schema::time")]
    pub last_scale_time: Option<Time>,
}

/// What the tokens that arrive ask for, in hundredths of a replica.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct TokenNeed {
    /// How many full replicas they are now, percent of one.
    #[schemars(range(min = 0, max = 1_000_000_000))]
    pub load_percent: i64,
    /// The same when a replica asked for now could serve.
    #[schemars(range(min = 0, max = 1_000_000_000))]
    pub forecast_percent: i64,
    /// How full a replica is planned to be, so that targets are held.
    #[schemars(range(min = 0, max = 100))]
    pub planned_fill_percent: i64,
    /// The cold start that the forecast looks ahead.
    #[schemars(range(min = 0, max = 1_000_000_000))]
    pub cold_start_seconds: i64,
}

/// Decisions of the autoscaler.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum ScalingDecision {
    /// More replicas.
    ScaleUp,
    /// One replica fewer.
    ScaleDown,
    /// As many as now.
    Hold,
}

/// One latency target as measured.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct TargetReading {
    /// Which latency.
    pub metric: LatencyMetric,
    /// Which percentile.
    #[schemars(range(min = 1, max = 99))]
    pub percentile: i32,
    /// The target.
    #[schemars(range(min = 1, max = 1_000_000_000))]
    pub target_milliseconds: i64,
    /// The measured percentile. Absent: too few observations.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 1_000_000_000))]
    pub measured_milliseconds: Option<i64>,
    /// Observations in the window, counted to 20.
    #[schemars(range(min = 0))]
    pub samples: i64,
    /// The target is not held.
    pub breached: bool,
}

/// Condition types.
pub mod condition {
    /// The replicas that the spec asks for serve it as it asks.
    pub const READY: &str = "Ready";
    /// A replica fits into the memory of the nodes it may run on.
    pub const FITS: &str = "Fits";
    /// The autoscaler can decide.
    pub const SCALING_ACTIVE: &str = "ScalingActive";
    /// A change is rolled out, or was; False when it does not come to an end.
    pub const PROGRESSING: &str = "Progressing";
    /// The operator is at work on the current spec (kstatus).
    pub const RECONCILING: &str = "Reconciling";
    /// Nothing will change until somebody changes something (kstatus).
    pub const STALLED: &str = "Stalled";
}

/// A timestamp in Kubernetes' form, whole seconds.
pub fn time(at: Timestamp) -> Time {
    Time(Timestamp::from_second(at.as_second()).unwrap_or(at))
}
