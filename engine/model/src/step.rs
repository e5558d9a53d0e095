//! One step on the executor's thread: the plan's rows become a batch, the batch becomes tokens.

use std::collections::VecDeque;
use std::thread;
use std::time::Instant;

use windlass_engine_core::constraint::{Constraint, TokenSet};
use windlass_engine_core::executor::{Geometry, MAX_IN_FLIGHT};
use windlass_engine_core::plan::{InputToken, PlanRow, RowOutput, RowScores, StepOutput, StepPlan, Ticket};
use windlass_engine_core::request::TokenId;

use crate::backend::Backend;
use crate::batch::{Batch, Logits};
use crate::pipeline::{Pipeline, PipelineError};
use crate::places;
use crate::ranks::Ranks;
use crate::sampler::{Draw, Drawn, RowTask, SampleError};

/// Runs plans on a decoder, in order, and keeps what later plans may feed back.
pub(crate) struct StepRunner<B: Backend> {
    model: Pipeline<B>,
    geometry: Geometry,
    batch: Batch,
    /// Outputs of the last steps. A plan names steps that were in flight when it was made, and may be submitted after
    /// they were collected.
    kept: VecDeque<(Ticket, Vec<RowOutput>)>,
}

impl<B: Backend> StepRunner<B> {
    pub fn new(model: Pipeline<B>, geometry: Geometry) -> StepRunner<B> {
        StepRunner { model, geometry, batch: Batch::default(), kept: VecDeque::new() }
    }

    /// Sizes that plans must keep.
    pub fn geometry(&self) -> Geometry {
        self.geometry
    }

    /// The ranks of this process.
    pub fn model(&self) -> &Ranks<B> {
        &self.model.ranks
    }

    /// The same, to drive them step by step.
    pub fn model_mut(&mut self) -> &mut Ranks<B> {
        &mut self.model.ranks
    }

    /// Makes the calling thread the one that runs steps.
    pub fn settle(&self) {
        self.model.ranks.settle();
    }

    /// Computes a step. A row that cannot be computed fails alone; an error is that of a device or another process.
    pub fn run(&mut self, ticket: Ticket, plan: &StepPlan) -> Result<StepOutput, PipelineError> {
        let started = Instant::now();
        self.model.copy_blocks(&plan.copies)?;
        let mut rows = self.fill_batch(plan);
        let mut scores = Vec::new();
        if !self.batch.is_empty() {
            let histories: Vec<Vec<TokenId>> = plan.rows.iter().map(|row| self.history(row)).collect();
            let masks = self.forward(plan, &histories)?;
            scores = self.draw(plan, &histories, &masks, &mut rows);
        }
        self.keep(ticket, &rows);
        Ok(StepOutput { rows, scores, busy_seconds: started.elapsed().as_secs_f64() })
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
        places::check(&self.geometry, row.first_position, row.tokens.len(), &row.blocks)?;
        for &token in &row.tokens {
            self.resolve(token)?;
        }
        let tokens = row.tokens.iter().filter_map(|&token| resolve(&self.kept, token).ok());
        let leading = row.score.as_ref().map_or(0, |score| score.targets.len());
        let logits = Logits { leading, last: row.sample.is_some() };
        self.batch.push(tokens, row.first_position, &row.blocks, logits);
        Ok(())
    }

    /// The token, if it is known by now.
    pub fn resolve(&self, token: InputToken) -> Result<TokenId, String> {
        let id = resolve(&self.kept, token)?;
        places::check_token(&self.geometry, id).map(|()| id)
    }

    /// Computes the batch; what constraints allow is found meanwhile.
    fn forward(&mut self, plan: &StepPlan, histories: &[Vec<TokenId>]) -> Result<Vec<Mask>, PipelineError> {
        if plan.rows.iter().all(|row| constraint(row).is_none()) {
            self.model.forward(&self.batch)?;
            return Ok(plan.rows.iter().map(|_| Ok(None)).collect());
        }
        thread::scope(|scope| {
            let masks =
                scope.spawn(|| plan.rows.iter().zip(histories).map(|(row, history)| mask(row, history)).collect());
            self.model.forward(&self.batch)?;
            let panicked = |_| plan.rows.iter().map(|_| Err("the constraint panicked".into())).collect();
            Ok(masks.join().unwrap_or_else(panicked))
        })
    }

