//! Pace: what is remembered, stabilization windows, and the conditions under which a replica may go.

use std::collections::VecDeque;
use std::time::Duration;

use jiff::Timestamp;
use windlass_operator_api::status::ScalingDecision;

use super::cold_start::ColdStarts;
use super::need::{Headroom, Need, Trend};
use super::policy::Policy;
use super::recommend::{Reason, Recommendation};
use super::signals::Signals;
use super::speed::Speed;
use super::{Decision, Supply};
use crate::capacity::Kept;
use crate::window::{minus, plus};

/// After new replicas serve, requests need this long to spread.
const SETTLE_UP: Duration = Duration::from_secs(30);
/// Where the known rate says that there are enough of them, old queues get this long to empty.
const SETTLE_UP_KNOWN: Duration = Duration::from_secs(60);
/// After a change, the one-minute mean of utilization still speaks of the time before for so long at most.
const SETTLE_DOWN: Duration = Duration::from_secs(60);
/// Where tokens are counted instead, this long.
const SETTLE_DOWN_KNOWN: Duration = Duration::from_secs(15);
/// By how much a newer rate counts that is lower than the one remembered while targets are held: a peak of this morning
/// is half forgotten after some two hours of readings every 5 seconds.
const FORGETTING: f64 = 0.0005;
/// Least utilization that a finished rate is extrapolated from.
const MIN_EXTRAPOLATED: f64 = 0.2;

/// What the rule remembers from one decision to the next. At a restart of the operator what was learned is found again
/// ([`crate::capacity`]) and the rest is lost: scaling down then waits until a whole window has been seen.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Memory {
    /// Recommendations, each in force from its time until that of the next, oldest first.
    pub recommendations: VecDeque<(Timestamp, i32)>,
    /// When replicas were last added.
    pub last_up: Option<Timestamp>,
    /// Replicas that were added of late, oldest first.
    pub added: VecDeque<(Timestamp, i32)>,
    /// When the number of replicas was last changed.
    pub last_change: Option<Timestamp>,
    /// Requests a second at which one replica was seen to hold every target.
    pub held: Option<f64>,
    /// Requests a second that one replica finished while it could not hold the targets.
    pub saturated: Option<f64>,
    /// What tokens cost a replica.
    pub speed: Speed,
    /// Share of a replica that is planned with.
    pub headroom: Headroom,
    /// How the load grows.
    pub trend: Trend,
    /// How long replicas take to serve.
    pub cold_starts: ColdStarts,
    /// When all this was last brought up to date.
    pub learned_at: Option<Timestamp>,
    /// What was last written down of it.
    pub kept: Option<Kept>,
}

impl Memory {
    /// Since when the present replicas have all served, if they came with the last scale-up: what was measured before
    /// speaks of fewer.
    pub fn settled_since(&self, supply: &Supply<'_>) -> Option<Timestamp> {
        let last_up = self.last_up?;
        supply.serving.iter().map(|(_, since)| *since).filter(|since| *since >= last_up).max()
    }

    /// Whether replicas that were asked for have only just come.
    pub fn is_settling_up(&self, supply: &Supply<'_>, now: Timestamp) -> bool {
        let settle = if self.rate_per_replica().is_some() { SETTLE_UP_KNOWN } else { SETTLE_UP };
        self.settled_since(supply).is_some_and(|since| since > minus(now, settle))
    }

    /// The rate one replica manages, as far as it is known.
    pub fn rate_per_replica(&self) -> Option<f64> {
        self.saturated.or(self.held)
    }

    /// How many replicas the tokens ask for, where it is known what they cost.
    pub(super) fn need(&self, policy: &Policy, signals: &Signals) -> Option<Need> {
        let costs = self.speed.costs()?;
        Some(Need::of(policy, signals, &costs, self.headroom.0, self.trend.growth(self.cold_starts.p90())))
    }

