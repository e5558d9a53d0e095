//! Builds a step within its budgets of tokens and logits.

use crate::draft::DraftTree;
use crate::executor::Geometry;
use crate::kv::KvCache;
use crate::plan::{PlanRow, StepPlan};
use crate::sequence::{RunId, Running};
use crate::update::StepStats;

/// A scheduled step: the plan for the executor, and what is needed to interpret its output.
#[derive(Debug)]
pub(crate) struct ScheduledStep {
    pub(crate) plan: StepPlan,
    pub(crate) rows: Vec<ScheduledRow>,
    /// Runs from whose blocks the step copies.
    pub(crate) copy_sources: Vec<RunId>,
    pub(crate) stats: StepStats,
}

/// A row of a scheduled step.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ScheduledRow {
    pub(super) run_id: RunId,
    /// Index of its first token in the sequence.
    pub(super) first: usize,
    /// Leading tokens of the sequence that are computed after the step.
    pub(super) end: usize,
    pub(super) samples: bool,
    /// Draft tokens of the row.
    pub(super) drafted: usize,
}

pub(super) struct StepBuilder {
    block_tokens: usize,
    tokens_left: usize,
    logits_left: usize,
    /// Sequences that found no block for their next token and wait for blocks that steps in flight release.
    pub(super) without_block: usize,
    step: ScheduledStep,
}

impl StepBuilder {
    /// An empty step, with capacity for about `rows` rows.
    pub(super) fn new(geometry: &Geometry, rows: usize) -> StepBuilder {
        StepBuilder {
            block_tokens: geometry.block_tokens as usize,
            tokens_left: geometry.max_step_tokens as usize,
            logits_left: geometry.max_step_logits as usize,
            without_block: 0,
            step: ScheduledStep {
                plan: StepPlan { rows: Vec::with_capacity(rows), ..StepPlan::default() },
                rows: Vec::with_capacity(rows),
                copy_sources: Vec::new(),
                stats: StepStats::default(),
            },
        }
    }

    /// Whether it has a row of this run.
    pub(super) fn has(&self, run_id: RunId) -> bool {
        self.step.rows.iter().any(|row| row.run_id == run_id)
    }

    /// Whether there is room for one token with its logits. Rows are not counted: there are never more running
    /// sequences than a step may have rows.
    pub(super) fn has_room(&self) -> bool {
        self.tokens_left > 0 && self.logits_left > 0
    }

    /// Room for draft tokens if `others` tokens have to fit beside them.
    pub(super) fn draft_room(&self, others: usize) -> usize {
        self.tokens_left.min(self.logits_left).saturating_sub(1 + others)
    }

    /// How many of the next tokens of a sequence fit.
    pub(super) fn room_for(&self, run: &Running) -> usize {
        let most = if run.needs_prompt_logits() { self.tokens_left.min(self.logits_left) } else { self.tokens_left };
        run.uncomputed().min(most)
    }

    /// Adds as many of them as the sequence has blocks for.
    pub(super) fn push(&mut self, run: &Running) {
        self.push_drafted(run, DraftTree::default());
    }

    /// The same with draft tokens, which must fit.
    pub(super) fn push_drafted(&mut self, run: &Running, draft: DraftTree) {
        let drafted = draft.len();
        let count = self.room_for(run).min(run.covered_uncomputed(self.block_tokens));
        let row = run.row(count, draft);
        self.tokens_left -= row.token_count();
        self.logits_left -= row.logit_count();
        self.count(&row, run.sequence.prompt_tokens);
        let first = row.first_position as usize;
        let end = first + row.tokens.len();
        self.step.rows.push(ScheduledRow { run_id: run.id, first, end, samples: row.sample.is_some(), drafted });
        self.step.plan.rows.push(row);
    }

    /// Limits the remaining tokens.
    pub(super) fn limit(&mut self, tokens: usize) {
        self.tokens_left = self.tokens_left.min(tokens);
    }

    /// Decode rows in the step.
    pub(super) fn decode_rows(&self) -> u32 {
        self.step.stats.decode_tokens
    }

    /// The step copies a block of this run before it computes.
    pub(super) fn add_copy_source(&mut self, run_id: RunId) {
        self.step.copy_sources.push(run_id);
    }

    /// The step, with the block moves that it needs; `None` if it is empty.
    pub(super) fn build(mut self, kv: &mut KvCache) -> Option<ScheduledStep> {
        if self.step.rows.is_empty() {
            return None;
        }
        self.step.plan.moves = kv.take_moves();
        Some(self.step)
    }

    fn count(&mut self, row: &PlanRow, prompt_tokens: usize) {
        let stats = &mut self.step.stats;
        stats.rows += 1;
        stats.draft_tokens += row.draft().map_or(0, DraftTree::len) as u32;
        match row.tokens.len() {
            1 if row.first_position as usize >= prompt_tokens => stats.decode_tokens += 1,
            tokens => stats.prefill_tokens += tokens as u32,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::GEOMETRY;
    use super::*;
    use crate::request::{CacheScope, Request, RequestId};
    use crate::sequence::Sequence;

    const SMALL: Geometry = Geometry { max_step_tokens: 8, max_step_logits: 3, ..GEOMETRY };

    fn prompt(kv: &mut KvCache, run_id: u64, tokens: usize) -> Running {
        let sequence = Sequence::new(Request::greedy(RequestId(run_id), vec![1; tokens], 4), 0.0);
        let table = kv.allocate(&sequence.tokens, CacheScope::SHARED, 0).expect("blocks are free");
        Running::new(RunId(run_id), sequence, table, 0)
    }

    #[test]
    fn there_is_room_while_tokens_and_logits_are_left() {
        let mut kv = KvCache::new(16, 4, None);
        for (tokens, rows) in [(1, 3), (4, 2), (3, 3), (8, 1)] {
            let mut step = StepBuilder::new(&SMALL, 0);
            let mut runs = 0;
            while step.has_room() {
                runs += 1;
                step.push(&prompt(&mut kv, runs, tokens));
            }
            assert_eq!(runs, rows, "{tokens}");
            assert!((1..=rows).all(|run_id| step.has(RunId(run_id))) && !step.has(RunId(rows + 1)));
            kv = KvCache::new(16, 4, None);
        }
    }

    #[test]
    fn a_step_tells_what_it_copies_from() {
        let mut kv = KvCache::new(16, 4, None);
        let mut step = StepBuilder::new(&SMALL, 0);
        step.add_copy_source(RunId(7));
        step.push(&prompt(&mut kv, 1, 2));
        assert_eq!(step.build(&mut kv).map(|step| step.copy_sources), Some(vec![RunId(7)]));
    }
}
