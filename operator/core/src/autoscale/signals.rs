//! What the engines' readings say about the targets, measured once per decision.

use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use windlass_operator_api::autoscaling::LatencyMetric;
use windlass_operator_api::status::TargetReading;

use super::policy::{Policy, Target};
use super::speed::Sample;
use super::{Cadence, Supply};
use crate::window::{Activity, LoadWindow, Reading, WINDOW, minus};

/// Rates are taken of this last part of the window, where enough happened in it: a burst shows at once.
const RECENT: Duration = Duration::from_secs(15);
/// Fewer observations than this say nothing about a percentile: one of them is five percent.
pub const MIN_SAMPLES: u64 = 20;
/// A reading is missing when this many were due since.
const MISSED_READINGS: u32 = 3;
/// A request that comes while a step is under way waits for its end. Steps are to be shorter than this.
const STEP_SECONDS: f64 = 1.0;
/// On top, for the time a reading itself takes.
const READING_SLACK: Duration = Duration::from_secs(5);

/// What is known of the load.
#[derive(Clone, Debug)]
pub struct Signals {
    /// Pods with a reading young enough to count.
    pub fresh: u32,
    /// Serving pods without one, by name.
    pub silent: Vec<String>,
    /// What happened in all pods in the window.
    pub activity: Activity,
    /// Requests a second that arrived of late.
    pub arriving: f64,
    /// Tokens a second that arrived of late.
    pub demand: Demand,
    /// Prompt tokens that wait.
    pub queued_tokens: f64,
    /// Replicas' worth of KV cache in use.
    pub kv: f64,
    /// What each replica computed of late, and how fast.
    pub samples: Vec<Sample>,
    /// Nothing is in the engines, and nothing came of late.
    pub is_idle: bool,
    /// Requests a second that ended of late; `None` with too few to tell.
    pub finishing: Option<f64>,
    /// Requests in batches.
    pub running: u64,
    /// Requests in queues.
    pub waiting: u64,
    /// One of them waits for more than the end of the step under way: there is always one of those in a large fleet.
    pub has_queue: bool,
    /// Mean utilization of fresh pods that report one, 0 to 1.
    pub utilization: Option<f64>,
    /// The targets, in the policy's order.
    pub targets: Vec<Measured>,
}

/// Tokens a second.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Demand {
    /// Of prompts.
    pub prompt: f64,
    /// To generate: what is generated, or what those who arrive will want, whichever is more.
    pub generated: f64,
}

impl Demand {
    /// `long` tells how long answers are, `recent` how many are asked for.
    fn of(long: &Activity, recent: &Activity) -> Self {
        let is_known = long.finished >= MIN_SAMPLES;
        let answer = if is_known { long.generated_tokens_per_second / long.finished_per_second } else { 0.0 };
        let generated = recent.generated_tokens_per_second.max(answer * recent.arrived_per_second);
        Demand { prompt: recent.arrived_tokens_per_second, generated }
    }
}

/// A target as measured.
#[derive(Clone, Debug, PartialEq)]
pub struct Measured {
    /// The target.
    pub target: Target,
    /// Observations in the window.
    pub samples: u64,
    /// The percentile, milliseconds, with enough observations.
    pub value: Option<f64>,
    /// How the target stands.
    pub standing: Standing,
}

/// Whether a target is held.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Standing {
    /// It is.
    Held,
    /// Too few observations to tell.
    Unknown,
    /// Observed latencies exceed it.
    Breached,
    /// Requests wait for longer than it already: they will exceed it whenever they are served.
    BreachedByQueue {
        /// Age of the oldest, milliseconds.
        oldest_ms: f64,
    },
}

impl Standing {
    /// Whether it is not held.
    pub fn is_breached(self) -> bool {
        matches!(self, Standing::Breached | Standing::BreachedByQueue { .. })
    }
}

impl Signals {
    /// Measures pods that serve, over what happened since `since` or in the window.
    pub fn measure(
        policy: &Policy,
        supply: &Supply<'_>,
        window: &LoadWindow,
        since: Option<Timestamp>,
        cadence: Cadence,
        now: Timestamp,
    ) -> Self {
        let start = since.unwrap_or(Timestamp::MIN).max(minus(now, WINDOW));
        let read = |pod: &str| window.latest(pod).filter(|reading| is_fresh(reading, cadence, now));
        let (fresh, silent): (Vec<_>, Vec<_>) = supply.serving.iter().partition(|(pod, _)| read(pod).is_some());
        let readings: Vec<&Reading> = fresh.iter().filter_map(|(pod, _)| read(pod)).collect();
        let happened = |since: Timestamp| {
            let mut sum = Activity::default();
            fresh.iter().filter_map(|(pod, _)| window.activity(pod, since)).for_each(|one| sum.add(&one));
            sum
        };
        let activity = happened(start);
        let recently = minus(now, RECENT);
        let recent = happened(recently.max(start));
        let long = happened(minus(now, WINDOW));
        let samples = fresh.iter().filter_map(|(pod, _)| sample(read(pod)?.at, &window.activity(pod, recently)?));
        let rates = if recent.finished >= MIN_SAMPLES { &recent } else { &activity };
        let in_engines = readings.iter().map(|reading| reading.stats.running + reading.stats.waiting);
        let is_idle = in_engines.sum::<u32>() == 0 && recent.arrived_per_second == 0.0;
        let measure = |target: &Target| Measured::of(*target, &activity, &readings).unless(is_idle);
        let targets = policy.targets.iter().map(measure).collect();
        Signals {
            fresh: u32::try_from(readings.len()).unwrap_or(u32::MAX),
            silent: silent.iter().map(|(pod, _)| (*pod).to_owned()).collect(),
            running: readings.iter().map(|reading| u64::from(reading.stats.running)).sum(),
            waiting: readings.iter().map(|reading| u64::from(reading.stats.waiting)).sum(),
            has_queue: readings.iter().any(|reading| reading.stats.oldest_queue_age_seconds > STEP_SECONDS),
            utilization: mean(readings.iter().filter_map(|reading| reading.stats.utilization)),
            arriving: rates.arrived_per_second,
            demand: Demand::of(&long, &happened(recently)),
            queued_tokens: readings.iter().map(|reading| reading.stats.queued_tokens as f64).sum(),
            kv: readings.iter().map(|reading| reading.stats.kv_usage).sum(),
            samples: samples.collect(),
            finishing: (rates.finished >= MIN_SAMPLES).then_some(rates.finished_per_second),
            is_idle,
            activity,
            targets,
        }
    }

