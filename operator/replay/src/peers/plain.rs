//! The plain rule: one pod more when the 95th percentile of the time to first token exceeds 2 seconds and utilization
//! 80 %, one fewer when utilization is below 30 %; over 10 samples, which then start anew.

use std::collections::{BTreeMap, VecDeque};

use super::mean;
use crate::policy::Policy;
use crate::protocol::{Hello, Reply, Tick};

const SAMPLES: usize = 10;
const LATENCY: f64 = 2.0;
const SHARE: f64 = 0.95;
const BUSY: f64 = 0.8;
const IDLE: f64 = 0.3;

/// See the module.
pub struct PlainRule {
    min: i32,
    max: i32,
    edges: Vec<f64>,
    /// Observations of each tick, by bucket, and utilization.
    samples: VecDeque<(Vec<u64>, f64)>,
    last: BTreeMap<String, Vec<u64>>,
}

impl PlainRule {
    /// With its numbers.
    pub fn new(hello: &Hello) -> Self {
        let (min, max, edges) = (hello.spec.min_replicas, hello.spec.max_replicas, hello.histogram_edges.ttft.clone());
        PlainRule { min, max, edges, samples: VecDeque::new(), last: BTreeMap::new() }
    }

    /// Observations since the last tick.
    fn observed(&mut self, tick: &Tick) -> Vec<u64> {
        let mut sum = vec![0; self.edges.len() + 1];
        for pod in tick.ready() {
            let Some(said) = &pod.metrics else { continue };
            let now = said.ttft.cumulative.clone();
            let before = self.last.insert(pod.name.clone(), now.clone()).unwrap_or_default();
            for (index, (total, count)) in sum.iter_mut().zip(now).enumerate() {
                *total += count.saturating_sub(before.get(index).copied().unwrap_or(0));
            }
        }
        sum
    }

    fn percentile(&self) -> f64 {
        let total = |index: usize| self.samples.iter().map(|(counts, _)| counts[index]).sum::<u64>() as f64;
        let all = total(self.edges.len());
        let bucket = (0..self.edges.len()).find(|&index| all > 0.0 && total(index) >= SHARE * all);
        match bucket {
            Some(index) => self.edges[index],
            None if all > 0.0 => f64::INFINITY,
            None => 0.0,
        }
    }
}

impl Policy for PlainRule {
    fn decide(&mut self, tick: &Tick) -> Reply {
        let current = tick.replicas();
        let observed = self.observed(tick);
        if let Some(busy) = mean(tick.readings().map(|said| said.gpu_utilization)) {
            self.samples.push_back((observed, busy));
        }
        if self.samples.len() < SAMPLES {
            return Reply::of(current);
        }
        let busy = mean(self.samples.iter().map(|(_, busy)| *busy)).unwrap_or(0.0);
        let step = i32::from(busy > BUSY && self.percentile() > LATENCY) - i32::from(busy < IDLE);
        match step {
            0 => drop(self.samples.pop_front()),
            _ => self.samples.clear(),
        }
        Reply::of((current + step).clamp(self.min, self.max))
    }
}
