//! Runs steps on the thread of the executor: the rows of a plan become a batch, and the logits of the batch become
//! tokens.

pub(crate) mod batch_builder;
pub(crate) mod row_result;
pub(crate) mod sampling_positions;
mod swap;

use std::convert::identity;
use std::panic::resume_unwind;
use std::thread;
use std::time::{Duration, Instant};

use windlass_engine_core::executor::Geometry;
use windlass_engine_core::plan::{
    BlockMove, PlanRow, RowLogprobs, RowOutput, SequenceFailure, StepOutput, StepPlan, Ticket,
};

use crate::batch::Batch;
use crate::decoder::{Model, StageModel};
use crate::sampler::{Drawn, RowTask};
use crate::step::batch_builder::BatchBuilder;
use crate::step::row_result::{RowResult, row_result, token_moves};
use crate::step::sampling_positions::{Mask, SamplingPosition, masks, positions};
use crate::step::swap::Swapper;
use crate::tier::Tier;

/// A step on its way through the stages of a pipeline.
pub(crate) struct PassedStep {
    pub ticket: Ticket,
    pub plan: StepPlan,
    /// The rows of the plan that can be computed.
    pub batch: Batch,
    pub rows: Vec<RowOutput>,
    /// The output `[tokens, hidden]` of the stage that computed last; empty before the first stage.
    pub activations: Vec<f32>,
    /// The longest time that one stage took for the step.
    pub busy: Duration,
}

/// Runs plans on a model, in order.
pub(crate) struct StepRunner<M: Model> {
    model: M,
    batch_builder: BatchBuilder,
    batch: Batch,
    /// The swap space of blocks outside the pool; `None` without one.
    swapper: Option<Swapper>,
    /// When the last step ended.
    last_end: Option<Instant>,
}

impl<M: Model> StepRunner<M> {
    pub fn new(model: M, geometry: Geometry, tier: Option<Box<dyn Tier>>) -> StepRunner<M> {
        let (batch_builder, batch, swapper) = (BatchBuilder::new(geometry), Batch::default(), tier.map(Swapper::new));
        StepRunner { model, batch_builder, batch, swapper, last_end: None }
    }

    /// Declares the calling thread the one that runs steps.
    pub fn confine(&self) {
        self.model.confine();
    }

    /// Allocates the memory of K and V if `held`, else frees it and the blocks in the tier.
    pub fn hold_kv(&mut self, held: bool) -> Result<(), M::Error> {
        if let Some(swapper) = self.swapper.as_mut().filter(|_| !held) {
            swapper.clear();
        }
        self.model.hold_kv(held)
    }

    /// The model.
    pub fn model(&self) -> &M {
        &self.model
    }

    /// The model, mutable.
    pub fn model_mut(&mut self) -> &mut M {
        &mut self.model
    }

    /// The bounds of rows, and the outputs of earlier steps.
    pub fn batch_builder(&self) -> &BatchBuilder {
        &self.batch_builder
    }

    /// Computes a step. A row that cannot be computed fails alone; an error is that of a device or of another process.
    pub fn run(&mut self, ticket: Ticket, plan: &StepPlan) -> Result<StepOutput, M::Error> {
        let started = Instant::now();
        self.move_blocks(&plan.moves)?;
        let rows = self.fill_batch(plan);
        self.compute((ticket, plan), rows, started, |model, batch| model.forward(batch))
    }

    /// Computes the last stage of a step that the earlier stages have computed.
    pub fn run_passed(&mut self, passed: PassedStep) -> Result<StepOutput, M::Error>
    where
        M: StageModel,
    {
        let PassedStep { ticket, plan, batch, rows, activations, busy } = passed;
        let started = Instant::now();
        self.move_blocks(&plan.moves)?;
        self.batch = batch;
        let output =
            self.compute((ticket, &plan), rows, started, |model, batch| model.forward_behind(batch, &activations))?;
        Ok(StepOutput { busy_seconds: output.busy_seconds.max(busy.as_secs_f64()), ..output })
    }

