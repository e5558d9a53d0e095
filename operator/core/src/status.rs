//! Status and events from findings and outcome: a pure fold over the previous status.
//!
//! A condition keeps its transition time while its status stays. Measured values are published with a decision or a
//! change of condition, else once a minute at most, and only if they differ: at rest nothing is written.

use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use windlass_operator_api::status::{AutoscalingStatus, ColdStart, ScalingDecision, TokenNeed, condition, time};
use windlass_operator_api::{InferenceService, InferenceServiceStatus};

use crate::assess::{Assessment, Findings, ScalingFinding};
use crate::autoscale::need::Need;
use crate::plan::Plan;
use crate::window::minus;

mod conditions;
mod events;

pub(crate) use conditions::is_unplannable;
pub use events::Event;

/// Nodes that are told.
const MAX_NODES: usize = 16;
/// Measured values alone are not worth a write more often than this.
const PUBLISH_INTERVAL: Duration = Duration::from_secs(60);

/// How the steps of a plan ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// All were done.
    Applied,
    /// One failed, and those after it were not tried.
    Failed {
        /// What was attempted, as `apply Deployment/llama`.
        attempt: String,
        /// What the API server answered.
        message: String,
    },
    /// Nothing can be made any more: the namespace is being deleted.
    NamespaceEnds,
}

/// What is to be written after a plan was carried out.
#[derive(Clone, Debug)]
pub struct StatusChange {
    /// The new status, whole; `None` when it equals the old one.
    pub status: Option<InferenceServiceStatus>,
    /// Events on transitions.
    pub events: Vec<Event>,
}

/// The status after `plan` was carried out with `outcome`, and the events of what has changed since
/// `service.status`.
pub fn compute(service: &InferenceService, plan: &Plan, outcome: &Outcome, now: Timestamp) -> StatusChange {
    let previous = service.status.clone().unwrap_or_default();
    let mut next = match &plan.assessment {
        Assessment::Leaving => return StatusChange { status: None, events: Vec::new() },
        Assessment::Refused(_) | Assessment::Strangers(_) => previous.clone(),
        Assessment::Planned(findings) => {
            let mut next = of_findings(findings, &previous, outcome, now);
            if conditions::was_ready(service, &previous) {
                believe(&previous, findings, &mut next);
            }
            next
        }
    };
    next.observed_generation = service.metadata.generation;
    next.conditions = conditions::all(service, &previous, &plan.assessment, outcome, now);
    hold_measured(&previous, &mut next, now);
    let events = events::of(service.status.as_ref(), &next);
    StatusChange { status: (service.status.as_ref() != Some(&next)).then_some(next), events }
}

fn of_findings(
    findings: &Findings,
    previous: &InferenceServiceStatus,
    outcome: &Outcome,
    now: Timestamp,
) -> InferenceServiceStatus {
    let counts = findings.counts;
    InferenceServiceStatus {
        observed_generation: None,
        conditions: Vec::new(),
        replicas: counts.replicas,
        ready_replicas: counts.ready,
        updated_replicas: counts.updated,
        available_replicas: counts.verified,
        desired_replicas: counts.desired,
        spot_replicas: counts.spot,
        standby_replicas: counts.standby,
        spot_fallback_replicas: (counts.fallback > 0).then_some(counts.fallback),
        spot_missing_replicas: (counts.off_spot > 0).then_some(counts.off_spot),
        selector: Some(findings.selector.clone()),
        url: Some(findings.url.clone()),
        served_name: Some(findings.served_name.clone()),
        interrupted_nodes: findings.interrupted_nodes.iter().take(MAX_NODES).cloned().collect(),
        model: findings.model.clone(),
        revision: Some(findings.revision.clone()),
        revisions: findings.revisions.clone(),
        choices: Some(findings.choices.clone()),
        fingerprints: findings.fingerprints.clone(),
        cold_start: cold_start(findings, previous),
        load: Some(findings.load.clone()),
        autoscaling: autoscaling(findings, previous, outcome, now),
    }
}

