//! The rule: from signals to a number of replicas and the term that won.

use std::fmt;

use jiff::Timestamp;
use windlass_operator_api::autoscaling::LatencyMetric;

use super::Supply;
use super::need::Need;
use super::pace::Memory;
use super::policy::Policy;
use super::signals::{Measured, Signals, Standing};

/// A backlog is to be worked off in this time, on top of what arrives. It waits inside engines, where new replicas
/// cannot take it: more of them only keep new requests away from it.
const BACKLOG_SECONDS: f64 = 300.0;
/// A remainder is taken to hold the targets at this share of the rate at which they were seen to be held.
const MARGIN: f64 = 0.9;

/// What the rule asks for.
#[derive(Clone, Debug, PartialEq)]
pub struct Recommendation {
    /// Replicas.
    pub replicas: i32,
    /// The term that won.
    pub reason: Reason,
    /// In words, with numbers.
    pub message: String,
}

/// Terms of the rule, as status and conditions spell them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    /// Fewer than `minReplicas`.
    BelowMinimum,
    /// More than `maxReplicas`.
    AboveMaximum,
    /// No replica serves: nothing can be measured.
    NoReadyReplicas,
    /// No replica that serves was read of late.
    StaleMetrics,
    /// A target is breached and the engines are busy, or requests wait.
    TargetBreached,
    /// The same, and what was asked for already is still on its way or has just come.
    AwaitingReplicas,
    /// More would be needed, and replicas asked for long ago do not come: neither would others.
    ReplicasStuck,
    /// The tokens that arrive, or will by the time a replica serves, are more than what was asked for computes.
    DemandForeseen,
    /// A target was breached by a load that has passed.
    LoadHasPassed,
    /// More would be needed than `maxReplicas`.
    AtMaximum,
    /// A target is breached while engines idle and queues are empty.
    LatencyNotCapacity,
    /// Too few requests to tell.
    NoSignal,
    /// Every target is held, and a replica fewer would not do.
    TargetsHeld,
    /// Engines idle below `scaleDownPercent`.
    LowUtilization,
    /// What would remain holds every target.
    RemainderHolds,
    /// As few as `minReplicas` allows.
    AtMinimum,
}

impl fmt::Display for Reason {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, formatter)
    }
}

/// The rule.
pub(super) fn recommend(
    policy: &Policy,
    supply: &Supply<'_>,
    signals: &Signals,
    memory: &Memory,
    need: Option<Need>,
    now: Timestamp,
) -> Recommendation {
    let context = Context { policy, supply, signals, memory, need, now };
    let terms = [Context::bounds, Context::blind, Context::breach, Context::foreseen];
    terms.iter().find_map(|term| term(&context)).unwrap_or_else(|| context.reduce())
}

struct Context<'a> {
    policy: &'a Policy,
    supply: &'a Supply<'a>,
    signals: &'a Signals,
    memory: &'a Memory,
    need: Option<Need>,
    now: Timestamp,
}