    /// Targets that are not held.
    pub fn breached(&self) -> impl Iterator<Item = &Measured> {
        self.targets.iter().filter(|measured| measured.standing.is_breached())
    }

    /// Whether any target is not held.
    pub fn is_breached(&self) -> bool {
        self.breached().next().is_some()
    }

    /// Whether every replica was read.
    pub fn are_whole(&self) -> bool {
        self.fresh > 0 && self.silent.is_empty()
    }

    /// Whether every target was observed to be held.
    pub fn all_held(&self) -> bool {
        self.targets.iter().all(|measured| measured.standing == Standing::Held)
    }

    /// The targets as status shows them.
    pub fn inputs(&self) -> Vec<TargetReading> {
        self.targets.iter().map(Measured::reading).collect()
    }
}

impl Measured {
    fn of(target: Target, activity: &Activity, readings: &[&Reading]) -> Self {
        let counts = activity.latency(target.metric);
        let samples = counts.total();
        let is_known = samples >= least_samples(&target);
        let milliseconds = f64::from(target.milliseconds);
        let overdue = Overdue::count(target.metric, milliseconds, readings);
        let late = samples as f64 - counts.within(milliseconds);
        let allowed = 1.0 - target.share();
        let exceeds = |late: f64, all: f64| late > allowed * all + 1e-9;
        let standing = if is_known && exceeds(late, samples as f64) {
            Standing::Breached
        } else if overdue.requests > 0.0 && exceeds(late + overdue.requests, samples as f64 + overdue.requests) {
            Standing::BreachedByQueue { oldest_ms: overdue.oldest_ms }
        } else if is_known {
            Standing::Held
        } else {
            Standing::Unknown
        };
        let value = is_known.then(|| counts.quantile(target.share())).flatten();
        Measured { target, samples, value, standing }
    }

    /// Nobody waits for anything: what was late a minute ago is no breach any more.
    fn unless(mut self, is_idle: bool) -> Self {
        if is_idle && self.standing.is_breached() {
            self.standing = Standing::Unknown;
        }
        self
    }

    fn reading(&self) -> TargetReading {
        TargetReading {
            metric: self.target.metric,
            percentile: self.target.percentile,
            target_milliseconds: self.target.milliseconds.into(),
            measured_milliseconds: self.value.map(|value| value.round() as i64),
            samples: self.samples.min(MIN_SAMPLES) as i64,
            breached: self.standing.is_breached(),
        }
    }
}

/// Waiting requests that exceed a target already. A latency is recorded only when it ends, so a queue that stands still
/// would look healthy without them.
struct Overdue {
    requests: f64,
    oldest_ms: f64,
}

impl Overdue {
    fn count(metric: LatencyMetric, target_ms: f64, readings: &[&Reading]) -> Self {
        if metric == LatencyMetric::InterToken {
            return Overdue { requests: 0.0, oldest_ms: 0.0 };
        }
        let stats = readings.iter().map(|reading| &reading.stats);
        let queues = stats.map(|stats| (stats.oldest_queue_age_seconds * 1000.0, stats.waiting));
        let late = queues.filter(|(oldest, _)| *oldest > target_ms);
        late.fold(Overdue { requests: 0.0, oldest_ms: 0.0 }, |sum, (oldest, waiting)| Overdue {
            // Of each queue only the oldest age is known: the others are taken to have come evenly since.
            requests: sum.requests + (f64::from(waiting) * (1.0 - target_ms / oldest)).max(1.0),
            oldest_ms: sum.oldest_ms.max(oldest),
        })
    }
}

/// So many that a single late one is no breach yet: 20 for the 95th percentile, 100 for the 99th.
fn least_samples(target: &Target) -> u64 {
    MIN_SAMPLES.max((1.0 / (1.0 - target.share())).round() as u64)
}

fn sample(at: Timestamp, activity: &Activity) -> Option<Sample> {
    Some(Sample {
        at,
        observations: activity.latency(LatencyMetric::InterToken).total(),
        inter_token_seconds: activity.inter_token_seconds()?,
        prompt: activity.prompt_tokens_per_second,
        generated: activity.generated_tokens_per_second,
    })
}

/// Whether the next few readings after this one cannot all be missing.
fn is_fresh(reading: &Reading, cadence: Cadence, now: Timestamp) -> bool {
    let is_busy = reading.stats.running + reading.stats.waiting > 0;
    let interval = if is_busy { cadence.active } else { cadence.idle };
    let limit = interval * MISSED_READINGS + READING_SLACK;
    now.duration_since(reading.at) <= SignedDuration::try_from(limit).unwrap_or(SignedDuration::MAX)
}

fn mean(values: impl Iterator<Item = f64>) -> Option<f64> {
    let (sum, count) = values.fold((0.0, 0_u32), |(sum, count), value| (sum + value, count + 1));
    (count > 0).then(|| sum / f64::from(count))
}
