//! The executor on a GPU: a step is issued and the next one after it, while the host does something else.
//!
//! A token that a step in flight draws is the next step's input without the host. A step that asks for what only the
//! host's sampler does (penalties, masks, log probabilities) is computed to its end when it is submitted.

use std::collections::VecDeque;
use std::time::Instant;

use windlass_engine_core::executor::{Executor, ExecutorError, Geometry, MAX_IN_FLIGHT};
use windlass_engine_core::plan::{InputToken, PlanRow, RowOutput, SampleRow, StepOutput, StepPlan, Ticket};
use windlass_engine_core::request::{Sampling, TokenId};
use windlass_engine_core::sampling::Penalties;
use windlass_kernels::cuda::ops::{ALL_BANNED, NOT_FINITE};

use super::draws::RowDraw;
use super::{CudaBackend, Feed};
use crate::batch::{Batch, Logits};
use crate::executor::check_size;
use crate::places;
use crate::step::StepRunner;

/// Computes steps on one GPU.
pub struct CudaExecutor {
    runner: StepRunner<CudaBackend>,
    next_ticket: u64,
    flights: VecDeque<Flight>,
    batch: Batch,
}

/// A step that was submitted and not collected.
struct Flight {
    ticket: Ticket,
    state: State,
}

enum State {
    Issued(Issued),
    Done(StepOutput),
}

/// A step that the device computes.
struct Issued {
    turn: usize,
    rows: Vec<RowOutput>,
    /// The rows that draw, in the order of their draws.
    drawing: Vec<usize>,
    /// Rows whose token another step in flight was to draw: which step, and which of its rows.
    fed: Vec<(usize, Ticket, u32)>,
    started: Instant,
}

impl CudaExecutor {
    pub(crate) fn new(runner: StepRunner<CudaBackend>) -> CudaExecutor {
        CudaExecutor { runner, next_ticket: 0, flights: VecDeque::new(), batch: Batch::default() }
    }

    /// The device.
    pub fn backend(&self) -> &CudaBackend {
        self.runner.model().backend()
    }

    /// Issues a step.
    fn issue(&mut self, ticket: Ticket, plan: &StepPlan) -> Result<Issued, ExecutorError> {
        let started = Instant::now();
        let turn = (ticket.0 % MAX_IN_FLIGHT as u64) as usize;
        let (mut feeds, mut fed) = (Vec::new(), Vec::new());
        self.batch.clear();
        let rows: Vec<RowOutput> = plan
            .rows
            .iter()
            .enumerate()
            .map(|(index, row)| match self.place(index, row, &mut feeds, &mut fed) {
                Ok(()) => RowOutput::Computed,
                Err(why) => RowOutput::Failed(why),
            })
            .collect();
        let draws = |index: &usize| plan.rows[*index].sample.is_some() && rows[*index] == RowOutput::Computed;
        let drawing: Vec<usize> = (0..rows.len()).filter(draws).collect();
        let row_draws: Vec<RowDraw<'_>> = drawing.iter().filter_map(|&index| row_draw(&plan.rows[index])).collect();
        let decoder = self.runner.model_mut().first_mut();
        decoder.copy_blocks(&plan.copies);
        decoder.device().0.feed(feeds);
        if !self.batch.is_empty() {
            decoder.forward(&self.batch);
        }
        let (backend, work) = decoder.device();
        backend.draw(work, turn, &row_draws);
        backend.check().map_err(failed)?;
        Ok(Issued { turn, rows, drawing, fed, started })
    }

    /// Puts a row into the batch.
    fn place(
        &mut self,
        index: usize,
        row: &PlanRow,
        feeds: &mut Vec<Feed>,
        fed: &mut Vec<(usize, Ticket, u32)>,
    ) -> Result<(), String> {
        places::check(&self.geometry(), row.first_position, row.tokens.len(), &row.blocks)?;
        let mut tokens: Vec<TokenId> = Vec::with_capacity(row.tokens.len());
        for &token in &row.tokens {
            match self.drawn_by(token)? {
                Some((ticket, source, turn, draw)) => {
                    feeds.push(Feed { token: self.batch.tokens().len() + tokens.len(), turn, draw });
                    fed.push((index, ticket, source));
                    tokens.push(0);
                }
                None => tokens.push(self.runner.resolve(token)?),
            }
        }
        let logits = Logits { leading: 0, last: row.sample.is_some() };
        self.batch.push(tokens, row.first_position, &row.blocks, logits);
        Ok(())
    }

