//! The operator's own autoscaler behind the protocol: readings in, the same decision as in the cluster out.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use windlass_engine_contract::stats::{self, LATENCY_EDGES_MS, Phase, Stats};
use windlass_operator_api::autoscaling::{Autoscaling, AutoscalingMode, LatencyMetric, LatencyTarget};
use windlass_operator_api::spot::SpotMode;
use windlass_operator_core::autoscale::policy::Policy as Limits;
use windlass_operator_core::autoscale::{Cadence, Memory, Supply, decide};
use windlass_operator_core::placement::{Placement, Standing};
use windlass_operator_core::validate::{Refusal, SpotPolicy};
use windlass_operator_core::window::LoadWindow;

use crate::policy::Policy;
use crate::protocol::{CapacityType, Edges, Hello, Histogram, Pod, PodMetrics, PodPhase, Reply, Spec, Tick};

/// Readings over which an engine's utilization is a mean: those of a minute.
const UTILIZATION_READINGS: usize = 12;

/// See the module.
pub struct Builtin {
    limits: Limits,
    edges: Edges,
    cadence: Cadence,
    window: LoadWindow,
    utilization: BTreeMap<String, VecDeque<f64>>,
    memory: Memory,
    spot: Option<Spot>,
}

/// Replicas on spot nodes.
struct Spot {
    policy: SpotPolicy,
    /// Replicas wanted at the last tick: of the pods there are, one may be a probe.
    wanted: i32,
    /// Some ran on demand then because no spot node came.
    was_given_up: bool,
}

impl Builtin {
    /// With the defaults of the resource.
    ///
    /// # Errors
    /// Bounds or targets that the resource does not take.
    pub fn new(hello: &Hello) -> Result<Self, Refusal> {
        let interval = Duration::from_secs_f64(hello.scrape_interval_seconds.clamp(1.0, 60.0));
        Ok(Builtin {
            limits: limits(hello)?,
            edges: hello.histogram_edges.clone(),
            cadence: Cadence { active: interval, idle: interval },
            window: LoadWindow::default(),
            utilization: BTreeMap::new(),
            memory: Memory::default(),
            spot: hello.spec.spot.available.then(|| Spot::new(&hello.spec)),
        })
    }

    fn read(&mut self, tick: &Tick) {
        let exists = |name: &str| tick.pods.iter().any(|pod| pod.name == name);
        self.window.retain(exists);
        self.utilization.retain(|name, _| exists(name));
        for pod in tick.ready() {
            let Some(said) = &pod.metrics else { continue };
            let recent = self.utilization.entry(pod.name.clone()).or_default();
            recent.push_back(said.gpu_utilization);
            if recent.len() > UTILIZATION_READINGS {
                recent.pop_front();
            }
            let mean = recent.iter().sum::<f64>() / recent.len() as f64;
            let stats = stats_of(pod, said, mean, &self.edges);
            self.window.record(&pod.name, at(tick.t), stats);
        }
    }
}

impl Policy for Builtin {
    fn decide(&mut self, tick: &Tick) -> Reply {
        self.read(tick);
        let since = |pod: &Pod| at(tick.t - pod.ready_seconds.unwrap_or(0.0));
        let supply = Supply {
            asked: self.spot.as_ref().map_or(tick.replicas(), |spot| spot.wanted),
            serving: tick.ready().map(|pod| (pod.name.as_str(), since(pod))).collect(),
            leaving: tick.pods.iter().filter(|pod| pod.phase == PodPhase::Draining).count() as i32,
            faltering: 0,
            is_rolling: false,
            overdue: 0,
            cold_starts: tick.ready().filter_map(|pod| Some((since(pod), cold_start(pod)?))).collect(),
        };
        let decision = decide(&self.limits, &supply, &self.window, &self.memory, self.cadence, at(tick.t));
        self.memory = decision.memory;
        let reason = format!("{}: {}", decision.reason, decision.message);
        match &mut self.spot {
            Some(spot) => Reply { reason, ..spot.place(tick, decision.replicas) },
            None => Reply { reason, victims: victims(tick, decision.replicas), ..Reply::of(decision.replicas) },
        }
    }
}

