//! Predicts the duration of a step, learned from earlier steps.
//!
//! A linear model, `base + prefill · tokens + decode · rows + draft · draft tokens`, fitted by recursive least
//! squares with forgetting, so that it follows growing contexts and busy machines. A coefficient that has no data for
//! long, such as that of prefill while all sequences decode, keeps its last value. There is no prediction until
//! enough steps were seen.

/// Weight of an observation relative to the next one: about two hundred steps are remembered.
const FORGETTING: f64 = 0.995;
/// Initial information about each feature, in observations of one unit: almost none.
const INITIAL_INFORMATION: f64 = 1e-5;
/// Least information about a feature, so that one odd step does not overturn a coefficient that had no data for long.
const MIN_INFORMATION: f64 = 1e-3;
/// Steps to observe before the model is used.
const ENOUGH_STEPS: u32 = 8;
/// Units of the features, so that all have the same order of magnitude.
const TOKENS: f64 = 256.0;
const ROWS: f64 = 16.0;
const DRAFT_TOKENS: f64 = 16.0;
/// Number of features: constant, prompt tokens, decode rows, draft tokens.
const FEATURES: usize = 4;

type Square = [[f64; FEATURES]; FEATURES];

/// The fitted model.
#[derive(Clone, Debug)]
pub(super) struct StepTimeModel {
    /// Coefficients, in seconds: for a step, for [`TOKENS`] prompt tokens, for [`ROWS`] decode rows, for
    /// [`DRAFT_TOKENS`] draft tokens.
    seconds: [f64; FEATURES],
    /// Weighted sum of the outer products of the features.
    information: Square,
    steps: u32,
    prefill_steps: u32,
    draft_steps: u32,
}

impl StepTimeModel {
    pub(super) fn new() -> StepTimeModel {
        let mut information = [[0.0; FEATURES]; FEATURES];
        (0..FEATURES).for_each(|i| information[i][i] = INITIAL_INFORMATION);
        StepTimeModel { seconds: [0.0; FEATURES], information, steps: 0, prefill_steps: 0, draft_steps: 0 }
    }

    /// Adds an observed step.
    pub(super) fn observe(&mut self, prefill_tokens: u32, decode_rows: u32, draft_tokens: u32, seconds: f64) {
        let x = features(prefill_tokens, decode_rows, draft_tokens);
        let error = seconds - dot(self.seconds, x);
        for i in 0..FEATURES {
            self.information[i].iter_mut().zip(x).for_each(|(sum, x_j)| *sum = FORGETTING * *sum + x[i] * x_j);
            self.information[i][i] += (1.0 - FORGETTING) * MIN_INFORMATION;
        }
        let gain = solve(self.information, x);
        self.seconds.iter_mut().zip(gain).for_each(|(seconds, gain)| *seconds += gain * error);
        self.steps = self.steps.saturating_add(1);
        self.prefill_steps = self.prefill_steps.saturating_add(u32::from(prefill_tokens > 0));
        self.draft_steps = self.draft_steps.saturating_add(u32::from(draft_tokens > 0));
    }

    /// Predicted seconds of a step; `None` until enough steps were observed.
    pub(super) fn predict(&self, prefill_tokens: u32, decode_rows: u32) -> Option<f64> {
        let believed = self.steps >= ENOUGH_STEPS && self.prefill_steps > 0;
        believed.then(|| dot(self.seconds, features(prefill_tokens, decode_rows, 0)).max(0.0))
    }

    /// Seconds that a draft token adds to a step; `None` until enough were observed.
    pub(super) fn draft_seconds(&self) -> Option<f64> {
        (self.draft_steps >= ENOUGH_STEPS).then(|| (self.seconds[3] / DRAFT_TOKENS).max(0.0))
    }

    /// Prompt tokens with which a step takes `times` as long as one without prefill; `None` until enough steps were
    /// observed.
    pub(super) fn prefill_for(&self, times: f64, decode_rows: u32) -> Option<u32> {
        self.prefill_within(times * self.predict(0, decode_rows)?, decode_rows)
    }

    /// Most prompt tokens with which a step with `decode_rows` decode rows takes at most `seconds`.
    pub(super) fn prefill_within(&self, seconds: f64, decode_rows: u32) -> Option<u32> {
        let left = seconds - self.predict(0, decode_rows)?;
        let per_token = self.seconds[1] / TOKENS;
        (per_token > 0.0).then(|| (left / per_token).clamp(0.0, f64::from(u32::MAX)) as u32)
    }
}

fn features(prefill_tokens: u32, decode_rows: u32, draft_tokens: u32) -> [f64; FEATURES] {
    [1.0, f64::from(prefill_tokens) / TOKENS, f64::from(decode_rows) / ROWS, f64::from(draft_tokens) / DRAFT_TOKENS]
}