    /// Learns from the signals what a replica manages, and what is asked of it.
    pub(super) fn learn(&self, policy: &Policy, supply: &Supply<'_>, signals: &Signals, now: Timestamp) -> Memory {
        let mut memory = self.learn_rates(policy, supply, signals);
        if !supply.is_rolling {
            memory.speed.learn(signals.samples.iter().copied(), now);
        }
        memory.cold_starts.learn(&supply.cold_starts);
        let elapsed = self.learned_at.map_or(0, |last| now.duration_since(last).as_secs().max(0));
        memory.learned_at = Some(now);
        let Some(need) = memory.need(policy, signals) else { return memory };
        // What was not read is no load of nothing.
        if signals.are_whole() {
            memory.trend = self.trend.with(need.load, now);
        }
        // What is stuck is not missed where those that serve are as many as the tokens ask for.
        let is_enough = need.least() <= f64::from(supply.ready());
        let had_enough = supply.pending() == 0 && is_enough && !self.is_settling_up(supply, now);
        let elapsed = Duration::from_secs(elapsed.unsigned_abs());
        if signals.is_breached() && had_enough && is_saturated(policy, signals) {
            memory.headroom = self.headroom.lowered(elapsed);
        } else if signals.all_held() {
            memory.headroom = self.headroom.raised(elapsed, need.filled(f64::from(supply.ready())));
        }
        memory
    }

    fn learn_rates(&self, policy: &Policy, supply: &Supply<'_>, signals: &Signals) -> Memory {
        let mut memory = self.clone();
        let is_telling = signals.are_whole() && !supply.is_rolling;
        let Some(finishing) = signals.finishing.filter(|_| is_telling) else { return memory };
        let rate = finishing / f64::from(supply.ready());
        if signals.all_held() {
            memory.held = Some(memory.held.map_or(rate, |held| rate.max(held + FORGETTING * (rate - held))));
            memory.saturated = memory.saturated.filter(|saturated| *saturated > rate);
        } else if signals.is_breached() && is_saturated(policy, signals) {
            // Without a queue, engines could do a little more than they do.
            let busy = signals.utilization.filter(|_| signals.waiting == 0).unwrap_or(1.0).max(MIN_EXTRAPOLATED);
            memory.saturated = Some(rate / busy);
            memory.held = memory.held.map(|held| held.min(rate / busy));
        }
        memory
    }

    /// Notes a recommendation and forgets what no window reaches.
    fn note(&mut self, policy: &Policy, replicas: i32, now: Timestamp) {
        if self.recommendations.back().is_none_or(|(_, last)| *last != replicas) {
            self.recommendations.push_back((now, replicas));
        }
        let start = minus(now, policy.up_window.max(policy.down_window));
        while self.recommendations.get(1).is_some_and(|(from, _)| *from <= start) {
            self.recommendations.pop_front();
        }
    }

    /// Recommendations with the times at which they ended, those that have.
    fn ended(&self) -> impl Iterator<Item = (i32, Timestamp)> {
        let ends = self.recommendations.iter().skip(1).map(|(from, _)| *from);
        self.recommendations.iter().map(|(_, replicas)| *replicas).zip(ends)
    }

    /// The smallest recommendation that was in force at any time of the last `window`.
    fn least_within(&self, window: Duration, now: Timestamp) -> Option<i32> {
        let start = minus(now, window);
        let ended = self.ended().filter(|(_, end)| *end > start).map(|(replicas, _)| replicas);
        ended.chain(self.recommendations.back().map(|(_, replicas)| *replicas)).min()
    }

    /// From when on a whole `window` is remembered in which none was `against` the last recommendation.
    fn agrees_from(&self, window: Duration, against: impl Fn(i32) -> bool) -> Timestamp {
        let began = self.recommendations.front().map_or(Timestamp::MAX, |(from, _)| *from);
        let last = self.ended().filter(|(replicas, _)| against(*replicas)).map(|(_, end)| end).max();
        plus(last.map_or(began, |last| last.max(began)), window)
    }

    /// Notes that so many replicas were added at `now`, and forgets what is older than `period`.
    fn note_added(&mut self, replicas: i32, period: Duration, now: Timestamp) {
        self.added.retain(|(at, _)| *at > minus(now, period));
        self.added.push_back((now, replicas));
    }

    /// Replicas added within the last `period`, with the time of the first.
    fn added_within(&self, period: Duration, now: Timestamp) -> (i32, Option<Timestamp>) {
        let recent = || self.added.iter().filter(|(at, _)| *at > minus(now, period));
        (recent().map(|(_, replicas)| *replicas).sum(), recent().next().map(|(at, _)| *at))
    }
}

fn is_saturated(policy: &Policy, signals: &Signals) -> bool {
    signals.waiting > 0 || signals.utilization.is_some_and(|share| share >= policy.scale_up_at)
}

/// What a recommendation comes to now.
struct Paced {
    replicas: i32,
    blockers: Vec<String>,
    next_change: Option<Timestamp>,
}

impl Paced {
    fn at_once(replicas: i32) -> Self {
        Paced { replicas, blockers: Vec::new(), next_change: None }
    }
}

