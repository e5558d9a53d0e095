//! Whether guessing pays, and how far: what is known of how well guesses hold, against what computing them costs.
//!
//! Guess number `n` of a sequence is of use with the probability that it and all before it hold, `held^n`. It pays if
//! the step's tokens per second are more with it than without: if that probability is above the share of a token that
//! the step would give in the time that a guess takes. Free guesses are made and scored all the time, so that a
//! sequence whose guesses begin to hold is noticed without computing any; costly ones are tried again now and then.
//!
//! A guess follows known tokens. So steps with guesses do not overlap where a step feeds on the one before, and while no
//! sequence guesses, all do. Steps of different sequences do not hang on each other's guesses.

use super::Scheduler;
use crate::draft::{Ask, DraftTree, MAX_DRAFT_TOKENS, Proposer};
use crate::request::{RequestId, TokenId};
use crate::sequence::Running;
use crate::update::DraftStats;

/// Weight of the last guess in what is known of a sequence's guesses, and of all of them.
const SEQUENCE_WEIGHT: f64 = 0.1;
const ENGINE_WEIGHT: f64 = 0.02;
/// Share of guesses that hold, before any was made.
const FIRST_SHARE: f64 = 0.5;
/// What a guess is taken to cost before any was computed: this share of a step's time for a token.
const FIRST_COST: f64 = 0.35;
/// The least that it is taken to cost, whatever was measured.
const LEAST_COST: f64 = 0.05;
/// How much better than doing without guesses have to look.
const MARGIN: f64 = 1.15;
/// Tokens after which a sequence that had no guess is asked about again: doubled each time, up to the second.
const FIRST_PAUSE_TOKENS: usize = 1;
const LONGEST_PAUSE_TOKENS: usize = 16;
/// Tokens after which a costly guess is tried again that did not pay.
const TRIAL_TOKENS: usize = 128;

/// What is guessed of one sequence.
#[derive(Clone, Debug, Default)]
pub(crate) struct Guess {
    /// What follows the known tokens.
    tree: DraftTree,
    /// Share of guesses that held; absent before any.
    held: Option<f64>,
    /// Tokens of the sequence from which on it is asked about again.
    resume_at: usize,
    pause_tokens: usize,
}

/// Guessing for all sequences.
#[derive(Debug)]
pub(super) struct Speculation {
    proposer: Box<dyn Proposer>,
    most: usize,
    /// Share of guesses that held, of all sequences.
    held: f64,
    stats: DraftStats,
}

impl Scheduler {
    /// Guesses from now on.
    pub(crate) fn speculate(&mut self, proposer: Box<dyn Proposer>, most: u32) {
        let most = (most as usize).min(MAX_DRAFT_TOKENS);
        self.speculation = Some(Speculation { proposer, most, held: FIRST_SHARE, stats: DraftStats::default() });
    }

    pub(super) fn draft_stats(&self) -> DraftStats {
        self.speculation.as_ref().map_or_else(DraftStats::default, |speculation| speculation.stats)
    }

    /// Whether the next step has to wait for those in flight: its guesses follow what they draw, or theirs are not
    /// judged yet.
    pub(super) fn waits_for_results(&self) -> bool {
        let waits = !self.in_flight.is_empty() && !self.is_staged();
        let Some(speculation) = self.speculation.as_ref().filter(|_| waits) else { return false };
        let bar = self.bar();
        self.in_flight.iter().any(|step| step.stats.draft_tokens > 0)
            || self.running.iter().any(|run| speculation.wants(run, bar))
    }

    /// Asks for costly guesses, which are made only to be computed.
    pub(super) fn guess_at_cost(&mut self) {
        let bar = self.bar();
        let Some(speculation) = self.speculation.as_mut().filter(|speculation| !speculation.proposer.is_free()) else {
            return;
        };
        let wanted = |run: &&mut Running| run.is_decoding() && run.guess.tree.is_empty() && speculation.wants(run, bar);
        let asked: Vec<&mut Running> = self.running.iter_mut().filter(wanted).collect();
        speculation.ask(asked);
    }

    /// Asks for free guesses, which are made to be scored, too.
    pub(super) fn guess_freely(&mut self) {
        let Some(speculation) = self.speculation.as_mut().filter(|speculation| speculation.proposer.is_free()) else {
            return;
        };
        speculation.ask(self.running.iter_mut().filter(|run| run.guess.is_due(run)).collect());
    }

    /// Tokens of a step that no guess takes: half, where prompts are computed or wait. They would starve otherwise, for as long
    /// as guesses hold.
    pub(super) fn reserved_for_prompts(&self) -> usize {
        let some = !self.waiting.is_empty() || self.has_prefills();
        if some { self.geometry.max_step_tokens as usize / 2 } else { 0 }
    }

    /// The guesses that the next step computes for the sequence at `index`, with blocks for them: those that pay by
    /// `bar`, at most `room`.
    pub(super) fn draft(&mut self, index: usize, room: usize, bar: f64) -> DraftTree {
        let headroom = self.running.len();
        let (run, Some(speculation)) = (&mut self.running[index], &self.speculation) else {
            return DraftTree::default();
        };
        // What was put off is drawn first: behind each guess there would be more to know in time.
        if !run.is_decoding() || run.was_put_off() || run.guess.tree.is_empty() {
            return DraftTree::default();
        }
        let most = room.min(speculation.most).min(run.sequence.draft_limit());
        let count = speculation.count(&run.guess, bar).min(most);
        let known = run.covered_after(1);
        let covered = self.kv.grow_spare(&mut run.table, known + count, headroom);
        run.guess.tree.first(count.min(covered - known))
    }

