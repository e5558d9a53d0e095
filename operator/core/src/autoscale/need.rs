//! What arrives held against what a replica computes: how many replicas the tokens ask for.
//!
//! A replica is planned to be filled to a share of what the inter-token target leaves it. That share, the headroom, is
//! a guard: breaches although there should have been enough lower it within minutes, targets that are held by replicas
//! as full as planned raise it within hours. So bursts that no mean shows, and targets that no model of an engine knows,
//! end in numbers.

use std::time::Duration;

use jiff::Timestamp;
use windlass_operator_api::autoscaling::LatencyMetric;

use super::policy::Policy;
use super::signals::Signals;
use super::speed::Costs;

/// Share of the KV cache that is planned with.
const KV_FILL: f64 = 0.85;
/// Tokens that wait are to be computed in this time, beside those that arrive.
const BACKLOG_SECONDS: f64 = 60.0;
/// Fewer replicas are believed to do when they would be filled to no more than this share of what is planned.
const HYSTERESIS: f64 = 0.85;
/// The mean between tokens that is planned for, as a share of the target: a percentile lies above the mean.
const MEAN_OF_TARGET: f64 = 0.8;

/// How many replicas the tokens ask for.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Need {
    /// Full replicas' worth of tokens.
    pub load: f64,
    /// The same when a replica asked for now could serve.
    pub forecast: f64,
    /// Replicas' worth of KV cache.
    pub kv: f64,
    /// Share to which a replica is planned to be filled.
    pub fill: f64,
}

impl Need {
    /// Of `costs`, filled to `headroom` of what the targets leave.
    pub fn of(policy: &Policy, signals: &Signals, costs: &Costs, headroom: f64, growth: f64) -> Self {
        let backlog = signals.queued_tokens / BACKLOG_SECONDS;
        let load = costs.replicas(signals.demand.prompt + backlog, signals.demand.generated);
        let between = policy.targets.iter().filter(|target| target.metric == LatencyMetric::InterToken);
        let tightest = between.map(|target| f64::from(target.milliseconds) / 1000.0 * MEAN_OF_TARGET);
        // A target that even an empty engine misses is no matter of capacity: the others are planned for.
        let fills = tightest.map(|seconds| costs.fill_within(seconds)).filter(|fill| *fill > 0.0);
        Need { load, forecast: load + growth, kv: signals.kv / KV_FILL, fill: fills.fold(1.0, f64::min) * headroom }
    }

    /// Replicas without which targets will not be held.
    pub fn least(&self) -> f64 {
        self.over(self.fill)
    }

    /// Replicas that certainly do.
    pub fn enough(&self) -> f64 {
        self.over(self.fill * HYSTERESIS)
    }

    /// How far so many replicas are filled now, of what is planned, 0 to 1.
    pub fn filled(&self, replicas: f64) -> f64 {
        ((self.load / self.fill).max(self.kv) / replicas).min(1.0)
    }

    fn over(&self, fill: f64) -> f64 {
        (self.load.max(self.forecast) / fill).max(self.kv)
    }
}

/// The share of a replica that is planned with.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Headroom(pub f64);

impl Default for Headroom {
    fn default() -> Self {
        Headroom(FIRST)
    }
}

const FIRST: f64 = 0.5;
const BOUNDS: (f64, f64) = (0.3, 0.85);
/// In which time a breach would lower it to a third, and targets held raise it as much.
const LOWERED_IN: f64 = 900.0;
const RAISED_IN: f64 = 4.0 * 3600.0;

impl Headroom {
    /// `share`, within the bounds that are ever planned with.
    pub fn bounded(share: f64) -> Self {
        Headroom(share.clamp(BOUNDS.0, BOUNDS.1))
    }

    /// After `elapsed` in which targets were breached although there should have been enough.
    pub fn lowered(self, elapsed: Duration) -> Self {
        self.times((-seconds(elapsed) / LOWERED_IN).exp())
    }

