//! One step on the executor's thread: the plan's rows become a batch, the batch becomes tokens.

use std::collections::VecDeque;
use std::time::Instant;

use windlass_engine_core::executor::{Geometry, MAX_IN_FLIGHT};
use windlass_engine_core::plan::{InputToken, PlanRow, RowOutput, StepOutput, StepPlan, Ticket};
use windlass_engine_core::request::TokenId;

use crate::backend::Backend;
use crate::batch::{Batch, Logits};
use crate::decoder::Decoder;
use crate::sampler::Draw;

/// Runs plans on a decoder, in order, and keeps what later plans may feed back.
pub(crate) struct StepRunner<B: Backend> {
    decoder: Decoder<B>,
    geometry: Geometry,
    batch: Batch,
    /// Outputs of the last steps. A plan names steps that were in flight when it was made, and may be submitted after
    /// they were collected.
    kept: VecDeque<(Ticket, Vec<RowOutput>)>,
}

impl<B: Backend> StepRunner<B> {
    pub fn new(decoder: Decoder<B>, geometry: Geometry) -> StepRunner<B> {
        StepRunner { decoder, geometry, batch: Batch::default(), kept: VecDeque::new() }
    }

    /// Computes a step. A row that cannot be computed fails alone.
    pub fn run(&mut self, ticket: Ticket, plan: &StepPlan) -> StepOutput {
        let started = Instant::now();
        let mut rows = self.fill_batch(plan);
        if !self.batch.is_empty() {
            self.decoder.forward(&self.batch);
            self.draw(plan, &mut rows);
        }
        self.keep(ticket, &rows);
        StepOutput { rows, busy_seconds: started.elapsed().as_secs_f64() }
    }

    /// Puts every sound row into the batch.
    fn fill_batch(&mut self, plan: &StepPlan) -> Vec<RowOutput> {
        self.batch.clear();
        plan.rows
            .iter()
            .map(|row| self.fill_row(row).map_or_else(RowOutput::Failed, |()| RowOutput::Computed))
            .collect()
    }

    fn fill_row(&mut self, row: &PlanRow) -> Result<(), String> {
        self.check_places(row)?;
        for &token in &row.tokens {
            self.resolve(token)?;
        }
        let tokens = row.tokens.iter().filter_map(|&token| resolve(&self.kept, token).ok());
        let logits = if row.sample.is_some() { Logits::Last } else { Logits::None };
        self.batch.push(tokens, row.first_position, &row.blocks, logits);
        Ok(())
    }

    fn check_places(&self, row: &PlanRow) -> Result<(), String> {
        let Geometry { block_tokens, blocks, max_sequence_tokens, .. } = self.geometry;
        let end = u64::from(row.first_position) + row.tokens.len() as u64;
        let held = row.blocks.len() as u64 * u64::from(block_tokens);
        if row.tokens.is_empty() {
            return Err("the row has no tokens".into());
        }
        if end > u64::from(max_sequence_tokens) {
            return Err(format!("the sequence reaches {end} tokens; the longest has {max_sequence_tokens}"));
        }
        if end > held {
            return Err(format!("the sequence reaches {end} tokens; its blocks hold {held}"));
        }
        match row.blocks.iter().find(|block| block.0 >= blocks) {
            Some(block) => Err(format!("the sequence names block {}; there are {blocks}", block.0)),
            None => Ok(()),
        }
    }

    fn resolve(&self, token: InputToken) -> Result<TokenId, String> {
        let id = resolve(&self.kept, token)?;
        match id < self.geometry.vocabulary {
            true => Ok(id),
            false => Err(format!("token {id} is outside the vocabulary of {}", self.geometry.vocabulary)),
        }
    }

    /// Draws the tokens of the rows that are in the batch and sample.
    fn draw(&mut self, plan: &StepPlan, outputs: &mut [RowOutput]) {
        let computed = plan.rows.iter().zip(outputs).filter(|(_, output)| **output == RowOutput::Computed);
        let (draws, outputs): (Vec<_>, Vec<_>) =
            computed.filter_map(|(row, output)| Some((draw_of(row)?, output))).unzip();
        for (drawn, output) in self.decoder.sample(&draws).into_iter().zip(outputs) {
            *output = drawn.map_or_else(|error| RowOutput::Failed(error.to_string()), RowOutput::Sampled);
        }
    }

    fn keep(&mut self, ticket: Ticket, rows: &[RowOutput]) {
        if self.kept.len() == MAX_IN_FLIGHT {
            self.kept.pop_front();
        }
        self.kept.push_back((ticket, rows.to_vec()));
    }
}

fn draw_of(row: &PlanRow) -> Option<Draw<'_>> {
    let sample = row.sample.as_ref()?;
    let position = row.first_position + row.tokens.len() as u32;
    Some(Draw { sampling: &sample.sampling, banned: &sample.banned, position })
}

fn resolve(kept: &VecDeque<(Ticket, Vec<RowOutput>)>, token: InputToken) -> Result<TokenId, String> {
    let (ticket, row) = match token {
        InputToken::Known(id) => return Ok(id),
        InputToken::SampledBy { ticket, row } => (ticket, row),
    };
    let step = kept.iter().find(|(kept, _)| *kept == ticket);
    match step.and_then(|(_, rows)| rows.get(row as usize)) {
        Some(RowOutput::Sampled(id)) => Ok(*id),
        Some(RowOutput::Failed(reason)) => Err(format!("its last token could not be sampled: {reason}")),
        _ => Err(format!("its input token was to be sampled in row {row} of step {}, which sampled none", ticket.0)),
    }
}
