//! Readings of engines with their ages: bounded, and nothing but arithmetic on them.
//!
//! Engines count from their start and never fall, so the difference of two readings is what happened between them, and
//! differences of several engines can be added. Percentiles are taken last, of the sum: never averaged.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use windlass_engine_contract::stats::{EffectiveConfig, Histogram, LATENCY_EDGES_MS, StartPhases, Stats};
use windlass_operator_api::autoscaling::LatencyMetric;

/// How far back latencies count: long enough for 20 requests of a slow model, short enough to follow a burst.
pub const WINDOW: Duration = Duration::from_secs(120);
/// Readings closer than this replace each other, so that a pod takes some thirty places at most, whatever the cadence.
const RESOLUTION: Duration = Duration::from_secs(4);
/// Buckets of a histogram, the last without an upper edge.
const BUCKETS: usize = LATENCY_EDGES_MS.len() + 1;
/// Buckets of all three histograms.
const PLACES: usize = 3 * BUCKETS;

/// Readings of a service's pods, by pod name.
#[derive(Clone, Debug, Default)]
pub struct LoadWindow {
    pods: BTreeMap<String, PodReadings>,
}

/// Readings of one pod: the newest in full, and of the earlier ones what differences are taken from.
#[derive(Clone, Debug, Default)]
struct PodReadings {
    latest: Option<Reading>,
    /// Oldest first, the newest included.
    history: VecDeque<Sample>,
    failure: Option<Failure>,
}

/// One reading.
#[derive(Clone, Debug)]
pub struct Reading {
    /// When it was taken.
    pub at: Timestamp,
    /// What the engine said; of what it built and of its start, what it last said.
    pub stats: Stats,
}

/// The counters of one reading.
#[derive(Clone, Debug)]
struct Sample {
    at: Timestamp,
    in_flight: u64,
    finished: u64,
    rejected: u64,
    prompt_tokens: u64,
    queued_tokens: u64,
    generation_tokens: u64,
    /// Sum of all times between tokens.
    inter_token_ms: f64,
    /// Latencies observed since the sample before: of seventy buckets a few.
    gained: Box<[Gain]>,
}

/// Observations in one bucket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Gain {
    /// Of [`PLACES`].
    place: u8,
    count: u32,
}

/// Observations per bucket, of one histogram after the other.
type Observations = [u64; PLACES];

/// Cumulative counts per bucket.
type Buckets = [u64; BUCKETS];

/// A scrape that brought nothing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// When it was tried.
    pub at: Timestamp,
    /// What went wrong.
    pub message: String,
}

impl LoadWindow {
    /// Adds a reading of `pod` and forgets what is too old to matter.
    pub fn record(&mut self, pod: &str, at: Timestamp, stats: Stats) {
        self.pods.entry(pod.to_owned()).or_default().record(at, stats);
    }

    /// Notes that `pod` did not answer.
    pub fn record_failure(&mut self, pod: &str, at: Timestamp, message: String) {
        self.pods.entry(pod.to_owned()).or_default().failure = Some(Failure { at, message });
    }

    /// Forgets pods that `keep` does not hold.
    pub fn retain(&mut self, keep: impl Fn(&str) -> bool) {
        self.pods.retain(|pod, _| keep(pod));
    }

    /// The newest reading of `pod`.
    pub fn latest(&self, pod: &str) -> Option<&Reading> {
        self.pods.get(pod)?.latest.as_ref()
    }

    /// What the engine in `pod` built.
    pub fn effective(&self, pod: &str) -> Option<&EffectiveConfig> {
        self.latest(pod)?.stats.effective.as_ref()
    }

    /// The cold start of `pod`.
    pub fn start(&self, pod: &str) -> Option<StartPhases> {
        self.latest(pod)?.stats.start
    }

    /// The last scrape of `pod`, when it failed.
    pub fn failure(&self, pod: &str) -> Option<&Failure> {
        self.pods.get(pod)?.failure.as_ref()
    }

    /// What happened in `pod` between `since` and its newest reading.
    pub fn activity(&self, pod: &str, since: Timestamp) -> Option<Activity> {
        self.pods.get(pod)?.activity(since)
    }
}

impl PodReadings {
    fn record(&mut self, at: Timestamp, mut stats: Stats) {
        if self.latest.as_ref().is_some_and(|last| stats.uptime_seconds < last.stats.uptime_seconds) {
            *self = PodReadings::default();
        }
        let (now, before) = (observations(&stats), self.latest.as_ref().map(|last| observations(&last.stats)));
        let mut gained: Observations =
            std::array::from_fn(|i| now[i].saturating_sub(before.map_or(0, |before| before[i])));
        if self.is_crowded() {
            let replaced = self.history.pop_back();
            replaced.iter().flat_map(|sample| &sample.gained).for_each(|gain| gain.add_to(&mut gained));
        }
        self.history.push_back(Sample::new(at, &stats, &gained));
        self.forget_before(minus(at, WINDOW));
        if let Some(last) = self.latest.take() {
            stats.effective = stats.effective.or(last.stats.effective);
            stats.start = stats.start.or(last.stats.start);
        }
        self.failure = None;
        self.latest = Some(Reading { at, stats });
    }