/// Solves `a x = b` by Gaussian elimination; `a` is positive definite.
fn solve(mut a: Square, mut b: [f64; FEATURES]) -> [f64; FEATURES] {
    for i in 0..FEATURES {
        for j in i + 1..FEATURES {
            let times = a[j][i] / a[i][i];
            (i..FEATURES).for_each(|k| a[j][k] -= times * a[i][k]);
            b[j] -= times * b[i];
        }
    }
    for i in (0..FEATURES).rev() {
        let known: f64 = (i + 1..FEATURES).map(|k| a[i][k] * b[k]).sum();
        b[i] = (b[i] - known) / a[i][i];
    }
    b
}

fn dot(a: [f64; FEATURES], b: [f64; FEATURES]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn truth(prefill_tokens: u32, decode_rows: u32) -> f64 {
        0.004 + 0.0002 * f64::from(prefill_tokens) + 0.0005 * f64::from(decode_rows)
    }

    fn taught(time: impl Fn(u32, u32) -> f64) -> StepTimeModel {
        let mut model = StepTimeModel::new();
        for step in 0..60 {
            let (prefill, rows) = (if step % 3 == 0 { step * 7 % 300 + 1 } else { 0 }, step * 5 % 33);
            model.observe(prefill, rows, 0, time(prefill, rows));
        }
        model
    }

    #[test]
    fn it_learns_a_linear_device_and_inverts_itself() {
        let model = taught(truth);
        for (prefill, rows) in [(0, 0), (0, 16), (100, 4), (512, 64)] {
            let predicted = model.predict(prefill, rows).unwrap();
            assert!((predicted / truth(prefill, rows) - 1.0).abs() < 0.02, "{prefill} {rows}: {predicted}");
        }
        let tokens = model.prefill_within(truth(200, 8), 8).unwrap();
        assert!((196..=204).contains(&tokens), "{tokens}");
        assert_eq!(model.prefill_within(0.001, 8), Some(0));
    }

    #[test]
    fn it_learns_what_a_draft_adds() {
        let mut model = taught(truth);
        assert_eq!(model.draft_seconds(), None);
        for step in 0..60 {
            let (rows, drafted) = (step % 9 + 1, step * 3 % 11);
            model.observe(0, rows, drafted, truth(0, rows) + 0.0007 * f64::from(drafted));
        }
        let seconds = model.draft_seconds().unwrap();
        assert!((seconds / 0.0007 - 1.0).abs() < 0.02, "{seconds}");
    }

    #[test]
    fn it_follows_a_device_that_gets_slower() {
        let mut model = taught(truth);
        for step in 0..600 {
            let (prefill, rows) = (if step % 3 == 0 { 64 } else { 0 }, step % 20);
            model.observe(prefill, rows, 0, 3.0 * truth(prefill, rows));
        }
        let ratio = model.predict(64, 10).unwrap() / (3.0 * truth(64, 10));
        assert!((0.95..1.05).contains(&ratio), "{ratio}");
    }

    #[test]
    fn what_it_knows_of_prompts_outlasts_any_number_of_steps_without_one() {
        let (mut model, mut dice) = (taught(truth), 1u64);
        for _ in 0..100_000 {
            // With the noise of a real machine.
            dice = crate::sim::mix(dice, 0);
            model.observe(0, 1, 0, truth(0, 1) * (0.9 + 0.2 * (dice % 1000) as f64 / 1000.0));
        }
        for (prefill, rows) in [(1, 0), (300, 0), (0, 16), (512, 64)] {
            let ratio = model.predict(prefill, rows).unwrap() / truth(prefill, rows);
            assert!((0.95..1.05).contains(&ratio), "{prefill} {rows}: {ratio}");
        }
    }

    #[test]
    fn it_is_believed_after_eight_steps_with_a_prompt_among_them() {
        let mut model = StepTimeModel::new();
        for step in 0..8 {
            assert_eq!(model.predict(100, 5), None, "{step}");
            model.observe(100, 5, 0, 0.03);
        }
        assert!(model.predict(100, 5).is_some());
    }

    #[test]
    fn it_says_nothing_before_it_knows_and_stays_sane_where_nothing_varies() {
        let mut model = StepTimeModel::new();
        assert_eq!(model.predict(1, 1), None);
        (0..100_000).for_each(|_| model.observe(0, 5, 0, 0.01));
        assert_eq!((model.predict(0, 5), model.prefill_within(1.0, 5)), (None, None), "no prompt was ever seen");
        model.observe(100, 5, 0, 0.03);
        let predicted = model.predict(100, 5).unwrap();
        assert!((0.01..0.05).contains(&predicted), "{predicted}");
    }
}
