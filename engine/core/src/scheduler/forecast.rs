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
    /// Seconds until a request with a prompt of so many tokens that came now would get its first token: the last step that
    /// computes the prompt goes through the other stages, too.
    pub(super) fn predicted_ttft_seconds(&self, prompt_tokens: u64) -> Option<f64> {
        let decoding = self.decoding_in_a_step();
        let prefilling = self.running.iter().map(|run| run.uncomputed() as u64).filter(|tokens| *tokens > 1);
        let tokens = prefilling.sum::<u64>() + self.waiting.prompt_tokens() + prompt_tokens;
        let chunk = u64::from(self.prefill_budget(decoding)).clamp(1, tokens.max(1));
        let step = self.step_time.predict(chunk as u32, decoding)?;
        let prefill = (tokens.div_ceil(chunk) + self.stages as u64 - 1) as f64 * step;
        Some(prefill + self.seconds_until_a_place(decoding)?)
    }

    /// Whether a request that comes now has others before it.
    pub(super) fn is_behind(&self) -> bool {
        !self.waiting.is_empty() || self.running.iter().any(|run| run.uncomputed() > 1)
    }

    /// Prompt tokens that a step with so many decoding rows may have.
    pub(super) fn prefill_budget(&self, decode_rows: u32) -> u32 {
        let most = self.geometry.max_step_tokens.saturating_sub(decode_rows);
        let target = self.target_inter_token_seconds.filter(|_| decode_rows > 0 || self.others_decode());
        // Between two tokens of a sequence lie as many steps as there are stages.
        let target = target.map(|target| target / self.stages as f64);
        let within = target.and_then(|target| self.step_time.prefill_within(target, decode_rows));
        let within = within.map_or(most, |within| within.max(self.geometry.block_tokens).min(most));
        within.min(u32::try_from(self.prompt_share(decode_rows)).unwrap_or(u32::MAX))
    }

    /// Seconds until so many sequences have ended as have to for one more than those that wait, each step of which has so
    /// many rows. A sequence gets a token every time that the step it is in has gone through all stages.
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
        let token = self.stages as f64 * self.step_time.predict(0, decoding)?;
        Some((rounds as f64 * longest + last) * token)
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::GEOMETRY;
    use super::*;
    use crate::engine::EngineConfig;
    use crate::executor::Geometry;
    use crate::plan::Ticket;
    use crate::request::{Request, RequestId};

    const PLACES: Geometry = Geometry { max_step_rows: 3, max_step_logits: 3, ..GEOMETRY };

    /// On a device that takes 4 ms a step, 0.2 for a prompt's token, 0.5 for a row; with places for three sequences, as many of
    /// which decode as there are `answers`, which may have so many tokens.
    fn scheduler(target_inter_token_seconds: Option<f64>, answers: &[u32]) -> Scheduler {
        staged(1, target_inter_token_seconds, answers)
    }

    /// The same on so many of them, which take that long each.
    fn staged(stages: usize, target_inter_token_seconds: Option<f64>, answers: &[u32]) -> Scheduler {
        let config = EngineConfig { target_inter_token_seconds, ..EngineConfig::PLAIN };
        let mut scheduler = Scheduler::new(PLACES, config).with_stages(stages);
        for step in 0..60 {
            let (prefill, rows) = (if step % 3 == 0 { step * 7 % 300 + 1 } else { 0 }, step * 5 % 33);
            let seconds = 0.004 + 0.0002 * f64::from(prefill) + 0.0005 * f64::from(rows);
            scheduler.step_time.observe(prefill, rows, 0, seconds);
        }
        for (id, &max_tokens) in (0..).zip(answers) {
            wait(&mut scheduler, id, max_tokens);
        }
        if let Some(step) = scheduler.schedule(0.0) {
            scheduler.submitted(Ticket(0), step.rows, &step.copied, step.stats);
        }
        scheduler
    }

    fn wait(scheduler: &mut Scheduler, id: u64, max_tokens: u32) {
        scheduler.add(Request::greedy(RequestId(id), vec![1, 2, 3], max_tokens), 0.0).expect("a request that fits");
    }

    fn assert_near(milliseconds: f64, expected: f64) {
        assert!((milliseconds / expected - 1.0).abs() < 0.02, "{milliseconds} ms, not {expected}");
    }

    #[test]
    fn the_mean_answer_follows_the_last_ones_slowly() {
        let mut answers = AnswerLength::default();
        let means = [10, 30, 30].map(|tokens| {
            answers.observe(tokens);
            answers.mean.map_or(0.0, |mean| (mean * 1e6).round() / 1e6)
        });
        assert_eq!(means, [10.0, 11.0, 11.95]);
    }

    #[test]
    fn an_answer_is_as_long_as_others_were_and_no_longer_than_it_may_be() {
        let mut scheduler = scheduler(None, &[20]);
        let run = &mut scheduler.running[0];
        (0..5).for_each(|_| run.sequence.tokens.push(7));
        let known = |mean| AnswerLength { mean }.remaining(run);
        assert_eq!([None, Some(9.0), Some(3.0), Some(50.0)].map(known), [15.0, 4.0, 1.0, 15.0]);
        (0..15).for_each(|_| run.sequence.tokens.push(7));
        assert_eq!(AnswerLength { mean: Some(30.0) }.remaining(run), 1.0, "its last token is being drawn");
    }

    #[test]
    fn a_first_token_comes_after_the_prompts_before_it_and_a_place() {
        let milliseconds = |scheduler: &Scheduler, prompt_tokens| {
            scheduler.predicted_ttft_seconds(prompt_tokens).expect("steps were measured") * 1e3
        };
        // Three steps of sixteen tokens; one of all of its tokens beside one that decodes.
        assert_near(milliseconds(&scheduler(None, &[]), 40), 3.0 * 7.2);
        assert_near(milliseconds(&scheduler(None, &[10]), 5), 5.5);
        // All places are taken, for ten, four and seven tokens yet.
        let mut full = scheduler(None, &[10, 4, 7]);
        assert_near(milliseconds(&full, 1), 5.7 + 4.0 * 5.5);
        wait(&mut full, 3, 4);
        assert_near(milliseconds(&full, 1), 6.3 + 7.0 * 5.5);
        wait(&mut full, 4, 4);
        wait(&mut full, 5, 4);
        assert_near(milliseconds(&full, 1), 7.5 + (10.0 + 4.0) * 5.5);
        // A prompt that is being computed is before it, too.
        let mut prefilling = scheduler(None, &[]);
        prefilling.add(Request::greedy(RequestId(9), vec![1; 40], 4), 0.0).expect("a request that fits");
        let step = prefilling.schedule(0.0).expect("a step");
        prefilling.submitted(Ticket(0), step.rows, &step.copied, step.stats);
        assert_near(milliseconds(&prefilling, 8), 2.0 * 7.2);
    }

    #[test]
    fn a_first_token_and_each_one_before_it_go_through_all_stages() {
        let milliseconds = |scheduler: &Scheduler, prompt_tokens| {
            scheduler.predicted_ttft_seconds(prompt_tokens).expect("steps were measured") * 1e3
        };
        // Three steps one after the other, of which the last one has two more stages to go.
        assert_near(milliseconds(&staged(3, None, &[]), 40), (3.0 + 2.0) * 7.2);
        // Two of the three rows are in one step, and four tokens take two stages each.
        assert_near(milliseconds(&staged(2, None, &[10, 4, 7]), 1), 2.0 * 5.2 + 4.0 * 2.0 * 5.0);
    }

    #[test]
    fn who_comes_is_behind_those_that_wait_and_prompts_that_are_computed() {
        assert!(!scheduler(None, &[]).is_behind() && !scheduler(None, &[4]).is_behind());
        let mut waiting = scheduler(None, &[4]);
        wait(&mut waiting, 1, 4);
        assert!(waiting.is_behind());
        waiting.schedule(0.0).expect("a step");
        assert!(waiting.is_behind(), "its prompt is not submitted");
    }

    #[test]
    fn a_prompt_gets_what_decodes_and_their_target_leave() {
        let budget = |target, rows| scheduler(target, &[]).prefill_budget(rows);
        assert_eq!([budget(None, 0), budget(None, 2), budget(None, 17)], [16, 14, 0]);
        // 0.2 ms a token in what 6.7 ms leave beside two rows; a block at least; all of it where nobody decodes.
        assert_eq!([budget(Some(6.7e-3), 2), budget(Some(1e-3), 2), budget(Some(1e-3), 0)], [8, 4, 16]);
        assert_eq!(budget(Some(1.0), 2), 14);
    }
}