    /// Whether the last two samples are so close that the next may take the place of the last.
    fn is_crowded(&self) -> bool {
        let mut newest = self.history.iter().rev();
        match (newest.next(), newest.next()) {
            (Some(last), Some(before)) => last.at.duration_since(before.at) < signed(RESOLUTION),
            _ => false,
        }
    }

    /// Keeps one sample at or before `start`, from which differences are taken.
    fn forget_before(&mut self, start: Timestamp) {
        while self.history.get(1).is_some_and(|second| second.at <= start) {
            self.history.pop_front();
        }
    }

    fn activity(&self, since: Timestamp) -> Option<Activity> {
        let (newest, said) = (self.history.back()?, &self.latest.as_ref()?.stats);
        let began = minus(newest.at, Duration::from_secs_f64(said.uptime_seconds.clamp(0.0, 1e9)));
        let before = match self.history.iter().rposition(|sample| sample.at <= since) {
            // The process began inside the span, and counted from nothing.
            None if began >= since => return Some(Activity::between(None, began, newest, &observations(said))),
            before => before.unwrap_or(0),
        };
        let earlier = self.history.get(before).filter(|earlier| earlier.at < newest.at)?;
        let mut gained = [0; PLACES];
        let later = self.history.iter().skip(before + 1);
        later.flat_map(|sample| &sample.gained).for_each(|gain| gain.add_to(&mut gained));
        Some(Activity::between(Some(earlier), earlier.at, newest, &gained))
    }
}

impl Sample {
    fn new(at: Timestamp, stats: &Stats, gained: &Observations) -> Self {
        Sample {
            at,
            in_flight: u64::from(stats.running) + u64::from(stats.waiting),
            finished: stats.finished,
            rejected: stats.rejected,
            prompt_tokens: stats.prompt_tokens,
            queued_tokens: stats.queued_tokens,
            generation_tokens: stats.generation_tokens,
            inter_token_ms: stats.inter_token.sum_ms,
            gained: gained.iter().enumerate().filter_map(Gain::of).collect(),
        }
    }
}

impl Gain {
    /// `None` for a bucket in which nothing was observed.
    fn of((place, &count): (usize, &u64)) -> Option<Gain> {
        let gain = Gain { place: u8::try_from(place).ok()?, count: u32::try_from(count).unwrap_or(u32::MAX) };
        (count > 0).then_some(gain)
    }

    fn add_to(&self, sum: &mut Observations) {
        sum[usize::from(self.place)] += u64::from(self.count);
    }
}

/// What happened in one engine, or in several together.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Activity {
    /// Time it took; of several engines, the longest.
    pub seconds: f64,
    /// Requests that ended, per second.
    pub finished_per_second: f64,
    /// Requests that arrived, per second: ended, refused, or in the engine more than before.
    pub arrived_per_second: f64,
    /// Requests that ended.
    pub finished: u64,
    /// Prompt tokens that arrived, per second: computed, or waiting more than before.
    pub arrived_tokens_per_second: f64,
    /// Prompt tokens computed, per second.
    pub prompt_tokens_per_second: f64,
    /// Tokens generated, per second.
    pub generated_tokens_per_second: f64,
    /// Sum of all times between tokens, milliseconds.
    inter_token_ms: f64,
    latencies: [LatencyCounts; 3],
}

impl Activity {
    fn between(before: Option<&Sample>, began: Timestamp, latest: &Sample, gained: &Observations) -> Self {
        let seconds = latest.at.duration_since(began).as_secs_f64().max(1e-3);
        let finished = latest.finished.saturating_sub(before.map_or(0, |sample| sample.finished));
        let rejected = latest.rejected.saturating_sub(before.map_or(0, |sample| sample.rejected));
        let grown = latest.in_flight as f64 - before.map_or(0, |sample| sample.in_flight) as f64;
        let computed = latest.prompt_tokens.saturating_sub(before.map_or(0, |sample| sample.prompt_tokens)) as f64;
        let queued = latest.queued_tokens as f64 - before.map_or(0, |sample| sample.queued_tokens) as f64;
        let generated = latest.generation_tokens.saturating_sub(before.map_or(0, |sample| sample.generation_tokens));
        let counts = |metric: usize| {
            let mut sum = 0;
            LatencyCounts(std::array::from_fn(|bucket| {
                sum += gained[metric * BUCKETS + bucket];
                sum
            }))
        };
        Activity {
            seconds,
            finished,
            finished_per_second: finished as f64 / seconds,
            arrived_per_second: ((finished + rejected) as f64 + grown).max(0.0) / seconds,
            arrived_tokens_per_second: (computed + queued).max(0.0) / seconds,
            prompt_tokens_per_second: computed / seconds,
            generated_tokens_per_second: generated as f64 / seconds,
            inter_token_ms: (latest.inter_token_ms - before.map_or(0.0, |sample| sample.inter_token_ms)).max(0.0),
            latencies: [0, 1, 2].map(counts),
        }
    }