impl Spot {
    /// As a user would write it: the fewest replicas on demand, the others on spot, and on demand when it does not come.
    fn new(spec: &Spec) -> Self {
        let after = spec.spot.fallback_after_seconds.unwrap_or(60.0).clamp(1.0, 3600.0);
        let policy = SpotPolicy {
            mode: Some(SpotMode::Prefer),
            on_demand_base: spec.spot.on_demand_base.unwrap_or(spec.min_replicas).max(0),
            max_percent_above_base: 100,
            fallback_after: Some(Duration::from_secs_f64(after)),
            node_selector: BTreeMap::new(),
            tolerations: Vec::new(),
        };
        Spot { policy, wanted: spec.initial_replicas, was_given_up: false }
    }

    /// Where so many replicas go. A probe is asked for beyond them; where the judge holds to its maximum, there is none.
    fn place(&mut self, tick: &Tick, replicas: i32) -> Reply {
        let placement = Placement::of(&self.policy, Some(standing(tick)), replicas, self.was_given_up, at(tick.t));
        (self.wanted, self.was_given_up) = (replicas, placement.fallback > 0);
        let mut victims = doomed(tick);
        for (capacity, wanted) in [(CapacityType::OnDemand, placement.on_demand), (CapacityType::Spot, placement.spot)]
        {
            let is_it = |pod: &Pod| pod.capacity_type == capacity;
            let ready = tick.ready().filter(|pod| is_it(pod) && !is_doomed(pod)).count() as i32;
            // What one kind has too many serves until the other kind does.
            let spared = tick.ready().filter(|pod| !is_doomed(pod)).count() as i32 - replicas;
            victims.extend(idlest(tick, (ready - wanted).min(spared), is_it));
        }
        Reply { on_demand: Some(placement.on_demand), victims, ..Reply::of(placement.on_demand + placement.spot) }
    }
}

/// How the pods for spot nodes stand. Those whose node is taken away are on their way out.
fn standing(tick: &Tick) -> Standing {
    let on_spot = || tick.standing().filter(|pod| !is_doomed(pod) && pod.capacity_type == CapacityType::Spot);
    let (waiting, placed): (Vec<&Pod>, Vec<&Pod>) = on_spot().partition(|pod| pod.phase == PodPhase::Pending);
    Standing {
        asked: on_spot().count() as i32,
        placed: placed.len() as i32,
        waiting_since: waiting.iter().map(|pod| at(tick.t - pod.age_seconds)).min(),
    }
}

/// Pods whose node is taken away, and the ones that a smaller number of replicas can miss best: those with the fewest
/// requests. A pod that does not serve goes by itself before any that does.
fn victims(tick: &Tick, replicas: i32) -> Vec<String> {
    let mut victims = doomed(tick);
    let staying = tick.replicas() - victims.len() as i32;
    let unready = tick.standing().filter(|pod| pod.phase != PodPhase::Ready).count() as i32;
    victims.extend(idlest(tick, staying - replicas - unready, |_| true));
    victims
}

/// Pods whose node is taken away.
fn doomed(tick: &Tick) -> Vec<String> {
    tick.standing().filter(|pod| is_doomed(pod)).map(|pod| pod.name.clone()).collect()
}

fn is_doomed(pod: &Pod) -> bool {
    pod.reclaim_in_seconds.is_some()
}

/// So many of these pods, those with the fewest requests.
fn idlest(tick: &Tick, count: i32, is_meant: impl Fn(&Pod) -> bool) -> impl Iterator<Item = String> {
    let mut ready: Vec<&Pod> = tick.ready().filter(|pod| !is_doomed(pod) && is_meant(pod)).collect();
    ready.sort_by_key(|pod| pod.metrics.as_ref().map_or(u32::MAX, |said| said.running + said.waiting));
    ready.into_iter().take(count.max(0) as usize).map(|pod| pod.name.clone()).collect::<Vec<_>>().into_iter()
}

/// How long a pod took to serve; those that were there at the start tell nothing.
fn cold_start(pod: &Pod) -> Option<Duration> {
    let seconds = pod.age_seconds - pod.ready_seconds?;
    Duration::try_from_secs_f64(seconds).ok().filter(|took| !took.is_zero())
}

/// Of a request's tokens, those that follow a long step are late; the mean over a request, which is what the protocol
/// asks for, reaches the target about when this percentile of single tokens does.
const TOKEN_PERCENTILE: i32 = 75;

