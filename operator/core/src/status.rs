//! Status and events from findings and outcome.

use jiff::Timestamp;
use windlass_operator_api::{InferenceService, InferenceServiceStatus};

use crate::plan::Plan;

/// What planning found out about the service.
#[derive(Clone, Debug, Default)]
pub struct Assessment {
    /// Replicas wanted.
    pub desired_replicas: i32,
}

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
}

/// What is to be written after a plan was carried out.
#[derive(Clone, Debug)]
pub struct StatusChange {
    /// The new status; `None` when it equals the old one.
    pub status: Option<InferenceServiceStatus>,
    /// Events on transitions.
    pub events: Vec<Event>,
}

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

/// The status after `plan` was carried out with `outcome`, and the events of what has changed since
/// `service.status`.
pub fn compute(service: &InferenceService, plan: &Plan, outcome: &Outcome, now: Timestamp) -> StatusChange {
    let (_, _, _) = (plan, outcome, now);
    StatusChange { status: service.status.clone(), events: Vec::new() }
}