impl Context<'_> {
    fn bounds(&self) -> Option<Recommendation> {
        let (asked, Policy { min, max, .. }) = (self.supply.asked, self.policy);
        if asked < *min {
            return say(*min, Reason::BelowMinimum, format!("{asked} is below minReplicas {min}"));
        }
        if asked > *max {
            return say(*max, Reason::AboveMaximum, format!("{asked} is above maxReplicas {max}"));
        }
        None
    }

    fn blind(&self) -> Option<Recommendation> {
        if self.supply.serving.is_empty() {
            let message = format!("none of {} replicas serves yet", self.supply.asked);
            return self.hold(Reason::NoReadyReplicas, message);
        }
        if self.signals.fresh == 0 {
            let message = format!("no recent reading of any of {} replicas", self.supply.ready());
            return self.hold(Reason::StaleMetrics, message);
        }
        None
    }

    fn breach(&self) -> Option<Recommendation> {
        let worst = self.signals.breached().max_by(|left, right| excess(left).total_cmp(&excess(right)))?;
        let told = told(worst);
        if !self.is_capacity() {
            let message = format!("{told}, but engines are {} busy and no request waits", percent(self.signals));
            return self.hold(Reason::LatencyNotCapacity, message);
        }
        let Policy { max, max_step, .. } = self.policy;
        if self.supply.asked >= *max {
            return self.hold(Reason::AtMaximum, format!("{told}; maxReplicas is {max}"));
        }
        let needed = self.needed();
        let is_settling = self.supply.pending() > 0 || self.memory.is_settling_up(self.supply, self.now);
        if is_settling && needed <= self.supply.asked {
            let message = format!("{told}; of {} replicas some are on their way or have just come", self.supply.asked);
            return self.hold(Reason::AwaitingReplicas, message);
        }
        if self.need.is_some_and(|need| need.enough() < f64::from(self.supply.ready())) && !self.signals.has_queue {
            let message = format!("{told}, by a load that has passed: {}", self.words());
            return self.hold(Reason::LoadHasPassed, message);
        }
        if let Some(stuck) = self.stuck(&told) {
            return Some(stuck);
        }
        let replicas = needed.max(self.supply.asked + 1).min(self.supply.asked + max_step).min(*max);
        let waiting = self.signals.waiting;
        let message = format!("{told}; engines are {} busy, {waiting} requests wait", percent(self.signals));
        say(replicas, Reason::TargetBreached, message)
    }

    /// No target is breached yet.
    fn foreseen(&self) -> Option<Recommendation> {
        let Policy { max, max_step, .. } = self.policy;
        let (needed, asked) = (self.needed(), self.supply.asked);
        if self.need.is_none() || needed <= asked {
            return None;
        }
        if asked >= *max {
            return self.hold(Reason::AtMaximum, format!("{}; maxReplicas is {max}", self.words()));
        }
        if let Some(stuck) = self.stuck(&self.words()) {
            return Some(stuck);
        }
        say(needed.min(asked + max_step).min(*max), Reason::DemandForeseen, self.words())
    }

    /// No more is asked for where what was asked for does not come.
    fn stuck(&self, why: &str) -> Option<Recommendation> {
        let (stuck, asked) = (self.supply.stuck(), self.supply.asked);
        if stuck == 0 {
            return None;
        }
        let late = "did not come to serve within spec.rollout.progressDeadlineSeconds, and neither would more";
        self.hold(Reason::ReplicasStuck, format!("{why}; {stuck} of {asked} replicas {late}"))
    }

    /// Tokens and capacity in words.
    fn words(&self) -> String {
        let demand = &self.signals.demand;
        let tokens = format!("{:.0} prompt and {:.0} answer tokens a second", demand.prompt, demand.generated);
        let Some(need) = self.need else { return format!("{tokens} arrive") };
        let ahead = self.memory.cold_starts.p90().as_secs();
        format!(
            "{tokens} fill {:.2} replicas, {:.2} in {ahead} s; each is to be filled to {}",
            need.load,
            need.forecast,
            percent_of(need.fill)
        )
    }

    /// Whether more replicas would help. A missing utilization does not hold a breach back.
    fn is_capacity(&self) -> bool {
        let is_busy = self.signals.utilization.is_none_or(|share| share >= self.policy.scale_up_at);
        is_busy || self.signals.waiting > 0
    }

    /// Replicas for what arrives and waits: by tokens, or at the rate of requests that a replica was seen to manage;
    /// 0 while neither is known.
    fn needed(&self) -> i32 {
        if let Some(need) = self.need {
            return need.least().ceil().min(1e6) as i32;
        }
        let Some(rate) = self.memory.rate_per_replica() else { return 0 };
        let demand = self.signals.arriving + self.signals.waiting as f64 / BACKLOG_SECONDS;
        (demand / rate).ceil().min(f64::from(self.policy.max)) as i32
    }

    /// No target is breached: as few replicas as utilization or the remainder permits.
    fn reduce(&self) -> Recommendation {
        let (asked, min) = (self.supply.asked, self.policy.min);
        if asked <= min {
            return Recommendation {
                replicas: asked,
                reason: Reason::AtMinimum,
                message: format!("no target is breached; minReplicas is {min}"),
            };
        }
        let by_utilization = self.fewest(|remaining| self.idles(remaining));
        let by_remainder = self.fewest(|remaining| self.remainder_holds(remaining));
        let ready = self.supply.ready();
        if by_utilization < asked && by_utilization <= by_remainder {
            let below = percent_of(self.policy.scale_down_below);
            let message = format!("{ready} replicas are {} busy, below {below}", percent(self.signals));
            return Recommendation { replicas: by_utilization, reason: Reason::LowUtilization, message };
        }
        if by_remainder < asked {
            let arriving = self.signals.arriving;
            let message = format!(
                "{by_remainder} replicas would hold every target at {arriving:.2} requests a second; {}",
                self.words()
            );
            return Recommendation { replicas: by_remainder, reason: Reason::RemainderHolds, message };
        }
        let (reason, message) = if self.signals.all_held() {
            (Reason::TargetsHeld, format!("every target is held; engines are {} busy", percent(self.signals)))
        } else {
            (Reason::NoSignal, "too few requests in the last two minutes to tell, and engines are not idle".to_owned())
        };
        Recommendation { replicas: asked, reason, message }
    }

    /// The fewest replicas that can be reached by steps each of which `permits`.
    fn fewest(&self, permits: impl Fn(i32) -> bool) -> i32 {
        let mut replicas = self.supply.asked;
        while replicas > self.policy.min && permits(replicas - 1) {
            replicas -= 1;
        }
        replicas
    }

    /// Whether engines would be idle enough before `remaining + 1` becomes `remaining`, and not too busy after; and the
    /// tokens would not ask for what went.
    fn idles(&self, remaining: i32) -> bool {
        let Some(work) = self.work() else { return false };
        let (before, after) = (work / f64::from(remaining + 1), work / f64::from(remaining));
        let is_calm = before < self.policy.scale_down_below && after < self.policy.scale_up_at;
        !self.signals.has_queue && is_calm && self.need.is_none_or(|need| need.least() <= f64::from(remaining))
    }

    /// Busy replicas, as a sum of shares.
    fn work(&self) -> Option<f64> {
        self.signals.utilization.map(|share| share * f64::from(self.supply.ready()))
    }

    /// Whether `remaining` replicas would get no more than was seen to be held.
    fn remainder_holds(&self, remaining: i32) -> bool {
        if let Some(need) = self.need {
            return !self.signals.has_queue && need.enough() <= f64::from(remaining);
        }
        let each = self.signals.arriving / f64::from(remaining);
        let is_known_to_hold = self.signals.all_held() && self.memory.held.is_some_and(|held| each <= held * MARGIN);
        let stays_calm = self.work().is_none_or(|work| work / f64::from(remaining) < self.policy.scale_up_at);
        !self.signals.has_queue && (self.signals.is_idle || (is_known_to_hold && stays_calm))
    }

    fn hold(&self, reason: Reason, message: String) -> Option<Recommendation> {
        say(self.supply.asked, reason, message)
    }
}