    /// The sequence at `index` got `tokens`, for `drafted` guesses that were computed.
    pub(super) fn judge(&mut self, index: usize, tokens: &[TokenId], drafted: usize) {
        let Some(speculation) = &mut self.speculation else { return };
        let run = &mut self.running[index];
        for &token in tokens {
            speculation.learn(&mut run.guess, token);
        }
        if drafted > 0 {
            speculation.stats.count(drafted, tokens.len() - 1);
        }
    }

    /// The request has ended.
    pub(super) fn forget_guesses(&mut self, request: RequestId) {
        if let Some(speculation) = &mut self.speculation {
            speculation.proposer.forget(request);
        }
    }

    /// The probability of holding from which on computing a guess pays.
    pub(super) fn bar(&self) -> f64 {
        if self.speculation.is_none() {
            return f64::INFINITY;
        }
        let rows = self.decoding_in_a_step().max(1);
        let cost = match (self.step_time.predict(0, rows), self.step_time.draft_seconds()) {
            (Some(step), Some(draft)) if step > 0.0 => draft * f64::from(rows) / step,
            _ => FIRST_COST,
        };
        cost.max(LEAST_COST) * MARGIN
    }
}

impl Speculation {
    /// Whether a step should wait to compute guesses for this sequence.
    fn wants(&self, run: &Running, bar: f64) -> bool {
        let decodes = run.has_prompt() && run.uncomputed() <= 1 && run.sequence.draft_limit() > 0;
        let (pays, made) = (self.share(&run.guess) > bar, !run.guess.tree.is_empty());
        let due = run.sequence.tokens.len() >= run.guess.resume_at;
        decodes && if self.proposer.is_free() { pays && made } else { pays || made || due }
    }

    fn share(&self, guess: &Guess) -> f64 {
        guess.held.unwrap_or(self.held)
    }

    /// Leading guesses that pay; a costly one is made for at least one to be tried.
    fn count(&self, guess: &Guess, bar: f64) -> usize {
        let share = self.share(guess);
        let pays = |node: &usize| share.powi(guess.tree.path(*node as u32).len() as i32) > bar;
        let count = (0..guess.tree.len()).take_while(pays).count();
        if self.proposer.is_free() { count } else { count.max(1) }
    }

    fn ask(&mut self, mut runs: Vec<&mut Running>) {
        let ask = |run: &&mut Running| {
            let most = self.most.min(run.sequence.draft_limit());
            (run.sequence.id, most)
        };
        let asked: Vec<(RequestId, usize)> = runs.iter().map(ask).collect();
        let tokens = runs.iter().map(|run| run.sequence.tokens.as_slice());
        let asks: Vec<Ask<'_>> =
            asked.iter().zip(tokens).map(|(&(request, most), tokens)| Ask { request, tokens, most }).collect();
        let trees = if asks.is_empty() { Vec::new() } else { self.proposer.propose(&asks) };
        for (run, tree) in runs.iter_mut().zip(trees) {
            match self.proposer.is_free() {
                true => run.guess.made(tree, run.sequence.tokens.len()),
                false => run.guess.tried(tree, run.sequence.tokens.len()),
            }
        }
    }

    fn learn(&mut self, guess: &mut Guess, token: TokenId) {
        if guess.tree.is_empty() {
            return;
        }
        let rest = guess.tree.behind(token);
        let held = f64::from(u8::from(rest.is_some()));
        guess.tree = rest.unwrap_or_default();
        let share = self.share(guess);
        guess.held = Some(share + SEQUENCE_WEIGHT * (held - share));
        self.held += ENGINE_WEIGHT * (held - self.held);
    }
}

impl Guess {
    fn is_due(&self, run: &Running) -> bool {
        let useful = run.has_prompt() && run.sequence.draft_limit() > 0;
        useful && self.tree.is_empty() && run.sequence.tokens.len() >= self.resume_at
    }

    /// A free guess was made of a sequence of so many tokens. It is made again when it has failed, or in a while where
    /// there was none.
    fn made(&mut self, tree: DraftTree, tokens: usize) {
        let pause = if tree.is_empty() { 2 * self.pause_tokens } else { FIRST_PAUSE_TOKENS };
        self.pause_tokens = pause.clamp(FIRST_PAUSE_TOKENS, LONGEST_PAUSE_TOKENS);
        self.resume_at = tokens + self.pause_tokens;
        self.tree = tree;
    }

    /// A costly guess was made. Where it does not pay it is tried again in a while.
    fn tried(&mut self, tree: DraftTree, tokens: usize) {
        self.resume_at = tokens + TRIAL_TOKENS;
        self.tree = tree;
    }
}

impl DraftStats {
    fn count(&mut self, drafted: usize, accepted: usize) {
        self.drafts += 1;
        self.tokens += drafted as u64;
        self.accepted += accepted as u64;
        self.accepted_by_position[..accepted].iter_mut().for_each(|count| *count += 1);
    }
}

#[cfg(test)]
mod tests;
