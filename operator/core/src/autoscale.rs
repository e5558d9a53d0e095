//! How many replicas: a pure rule from policy, readings and time.
//!
//! **Up**: a latency target is breached, as measured or as the age of waiting requests tells, and either the engines
//! are busy or requests wait; or the tokens that arrive, now or by the time a replica could be there, are more than
//! what was asked for can compute within the targets. A breach while engines idle and queues are empty is no matter of
//! capacity and changes nothing. **Down**: engines are idle enough, or what would remain holds every target; one
//! replica at a time, one that does not serve first. What is not known holds the number where it is, with one exception:
//! a breach is never held back by a missing utilization.
//!
//! This module reads no object and no clock. [`signals`] measures, [`speed`] learns what a replica computes, [`need`]
//! holds the two against each other, [`cold_start`] knows how far to look ahead, [`recommend`] is the rule, [`pace`] stabilizes.

pub mod cold_start;
pub mod need;
pub mod pace;
pub mod policy;
pub mod recommend;
pub mod signals;
pub mod speed;

use std::time::Duration;

use jiff::Timestamp;
use windlass_operator_api::status::{ScalingDecision, TargetReading};

pub use pace::Memory;
use policy::Policy;
pub use recommend::Reason;
use signals::Signals;

use crate::window::LoadWindow;

/// How the service stands, besides its load.
#[derive(Clone, Debug)]
pub struct Supply<'a> {
    /// Replicas asked of the workloads; pending ones count, for they are on their way.
    pub asked: i32,
    /// Pods that serve, with the time since when.
    pub serving: Vec<(&'a str, Timestamp)>,
    /// Pods that drain.
    pub leaving: i32,
    /// Pods that served and are not ready now, those that are overdue left out: a ReplicaSet would take them before the
    /// pod that was chosen.
    pub faltering: i32,
    /// Pods are being replaced by those of another template.
    pub is_rolling: bool,
    /// Replicas asked for so long ago that they should serve, and do not.
    pub overdue: i32,
    /// Since when pods serve, and how long each of them took to do so; those that do not tell are left out.
    pub cold_starts: Vec<(Timestamp, Duration)>,
}

impl Supply<'_> {
    /// Pods that serve.
    pub fn ready(&self) -> i32 {
        crate::fleet::count(self.serving.iter())
    }

    /// Replicas asked for that do not serve yet, and are to be waited for.
    pub fn pending(&self) -> i32 {
        self.missing() - self.stuck()
    }

    /// Replicas asked for that are not waited for any longer: no node came for them, or they do not start.
    pub fn stuck(&self) -> i32 {
        self.overdue.clamp(0, self.missing())
    }

    fn missing(&self) -> i32 {
        (self.asked - self.ready()).max(0)
    }
}

/// How often engines are read: three missing readings are a silence.
#[derive(Clone, Copy, Debug)]
pub struct Cadence {
    /// With traffic.
    pub active: Duration,
    /// Without.
    pub idle: Duration,
}

/// What was decided, and why.
#[derive(Clone, Debug)]
pub struct Decision {
    /// Replicas wanted from now on.
    pub replicas: i32,
    /// What that is in relation to now.
    pub kind: ScalingDecision,
    /// The term that won.
    pub reason: Reason,
    /// The decision in words, with its numbers.
    pub message: String,
    /// What the tokens ask for, where that is known.
    pub need: Option<need::Need>,
    /// One entry per target.
    pub inputs: Vec<TargetReading>,
    /// What keeps a further step from being taken now.
    pub blockers: Vec<String>,
    /// When it can be taken, where nothing but time keeps it.
    pub next_change: Option<Timestamp>,
    /// What to remember.
    pub memory: Memory,
}

/// Decides, from what is known at `now`.
pub fn decide(
    policy: &Policy,
    supply: &Supply<'_>,
    window: &LoadWindow,
    memory: &Memory,
    cadence: Cadence,
    now: Timestamp,
) -> Decision {
    let signals = Signals::measure(policy, supply, window, memory.settled_since(supply), cadence, now);
    let learned = memory.learn(policy, supply, &signals, now);
    let need = learned.need(policy, &signals);
    let recommendation = recommend::recommend(policy, supply, &signals, &learned, need, now);
    Decision { need, ..pace::apply(policy, supply, &signals, recommendation, learned, cadence.active, now) }
}

#[cfg(test)]
mod tests;
