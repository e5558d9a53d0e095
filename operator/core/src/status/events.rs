//! Events: told when a condition or the number of replicas changes, never because time has passed.

use windlass_operator_api::InferenceServiceStatus;
use windlass_operator_api::status::condition;

use super::of_type;

/// An event about the service.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Event {
    /// Warning instead of Normal.
    pub warning: bool,
    /// A stable CamelCase word.
    pub reason: String,
    /// What was done, as events/v1 `action` takes it: a CamelCase word.
    pub action: &'static str,
    /// The text.
    pub message: String,
}

/// Reasons of Ready=False that are steps on the way and no trouble.
const ORDINARY: [&str; 5] = ["Starting", "Inspecting", "RollingOut", "VerifyingConfiguration", "ScaledToZero"];

/// Reason of ScalingActive where somebody else sets the same replicas.
pub(super) const FOREIGN_AUTOSCALER: &str = "ForeignAutoscaler";

/// What has changed since `previous`.
pub(super) fn of(previous: Option<&InferenceServiceStatus>, next: &InferenceServiceStatus) -> Vec<Event> {
    let all = [
        ready(previous, next),
        fits(previous, next),
        scaled(previous, next),
        latency(previous, next),
        foreign(previous, next),
        spot(previous, next),
        interrupted(previous, next),
    ];
    all.into_iter().flatten().collect()
}

/// Nodes that are taken back from now on.
fn interrupted(previous: Option<&InferenceServiceStatus>, next: &InferenceServiceStatus) -> Option<Event> {
    let known = |node: &&String| previous.is_some_and(|previous| previous.interrupted_nodes.contains(node));
    let new: Vec<&str> = next.interrupted_nodes.iter().filter(|node| !known(node)).map(String::as_str).collect();
    (!new.is_empty()).then(|| Event {
        warning: true,
        reason: "NodeInterrupted".to_owned(),
        action: "Evacuate",
        message: format!("{} will be taken back: its replicas drain and are replaced", new.join(", ")),
    })
}

fn spot(previous: Option<&InferenceServiceStatus>, next: &InferenceServiceStatus) -> Option<Event> {
    let (before, now) = (previous?.spot_fallback_replicas, next.spot_fallback_replicas);
    (before.is_some() != now.is_some()).then(|| Event {
        warning: now.is_some(),
        reason: if now.is_some() { "SpotFallback" } else { "SpotReturned" }.to_owned(),
        action: "Place",
        message: match now {
            Some(count) => format!("no spot node came: {count} replicas run on demand until one does"),
            None => "replicas are on spot nodes again, or will be".to_owned(),
        },
    })
}

fn ready(previous: Option<&InferenceServiceStatus>, next: &InferenceServiceStatus) -> Option<Event> {
    let now = of_type(next, condition::READY)?;
    let before = previous.and_then(|previous| of_type(previous, condition::READY));
    let is_same = before.is_some_and(|before| before.status == now.status && before.reason == now.reason);
    (!is_same).then(|| Event {
        warning: now.status != "True" && !ORDINARY.contains(&now.reason.as_str()),
        reason: if now.status == "True" { "Ready".to_owned() } else { now.reason.clone() },
        action: "Assess",
        message: now.message.clone(),
    })
}

/// A model that does not fit, said once, with the alternatives.
fn fits(previous: Option<&InferenceServiceStatus>, next: &InferenceServiceStatus) -> Option<Event> {
    let found = of_type(next, condition::FITS).filter(|found| found.status == "False")?;
    let before = previous.and_then(|previous| of_type(previous, condition::FITS));
    (before.is_none_or(|before| before.status != "False")).then(|| Event {
        warning: true,
        reason: found.reason.clone(),
        action: "Place",
        message: found.message.clone(),
    })
}

/// Somebody else sets the same replicas.
fn foreign(previous: Option<&InferenceServiceStatus>, next: &InferenceServiceStatus) -> Option<Event> {
    let find = |status: &InferenceServiceStatus| {
        of_type(status, condition::SCALING_ACTIVE).filter(|found| found.reason == FOREIGN_AUTOSCALER).cloned()
    };
    let found = find(next).filter(|_| previous.and_then(find).is_none())?;
    Some(Event { warning: true, reason: found.reason, action: "Scale", message: found.message })
}

fn scaled(previous: Option<&InferenceServiceStatus>, next: &InferenceServiceStatus) -> Option<Event> {
    let (before, now) = (previous?.desired_replicas, next.desired_replicas);
    let because = next.autoscaling.as_ref().map(|decision| format!(": {}", decision.message)).unwrap_or_default();
    (before != now).then(|| Event {
        warning: false,
        reason: if now > before { "ScaledUp" } else { "ScaledDown" }.to_owned(),
        action: "Scale",
        message: format!("from {before} to {now} replicas{because}"),
    })
}

/// A breach that more replicas would not mend: somebody should know.
fn latency(previous: Option<&InferenceServiceStatus>, next: &InferenceServiceStatus) -> Option<Event> {
    let is_it = |status: &InferenceServiceStatus| {
        of_type(status, condition::SCALING_ACTIVE).is_some_and(|found| found.reason == "LatencyNotCapacity")
    };
    (is_it(next) && !previous.is_some_and(is_it)).then(|| Event {
        warning: true,
        reason: "LatencyNotCapacity".to_owned(),
        action: "Scale",
        message: next.autoscaling.as_ref().map(|decision| decision.message.clone()).unwrap_or_default(),
    })
}
