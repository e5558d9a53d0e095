//! The executor on GPUs: a step is issued and the next one after it, while the host does something else.
//!
//! A token that a step in flight draws is the next step's input without the host. Where draws hang on the tokens before them
//! (penalties, masks), the next step is computed up to its logits, and its draws are issued as soon as those tokens are known.
//! What only the host's sampler does is done when its step is collected, or before the next one takes its logits' place.

use std::collections::VecDeque;
use std::convert::identity;
use std::ops::Range;
use std::time::{Duration, Instant};

use windlass_engine_core::draft::DraftTree;
use windlass_engine_core::executor::{Executor, ExecutorError, Geometry, MAX_IN_FLIGHT, Prepared};
use windlass_engine_core::plan::{
    InputToken, PlanRow, RowLogprobs, RowOutput, SequenceFailure, StepOutput, StepPlan, Ticket,
};
use windlass_engine_core::request::TokenId;
use windlass_kernels::cuda::ops::{ALL_BANNED, NOT_FINITE};

use super::group::CudaDecoder;
use super::rank::SampledInput;
use super::sampler::{self, SamplingTask};
use crate::batch::bounds;
use crate::batch::{Batch, Logits};
use crate::decoder::Model;
use crate::executor::{check, check_oldest};
use crate::sampler::{Drawn, SampleError};
use crate::step::sampling_positions::{Mask, SamplingPosition, masks};
use crate::step::{StepRunner, tasks, uncomputable};

/// Computes steps on one GPU, or on several that share the model.
pub struct CudaExecutor {
    runner: StepRunner<CudaDecoder>,
    next_ticket: u64,
    in_flight: VecDeque<InFlight>,
    batch: Batch,
}

/// A step that was submitted and not collected.
struct InFlight {
    ticket: Ticket,
    state: State,
}

enum State {
    Running(Running),
    Done(StepOutput),
}

/// How far the draws of a step are.
enum DrawState {
    /// They hang on tokens that a step before draws.
    Waiting,
    /// The host makes them: where each row draws, and what its constraint allows there.
    OnHost { positions: Vec<Vec<SamplingPosition>>, masks: Vec<Vec<Mask>> },
    /// The device has been told to make them; with what each row's constraint allows.
    OnDevice { masks: Vec<Vec<Mask>> },
}

/// A step that the device computes.
struct Running {
    buffer: usize,
    /// As they were planned.
    plan: Vec<PlanRow>,
    rows: Vec<RowOutput>,
    /// Each row's of the step's logits; none of a row that is not computed.
    logits: Vec<Range<usize>>,
    draws: DrawState,
    /// Rows whose token another step in flight was to draw.
    awaited: Vec<(usize, InputToken)>,
    started: Instant,
    patience: Duration,
    /// How long it was waited for what constraints allow.
    waited: Duration,
}

impl InFlight {
    /// Whether its draws are still to be made of its logits.
    fn needs_logits(&self) -> bool {
        matches!(&self.state, State::Running(running) if !matches!(running.draws, DrawState::OnDevice { .. }))
    }
}

impl Running {
    /// Whether its draws hang on tokens that a step before it draws.
    fn awaits_history(&self) -> bool {
        let reads = |row: &PlanRow| row.sample.as_ref().is_some_and(|sample| sample.history.is_some());
        self.awaited.iter().any(|(row, _)| reads(&self.plan[*row]))
    }
}

/// A step's tokens that come from another one, while its batch is filled.
#[derive(Default)]
struct AwaitedTokens {
    sampled_inputs: Vec<SampledInput>,
    rows: Vec<(usize, InputToken)>,
}

impl CudaExecutor {
    pub(super) fn new(runner: StepRunner<CudaDecoder>) -> CudaExecutor {
        CudaExecutor { runner, next_ticket: 0, in_flight: VecDeque::new(), batch: Batch::default() }
    }

    /// The decoder.
    pub fn decoder(&self) -> &CudaDecoder {
        self.runner.model()
    }

    /// Issues a step up to its logits.
    fn issue(&mut self, ticket: Ticket, plan: StepPlan) -> Result<Running, ExecutorError> {
        let started = Instant::now();
        let buffer = (ticket.0 % MAX_IN_FLIGHT as u64) as usize;
        self.runner.move_blocks(&plan.moves).map_err(failed)?;
        let mut awaited = AwaitedTokens::default();
        let rows = self.fill_batch(&plan, &mut awaited);
        let logits = logits(&plan.rows, &rows);
        let CudaExecutor { runner, batch, .. } = self;
        runner.model_mut().step(batch, awaited.sampled_inputs).map_err(failed)?;
        let (draws, patience, waited) = (DrawState::Waiting, plan.mask_timeout, Duration::ZERO);
        Ok(Running { buffer, plan: plan.rows, rows, logits, draws, awaited: awaited.rows, started, patience, waited })
    }

