//! What tokens cost an engine, learned from the time between them.
//!
//! A step of a continuous batch takes a fixed time and some more for every token in it. So the rate at which a running
//! sequence gets its tokens falls in proportion to the tokens that the engine computes in a second:
//!
//! `1 / t = a − b · prompt − c · generated`
//!
//! with `t` the mean time between tokens and the rates of one replica. `a` is the rate of an empty engine; at
//! `b · prompt + c · generated = a` it is full, and no token comes at all. The fit is a weighted least-squares line
//! over readings of single replicas that forgets within hours. Where readings cannot tell the two costs apart, as when
//! prompts and answers always come together, it leans towards one generated token costing as much as two of a prompt.

use std::time::Duration;

use jiff::Timestamp;

/// An older reading counts half after this time.
const HALF_LIFE: Duration = Duration::from_secs(3600);
/// A reading counts for as many observations as it has, up to this.
const MOST_OBSERVATIONS: f64 = 100.0;
/// Observations below which nothing is known.
const LEAST_WEIGHT: f64 = 500.0;
/// Share of the variation that the line must explain to be believed.
const LEAST_EXPLAINED: f64 = 0.3;
/// A generated token is taken to cost as much as so many prompt tokens, where readings do not tell.
const PRIOR_RATIO: f64 = 2.0;
/// How strongly, as a share of the variation of prompt tokens.
const PRIOR_WEIGHT: f64 = 0.02;

/// One reading of one replica.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sample {
    /// When it was made.
    pub at: Timestamp,
    /// Observations of the time between tokens.
    pub observations: u64,
    /// Their mean, seconds.
    pub inter_token_seconds: f64,
    /// Prompt tokens computed, a second.
    pub prompt: f64,
    /// Tokens generated, a second.
    pub generated: f64,
}

/// What was learned: weighted sums of readings.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Speed {
    weight: f64,
    /// Sums of prompt rate, generation rate and token rate of a sequence.
    sums: [f64; 3],
    /// Sums of their products: pp, pg, gg, py, gy, yy.
    products: [f64; 6],
    learned_at: Option<Timestamp>,
}

/// What tokens cost.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Costs {
    /// Time between tokens in an empty engine, seconds.
    pub step_seconds: f64,
    /// Replicas that a prompt token a second fills.
    pub prompt: f64,
    /// Replicas that a generated token a second fills.
    pub generated: f64,
}

impl Costs {
    /// Replicas that so many tokens a second fill.
    pub fn replicas(&self, prompt: f64, generated: f64) -> f64 {
        self.prompt * prompt + self.generated * generated
    }

    /// How full a replica may be so that the mean time between tokens stays within `seconds`, at least 0.
    pub fn fill_within(&self, seconds: f64) -> f64 {
        (1.0 - self.step_seconds / seconds).max(0.0)
    }
}

impl Speed {
    /// Everything that was learned, as numbers, and when.
    pub fn to_parts(&self) -> ([f64; 10], Option<Timestamp>) {
        let mut parts = [self.weight; 10];
        parts[1..4].copy_from_slice(&self.sums);
        parts[4..].copy_from_slice(&self.products);
        (parts, self.learned_at)
    }

    /// The same again; `None` for numbers that no readings give.
    pub fn of_parts(parts: &[f64], learned_at: Timestamp) -> Option<Speed> {
        let parts: &[f64; 10] = parts.try_into().ok()?;
        let [weight, s0, s1, s2, products @ ..] = *parts;
        let is_sound = parts.iter().all(|part| part.is_finite() && *part >= 0.0);
        is_sound.then_some(Speed { weight, sums: [s0, s1, s2], products, learned_at: Some(learned_at) })
    }

    /// Takes in readings made by `now`, but those that it has taken in: events of pods bring looks without new ones.
    pub fn learn(&mut self, samples: impl Iterator<Item = Sample>, now: Timestamp) {
        let last = self.learned_at;
        self.forget(now);
        let is_new = |sample: &Sample| last.is_none_or(|last| sample.at > last);
        for sample in samples.filter(|sample| is_new(sample) && sample.inter_token_seconds > 0.0) {
            let weight = (sample.observations as f64).min(MOST_OBSERVATIONS);
            let (p, g, y) = (sample.prompt, sample.generated, 1.0 / sample.inter_token_seconds);
            self.weight += weight;
            add(&mut self.sums, [p, g, y], weight);
            add(&mut self.products, [p * p, p * g, g * g, p * y, g * y, y * y], weight);
        }
    }

    fn forget(&mut self, now: Timestamp) {
        let elapsed = self.learned_at.map_or(0.0, |last| now.duration_since(last).as_secs_f64().max(0.0));
        let kept = 0.5_f64.powf(elapsed / HALF_LIFE.as_secs_f64());
        self.weight *= kept;
        self.sums.iter_mut().chain(&mut self.products).for_each(|sum| *sum *= kept);
        self.learned_at = Some(now);
    }

