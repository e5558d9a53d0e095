//! `spec.autoscaling`, validated: who decides, and by which numbers.

use std::time::Duration;

use windlass_operator_api::InferenceServiceSpec;
use windlass_operator_api::autoscaling::{Autoscaling, AutoscalingMode, LatencyMetric};

use crate::validate::{Refusal, bounded};

/// Who decides the number of replicas.
#[derive(Clone, Debug, PartialEq)]
pub enum Scaling {
    /// `spec.replicas`.
    Manual {
        /// Replicas wanted.
        replicas: i32,
    },
    /// `spec.replicas` as another autoscaler sets it.
    External {
        /// Replicas wanted.
        replicas: i32,
    },
    /// `spec.replicas` as a HorizontalPodAutoscaler of ours sets it.
    Hpa {
        /// Replicas wanted.
        replicas: i32,
        /// What it holds to.
        policy: Policy,
        /// It holds to utilization too.
        by_utilization: bool,
    },
    /// The autoscaler.
    Builtin(Policy),
}

/// What the autoscaler holds to.
#[derive(Clone, Debug, PartialEq)]
pub struct Policy {
    /// Fewest replicas, at least 1.
    pub min: i32,
    /// Most replicas.
    pub max: i32,
    /// Latency targets, at least one.
    pub targets: Vec<Target>,
    /// From this utilization on, 0 to 1, a breach is a matter of capacity.
    pub scale_up_at: f64,
    /// Below this utilization a replica may go.
    pub scale_down_below: f64,
    /// The smallest recommendation of this span counts for adding.
    pub up_window: Duration,
    /// The largest recommendation of this span counts for removing.
    pub down_window: Duration,
    /// Most replicas added at once.
    pub max_step: i32,
    /// Replicas to spare, beyond those decided.
    pub standby: i32,
    /// Replicas to keep while decisions are only reported; `None`: they are applied.
    pub shadow: Option<i32>,
}

/// A latency to hold.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Target {
    /// Which latency.
    pub metric: LatencyMetric,
    /// Percentile, 1 to 99.
    pub percentile: i32,
    /// Upper limit.
    pub milliseconds: i32,
}

impl Target {
    /// The percentile as a share, 0 to 1.
    pub fn share(&self) -> f64 {
        f64::from(self.percentile) / 100.0
    }
}

const MAX_REPLICAS: i32 = 1000;
const MAX_STANDBY: i32 = 100;
const DEFAULT_SCALE_UP_PERCENT: i32 = 80;
const DEFAULT_SCALE_DOWN_PERCENT: i32 = 30;
const DEFAULT_DOWN_WINDOW_SECONDS: i32 = 300;
/// Doubling from one or two replicas is one decision; a wrong one costs four pods at most.
const DEFAULT_MAX_STEP: i32 = 4;

impl Policy {
    pub(crate) fn validate(spec: &InferenceServiceSpec) -> Result<Scaling, Refusal> {
        let replicas = bounded("spec.replicas", spec.replicas, 0, MAX_REPLICAS)? as i32;
        let Some(autoscaling) = &spec.autoscaling else { return Ok(Scaling::Manual { replicas }) };
        Ok(match autoscaling.mode {
            AutoscalingMode::Manual => Scaling::Manual { replicas },
            AutoscalingMode::External => Scaling::External { replicas },
            AutoscalingMode::Hpa => Scaling::Hpa {
                replicas,
                policy: Policy::builtin(autoscaling, replicas)?,
                by_utilization: autoscaling.gpu_utilization.is_some(),
            },
            AutoscalingMode::Builtin => Scaling::Builtin(Policy::builtin(autoscaling, replicas)?),
        })
    }

    /// Mode Builtin; `replicas` are kept while `shadow` is on.
    ///
    /// # Errors
    /// A value that the definition of the resource does not allow.
    pub fn builtin(autoscaling: &Autoscaling, replicas: i32) -> Result<Policy, Refusal> {
        let (min, max) = bounds(autoscaling)?;
        let (up, down) = utilization(autoscaling)?;
        let behavior = autoscaling.behavior.clone().unwrap_or_default();
        let (up_pace, down_pace) = (behavior.scale_up.unwrap_or_default(), behavior.scale_down.unwrap_or_default());
        Ok(Policy {
            min,
            max,
            targets: targets(autoscaling)?,
            scale_up_at: f64::from(up) / 100.0,
            scale_down_below: f64::from(down) / 100.0,
            up_window: seconds(up_pace.stabilization_window_seconds.unwrap_or(0)),
            down_window: seconds(down_pace.stabilization_window_seconds.unwrap_or(DEFAULT_DOWN_WINDOW_SECONDS)),
            max_step: up_pace.max_step.unwrap_or(DEFAULT_MAX_STEP).max(1),
            standby: standby(autoscaling)?,
            shadow: autoscaling.shadow.unwrap_or(false).then_some(replicas),
        })
    }
}

fn bounds(autoscaling: &Autoscaling) -> Result<(i32, i32), Refusal> {
    let refusal = |field, problem: &str| Refusal::Autoscaling { field, problem: problem.into() };
    let max = autoscaling
        .max_replicas
        .ok_or_else(|| refusal("spec.autoscaling.maxReplicas", "required in modes Builtin and HPA"))?;
    let max = bounded("spec.autoscaling.maxReplicas", max, 1, MAX_REPLICAS)? as i32;
    let min = autoscaling.min_replicas.unwrap_or(1);
    bounded("spec.autoscaling.minReplicas", min, 1, max)?;
    Ok((min, max))
}

/// None in shadow, which leaves the number of replicas alone.
fn standby(autoscaling: &Autoscaling) -> Result<i32, Refusal> {
    let given = autoscaling.standby_replicas.unwrap_or(0);
    bounded("spec.autoscaling.standbyReplicas", given, 0, MAX_STANDBY)?;
    Ok(if autoscaling.shadow.unwrap_or(false) { 0 } else { given })
}

fn utilization(autoscaling: &Autoscaling) -> Result<(i32, i32), Refusal> {
    let given = autoscaling.gpu_utilization.clone().unwrap_or_default();
    let up = given.scale_up_percent.unwrap_or(DEFAULT_SCALE_UP_PERCENT);
    let down = given.scale_down_percent.unwrap_or(DEFAULT_SCALE_DOWN_PERCENT);
    bounded("spec.autoscaling.gpuUtilization.scaleUpPercent", up, 1, 100)?;
    bounded("spec.autoscaling.gpuUtilization.scaleDownPercent", down, 0, up - 1)?;
    Ok((up, down))
}

fn targets(autoscaling: &Autoscaling) -> Result<Vec<Target>, Refusal> {
    let field = "spec.autoscaling.targets";
    if autoscaling.targets.is_empty() {
        return Err(Refusal::Autoscaling {
            field,
            problem: "modes Builtin and HPA need at least one latency target".into(),
        });
    }
    let target = |given: &windlass_operator_api::autoscaling::LatencyTarget| {
        bounded("spec.autoscaling.targets[].percentile", given.percentile, 1, 99)?;
        bounded("spec.autoscaling.targets[].milliseconds", given.milliseconds, 1, 60_000)?;
        Ok(Target { metric: given.metric, percentile: given.percentile, milliseconds: given.milliseconds })
    };
    autoscaling.targets.iter().map(target).collect()
}

fn seconds(count: i32) -> Duration {
    Duration::from_secs(count.max(0).unsigned_abs().into())
}