fn say(replicas: i32, reason: Reason, message: String) -> Option<Recommendation> {
    Some(Recommendation { replicas, reason, message })
}

/// By how much a target is exceeded, as a multiple.
fn excess(measured: &Measured) -> f64 {
    let value = match measured.standing {
        Standing::BreachedByQueue { oldest_ms } => oldest_ms.max(measured.value.unwrap_or(0.0)),
        _ => measured.value.unwrap_or(0.0),
    };
    value / f64::from(measured.target.milliseconds)
}

/// A breach in words.
fn told(measured: &Measured) -> String {
    let target = &measured.target;
    let metric = match target.metric {
        LatencyMetric::TimeToFirstToken => "time to first token",
        LatencyMetric::InterToken => "time between tokens",
        LatencyMetric::EndToEnd => "time to last token",
    };
    let limit = target.milliseconds;
    match (measured.standing, measured.value) {
        (Standing::BreachedByQueue { oldest_ms }, _) => {
            format!("a request waits for {oldest_ms:.0} ms, above the {metric} target of {limit} ms")
        }
        (_, value) => {
            let value = value.unwrap_or_default();
            format!("{metric} p{} is {value:.0} ms, above {limit} ms", target.percentile)
        }
    }
}

fn percent(signals: &Signals) -> String {
    signals.utilization.map_or_else(|| "an unknown share".to_owned(), percent_of)
}

fn percent_of(share: f64) -> String {
    format!("{:.0} %", share * 100.0)
}