    /// Computes the batch by `forward` and samples. The batch has those `rows` of the plan that can be computed.
    fn compute(
        &mut self,
        (ticket, plan): (Ticket, &StepPlan),
        mut rows: Vec<RowOutput>,
        started: Instant,
        forward: impl FnOnce(&mut M, &Batch) -> Result<(), M::Error>,
    ) -> Result<StepOutput, M::Error> {
        let (mut scores, mut waited) = (Vec::new(), Duration::ZERO);
        if !self.batch.is_empty() {
            let positions = self.positions(&plan.rows);
            let masks;
            (masks, waited) = self.forward(plan, &positions, started, forward)?;
            scores = self.draw(&plan.rows, &positions, &masks, &mut rows)?;
        }
        self.keep(ticket, &rows);
        Ok(StepOutput { rows, scores, busy_seconds: self.ended(started).saturating_sub(waited).as_secs_f64() })
    }

    /// Ends a step, and returns how long it took: from its start, or from the end of the last step if that is later.
    pub fn ended(&mut self, started: Instant) -> Duration {
        let (end, last_end) = (Instant::now(), self.last_end);
        self.last_end = Some(end);
        end.duration_since(last_end.map_or(started, |last| started.max(last)))
    }

    /// Moves K and V of blocks, in order.
    pub fn move_blocks(&mut self, moves: &[BlockMove]) -> Result<(), M::Error> {
        moves.iter().try_for_each(|moved| self.move_block(*moved))
    }

    fn move_block(&mut self, moved: BlockMove) -> Result<(), M::Error> {
        match (moved, &mut self.swapper) {
            (BlockMove::Copy { from, to }, _) => return self.model.copy_block(from, to),
            (BlockMove::SwapOut { block, slot }, Some(swapper)) => swapper.store(&mut self.model, block, slot),
            (BlockMove::SwapIn { slot, block }, Some(swapper)) => swapper.load(&mut self.model, slot, block),
            (BlockMove::SwapOut { .. } | BlockMove::SwapIn { .. }, None) => {
                unreachable!("without a tier there are no slots")
            }
        }
        Ok(())
    }

    /// Puts every row that can be computed into the batch.
    fn fill_batch(&mut self, plan: &StepPlan) -> Vec<RowOutput> {
        self.batch.clear();
        plan.rows.iter().map(|row| self.fill_row(row).map_or_else(identity, |()| RowOutput::Computed)).collect()
    }

    fn fill_row(&mut self, row: &PlanRow) -> Result<(), RowOutput> {
        self.check(row).map_err(RowOutput::Failed)?;
        self.batch_builder.fill(row, &mut self.batch)
    }

    /// Whether a row can be computed, as far as that does not depend on its tokens; else why not.
    pub fn check(&mut self, row: &PlanRow) -> Result<(), SequenceFailure> {
        self.batch_builder.check(row).and_then(|()| M::check(row)).map_err(SequenceFailure::Uncomputable)?;
        match &mut self.swapper {
            Some(swapper) => swapper.check(row, self.batch_builder.geometry()).map_err(SequenceFailure::LostKv),
            None => Ok(()),
        }
    }

    /// Computes the batch while another thread gets the token masks. Returns the masks, and how long they were waited
    /// for after the batch was computed.
    fn forward(
        &mut self,
        plan: &StepPlan,
        positions: &[Vec<SamplingPosition>],
        started: Instant,
        forward: impl FnOnce(&mut M, &Batch) -> Result<(), M::Error>,
    ) -> Result<(Vec<Vec<Mask>>, Duration), M::Error> {
        let constrained = |row: &PlanRow| row.sample.as_ref().is_some_and(|sample| sample.constraint.is_some());
        if !plan.rows.iter().any(constrained) {
            forward(&mut self.model, &self.batch)?;
            let free = positions.iter().map(|positions| positions.iter().map(|_| Ok(None)).collect()).collect();
            return Ok((free, Duration::ZERO));
        }
        thread::scope(|scope| {
            let masks = scope.spawn(|| masks(&plan.rows, positions, started + plan.mask_timeout));
            forward(&mut self.model, &self.batch)?;
            let computed = Instant::now();
            let masks = masks.join().unwrap_or_else(|panic| resume_unwind(panic));
            Ok((masks, computed.elapsed()))
        })
    }