/// The longest of all is not known before all are read: until then what was told stands, or a new operator would tell of
/// one replica after another.
fn cold_start(findings: &Findings, previous: &InferenceServiceStatus) -> Option<ColdStart> {
    let (found, told) = (findings.cold_start, previous.cold_start);
    if findings.unverified > 0 { told.or(found) } else { found.or(told) }
}

/// What was found of engines for this spec stands until they are read again: a new operator takes nothing back.
fn believe(previous: &InferenceServiceStatus, findings: &Findings, next: &mut InferenceServiceStatus) {
    let most = findings.counts.verified + findings.unverified;
    next.available_replicas = next.available_replicas.max(previous.available_replicas.min(most));
    let found = previous.choices.as_ref().and_then(|choices| choices.quantization.clone());
    if let Some(choices) = next.choices.as_mut() {
        choices.quantization = choices.quantization.take().or(found);
    }
    if findings.counts.verified == 0 {
        next.load.clone_from(&previous.load);
    }
}

fn autoscaling(
    findings: &Findings,
    previous: &InferenceServiceStatus,
    outcome: &Outcome,
    now: Timestamp,
) -> Option<AutoscalingStatus> {
    let ScalingFinding::Builtin { decision, shadow } = &findings.scaling else { return None };
    let is_applied = decision.kind != ScalingDecision::Hold && !shadow && *outcome == Outcome::Applied;
    let before = previous.autoscaling.as_ref().and_then(|autoscaling| autoscaling.last_scale_time.clone());
    Some(AutoscalingStatus {
        decision: decision.kind,
        reason: decision.reason.to_string(),
        message: decision.message.clone(),
        recommended_replicas: decision.replicas,
        shadow: *shadow,
        inputs: decision.inputs.clone(),
        need: decision.need.map(|need| token_need(need, decision.memory.cold_starts.p90())),
        blockers: decision.blockers.clone(),
        next_change_time: decision.next_change.map(time),
        last_scale_time: if is_applied { Some(time(now)) } else { before },
    })
}

fn token_need(need: Need, cold_start: Duration) -> TokenNeed {
    let percent = |replicas: f64| (replicas * 100.0).round().clamp(0.0, 1e9) as i64;
    TokenNeed {
        load_percent: percent(need.load),
        forecast_percent: percent(need.forecast),
        planned_fill_percent: percent(need.fill),
        cold_start_seconds: i64::try_from(cold_start.as_secs()).unwrap_or(i64::MAX),
    }
}

/// Keeps the previous measured values where nothing else changed and it is too early, or where they are the same.
fn hold_measured(previous: &InferenceServiceStatus, next: &mut InferenceServiceStatus, now: Timestamp) {
    if without_measured(previous) != without_measured(next) {
        return;
    }
    let measured = previous.load.as_ref().and_then(|load| load.measured_time.as_ref());
    let is_recent = measured.is_some_and(|measured| measured.0 > minus(now, PUBLISH_INTERVAL));
    let mut same_time = next.clone();
    if let (Some(load), Some(before)) = (same_time.load.as_mut(), previous.load.as_ref()) {
        load.measured_time = before.measured_time.clone();
    }
    if is_recent || same_time == *previous {
        *next = previous.clone();
    }
}

/// The status without what is measured anew each time.
fn without_measured(status: &InferenceServiceStatus) -> InferenceServiceStatus {
    let mut bare = status.clone();
    bare.load = None;
    if let Some(autoscaling) = bare.autoscaling.as_mut() {
        autoscaling.message.clear();
        autoscaling.inputs.clear();
        autoscaling.need = None;
        autoscaling.next_change_time = None;
    }
    let scaling = bare.conditions.iter_mut().find(|found| found.type_ == condition::SCALING_ACTIVE);
    if let Some(scaling) = scaling {
        scaling.message.clear();
    }
    bare
}

/// The condition of this type.
fn of_type<'a>(status: &'a InferenceServiceStatus, kind: &str) -> Option<&'a Condition> {
    status.conditions.iter().find(|found| found.type_ == kind)
}

#[cfg(test)]
mod tests;