    /// Puts every sound row into the batch.
    fn fill_batch(&mut self, plan: &StepPlan, awaited: &mut AwaitedTokens) -> Vec<RowOutput> {
        self.batch.clear();
        let fill = |(index, row)| self.fill_row(index, row, awaited).map_or_else(identity, |()| RowOutput::Computed);
        plan.rows.iter().enumerate().map(fill).collect()
    }

    fn fill_row(&mut self, index: usize, row: &PlanRow, awaited: &mut AwaitedTokens) -> Result<(), RowOutput> {
        self.runner.check(row).map_err(RowOutput::Failed)?;
        let (mut tokens, mut sampled_inputs): (Vec<TokenId>, Vec<SampledInput>) =
            (Vec::with_capacity(row.tokens.len()), Vec::new());
        for &token in &row.tokens {
            match self.drawn_by(token).map_err(uncomputable)? {
                Some((buffer, draw)) => {
                    sampled_inputs.push(SampledInput { token: self.batch.tokens().len() + tokens.len(), buffer, draw });
                    awaited.rows.push((index, token));
                    tokens.push(0);
                }
                None => tokens.push(self.runner.batch_builder().resolve(token)?),
            }
        }
        let none = DraftTree::default();
        let draft = row.draft().unwrap_or(&none);
        let geometry = self.runner.batch_builder().geometry();
        let checked = draft.nodes().iter().try_for_each(|node| bounds::check_token(geometry, node.token));
        checked.map_err(uncomputable)?;
        awaited.sampled_inputs.extend(sampled_inputs);
        let leading = row.score.as_ref().map_or(0, |score| score.targets.len());
        let logits = Logits { leading, trailing: usize::from(row.sample.is_some()) };
        self.batch.push_drafted(tokens, draft, row.first_position, &row.blocks, logits);
        Ok(())
    }

    /// Where a step in flight draws a token: the step's turn, and which of its draws it is.
    fn drawn_by(&self, token: InputToken) -> Result<Option<(usize, usize)>, String> {
        let InputToken::SampledBy { ticket, row } = token else { return Ok(None) };
        let step = self.in_flight.iter().find(|step| step.ticket == ticket);
        let Some(InFlight { state: State::Running(running), .. }) = step else { return Ok(None) };
        let planned = running.plan.get(row as usize).filter(|planned| planned.sample.is_some());
        let logits = running.logits.get(row as usize).filter(|logits| !logits.is_empty());
        match (planned, logits) {
            // Which of several is the last is known once all are.
            (Some(planned), _) if planned.draft().is_some_and(|draft| !draft.is_empty()) => {
                Err(format!("its input token follows the guesses in row {row} of step {}", ticket.0))
            }
            (Some(_), Some(logits)) => Ok(Some((running.buffer, logits.end - 1))),
            _ => {
                Err(format!("its input token was to be sampled in row {row} of step {}, which sampled none", ticket.0))
            }
        }
    }

    /// Has the device make a step's draws, unless they hang on tokens that are not known yet, or are the host's.
    fn issue_draws(&mut self, index: usize) -> Result<(), ExecutorError> {
        let is_first = self.in_flight.iter().take(index).all(|step| matches!(step.state, State::Done(_)));
        let CudaExecutor { runner, in_flight, .. } = self;
        let Some(InFlight { state: State::Running(running), .. }) = in_flight.get_mut(index) else { return Ok(()) };
        if !matches!(running.draws, DrawState::Waiting) || (!is_first && running.awaits_history()) {
            return Ok(());
        }
        let positions = runner.positions(&running.plan);
        let asked = Instant::now();
        let masks = masks(&running.plan, &positions, asked + running.patience);
        running.waited = asked.elapsed();
        let tasks = tasks(&running.plan, &positions, &masks, &running.rows);
        let sampling_tasks = sampler::sampling_tasks(&tasks, runner.model().vocabulary());
        running.draws = match sampling_tasks.iter().all(SamplingTask::is_on_device) {
            false => DrawState::OnHost { positions, masks },
            true => {
                runner.model_mut().draw(running.buffer, sampling_tasks).map_err(failed)?;
                DrawState::OnDevice { masks }
            }
        };
        Ok(())
    }

    /// Finishes the steps in flight if one of them still needs its logits, whose place the next one takes.
    fn free_logits(&mut self) -> Result<(), ExecutorError> {
        match self.in_flight.iter().rposition(InFlight::needs_logits) {
            Some(last) => (0..=last).try_for_each(|index| self.finish(index)),
            None => Ok(()),
        }
    }

