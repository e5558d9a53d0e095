//! llm-d's workload variant autoscaler: a rule on saturation, and one on tokens. Every 60 seconds, by way of a
//! HorizontalPodAutoscaler that waits for 240 seconds in both directions, as its chart has it.

use std::collections::{BTreeMap, VecDeque};

use super::{Behavior, Every};
use crate::policy::Policy;
use crate::protocol::{Hello, Pod, Reply, Tick};

const WINDOW: f64 = 60.0;
const STABILIZATION: f64 = 240.0;
/// A pod is saturated from this KV usage on, or this queue.
const KV_SATURATED: f64 = 0.8;
const QUEUE_SATURATED: f64 = 5.0;
/// More pods are wanted where less than this is spare on average.
const KV_SPARE: f64 = 0.1;
const QUEUE_SPARE: f64 = 3.0;

/// KV usage and queue of each pod, the most of the last minute.
#[derive(Default)]
struct Peaks(BTreeMap<String, VecDeque<(f64, f64, f64)>>);

impl Peaks {
    fn take(&mut self, tick: &Tick) {
        for pod in tick.ready() {
            let Some(said) = &pod.metrics else { continue };
            let samples = self.0.entry(pod.name.clone()).or_default();
            samples.push_back((tick.t, said.kv_usage, said.waiting.into()));
            samples.retain(|(at, ..)| *at > tick.t - WINDOW);
        }
        self.0.retain(|name, _| tick.pods.iter().any(|pod| pod.name == *name));
    }

    fn of(&self, pod: &Pod) -> Option<(f64, f64)> {
        let samples = self.0.get(&pod.name)?;
        let most = |pick: fn(&(f64, f64, f64)) -> f64| samples.iter().map(pick).fold(0.0, f64::max);
        Some((most(|sample| sample.1), most(|sample| sample.2)))
    }
}

/// One up when little is spare, one down when what remains has enough.
pub struct WvaV1 {
    peaks: Peaks,
    every: Every,
    behavior: Behavior,
    wanted: Option<i32>,
}

impl WvaV1 {
    /// With its defaults.
    pub fn new(hello: &Hello) -> Self {
        let behavior = Behavior::new(hello, STABILIZATION, STABILIZATION);
        WvaV1 { peaks: Peaks::default(), every: Every::new(60.0), behavior, wanted: None }
    }

    fn wish(&self, tick: &Tick) -> i32 {
        let current = tick.replicas();
        let loads: Vec<(f64, f64)> = tick.ready().filter_map(|pod| self.peaks.of(pod)).collect();
        let calm = loads.iter().filter(|(kv, queue)| *kv < KV_SATURATED && *queue < QUEUE_SATURATED);
        let count = calm.clone().count() as f64;
        let sum = |pick: fn(&(f64, f64)) -> f64| calm.clone().map(pick).sum::<f64>();
        let (kv, queue) = (sum(|load| load.0), sum(|load| load.1));
        let is_scarce =
            |count: f64| KV_SATURATED - kv / count < KV_SPARE || QUEUE_SATURATED - queue / count < QUEUE_SPARE;
        let is_pending = current > loads.len() as i32;
        if loads.is_empty() || is_pending {
            current
        } else if count == 0.0 || is_scarce(count) {
            current + 1
        } else if count >= 2.0 && !is_scarce(count - 1.0) {
            current - 1
        } else {
            current
        }
    }
}

impl Policy for WvaV1 {
    fn decide(&mut self, tick: &Tick) -> Reply {
        self.peaks.take(tick);
        if self.every.is_due(tick.t) {
            let wish = self.wish(tick);
            self.wanted = Some(self.behavior.settle(tick.t, tick.replicas(), wish));
        }
        Reply::of(self.wanted.take().unwrap_or(tick.replicas()))
    }
}

/// Load above which pods are added, and below which they may go.
const FILL_UP: f64 = 0.85;
const FILL_DOWN: f64 = 0.70;

/// Tokens wanted against tokens that pods hold.
pub struct WvaV2 {
    kv_tokens: f64,
    /// Tokens in a pod whose queue was saturated: what it can compute.
    compute_bound: Option<f64>,
    every: Every,
    behavior: Behavior,
    wanted: Option<i32>,
}

impl WvaV2 {
    /// With its defaults.
    pub fn new(hello: &Hello) -> Self {
        let behavior = Behavior::new(hello, STABILIZATION, STABILIZATION);
        let kv_tokens = hello.engine.kv_cache_tokens as f64;
        WvaV2 { kv_tokens, compute_bound: None, every: Every::new(60.0), behavior, wanted: None }
    }

    fn learn(&mut self, tick: &Tick) {
        for said in tick.readings().filter(|said| f64::from(said.waiting) >= QUEUE_SATURATED) {
            let tokens = said.kv_usage * self.kv_tokens;
            self.compute_bound = Some(self.compute_bound.map_or(tokens, |known| 0.7 * known + 0.3 * tokens));
        }
    }

    fn wish(&self, tick: &Tick) -> i32 {
        let current = tick.replicas();
        let bound = KV_SATURATED * self.kv_tokens;
        let capacity = self.compute_bound.map_or(bound, |tokens| tokens.min(bound)).max(1.0);
        let prompts: u64 = tick.readings().map(|said| said.prompt_tokens_total).sum();
        let finished: u64 = tick.readings().map(|said| said.requests_finished_total).sum();
        let prompt = prompts as f64 / finished.max(1) as f64;
        let demand: f64 =
            tick.readings().map(|said| said.kv_usage * self.kv_tokens + f64::from(said.waiting) * prompt).sum();
        let ready = tick.ready().count() as f64;
        let required = demand / FILL_UP - f64::from(current) * capacity;
        let spare = ready * capacity - demand / FILL_DOWN;
        if required > 0.0 {
            current + (required / capacity).ceil() as i32
        } else {
            current - (spare / capacity).floor().max(0.0) as i32
        }
    }
}

impl Policy for WvaV2 {
    fn decide(&mut self, tick: &Tick) -> Reply {
        self.learn(tick);
        if self.every.is_due(tick.t) && tick.readings().next().is_some() {
            let wish = self.wish(tick);
            self.wanted = Some(self.behavior.settle(tick.t, tick.replicas(), wish));
        }
        Reply::of(self.wanted.take().unwrap_or(tick.replicas()))
    }
}
