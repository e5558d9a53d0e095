//! When a request would get its first token, from what is before it and how fast steps are.

use super::Scheduler;
use crate::sequence::Running;

/// Weight of the last answer in the mean length of answers.
const ANSWER_WEIGHT: f64 = 0.05;

/// How long answers are, of the requests that ended by themselves or by their limit.
#[derive(Debug, Default)]
pub(super) struct AnswerLength {
    mean: Option<f64>,
}

impl AnswerLength {
    pub(super) fn observe(&mut self, tokens: usize) {
        let mean = self.mean.unwrap_or(tokens as f64);
        self.mean = Some(mean + ANSWER_WEIGHT * (tokens as f64 - mean));
    }

    /// Tokens that a sequence is likely to generate yet, at most what it may.
    fn remaining(&self, run: &Running) -> f64 {
        let most = run.sequence.remaining_tokens() as f64;
        self.mean.map_or(most, |mean| (mean - run.sequence.generated() as f64).clamp(1.0, most.max(1.0)))
    }
}

impl Scheduler {
    /// Seconds until a request with a prompt of so many tokens that came now would get its first token.
    pub(super) fn predicted_ttft_seconds(&self, prompt_tokens: u64) -> Option<f64> {
        let decoding = self.running.iter().filter(|run| run.uncomputed() <= 1).count() as u32;
        let prefilling = self.running.iter().map(|run| run.uncomputed() as u64).filter(|tokens| *tokens > 1);
        let tokens = prefilling.sum::<u64>() + self.waiting.prompt_tokens() + prompt_tokens;
        let chunk = u64::from(self.prefill_budget(decoding)).clamp(1, tokens.max(1));
        let step = self.step_time.predict(chunk as u32, decoding)?;
        let prefill = tokens.div_ceil(chunk) as f64 * step;
        Some(prefill + self.seconds_until_a_place(decoding)?)
    }

    /// Whether a request that comes now has others before it.
    pub(super) fn is_behind(&self) -> bool {
        !self.waiting.is_empty() || self.running.iter().any(|run| run.uncomputed() > 1)
    }

    /// Prompt tokens that a step with so many decoding rows may have.
    pub(super) fn prefill_budget(&self, decode_rows: u32) -> u32 {
        let most = self.geometry.max_step_tokens.saturating_sub(decode_rows);
        let target = self.target_inter_token_seconds.filter(|_| decode_rows > 0);
        let within = target.and_then(|target| self.step_time.prefill_within(target, decode_rows));
        within.map_or(most, |within| within.max(self.geometry.block_tokens).min(most))
    }

    /// Seconds until so many sequences have ended as have to for one more than those that wait.
    fn seconds_until_a_place(&self, decoding: u32) -> Option<f64> {
        let missing = (self.waiting.len() + 1).saturating_sub(self.free_places());
        if missing == 0 {
            return Some(0.0);
        }
        let mut remaining: Vec<f64> = self.running.iter().map(|run| self.answers.remaining(run)).collect();
        remaining.sort_by(f64::total_cmp);
        // More places than sequences: as often as all of them end.
        let rounds = (missing - 1) / remaining.len().max(1);
        let last = remaining.get((missing - 1) % remaining.len().max(1))?;
        let longest = remaining.last()?;
        Some((rounds as f64 * longest + last) * self.step_time.predict(0, decoding)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mean_answer_follows_the_last_ones_slowly() {
        let mut answers = AnswerLength::default();
        let mut means = [10, 30, 30].map(|tokens| {
            answers.observe(tokens);
            answers.mean
        });
        means.iter_mut().flatten().for_each(|mean| *mean = (*mean * 1e6).round() / 1e6);
        assert_eq!(means, [10.0, 11.0, 11.95].map(Some));
    }
}
