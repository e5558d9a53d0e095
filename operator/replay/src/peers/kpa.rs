//! Knative's pod autoscaler on concurrency: 70 % of 100 requests per pod, over 60 seconds; in a panic over 6.
//!
//! A panic begins where the short window asks for twice the pods there are, and lasts for a stable window during which
//! nothing is removed. Up by a factor of 1000 at most, down by half.

use std::collections::VecDeque;

use crate::policy::Policy;
use crate::protocol::{Hello, Reply, Tick};

const TARGET: f64 = 70.0;
const STABLE: f64 = 60.0;
const PANIC: f64 = 6.0;
const PANIC_AT: f64 = 2.0;
const DOWN_RATE: f64 = 2.0;

/// See the module.
pub struct KpaPolicy {
    min: i32,
    max: i32,
    samples: VecDeque<(f64, f64)>,
    panicked: Option<f64>,
    /// The number that a panic does not fall below.
    held: i32,
}

impl KpaPolicy {
    /// With its defaults.
    pub fn new(hello: &Hello) -> Self {
        let (min, max) = (hello.spec.min_replicas, hello.spec.max_replicas);
        KpaPolicy { min, max, samples: VecDeque::new(), panicked: None, held: 0 }
    }

    fn wanted(&self, now: f64, window: f64) -> f64 {
        let recent = self.samples.iter().filter(|(at, _)| *at > now - window).map(|(_, requests)| *requests);
        (super::mean(recent).unwrap_or(0.0) / TARGET).ceil()
    }
}

impl Policy for KpaPolicy {
    fn decide(&mut self, tick: &Tick) -> Reply {
        let (now, ready) = (tick.t, tick.ready().count().max(1) as f64);
        let inside: f64 = tick.readings().map(|said| f64::from(said.running + said.waiting)).sum();
        self.samples.push_back((now, inside + tick.gateway.queued as f64));
        self.samples.retain(|(at, _)| *at > now - STABLE);
        let (stable, urgent) = (self.wanted(now, STABLE), self.wanted(now, PANIC));
        if urgent / ready >= PANIC_AT {
            self.panicked = Some(now);
        } else if self.panicked.is_some_and(|since| now - since > STABLE) {
            self.panicked = None;
            self.held = 0;
        }
        let slowest = (ready / DOWN_RATE).floor();
        let wanted = if self.panicked.is_some() { urgent.max(stable) } else { stable.max(slowest) } as i32;
        self.held = if self.panicked.is_some() { self.held.max(wanted) } else { 0 };
        Reply::of(wanted.max(self.held).clamp(self.min, self.max))
    }
}
