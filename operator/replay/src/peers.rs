//! Other scaling policies, with their defaults, to compare with. Written from their documentation; none of their code.
//!
//! What a peer leaves to its user is set as its own examples have it. All of them are asked every 5 seconds and keep to
//! their own cadence within that.

mod apa;
mod hpa;
mod kpa;
mod plain;
mod queue;
mod wva;

use std::collections::VecDeque;

pub use apa::ApaPolicy;
pub use hpa::HpaPolicy;
pub use kpa::KpaPolicy;
pub use plain::PlainRule;
pub use queue::QueuePolicy;
pub use wva::{WvaV1, WvaV2};

use crate::policy::Policy;
use crate::protocol::{Hello, Reply, Tick};

/// As many as were given, whatever happens.
pub struct StaticPool(pub i32);

impl Policy for StaticPool {
    fn decide(&mut self, _tick: &Tick) -> Reply {
        Reply::of(self.0)
    }
}

/// Lets a loop run at its own interval.
struct Every {
    seconds: f64,
    next: f64,
}

impl Every {
    fn new(seconds: f64) -> Self {
        Every { seconds, next: 0.0 }
    }

    fn is_due(&mut self, now: f64) -> bool {
        let is_due = now >= self.next;
        if is_due {
            self.next = now + self.seconds;
        }
        is_due
    }
}

/// What a HorizontalPodAutoscaler does with a recommendation: rate limits and stabilization windows.
///
/// Defaults of autoscaling/v2: up at once, by 100 % or 4 pods within 15 seconds; down after 300 seconds.
struct Behavior {
    min: i32,
    max: i32,
    up_window: f64,
    down_window: f64,
    recommendations: VecDeque<(f64, i32)>,
}

impl Behavior {
    fn new(hello: &Hello, up_window: f64, down_window: f64) -> Self {
        let (min, max) = (hello.spec.min_replicas, hello.spec.max_replicas);
        Behavior { min, max, up_window, down_window, recommendations: VecDeque::new() }
    }

    /// The number after `wanted` is recommended at `now` with `current` pods.
    fn settle(&mut self, now: f64, current: i32, wanted: i32) -> i32 {
        self.recommendations.push_back((now, wanted));
        let longest = self.up_window.max(self.down_window);
        self.recommendations.retain(|(at, _)| *at >= now - longest);
        let within = |window: f64| self.recommendations.iter().filter(move |(at, _)| *at >= now - window);
        let least = within(self.up_window).map(|(_, count)| *count).min().unwrap_or(wanted);
        let most = within(self.down_window).map(|(_, count)| *count).max().unwrap_or(wanted);
        let stable = if current < least { least } else { current.min(most) };
        let stable = if current > most { most } else { stable };
        stable.min((current * 2).max(current + 4)).clamp(self.min, self.max)
    }
}

/// `current × value / target`, rounded up; no change within a tenth.
fn proportional(current: i32, value: f64, target: f64) -> i32 {
    let ratio = value / target;
    if (ratio - 1.0).abs() <= 0.1 { current } else { (f64::from(current) * ratio).ceil() as i32 }
}

fn mean(values: impl Iterator<Item = f64>) -> Option<f64> {
    let (sum, count) = values.fold((0.0, 0), |(sum, count), value| (sum + value, count + 1));
    (count > 0).then(|| sum / f64::from(count))
}

#[cfg(test)]
mod tests;
