//! `spec.autoscaling`: mode, bounds, latency targets, utilization thresholds and pace.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// How the number of replicas follows the load.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("x-kubernetes-validations" = [
    {
        "rule": "!(self.mode in ['Builtin', 'HPA']) || has(self.maxReplicas)",
        "message": "spec.autoscaling.maxReplicas: required in modes Builtin and HPA"
    },
    {
        "rule": "!(self.mode in ['Builtin', 'HPA']) || (has(self.targets) && size(self.targets) > 0)",
        "message": "spec.autoscaling.targets: modes Builtin and HPA need at least one latency target"
    },
    {
        "rule": "!has(self.maxReplicas) || (has(self.minReplicas) ? self.minReplicas : 1) <= self.maxReplicas",
        "message": "spec.autoscaling.minReplicas: at most maxReplicas"
    },
    {
        "rule": "self.mode in ['Builtin', 'HPA'] || (!has(self.minReplicas) && !has(self.maxReplicas) && !has(self.targets) && !has(self.gpuUtilization) && !has(self.behavior) && !has(self.standbyReplicas) && !has(self.shadow))",
        "message": "spec.autoscaling: every field besides mode acts only in modes Builtin and HPA"
    },
    {
        "rule": "self.mode != 'HPA' || (!has(self.shadow) && !has(self.standbyReplicas) && !(has(self.gpuUtilization) && has(self.gpuUtilization.scaleDownPercent)))",
        "message": "spec.autoscaling: shadow, standbyReplicas and gpuUtilization.scaleDownPercent act only in mode Builtin"
    },
    {
        "rule": "!(has(self.shadow) && self.shadow && has(self.standbyReplicas) && self.standbyReplicas > 0)",
        "message": "spec.autoscaling.standbyReplicas: none with shadow, which leaves the number of replicas alone"
    }
]))]
pub struct Autoscaling {
    /// Manual: `spec.replicas` is obeyed. Builtin: the operator scales to hold the targets, and `spec.replicas` is not
    /// used. HPA: a HorizontalPodAutoscaler made from the fields below sets `spec.replicas`, by metrics that the operator
    /// serves as custom.metrics.k8s.io. External: another autoscaler sets it through `/scale`. In these two, one serving
    /// replica is enough for Ready.
    pub mode: AutoscalingMode,
    /// Fewest replicas. Absent: 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 1000))]
    pub min_replicas: Option<i32>,
    /// Most replicas.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 1000))]
    pub max_replicas: Option<i32>,
    /// Latency targets. A breach of any of them, with the pods busy or requests waiting, adds replicas.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 9), extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["metric", "percentile"]))]
    pub targets: Vec<LatencyTarget>,
    /// Utilization below which a replica may go, and from which a breach is a matter of capacity. On CPU it is the busy
    /// share of the engine's step loop.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gpu_utilization: Option<GpuUtilization>,
    /// Pace of scaling.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub behavior: Option<Behavior>,
    /// Replicas beyond those that the load asks for, loaded and reached by no request: when one more is needed, one of
    /// these takes requests within a moment and another is started. Absent: 0.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 100))]
    pub standby_replicas: Option<i32>,
    /// Decide and report in status, but leave the number of replicas at `spec.replicas`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shadow: Option<bool>,
}

/// Who decides the number of replicas.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum AutoscalingMode {
    /// `spec.replicas`.
    #[default]
    Manual,
    /// The operator.
    Builtin,
    /// A HorizontalPodAutoscaler that the operator makes.
    #[serde(rename = "HPA")]
    Hpa,
    /// Another autoscaler, through `/scale`: a HorizontalPodAutoscaler, KEDA.
    External,
}

/// One latency that is to be held.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct LatencyTarget {
    /// Which latency.
    pub metric: LatencyMetric,
    /// Share of observations that must be at or below `milliseconds`, percent.
    #[schemars(range(min = 50, max = 99))]
    pub percentile: i32,
    /// The target. What is within it is counted exactly where it is one of the edges of engines' histograms: 5, 10, 20, 30, 40,
    /// 50, 75, 100, 150, 200, 300, 400, 500, 750, 1000, 1500, 2000, 3000, 5000, 10000, 30000, 60000; between two of them it is
    /// estimated.
    #[schemars(range(min = 1, max = 60_000))]
    pub milliseconds: i32,
}

/// Latencies that the engine measures.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
pub enum LatencyMetric {
    /// Arrival of a request to its first token.
    TimeToFirstToken,
    /// Between consecutive tokens of one request.
    InterToken,
    /// Arrival of a request to its last token.
    EndToEnd,
}

/// Utilization thresholds, percent.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("x-kubernetes-validations" = [
    {
        "rule": "(has(self.scaleDownPercent) ? self.scaleDownPercent : 30) < (has(self.scaleUpPercent) ? self.scaleUpPercent : 80)",
        "message": "spec.autoscaling.gpuUtilization.scaleDownPercent: below scaleUpPercent (absent: 30 and 80)"
    }
]))]
pub struct GpuUtilization {
    /// A breached target adds replicas at or above this; in mode HPA, the utilization that is held. Absent: 80, and in
    /// mode HPA utilization is not weighed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 100))]
    pub scale_up_percent: Option<i32>,
    /// Below this a replica may go. Absent: 30.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 99))]
    pub scale_down_percent: Option<i32>,
}

/// Pace of scaling, as in a HorizontalPodAutoscaler.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Behavior {
    /// Adding replicas. Absent: no window, up to 4 at a time.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scale_up: Option<ScaleUp>,
    /// Removing replicas, one at a time. Absent: a window of 300 seconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scale_down: Option<ScaleDown>,
}

/// Pace of adding replicas.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ScaleUp {
    /// The smallest recommendation of this many seconds counts. Absent: 0.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 3600))]
    pub stabilization_window_seconds: Option<i32>,
    /// Most replicas added in as long as busy engines take to be read, 5 seconds unless the operator is told otherwise; in
    /// mode HPA, in 15 seconds. Absent: 4.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 1000))]
    pub max_step: Option<i32>,
}

/// Pace of removing replicas.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ScaleDown {
    /// The largest recommendation of this many seconds counts. Absent: 300.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 3600))]
    pub stabilization_window_seconds: Option<i32>,
}