    /// Adds what happened in another engine.
    pub fn add(&mut self, other: &Activity) {
        self.seconds = self.seconds.max(other.seconds);
        self.finished += other.finished;
        self.finished_per_second += other.finished_per_second;
        self.arrived_per_second += other.arrived_per_second;
        self.arrived_tokens_per_second += other.arrived_tokens_per_second;
        self.prompt_tokens_per_second += other.prompt_tokens_per_second;
        self.generated_tokens_per_second += other.generated_tokens_per_second;
        self.inter_token_ms += other.inter_token_ms;
        for (sum, counts) in self.latencies.iter_mut().zip(&other.latencies) {
            sum.0.iter_mut().zip(counts.0).for_each(|(sum, count)| *sum += count);
        }
    }

    /// Mean time between tokens, seconds; `None` where there was none.
    pub fn inter_token_seconds(&self) -> Option<f64> {
        let count = self.latency(LatencyMetric::InterToken).total();
        (count > 0).then(|| self.inter_token_ms / 1000.0 / count as f64)
    }

    /// Observations of one latency.
    pub fn latency(&self, metric: LatencyMetric) -> &LatencyCounts {
        match metric {
            LatencyMetric::TimeToFirstToken => &self.latencies[0],
            LatencyMetric::InterToken => &self.latencies[1],
            LatencyMetric::EndToEnd => &self.latencies[2],
        }
    }
}

/// Observations of a latency in a span, cumulative per bucket.
#[derive(Clone, Debug, PartialEq)]
pub struct LatencyCounts(Buckets);

impl Default for LatencyCounts {
    fn default() -> Self {
        LatencyCounts([0; BUCKETS])
    }
}

impl LatencyCounts {
    /// How many there are.
    pub fn total(&self) -> u64 {
        self.0[BUCKETS - 1]
    }

    /// How many are at or below `milliseconds`, interpolated inside a bucket. Those in the last bucket, which has no
    /// upper edge, are above everything.
    pub fn within(&self, milliseconds: f64) -> f64 {
        let bucket = LATENCY_EDGES_MS.partition_point(|&edge| f64::from(edge) < milliseconds);
        let below = if bucket == 0 { 0 } else { self.0[bucket - 1] };
        let Some(&upper) = LATENCY_EDGES_MS.get(bucket) else { return below as f64 };
        let lower = lower_edge(bucket);
        let share = (milliseconds - lower) / (f64::from(upper) - lower);
        below as f64 + share * self.0[bucket].saturating_sub(below) as f64
    }

    /// The value below which `share` of the observations lie, interpolated inside a bucket; `None` without any. It
    /// never exceeds the last edge.
    pub fn quantile(&self, share: f64) -> Option<f64> {
        let rank = share * self.total() as f64;
        let bucket = (self.total() > 0).then(|| self.0.iter().position(|&count| count as f64 >= rank))??;
        let lower = lower_edge(bucket);
        let Some(&upper) = LATENCY_EDGES_MS.get(bucket) else { return Some(lower) };
        let below = if bucket == 0 { 0 } else { self.0[bucket - 1] };
        let inside = self.0[bucket].saturating_sub(below).max(1) as f64;
        Some(lower + (f64::from(upper) - lower) * ((rank - below as f64) / inside).clamp(0.0, 1.0))
    }
}

fn lower_edge(bucket: usize) -> f64 {
    if bucket == 0 { 0.0 } else { f64::from(LATENCY_EDGES_MS[bucket - 1]) }
}

/// Observations since the engine started.
fn observations(stats: &Stats) -> Observations {
    let histograms = [&stats.time_to_first_token, &stats.inter_token, &stats.end_to_end].map(buckets);
    std::array::from_fn(|place| {
        let (counts, bucket) = (&histograms[place / BUCKETS], place % BUCKETS);
        counts[bucket].saturating_sub(if bucket == 0 { 0 } else { counts[bucket - 1] })
    })
}

/// The counts of a histogram as it came from outside: one of another length counts as empty.
fn buckets(histogram: &Histogram) -> Buckets {
    Buckets::try_from(histogram.counts.as_slice()).unwrap_or([0; BUCKETS])
}

fn signed(duration: Duration) -> SignedDuration {
    SignedDuration::try_from(duration).unwrap_or(SignedDuration::MAX)
}

/// `duration` before `at`.
pub(crate) fn minus(at: Timestamp, duration: Duration) -> Timestamp {
    at.checked_sub(signed(duration)).unwrap_or(Timestamp::MIN)
}

pub(crate) fn plus(at: Timestamp, duration: Duration) -> Timestamp {
    at.checked_add(signed(duration)).unwrap_or(Timestamp::MAX)
}

#[cfg(test)]
mod tests;