    /// Draws the tokens of those rows of the batch that sample, and scores prompt tokens.
    pub fn draw(
        &mut self,
        rows: &[PlanRow],
        positions: &[Vec<SamplingPosition>],
        masks: &[Vec<Mask>],
        outputs: &mut [RowOutput],
    ) -> Result<Vec<RowLogprobs>, M::Error> {
        let results = self.model.sample(&tasks(rows, positions, masks, outputs))?;
        self.verify(rows, masks, results.into_iter().map(|result| result.map_err(SequenceFailure::from)), outputs)
    }

    /// Verifies draft tokens, sets the output of every row in the batch, and moves K and V of accepted draft tokens to
    /// their positions. `results` has one entry for each row of logits, in order.
    pub fn verify(
        &mut self,
        rows: &[PlanRow],
        masks: &[Vec<Mask>],
        mut results: impl Iterator<Item = Result<Drawn, SequenceFailure>>,
        outputs: &mut [RowOutput],
    ) -> Result<Vec<RowLogprobs>, M::Error> {
        let (mut scores, mut moved) = (Vec::new(), Vec::new());
        for index in in_batch(outputs) {
            let row = &rows[index];
            match row_result(row, results.by_ref().take(row.logit_count()).collect(), &masks[index]) {
                Ok(RowResult { output, prompt, sampled, accepted }) => {
                    outputs[index] = output;
                    moved.extend(token_moves(row, &accepted, self.batch_builder.geometry()));
                    let told = !prompt.is_empty() || !sampled.is_empty();
                    scores.extend(told.then_some(RowLogprobs { row: index as u32, prompt, sampled }));
                }
                Err(failure) => outputs[index] = RowOutput::Failed(failure),
            }
        }
        // A step that continues after them is planned only when they are known.
        self.model.move_tokens(&moved)?;
        Ok(scores)
    }

    /// The sampling positions of each row.
    pub fn positions(&self, rows: &[PlanRow]) -> Vec<Vec<SamplingPosition>> {
        rows.iter().map(|row| positions(row, self.batch_builder.history(row))).collect()
    }

    /// Keeps the output of a step, for later steps that name its tokens.
    pub fn keep(&mut self, ticket: Ticket, rows: &[RowOutput]) {
        self.batch_builder.keep(ticket, rows);
    }
}

/// Indices of the rows that are in the batch.
fn in_batch(outputs: &[RowOutput]) -> Vec<usize> {
    (0..outputs.len()).filter(|index| outputs[*index] == RowOutput::Computed).collect()
}

/// The sampling tasks of all rows in the batch, one for each row of logits, in order.
pub(crate) fn tasks<'a>(
    rows: &'a [PlanRow],
    positions: &'a [Vec<SamplingPosition>],
    masks: &'a [Vec<Mask>],
    outputs: &[RowOutput],
) -> Vec<RowTask<'a>> {
    let of_row = |index: usize| row_tasks(&rows[index], &positions[index], &masks[index]);
    in_batch(outputs).into_iter().flat_map(of_row).collect()
}

/// The sampling tasks of one row, in the order of its logits.
fn row_tasks<'a>(
    row: &'a PlanRow,
    positions: &'a [SamplingPosition],
    masks: &'a [Mask],
) -> impl Iterator<Item = RowTask<'a>> {
    let scored = row.score.iter().flat_map(|score| score.targets.iter().map(|&target| (target, score.top)));
    let scored = scored.map(|(target, top)| RowTask::Score { target, top });
    let draws = positions.iter().zip(masks).filter_map(|(position, mask)| position.draw(row, mask));
    scored.chain(draws.map(RowTask::Draw))
}

/// The output of a row that cannot be computed.
pub(crate) fn uncomputable(why: String) -> RowOutput {
    RowOutput::Failed(SequenceFailure::Uncomputable(why))
}