    /// The line through the readings; `None` while they do not make one.
    pub fn costs(&self) -> Option<Costs> {
        if self.weight < LEAST_WEIGHT {
            return None;
        }
        let [p, g, y] = self.sums.map(|sum| sum / self.weight);
        let [pp, pg, gg, py, gy, yy] = self.products.map(|sum| sum / self.weight);
        let (pp, pg, gg, yy) = (pp - p * p, pg - p * g, gg - g * g, yy - y * y);
        // The rate falls with load: slopes are counted downwards.
        let (py, gy) = (p * y - py, g * y - gy);
        let (b, c) = slopes(pp, pg, gg, py, gy)?;
        let a = y + b * p + c * g;
        let explained = (2.0 * (b * py + c * gy) - (b * b * pp + 2.0 * b * c * pg + c * c * gg)) / yy;
        (explained >= LEAST_EXPLAINED).then(|| Costs { step_seconds: 1.0 / a, prompt: b / a, generated: c / a })
    }
}

/// Slopes, neither below 0, of the line with these variances and covariances.
fn slopes(pp: f64, pg: f64, gg: f64, py: f64, gy: f64) -> Option<(f64, f64)> {
    let prior = PRIOR_WEIGHT * pp + f64::EPSILON;
    let (pp, pg, gg) = (pp + prior, pg - prior / PRIOR_RATIO, gg + prior / (PRIOR_RATIO * PRIOR_RATIO));
    let determinant = pp * gg - pg * pg;
    if determinant <= 0.0 {
        return None;
    }
    let (b, c) = ((gg * py - pg * gy) / determinant, (pp * gy - pg * py) / determinant);
    Some(match (b >= 0.0, c >= 0.0) {
        (true, false) => ((py / pp).max(0.0), 0.0),
        (false, true) => (0.0, (gy / gg).max(0.0)),
        (_, _) => (b.max(0.0), c.max(0.0)),
    })
}

