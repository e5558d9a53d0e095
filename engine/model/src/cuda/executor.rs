//! The executor on GPUs. It issues a step, and the next one before the first has ended, while the host does other work.
//!
//! A token that a step in flight samples becomes input of the next step on the device, without the host. If sampling
//! depends on earlier tokens (penalties, masks), the next step is computed up to its logits, and its draws are issued
//! when those tokens are known. Draws that only the host's sampler can make are made when the step is collected, or
//! before the next step overwrites its logits.

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

/// State of a step's draws.
enum DrawState {
    /// They are not issued yet: they may depend on tokens that an earlier step samples.
    Waiting,
    /// The host makes them, at these sampling positions and with these token masks.
    OnHost { positions: Vec<Vec<SamplingPosition>>, masks: Vec<Vec<Mask>> },
    /// They are issued on the device; with the token masks of each row.
    OnDevice { masks: Vec<Vec<Mask>> },
}

/// A step that the device computes.
struct Running {
    buffer: usize,
    /// The planned rows.
    plan: Vec<PlanRow>,
    rows: Vec<RowOutput>,
    /// The range of each row in the step's logits; empty for a row that is not computed.
    logits: Vec<Range<usize>>,
    draws: DrawState,
    /// Rows with an input token that an earlier step in flight samples, and the token.
    awaited: Vec<(usize, InputToken)>,
    started: Instant,
    patience: Duration,
    /// How long token masks were waited for.
    waited: Duration,
}

impl InFlight {
    /// Whether its logits are still needed for draws.
    fn needs_logits(&self) -> bool {
        matches!(&self.state, State::Running(running) if !matches!(running.draws, DrawState::OnDevice { .. }))
    }
}

impl Running {
    /// Whether its draws depend on tokens that an earlier step samples.
    fn awaits_history(&self) -> bool {
        let reads = |row: &PlanRow| row.sample.as_ref().is_some_and(|sample| sample.history.is_some());
        self.awaited.iter().any(|(row, _)| reads(&self.plan[*row]))
    }
}

/// The input tokens of a step that earlier steps in flight sample; collected while the batch is filled.
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

    /// Puts every row that can be computed into the batch.
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

    /// The buffer and the index of the draw by which a step in flight samples `token`; `None` if no step in flight
    /// does.
    fn drawn_by(&self, token: InputToken) -> Result<Option<(usize, usize)>, String> {
        let InputToken::SampledBy { ticket, row } = token else { return Ok(None) };
        let step = self.in_flight.iter().find(|step| step.ticket == ticket);
        let Some(InFlight { state: State::Running(running), .. }) = step else { return Ok(None) };
        let planned = running.plan.get(row as usize).filter(|planned| planned.sample.is_some());
        let logits = running.logits.get(row as usize).filter(|logits| !logits.is_empty());
        match (planned, logits) {
            // The last accepted token is known only after verification.
            (Some(planned), _) if planned.draft().is_some_and(|draft| !draft.is_empty()) => {
                Err(format!("its input token follows the guesses in row {row} of step {}", ticket.0))
            }
            (Some(_), Some(logits)) => Ok(Some((running.buffer, logits.end - 1))),
            _ => {
                Err(format!("its input token was to be sampled in row {row} of step {}, which sampled none", ticket.0))
            }
        }
    }

    /// Issues the draws of a step on the device, unless they depend on tokens that are not known yet, or the host has
    /// to make them.
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

    /// Finishes the steps in flight if one of them still needs its logits, which the next step overwrites.
    fn free_logits(&mut self) -> Result<(), ExecutorError> {
        match self.in_flight.iter().rposition(InFlight::needs_logits) {
            Some(last) => (0..=last).try_for_each(|index| self.finish(index)),
            None => Ok(()),
        }
    }

    /// Waits for a step in flight and makes the draws that are left to the host. Earlier steps are finished already.
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

    /// Ends a step with the outputs of its rows.
    fn end(&mut self, index: usize, mut rows: Vec<RowOutput>, mut scores: Vec<RowLogprobs>) {
        let Some(InFlight { ticket, state: State::Running(running) }) = self.in_flight.get(index) else { return };
        // The device is assumed to compute for two thirds of the longest wait for masks; only the rest counts as idle.
        let (started, waited) = (running.started, running.waited.saturating_sub(running.patience * 2 / 3));
        // A row whose input token was not sampled has no valid output.
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
        // Draws that depended on its tokens can be issued now.
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

/// The range of each row in the step's logits.
fn logits(plan: &[PlanRow], rows: &[RowOutput]) -> Vec<Range<usize>> {
    let mut end = 0;
    let of_row = |(row, output): (&PlanRow, &RowOutput)| {
        let first = end;
        end += if *output == RowOutput::Computed { row.logit_count() } else { 0 };
        first..end
    };
    plan.iter().zip(rows).map(of_row).collect()
}

/// The drawn token, or why none was drawn.
fn token(drawn: Drawn) -> Result<Drawn, SequenceFailure> {
    match drawn.token {
        NOT_FINITE => Err(SequenceFailure::Corrupted("the model gave a logit that is not finite".into())),
        ALL_BANNED => Err(SampleError::AllBanned.into()),
        _ => Ok(drawn),
    }
}