/// The resource that a user would write for these goals.
fn limits(hello: &Hello) -> Result<Limits, Refusal> {
    let targets = hello.spec.targets;
    let requests = ((targets.share * 100.0).floor() as i32).clamp(50, 99);
    let target = |metric, percentile, seconds: f64| LatencyTarget {
        metric,
        percentile,
        milliseconds: ((seconds * 1000.0).round() as i32).clamp(1, 60_000),
    };
    let autoscaling = Autoscaling {
        mode: AutoscalingMode::Builtin,
        min_replicas: Some(hello.spec.min_replicas.max(1)),
        max_replicas: Some(hello.spec.max_replicas.max(1)),
        targets: vec![
            target(LatencyMetric::TimeToFirstToken, requests, targets.ttft_seconds),
            target(LatencyMetric::InterToken, TOKEN_PERCENTILE, targets.inter_token_seconds),
        ],
        ..Autoscaling::default()
    };
    Limits::builtin(&autoscaling, hello.spec.initial_replicas)
}

/// Simulated time as a point in time; the readings' ages are all that matters.
fn at(seconds: f64) -> Timestamp {
    Timestamp::from_second(1_000_000).unwrap_or_default().saturating_add(span(seconds)).unwrap_or(Timestamp::MAX)
}

fn span(seconds: f64) -> SignedDuration {
    SignedDuration::try_from_secs_f64(seconds).unwrap_or_default()
}

/// What the engine's `/stats` would say.
fn stats_of(pod: &Pod, said: &PodMetrics, utilization: f64, edges: &Edges) -> Stats {
    Stats {
        uptime_seconds: pod.age_seconds,
        phase: Phase::Ready,
        simulated: true,
        running: said.running,
        waiting: said.waiting,
        oldest_queue_age_seconds: said.oldest_queue_age_seconds,
        queued_tokens: u64::from(said.waiting) * mean_prompt(said),
        remaining_tokens: said.running.into(),
        kv_usage: said.kv_usage,
        cached_blocks: 0,
        utilization: Some(utilization),
        finished: said.requests_finished_total,
        rejected: 0,
        prompt_tokens: said.prompt_tokens_total,
        generation_tokens: said.generation_tokens_total,
        time_to_first_token: rebin(&said.ttft, &edges.ttft),
        inter_token: rebin(&said.inter_token, &edges.inter_token),
        end_to_end: rebin(&said.e2e, &edges.e2e),
        effective: None,
        start: None,
        fingerprint: None,
        gpus: None,
    }
}

/// Mean length of the prompts so far.
fn mean_prompt(said: &PodMetrics) -> u64 {
    said.prompt_tokens_total / (said.requests_finished_total + u64::from(said.running)).max(1)
}

/// The same observations over the engine's own edges; between the edges of `said` they are taken to lie evenly.
fn rebin(said: &Histogram, edges: &[f64]) -> stats::Histogram {
    if said.cumulative.len() != edges.len() + 1 {
        return stats::Histogram::default();
    }
    let total = said.cumulative.last().copied().unwrap_or(0);
    let counts = LATENCY_EDGES_MS.iter().map(|&edge| within(said, edges, f64::from(edge) / 1000.0) as u64);
    stats::Histogram { counts: counts.chain([total]).collect(), sum_ms: said.sum * 1000.0 }
}

/// Observations at or below `seconds`.
fn within(said: &Histogram, edges: &[f64], seconds: f64) -> f64 {
    let bucket = edges.partition_point(|&edge| edge < seconds);
    let (lower, below) = match bucket.checked_sub(1) {
        Some(previous) => (edges[previous], said.cumulative[previous] as f64),
        None => (0.0, 0.0),
    };
    let Some(&upper) = edges.get(bucket) else { return below };
    let share = if upper > lower { (seconds - lower) / (upper - lower) } else { 1.0 };
    below + share.clamp(0.0, 1.0) * (said.cumulative[bucket] as f64 - below)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn observations_keep_their_place_over_other_edges() {
        let said = Histogram { cumulative: vec![10, 30, 30, 40], sum: 20.0 };
        let edges = [0.005, 0.015, 1.0];
        let moved = rebin(&said, &edges);
        let at = |milliseconds: u32| {
            moved.counts[LATENCY_EDGES_MS.iter().position(|&edge| edge == milliseconds).expect("an edge")]
        };
        assert_eq!((at(5), at(10), at(20), at(1000), at(60_000)), (10, 20, 30, 30, 30));
        assert_eq!((moved.counts.last(), moved.sum_ms), (Some(&40), 20_000.0));
        assert_eq!(rebin(&said, &[1.0]), stats::Histogram::default());
    }
}