    /// After `elapsed` in which all targets were held by replicas that were `filled` so far of what is planned: empty ones
    /// tell nothing of full ones, or a quiet night would end in a bad morning.
    pub fn raised(self, elapsed: Duration, filled: f64) -> Self {
        self.times((seconds(elapsed) * filled / RAISED_IN).exp())
    }

    fn times(self, factor: f64) -> Self {
        Headroom::bounded(self.0 * factor)
    }
}

/// However long nobody looked, no more than this was seen.
fn seconds(elapsed: Duration) -> f64 {
    elapsed.as_secs_f64().min(60.0)
}

/// Growth of the load, from a fast and a slow mean of it.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Trend {
    fast: f64,
    slow: f64,
    at: Option<Timestamp>,
}

const FAST: f64 = 150.0;
const SLOW: f64 = 600.0;

impl Trend {
    /// With `load` at `now`.
    pub fn with(self, load: f64, now: Timestamp) -> Self {
        let Some(last) = self.at else { return Trend { fast: load, slow: load, at: Some(now) } };
        let elapsed = now.duration_since(last).as_secs_f64().max(0.0);
        let towards = |mean: f64, seconds: f64| mean + (load - mean) * (1.0 - (-elapsed / seconds).exp());
        Trend { fast: towards(self.fast, FAST), slow: towards(self.slow, SLOW), at: Some(now) }
    }

    /// By how much the load grows in `horizon`; 0 where it falls.
    pub fn growth(&self, horizon: Duration) -> f64 {
        // The means of a straight line lie behind it by their own time.
        ((self.fast - self.slow) / (SLOW - FAST) * horizon.as_secs_f64()).max(0.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::at;

    #[test]
    fn a_breach_lowers_the_headroom_in_minutes_and_rest_raises_it_in_hours() {
        let look = Duration::from_secs(5);
        let low = |from: Headroom, minutes: u32| (0..minutes * 12).fold(from, |headroom, _| headroom.lowered(look));
        let high =
            |from: Headroom, minutes: u32| (0..minutes * 12).fold(from, |headroom, _| headroom.raised(look, 1.0));
        let first = Headroom::default();
        let soon = low(first, 2);
        assert!((0.43..0.45).contains(&soon.0), "{soon:?}");
        let lowered = low(first, 10);
        assert!((0.3..0.35).contains(&lowered.0), "{lowered:?}");
        let raised = high(lowered, 10);
        assert!(raised.0 < lowered.0 * 1.05 && raised.0 > lowered.0, "{raised:?}");
        assert_eq!((low(first, 600).0, high(first, 6000).0), BOUNDS);
    }

    #[test]
    fn a_long_time_between_two_looks_counts_as_a_minute() {
        let first = Headroom::default();
        let (minute, hour) = (Duration::from_secs(60), Duration::from_secs(3600));
        assert_eq!((first.lowered(hour), first.raised(hour, 0.5)), (first.lowered(minute), first.raised(minute, 0.5)));
    }

    #[test]
    fn replicas_are_as_full_as_tokens_or_the_kv_cache_make_them() {
        let need = |load: f64, kv: f64| Need { load, forecast: 9.0, kv, fill: 0.5 };
        for (load, kv, expected) in
            [(0.0, 0.0, 0.0), (0.5, 0.0, 0.25), (0.5, 2.0, 0.5), (3.0, 2.0, 1.0), (2.0, 0.0, 1.0)]
        {
            assert_eq!(need(load, kv).filled(4.0), expected, "{load} {kv}");
        }
    }

    #[test]
    fn a_load_that_rises_is_foreseen_and_one_that_falls_is_not() {
        let after = |slope: f64| {
            (0..1200).fold(Trend::default(), |trend, i| trend.with(100.0 + slope * f64::from(i), at(i64::from(i))))
        };
        let grown = after(0.01).growth(Duration::from_secs(180));
        assert!((grown - 1.8).abs() < 0.4, "{grown}");
        assert_eq!(after(-0.01).growth(Duration::from_secs(180)), 0.0);
        assert_eq!(after(0.0).growth(Duration::from_secs(180)), 0.0);
    }
}