/// Turns a recommendation into a decision: stabilized, `maxStep` replicas upwards in a `period` at most, one at a time
/// downwards.
pub(super) fn apply(
    policy: &Policy,
    supply: &Supply<'_>,
    signals: &Signals,
    wish: Recommendation,
    mut memory: Memory,
    period: Duration,
    now: Timestamp,
) -> Decision {
    memory.note(policy, wish.replicas, now);
    let Paced { replicas, blockers, next_change } = match wish.reason {
        // The user has changed the bounds: no load is weighed.
        Reason::BelowMinimum | Reason::AboveMaximum => Paced::at_once(wish.replicas),
        _ if wish.replicas > supply.asked => up(policy, supply, &memory, period, now),
        _ if wish.replicas < supply.asked => down(policy, supply, signals, &memory, now),
        _ => Paced::at_once(supply.asked),
    };
    let kind = match replicas.cmp(&supply.asked) {
        std::cmp::Ordering::Greater => ScalingDecision::ScaleUp,
        std::cmp::Ordering::Less => ScalingDecision::ScaleDown,
        std::cmp::Ordering::Equal => ScalingDecision::Hold,
    };
    if policy.shadow.is_none() && kind != ScalingDecision::Hold {
        memory.last_change = Some(now);
        if kind == ScalingDecision::ScaleUp {
            memory.last_up = Some(now);
            memory.note_added(replicas - supply.asked, period, now);
        }
    }
    Decision {
        replicas,
        kind,
        reason: wish.reason,
        message: wish.message,
        need: None,
        inputs: signals.inputs(),
        blockers,
        next_change,
        memory,
    }
}

/// The smallest recommendation of the window counts, as far as the step lets it, and none lowers the number here. However
/// often it is looked: events of pods bring looks that know of no other load.
fn up(policy: &Policy, supply: &Supply<'_>, memory: &Memory, period: Duration, now: Timestamp) -> Paced {
    let (window, asked) = (policy.up_window, supply.asked);
    let agrees_from = memory.agrees_from(window, |replicas| replicas <= asked);
    if agrees_from > now {
        let blocker = format!("scaleUp.stabilizationWindowSeconds: {}", window.as_secs());
        return Paced { replicas: asked, blockers: vec![blocker], next_change: Some(agrees_from) };
    }
    let least = memory.least_within(window, now).unwrap_or(asked);
    let (added, since) = memory.added_within(period, now);
    let replicas = least.min(asked + (policy.max_step - added).max(0)).max(asked);
    if replicas >= least {
        return Paced::at_once(replicas);
    }
    let blocker = format!("scaleUp.maxStep: {} in {} seconds", policy.max_step, period.as_secs());
    Paced { replicas, blockers: vec![blocker], next_change: since.map(|since| plus(since, period)) }
}

/// One replica fewer, when nothing speaks against it. One that never came to serve goes first, so a replica for which there
/// is no node never keeps the others; one that served and is not ready now may hold streams, and is waited for.
fn down(policy: &Policy, supply: &Supply<'_>, signals: &Signals, memory: &Memory, now: Timestamp) -> Paced {
    let window = policy.down_window;
    let settle = if memory.speed.costs().is_some() { SETTLE_DOWN_KNOWN } else { SETTLE_DOWN }.min(window);
    let agrees_from = memory.agrees_from(window, |replicas| replicas >= supply.asked);
    let settled_at = memory.last_change.map_or(now, |change| plus(change, settle));
    let waits = [
        (agrees_from > now).then(|| format!("scaleDown.stabilizationWindowSeconds: {}", window.as_secs())),
        (settled_at > now).then(|| format!("replicas changed less than {} seconds ago", settle.as_secs())),
    ];
    let others = [
        (supply.leaving > 0).then(|| "a replica still drains".to_owned()),
        (supply.faltering > 0).then(|| "a replica that served is not ready now".to_owned()),
        supply.is_rolling.then(|| "a rollout is under way".to_owned()),
        (!signals.silent.is_empty()).then(|| "no recent reading of every replica".to_owned()),
    ];
    let waits_alone = others.iter().all(Option::is_none);
    let blockers: Vec<String> = waits.into_iter().chain(others).flatten().collect();
    if blockers.is_empty() {
        return Paced::at_once(supply.asked - 1);
    }
    Paced { replicas: supply.asked, blockers, next_change: waits_alone.then(|| agrees_from.max(settled_at)) }
}