    /// Draws the tokens of the rows that are in the batch and sample, and scores what is to be scored.
    fn draw(
        &mut self,
        plan: &StepPlan,
        histories: &[Vec<TokenId>],
        masks: &[Mask],
        outputs: &mut [RowOutput],
    ) -> Vec<RowScores> {
        let computed = |index: &usize| outputs[*index] == RowOutput::Computed;
        let indices: Vec<usize> = (0..plan.rows.len()).filter(computed).collect();
        let allowed = |index: usize| masks[index].as_ref().ok().and_then(Option::as_ref);
        let tasks_of = |&index: &usize| tasks(&plan.rows[index], &histories[index], allowed(index));
        let tasks: Vec<RowTask<'_>> = indices.iter().flat_map(tasks_of).collect();
        let mut results = self.model.sample(&tasks).into_iter();
        let mut scores = Vec::new();
        for &index in &indices {
            let results = results.by_ref().take(plan.rows[index].logit_count());
            let outcome = outcome(index as u32, &plan.rows[index], results).map_err(|error| error.to_string());
            match masks[index].as_ref().map_err(String::clone).and(outcome) {
                Ok((output, row_scores)) => {
                    outputs[index] = output;
                    scores.extend(row_scores);
                }
                Err(error) => outputs[index] = RowOutput::Failed(error),
            }
        }
        scores
    }

    /// The tokens before the one that a row draws, where drawing depends on them.
    fn history(&self, row: &PlanRow) -> Vec<TokenId> {
        let Some(history) = row.sample.as_ref().and_then(|sample| sample.history.as_ref()) else { return Vec::new() };
        let sampled = row.tokens.last().filter(|token| matches!(token, InputToken::SampledBy { .. }));
        let sampled = sampled.and_then(|&token| resolve(&self.kept, token).ok());
        history.tokens.iter().copied().chain(sampled).collect()
    }

    /// Keeps what a step gave for the plans that may name it.
    pub fn keep(&mut self, ticket: Ticket, rows: &[RowOutput]) {
        if self.kept.len() == MAX_IN_FLIGHT {
            self.kept.pop_front();
        }
        self.kept.push_back((ticket, rows.to_vec()));
    }
}

/// What to do with each of a row's logits, in their order.
fn tasks<'a>(
    row: &'a PlanRow,
    history: &'a [TokenId],
    allowed: Option<&'a TokenSet>,
) -> impl Iterator<Item = RowTask<'a>> {
    let scored = row.score.iter().flat_map(|score| score.targets.iter().map(|&target| (target, score.top)));
    let scored = scored.map(|(target, top)| RowTask::Score { target, top });
    scored.chain(draw_of(row, history, allowed).map(RowTask::Draw))
}

/// The tokens that a row's constraint allows; `None` without one.
type Mask = Result<Option<TokenSet>, String>;

fn constraint(row: &PlanRow) -> Option<&dyn Constraint> {
    row.sample.as_ref()?.constraint.as_deref()
}

fn mask(row: &PlanRow, history: &[TokenId]) -> Mask {
    let Some(constraint) = constraint(row) else { return Ok(None) };
    constraint.allowed(&history[prompt_tokens(row)..]).map(Some)
}

/// Leading tokens of a row's history that are its prompt.
fn prompt_tokens(row: &PlanRow) -> usize {
    let history = row.sample.as_ref().and_then(|sample| sample.history.as_ref());
    history.map_or(0, |history| history.prompt_tokens)
}

fn draw_of<'a>(row: &'a PlanRow, history: &'a [TokenId], allowed: Option<&'a TokenSet>) -> Option<Draw<'a>> {
    let sample = row.sample.as_ref()?;
    let (prompt, generated) = history.split_at(prompt_tokens(row));
    let position = row.first_position + row.tokens.len() as u32;
    let (sampling, banned, logprobs) = (sample.sampling.as_ref(), sample.banned.as_slice(), sample.logprobs);
    Some(Draw { sampling, banned, prompt, generated, allowed, position, logprobs })
}

/// What a row gives, from what each of its logits gave.
fn outcome(
    index: u32,
    row: &PlanRow,
    results: impl Iterator<Item = Result<Drawn, SampleError>>,
) -> Result<(RowOutput, Option<RowScores>), SampleError> {
    let mut results = results.collect::<Result<Vec<Drawn>, SampleError>>()?;
    let drawn = row.sample.as_ref().and_then(|_| results.pop());
    let output = drawn.as_ref().map_or(RowOutput::Computed, |drawn| RowOutput::Sampled(drawn.token));
    let sampled = drawn.and_then(|drawn| drawn.logprobs);
    let prompt: Vec<_> = results.into_iter().filter_map(|scored| scored.logprobs).collect();
    let told = sampled.is_some() || !prompt.is_empty();
    Ok((output, told.then_some(RowScores { row: index, prompt, sampled })))
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
