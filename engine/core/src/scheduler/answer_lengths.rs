//! Lengths of answers, learned from finished ones.
//!
//! An answer that was cut at its limit, or that is still running, only tells that it would have been longer. So the
//! lengths are censored data, and the estimate is the Nelson-Aalen one of the cumulative hazard: at each length, the
//! share of the answers that got there and stopped there (Nelson 1972, Aalen 1978).

use std::collections::VecDeque;

/// Finished answers that are remembered.
const REMEMBERED: usize = 128;
/// Prior for lengths beyond all observed ones: one answer in this many tokens stops.
const PRIOR_TOKENS: f64 = 1024.0;

/// The most recently finished answers.
#[derive(Debug, Default)]
pub(super) struct AnswerLengths {
    ended: VecDeque<ObservedAnswer>,
}

/// An observed answer.
#[derive(Clone, Copy, Debug)]
struct ObservedAnswer {
    tokens: usize,
    /// Whether it stopped by itself, and not at its limit.
    stopped: bool,
}

/// Estimated cumulative hazard of stopping, by length.
#[derive(Debug)]
pub(super) struct CumulativeHazard {
    /// Lengths at which answers stopped, ascending, with the cumulative hazard up to each; the last entry is the
    /// longest observed length.
    stops: Vec<(usize, f64)>,
    /// Hazard of each token beyond that.
    blocks_beyond: f64,
}

impl AnswerLengths {
    /// Records a finished answer: it stopped by itself, or was cut at its limit.
    pub(super) fn observe(&mut self, tokens: usize, stopped: bool) {
        self.ended.truncate(REMEMBERED - 1);
        self.ended.push_front(ObservedAnswer { tokens, stopped });
    }

    /// Estimates the hazard from the finished answers and from running ones of these lengths.
    pub(super) fn hazard(&self, running: impl Iterator<Item = usize>) -> CumulativeHazard {
        let running = running.map(|tokens| ObservedAnswer { tokens, stopped: false });
        let mut seen: Vec<ObservedAnswer> = self.ended.iter().copied().chain(running).collect();
        // Among answers of one length, those that stopped were at risk together with those that did not.
        seen.sort_unstable_by_key(|seen| (seen.tokens, !seen.stopped));
        let (mut stops, mut sum) = (Vec::new(), 0.0);
        for (index, stop) in seen.iter().enumerate().filter(|(_, seen)| seen.stopped) {
            sum += 1.0 / (seen.len() - index) as f64;
            stops.push((stop.tokens, sum));
        }
        let tokens = seen.iter().map(|seen| seen.tokens as f64).sum::<f64>();
        let blocks_beyond = (stops.len() as f64 + 1.0) / (tokens + PRIOR_TOKENS);
        stops.extend(seen.last().map(|longest| (longest.tokens, sum)));
        CumulativeHazard { stops, blocks_beyond }
    }
}

impl CumulativeHazard {
    /// Tokens that an answer of `generated` tokens still has to come, at most `max_tokens`: the given quantile of such
    /// answers, for `quantile` in 0 to 1.
    pub(super) fn remaining(&self, generated: usize, max_tokens: usize, quantile: f64) -> usize {
        let passed = self.stops.partition_point(|(tokens, _)| *tokens <= generated);
        let before = passed.checked_sub(1).map_or(0.0, |last| self.stops[last].1);
        let target = before - (1.0 - quantile).ln();
        let end = self.stops[passed..].iter().find(|(_, hazard)| *hazard >= target).map(|(tokens, _)| *tokens);
        let end = end.unwrap_or_else(|| {
            let (last, reached) = self.stops[passed..].last().copied().unwrap_or((generated, before));
            last + ((target - reached) / self.blocks_beyond) as usize
        });
        end.saturating_sub(generated).clamp(1, max_tokens.max(1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What is left of answers of `generated` tokens in the middle and at both ends.
    fn quartiles(answers: &AnswerLengths, generated: usize, max_tokens: usize) -> [usize; 3] {
        let hazard = answers.hazard(std::iter::empty());
        [0.25, 0.5, 0.75].map(|quantile| hazard.remaining(generated, max_tokens, quantile))
    }

    #[test]
    fn answers_are_as_long_as_others_that_stopped() {
        let mut answers = AnswerLengths::default();
        (1..=100).for_each(|tokens| answers.observe(tokens, true));
        let [short, middle, long] = quartiles(&answers, 0, 1000);
        assert!((23..=27).contains(&short) && (47..=53).contains(&middle) && (72..=78).contains(&long));
        let [_, middle, _] = quartiles(&answers, 60, 1000);
        assert!((17..=23).contains(&middle), "of those of more than 60 tokens: {middle}");
        assert_eq!(quartiles(&answers, 0, 30), [short, 30, 30], "none is longer than it may be");
        assert_eq!(quartiles(&answers, 20, 0), [1; 3], "the last token is being drawn");
    }

    #[test]
    fn those_that_ran_into_their_limit_would_have_been_longer() {
        let mut answers = AnswerLengths::default();
        (0..100).for_each(|_| answers.observe(50, false));
        assert_eq!(quartiles(&answers, 0, 80), [80; 3]);
        // Most stopped at ten, and of the others nothing more is known.
        let mut answers = AnswerLengths::default();
        (0..100).for_each(|index| answers.observe(if index % 5 < 3 { 10 } else { 50 }, index % 5 < 3));
        let [short, middle, long] = quartiles(&answers, 0, 1000);
        assert!(short == 10 && middle == 10 && long > 50, "{short} {middle} {long}");
        assert!(quartiles(&answers, 10, 1000).iter().all(|rest| *rest > 40), "none stopped before fifty");
    }

    #[test]
    fn those_that_run_count_and_old_ones_are_forgotten() {
        let mut answers = AnswerLengths::default();
        answers.observe(10, true);
        let alone = answers.hazard(std::iter::empty()).remaining(0, 1000, 0.5);
        let beside = answers.hazard([200, 200, 200].into_iter()).remaining(0, 1000, 0.5);
        assert!(alone == 10 && beside > 200, "{alone} {beside}");
        (0..REMEMBERED).for_each(|_| answers.observe(70, true));
        assert_eq!(quartiles(&answers, 0, 1000), [70; 3]);
        assert_eq!(answers.ended.len(), REMEMBERED);
    }

    #[test]
    fn nothing_seen_is_a_stop_in_a_thousand_tokens() {
        let [_, middle, _] = quartiles(&AnswerLengths::default(), 5, 100_000);
        assert!((705..=715).contains(&middle), "{middle}");
    }
}
