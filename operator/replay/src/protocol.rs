//! The replay protocol, version 1: what a judge tells a scaling policy, and what the policy answers.
//!
//! One JSON object a line: one [`Hello`], then a [`Tick`] every few simulated seconds, each answered by one [`Reply`],
//! then `end`. Fields that are not known here are ignored. Ages and durations are seconds, ratios 0 to 1.

use serde::{Deserialize, Serialize};

/// The version that is spoken.
pub const VERSION: u32 = 1;
/// Longest line that is read: a tick of thousands of pods.
pub const MAX_LINE_BYTES: u64 = 64 << 20;

/// One line from the judge.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(tag = "type", rename_all = "camelCase")]
pub enum Message {
    /// The first line.
    Hello(Hello),
    /// A look at the world.
    Tick(Tick),
    /// The last line.
    End,
}

/// What is to be scaled.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Hello {
    /// [`VERSION`].
    pub protocol: u32,
    /// A name for people.
    #[serde(default)]
    pub scenario: String,
    /// Time between ticks.
    pub scrape_interval_seconds: f64,
    /// Bounds and goals.
    pub spec: Spec,
    /// The engine in every pod.
    #[serde(default)]
    pub engine: EngineSize,
    /// Upper edges of the latency histograms.
    pub histogram_edges: Edges,
}

/// Bounds and goals.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Spec {
    /// Fewest pods.
    pub min_replicas: i32,
    /// Most pods.
    pub max_replicas: i32,
    /// Pods at the start.
    #[serde(default = "one")]
    pub initial_replicas: i32,
    /// Latencies to hold.
    pub targets: Targets,
    /// How long a pod may finish its streams.
    #[serde(default)]
    pub drain_timeout_seconds: f64,
    /// Whether spot nodes are to be had.
    #[serde(default)]
    pub spot: SpotSupply,
}

/// Latencies to hold, both by the same share of requests.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Targets {
    /// Arrival to first token.
    pub ttft_seconds: f64,
    /// Mean time per output token after the first.
    pub inter_token_seconds: f64,
    /// Share of all requests that are to hold both.
    pub share: f64,
}

/// Spot nodes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct SpotSupply {
    /// There are some, at times.
    #[serde(default)]
    pub available: bool,
    /// Replicas that stay off them; absent: the fewest.
    #[serde(default)]
    pub on_demand_base: Option<i32>,
    /// Replicas run on demand when one has waited for so long; absent: 60.
    #[serde(default)]
    pub fallback_after_seconds: Option<f64>,
}

/// Sizes of the engine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct EngineSize {
    /// Tokens that the KV cache holds.
    #[serde(default)]
    pub kv_cache_tokens: u64,
    /// Most sequences in a batch.
    #[serde(default)]
    pub max_num_seqs: u32,
    /// Most tokens in a step.
    #[serde(default)]
    pub max_num_batched_tokens: u32,
}

/// Upper edges of histograms, seconds, rising; one more bucket has no edge.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Edges {
    /// Arrival to first token.
    pub ttft: Vec<f64>,
    /// Between tokens.
    pub inter_token: Vec<f64>,
    /// Arrival to last token.
    pub e2e: Vec<f64>,
}

/// A look at the world.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Tick {
    /// Simulated time since the start.
    pub t: f64,
    /// Requests in front of the pods.
    #[serde(default)]
    pub gateway: Gateway,
    /// Every pod that exists, oldest first.
    pub pods: Vec<Pod>,
}

/// Requests held because no pod is ready.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Gateway {
    /// How many.
    pub queued: u64,
    /// Age of the oldest.
    pub oldest_age_seconds: f64,
}

/// One pod.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Pod {
    /// Its name, never used again.
    pub name: String,
    /// Where it is in its life.
    pub phase: PodPhase,
    /// Kind of its node.
    #[serde(default)]
    pub capacity_type: CapacityType,
    /// Since it was made.
    pub age_seconds: f64,
    /// Since it was ready.
    pub ready_seconds: Option<f64>,
    /// Until its spot node is taken away; absent without notice.
    #[serde(default)]
    pub reclaim_in_seconds: Option<f64>,
    /// What its engine says; absent when it was not read.
    #[serde(default)]
    pub metrics: Option<PodMetrics>,
    /// The same as text, in place of `metrics`, where the judge is told to ([`crate::exposition`]).
    #[serde(default, skip_serializing)]
    pub prometheus: Option<String>,
}

/// Stages of a pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum PodPhase {
    /// No node.
    Pending,
    /// Loading.
    Starting,
    /// Serving.
    Ready,
    /// Finishing its streams.
    Draining,
}

/// Kinds of nodes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum CapacityType {
    /// Stays.
    #[default]
    OnDemand,
    /// Can be taken back.
    Spot,
}

/// What an engine says.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PodMetrics {
    /// Requests in the batch.
    pub running: u32,
    /// Requests in the queue.
    pub waiting: u32,
    /// Age of the oldest waiting request.
    pub oldest_queue_age_seconds: f64,
    /// Share of the KV cache in use.
    pub kv_usage: f64,
    /// Share of the time since the last tick in which the device worked.
    pub gpu_utilization: f64,
    /// Prompt tokens so far.
    pub prompt_tokens_total: u64,
    /// Generated tokens so far.
    pub generation_tokens_total: u64,
    /// Requests that ended so far.
    pub requests_finished_total: u64,
    /// Arrival to first token.
    pub ttft: Histogram,
    /// Between tokens.
    pub inter_token: Histogram,
    /// Arrival to last token.
    pub e2e: Histogram,
}

/// Observations so far.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Histogram {
    /// At or below each edge; the last entry counts all.
    pub cumulative: Vec<u64>,
    /// Sum, seconds.
    pub sum: f64,
}

/// What a policy asks for.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Reply {
    /// Pods that do not drain.
    pub desired_replicas: i32,
    /// How many of them are on demand; absent: spot first.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub on_demand: Option<i32>,
    /// Pods that drain now.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub victims: Vec<String>,
    /// For people.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub reason: String,
}

impl Reply {
    /// So many pods, and nothing else.
    pub fn of(desired_replicas: i32) -> Self {
        Reply { desired_replicas, ..Reply::default() }
    }
}

impl Tick {
    /// Pods that do not drain.
    pub fn standing(&self) -> impl Iterator<Item = &Pod> {
        self.pods.iter().filter(|pod| pod.phase != PodPhase::Draining)
    }

    /// Pods that serve.
    pub fn ready(&self) -> impl Iterator<Item = &Pod> {
        self.pods.iter().filter(|pod| pod.phase == PodPhase::Ready)
    }

    /// Pods that do not drain, counted.
    pub fn replicas(&self) -> i32 {
        self.standing().count() as i32
    }

    /// What pods that serve say.
    pub fn readings(&self) -> impl Iterator<Item = &PodMetrics> {
        self.ready().filter_map(|pod| pod.metrics.as_ref())
    }
}

impl Histogram {
    /// An empty one over so many edges.
    pub fn over(edges: usize) -> Self {
        Histogram { cumulative: vec![0; edges + 1], sum: 0.0 }
    }

    /// Counts one observation.
    pub fn observe(&mut self, edges: &[f64], seconds: f64) {
        let first = edges.partition_point(|&edge| edge < seconds);
        self.cumulative[first..].iter_mut().for_each(|count| *count += 1);
        self.sum += seconds;
    }
}

fn one() -> i32 {
    1
}
