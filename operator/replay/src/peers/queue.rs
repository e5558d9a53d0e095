//! KEDA on the number of waiting requests: one pod per 5 of them, by way of a HorizontalPodAutoscaler.

use super::{Behavior, Every};
use crate::policy::Policy;
use crate::protocol::{Hello, Reply, Tick};

/// Waiting requests for which one pod is wanted.
const WAITING_PER_POD: f64 = 5.0;

/// See the module.
pub struct QueuePolicy {
    every: Every,
    behavior: Behavior,
}

impl QueuePolicy {
    /// With its defaults.
    pub fn new(hello: &Hello) -> Self {
        QueuePolicy { every: Every::new(15.0), behavior: Behavior::new(hello, 0.0, 300.0) }
    }
}

impl Policy for QueuePolicy {
    fn decide(&mut self, tick: &Tick) -> Reply {
        let current = tick.replicas();
        if !self.every.is_due(tick.t) || tick.readings().next().is_none() {
            return Reply::of(current);
        }
        let waiting = tick.readings().map(|said| f64::from(said.waiting)).sum::<f64>() + tick.gateway.queued as f64;
        let ratio = waiting / (WAITING_PER_POD * f64::from(current.max(1)));
        let wanted = if (ratio - 1.0).abs() <= 0.1 { current } else { (waiting / WAITING_PER_POD).ceil() as i32 };
        Reply::of(self.behavior.settle(tick.t, current, wanted))
    }
}
