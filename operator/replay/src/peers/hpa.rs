//! HorizontalPodAutoscaler, autoscaling/v2, on the mean GPU utilization of the pods, target 80 %.
//!
//! Every 15 seconds. Pods that are not ready count as unused when that would add pods, and then only change the number,
//! not its direction.

use super::{Behavior, Every, mean, proportional};
use crate::policy::Policy;
use crate::protocol::{Hello, Reply, Tick};

const TARGET: f64 = 0.8;

/// See the module.
pub struct HpaPolicy {
    every: Every,
    behavior: Behavior,
}

impl HpaPolicy {
    /// With its defaults.
    pub fn new(hello: &Hello) -> Self {
        HpaPolicy { every: Every::new(15.0), behavior: Behavior::new(hello, 0.0, 300.0) }
    }
}

impl Policy for HpaPolicy {
    fn decide(&mut self, tick: &Tick) -> Reply {
        let current = tick.replicas();
        let read = tick.readings().count() as i32;
        let Some(value) = mean(tick.readings().map(|said| said.gpu_utilization)) else { return Reply::of(current) };
        if !self.every.is_due(tick.t) {
            return Reply::of(current);
        }
        let over_all = value * f64::from(read) / f64::from(current.max(1));
        let wanted = match proportional(read, value, TARGET) {
            more if more > read && over_all > TARGET => proportional(current, over_all, TARGET),
            more if more > read => current,
            same if same == read => current,
            fewer => fewer,
        };
        Reply::of(self.behavior.settle(tick.t, current, wanted))
    }
}