fn add<const N: usize>(sums: &mut [f64; N], values: [f64; N], weight: f64) {
    sums.iter_mut().zip(values).for_each(|(sum, value)| *sum += weight * value);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::at;

    /// 12 ms a step, 0.1 ms a prompt token, 0.2 ms a generated one.
    fn engine(prompt: f64, generated: f64) -> Sample {
        engine_of(1e-4, 2e-4, prompt, generated)
    }

    fn engine_of(each_prompt: f64, each_generated: f64, prompt: f64, generated: f64) -> Sample {
        let inter_token_seconds = 0.012 / (1.0 - each_prompt * prompt - each_generated * generated);
        Sample { at: at(0), observations: 50, inter_token_seconds, prompt, generated }
    }

    /// Prompt and generated tokens that often come together, in steps of so many.
    fn loads(prompt: f64, generated: f64) -> impl Iterator<Item = (f64, f64)> {
        (0..64).map(move |i| (prompt * f64::from(i % 8), generated * f64::from(i % 8 / 2 + i / 8)))
    }

    fn learned(samples: impl Iterator<Item = Sample>) -> Speed {
        let mut speed = Speed::default();
        speed.learn(samples, at(0));
        speed
    }

    #[test]
    fn the_costs_of_an_engine_are_found() {
        let loads = (0..40).map(|i| (f64::from(i % 8) * 1000.0, f64::from(i / 8) * 200.0));
        let costs = learned(loads.map(|(p, g)| engine(p, g))).costs().expect("a line");
        assert!((costs.step_seconds - 0.012).abs() < 0.001, "{costs:?}");
        assert!((costs.prompt / 1e-4 - 1.0).abs() < 0.1 && (costs.generated / 2e-4 - 1.0).abs() < 0.1, "{costs:?}");
        assert!((costs.fill_within(0.048) - 0.75).abs() < 0.02 && costs.fill_within(0.001) == 0.0);
    }

    #[test]
    fn tokens_that_always_come_together_are_told_apart_by_what_is_usual_and_their_sum_is_right() {
        let loads = (0..40).map(|i| f64::from(i % 20) * 400.0);
        let costs = learned(loads.map(|p| engine(p, p / 10.0))).costs().expect("a line");
        let sum = costs.replicas(5000.0, 500.0);
        assert!((sum - 0.6).abs() < 0.02, "{sum} {costs:?}");
        assert!((costs.generated / costs.prompt - 2.0).abs() < 0.5, "{costs:?}");
    }

    #[test]
    fn one_load_or_a_cloud_make_no_line() {
        assert_eq!(Speed::default().costs(), None);
        assert_eq!(learned((0..40).map(|_| engine(1000.0, 100.0))).costs(), None);
        let cloud = (0..40).map(|i| Sample {
            inter_token_seconds: if i % 2 == 0 { 0.02 } else { 0.2 },
            ..engine(f64::from(i / 2 % 5) * 100.0, 10.0)
        });
        assert_eq!(learned(cloud).costs(), None);
    }

    #[test]
    fn what_readings_do_not_tell_is_what_is_usual_and_changes_nothing_that_they_do() {
        for (prompt, generated) in [(500.0, 100.0), (500.0, 0.0), (0.0, 100.0)] {
            let costs = learned(loads(prompt, generated).map(|(p, g)| engine(p, g))).costs().expect("a line");
            let found = [costs.step_seconds / 0.012, costs.prompt / 1e-4, costs.generated / 2e-4];
            assert!(found.iter().all(|share| (share - 1.0).abs() < 1e-6), "{prompt} {generated}: {found:?}");
        }
    }

    #[test]
    fn a_line_is_believed_where_it_explains_three_tenths_of_what_varies() {
        let lines: Vec<_> = loads(500.0, 100.0).map(|(p, g)| engine(p, g)).collect();
        let rates = || lines.iter().map(|sample| 1.0 / sample.inter_token_seconds);
        let mean = rates().sum::<f64>() / 64.0;
        let variance = rates().map(|rate| (rate - mean).powi(2)).sum::<f64>() / 64.0;
        let found = |explained: f64| {
            let noise = (variance * (1.0 - explained) / explained).sqrt();
            let beside = |sample: &Sample, noise: f64| Sample {
                inter_token_seconds: 1.0 / (1.0 / sample.inter_token_seconds + noise),
                ..*sample
            };
            learned(lines.iter().flat_map(|sample| [beside(sample, noise), beside(sample, -noise)])).costs()
        };
        assert!(found(0.29).is_none() && found(0.31).is_some());
    }

    #[test]
    fn tokens_that_seem_to_cost_less_than_nothing_cost_nothing() {
        for (prompt, generated, expected) in [(1e-4, -1e-5, (1.0, 0.0)), (-1e-5, 2e-4, (0.0, 1.0))] {
            let grid = (0..64).map(|i| (f64::from(i % 8) * 500.0, f64::from(i / 8) * 200.0));
            let costs = learned(grid.map(|(p, g)| engine_of(prompt, generated, p, g))).costs().expect("a line");
            let found = (costs.prompt / 1e-4, costs.generated / 2e-4);
            assert!((found.0 - expected.0).abs() < 0.1 && (found.1 - expected.1).abs() < 0.1, "{found:?}");
        }
    }

    #[test]
    fn a_line_is_believed_from_five_hundred_observations_on() {
        let after = |readings: u32| learned((0..readings).map(|i| engine(f64::from(i) * 1000.0, 100.0))).costs();
        assert_eq!((after(9).is_some(), after(10).is_some()), (false, true));
    }

    #[test]
    fn loads_that_hardly_slow_an_engine_make_a_line() {
        let costs = learned((0..40).map(|i| engine(f64::from(i % 8) * 100.0, 0.0))).costs().expect("a line");
        assert!((costs.prompt / 1e-4 - 1.0).abs() < 0.01, "{costs:?}");
    }

    #[test]
    fn a_reading_without_time_between_tokens_teaches_nothing() {
        let loads = || (0..40).map(|i| engine(f64::from(i % 8) * 1000.0, 100.0));
        let empty = Sample { inter_token_seconds: 0.0, ..engine(500.0, 0.0) };
        assert_eq!(learned(loads().chain([empty])), learned(loads()));
    }

    #[test]
    fn a_reading_counts_once_however_often_it_is_looked_at() {
        let read_at = |second| {
            let loads = (0..40).map(|i| engine(f64::from(i % 8) * 1000.0, 100.0));
            loads.map(move |sample| Sample { at: at(second), ..sample })
        };
        let weight = |looks: &[(i64, i64)]| {
            let mut speed = Speed::default();
            looks.iter().for_each(|&(read, looked)| speed.learn(read_at(read), at(looked)));
            (speed.to_parts().0[0] / 1000.0).round()
        };
        assert_eq!((weight(&[(0, 1)]), weight(&[(0, 1), (0, 2), (1, 3)]), weight(&[(0, 1), (2, 2)])), (2.0, 2.0, 4.0));
    }

    #[test]
    fn a_faster_engine_replaces_a_slower_one_within_hours() {
        let mut speed = learned((0..200).map(|i| engine(f64::from(i % 8) * 1000.0, 100.0)));
        let twice = |i: u32| {
            let slow = engine(f64::from(i % 8) * 1000.0, 100.0);
            let (inter_token_seconds, prompt) = (slow.inter_token_seconds / 2.0, slow.prompt * 2.0);
            Sample { at: at(6 * 3600), inter_token_seconds, prompt, ..slow }
        };
        speed.learn((0..200).map(twice), at(6 * 3600));
        let costs = speed.costs().expect("a line");
        assert!((costs.prompt / 5e-5 - 1.0).abs() < 0.25, "{costs:?}");
    }
}
