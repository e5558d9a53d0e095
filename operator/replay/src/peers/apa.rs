//! AIBrix' APA on the mean KV usage of the pods, target 50 %: every 10 seconds, no change within a tenth, at most twice
//! the pods up and half of them down.

use super::{Every, mean, proportional};
use crate::policy::Policy;
use crate::protocol::{Hello, Reply, Tick};

const TARGET: f64 = 0.5;

/// See the module.
pub struct ApaPolicy {
    min: i32,
    max: i32,
    every: Every,
}

impl ApaPolicy {
    /// With its defaults.
    pub fn new(hello: &Hello) -> Self {
        ApaPolicy { min: hello.spec.min_replicas, max: hello.spec.max_replicas, every: Every::new(10.0) }
    }
}

impl Policy for ApaPolicy {
    fn decide(&mut self, tick: &Tick) -> Reply {
        let current = tick.replicas();
        let Some(usage) = mean(tick.readings().map(|said| said.kv_usage)) else { return Reply::of(current) };
        if !self.every.is_due(tick.t) {
            return Reply::of(current);
        }
        let wanted = proportional(current, usage, TARGET).clamp(current / 2, current * 2);
        Reply::of(wanted.clamp(self.min, self.max))
    }
}