    /// The step in flight that draws a token: its ticket, row and turn, and which of its draws it is.
    fn drawn_by(&self, token: InputToken) -> Result<Option<(Ticket, u32, usize, usize)>, String> {
        let InputToken::SampledBy { ticket, row } = token else { return Ok(None) };
        let flight = self.flights.iter().find(|flight| flight.ticket == ticket);
        let Some(Flight { state: State::Issued(issued), .. }) = flight else { return Ok(None) };
        match issued.drawing.iter().position(|&drawing| drawing == row as usize) {
            Some(draw) => Ok(Some((ticket, row, issued.turn, draw))),
            None => Err(format!("its input token was to be sampled in row {row} of step {}, which sampled none", ticket.0)),
        }
    }

    /// Waits for the steps in flight.
    fn finish_all(&mut self) -> Result<(), ExecutorError> {
        for index in 0..self.flights.len() {
            self.finish(index)?;
        }
        Ok(())
    }

    /// Waits for a step in flight; those before it are finished.
    fn finish(&mut self, index: usize) -> Result<(), ExecutorError> {
        let Flight { ticket, state } = &self.flights[index];
        let (ticket, State::Issued(issued)) = (*ticket, state) else { return Ok(()) };
        let tokens = self.backend().drawn(issued.turn, issued.drawing.len()).map_err(failed)?;
        let mut rows = issued.rows.clone();
        for (&row, token) in issued.drawing.iter().zip(tokens) {
            rows[row] = output(token);
        }
        for &(row, source, source_row) in &issued.fed {
            let token = InputToken::SampledBy { ticket: source, row: source_row };
            if let Err(why) = self.runner.resolve(token) {
                rows[row] = RowOutput::Failed(why);
            }
        }
        let busy_seconds = issued.started.elapsed().as_secs_f64();
        self.runner.keep(ticket, &rows);
        self.flights[index].state = State::Done(StepOutput { rows, scores: Vec::new(), busy_seconds });
        Ok(())
    }
}

impl Executor for CudaExecutor {
    fn geometry(&self) -> Geometry {
        self.runner.geometry()
    }

    fn submit(&mut self, plan: StepPlan) -> Result<Ticket, ExecutorError> {
        check_size(&self.geometry(), &plan, self.flights.len())?;
        let ticket = Ticket(self.next_ticket);
        let state = match plan.rows.iter().all(is_plain) {
            true => State::Issued(self.issue(ticket, &plan)?),
            false => {
                self.finish_all()?;
                let output = self.runner.run(ticket, &plan).map_err(|error| ExecutorError(error.to_string()))?;
                self.backend().settle().map_err(failed)?;
                State::Done(output)
            }
        };
        self.next_ticket += 1;
        self.flights.push_back(Flight { ticket, state });
        Ok(ticket)
    }

    fn collect(&mut self, ticket: Ticket) -> Result<StepOutput, ExecutorError> {
        match self.flights.front() {
            Some(oldest) if oldest.ticket == ticket => {}
            oldest => {
                let oldest = oldest.map(|flight| flight.ticket);
                return Err(ExecutorError(format!("{ticket:?} was collected; the oldest is {oldest:?}")));
            }
        }
        self.finish(0)?;
        match self.flights.pop_front() {
            Some(Flight { state: State::Done(output), .. }) => Ok(output),
            _ => Err(ExecutorError("the step was not finished".into())),
        }
    }
}

fn failed(error: impl std::fmt::Display) -> ExecutorError {
    ExecutorError(error.to_string())
}

fn output(token: u32) -> RowOutput {
    match token {
        NOT_FINITE => RowOutput::Failed("the model gave a logit that is not finite".into()),
        ALL_BANNED => RowOutput::Failed("every token is banned".into()),
        token => RowOutput::Sampled(token),
    }
}

fn row_draw(row: &PlanRow) -> Option<RowDraw<'_>> {
    let sampling = row.sample.as_ref()?.sampling.as_ref();
    Some((sampling, row.first_position + row.tokens.len() as u32))
}

/// Whether the device draws this row's token by itself.
fn is_plain(row: &PlanRow) -> bool {
    let sample = row.sample.as_ref();
    row.score.is_none() && sample.is_none_or(|SampleRow { sampling, banned, history, constraint, logprobs }| {
        let Sampling { typical_p, penalties, logit_bias, bad_words, allowed_tokens, .. } = sampling.as_ref();
        let alone = banned.is_empty() && history.is_none() && constraint.is_none() && logprobs.is_none();
        let unedited = logit_bias.is_empty() && bad_words.is_empty() && allowed_tokens.is_empty();
        alone && unedited && *penalties == Penalties::NONE && *typical_p >= 1.0
    })
}