    /// Waits for a step in flight, and makes the draws that are the host's; those before it are finished.
    fn finish(&mut self, index: usize) -> Result<(), ExecutorError> {
        self.issue_draws(index)?;
        let CudaExecutor { runner, in_flight, .. } = self;
        let Some(InFlight { state: State::Running(running), .. }) = in_flight.get(index) else { return Ok(()) };
        let mut rows = running.rows.clone();
        let scores = match &running.draws {
            DrawState::Waiting => unreachable!("all before it are finished"),
            DrawState::OnHost { positions, masks } => runner.draw(&running.plan, positions, masks, &mut rows),
            DrawState::OnDevice { masks } => {
                let logits = running.logits.last().map_or(0, |logits| logits.end);
                let drawn = runner.model_mut().drawn(running.buffer, logits).map_err(failed)?.into_iter().map(token);
                runner.verify(&running.plan, masks, drawn, &mut rows)
            }
        };
        self.end(index, rows, scores.map_err(failed)?);
        Ok(())
    }

    /// Ends a step with what came of its rows.
    fn end(&mut self, index: usize, mut rows: Vec<RowOutput>, mut scores: Vec<RowLogprobs>) {
        let Some(InFlight { ticket, state: State::Running(running) }) = self.in_flight.get(index) else { return };
        // The device computes for about two thirds of the longest that masks are waited for.
        let (started, waited) = (running.started, running.waited.saturating_sub(running.patience * 2 / 3));
        // What followed a token that did not come is worth nothing.
        for &(row, token) in &running.awaited {
            if let Err(output) = self.runner.batch_builder().resolve(token) {
                rows[row] = output;
            }
        }
        scores.retain(|told| match rows[told.row as usize] {
            RowOutput::Failed(_) => false,
            RowOutput::Deferred => told.sampled.is_empty(),
            _ => true,
        });
        let busy_seconds = self.runner.ended(started).saturating_sub(waited).as_secs_f64();
        self.runner.keep(*ticket, &rows);
        self.in_flight[index].state = State::Done(StepOutput { rows, scores, busy_seconds });
    }
}

impl Executor for CudaExecutor {
    fn geometry(&self) -> Geometry {
        *self.runner.batch_builder().geometry()
    }

    fn submit(&mut self, plan: StepPlan) -> Result<Ticket, ExecutorError> {
        check(&self.geometry(), &plan, self.in_flight.len(), MAX_IN_FLIGHT)?;
        self.free_logits()?;
        assert!(
            !self.in_flight.iter().any(InFlight::needs_logits),
            "logits that nobody has read would be written over"
        );
        let ticket = Ticket(self.next_ticket);
        let state = State::Running(self.issue(ticket, plan)?);
        self.next_ticket += 1;
        self.in_flight.push_back(InFlight { ticket, state });
        self.issue_draws(self.in_flight.len() - 1)?;
        Ok(ticket)
    }

    fn collect(&mut self, ticket: Ticket) -> Result<StepOutput, ExecutorError> {
        check_oldest(ticket, self.in_flight.front().map(|step| step.ticket))?;
        self.finish(0)?;
        let Some(InFlight { state: State::Done(output), .. }) = self.in_flight.pop_front() else {
            return Err(ExecutorError("the step was not finished".into()));
        };
        // What hung on its tokens does so no longer.
        self.issue_draws(0)?;
        Ok(output)
    }

    fn prepare(&mut self) -> Result<Prepared, ExecutorError> {
        self.runner.model_mut().prepare().map_err(failed)
    }

    fn hold_kv(&mut self, held: bool) -> Result<(), ExecutorError> {
        self.runner.hold_kv(held).map_err(failed)
    }

    fn weights_to_move(&self) -> Option<u64> {
        self.decoder().weights_to_move()
    }

    fn hold_weights(&mut self, held: bool) -> Result<(), ExecutorError> {
        self.runner.model_mut().hold_weights(held).map_err(failed)
    }
}

fn failed(error: impl std::fmt::Display) -> ExecutorError {
    ExecutorError(error.to_string())
}

/// Which of a step's logits are whose, by what is computed of its rows.
fn logits(plan: &[PlanRow], rows: &[RowOutput]) -> Vec<Range<usize>> {
    let mut end = 0;
    let of_row = |(row, output): (&PlanRow, &RowOutput)| {
        let first = end;
        end += if *output == RowOutput::Computed { row.logit_count() } else { 0 };
        first..end
    };
    plan.iter().zip(rows).map(of_row).collect()
}

/// What the device drew, or why it drew nothing.
fn token(drawn: Drawn) -> Result<Drawn, SequenceFailure> {
    match drawn.token {
        NOT_FINITE => Err(SequenceFailure::Corrupted("the model gave a logit that is not finite".into())),
        ALL_BANNED => Err(SampleError::AllBanned.into()),
        _ => Ok(drawn),
    }
}
