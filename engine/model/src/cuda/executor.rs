//! The executor on GPUs: a step is issued and the next one after it, while the host does something else.
//!
//! A token that a step in flight draws is the next step's input without the host. A step whose draws hang on what the host
//! knows (penalties, masks), or that tells of a prompt, is computed to its end when it is submitted.

use std::collections::VecDeque;
use std::time::Instant;

use windlass_engine_core::draft::DraftTree;
use windlass_engine_core::executor::{Executor, ExecutorError, Geometry, MAX_IN_FLIGHT};
use windlass_engine_core::plan::{
    InputToken, PlanRow, RowOutput, RowScores, SampleRow, SequenceFailure, StepOutput, StepPlan, Ticket,
};
use windlass_engine_core::request::{Sampling, TokenId};
use windlass_engine_core::sampling::{Penalties, TokenLogprobs};
use windlass_kernels::cuda::ops::{ALL_BANNED, NOT_FINITE};

use super::decoder::CudaDecoder;
use super::draws::{RowDraw, tells};
use super::rank::Feed;
use crate::batch::{Batch, Logits};
use crate::bounds;
use crate::executor::{check, check_oldest};
use crate::sampler::{Drawn, SampleError};
use crate::step::{StepRunner, uncomputable};

/// Computes steps on one GPU, or on several that share the model.
pub struct CudaExecutor {
    runner: StepRunner<CudaDecoder>,
    next_ticket: u64,
    flights: VecDeque<Flight>,
    batch: Batch,
    /// When the last step came to its end: the device computes one after the other.
    last_end: Option<Instant>,
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
    /// As they were planned.
    plan: Vec<PlanRow>,
    rows: Vec<RowOutput>,
    /// The row of each draw. A row with guesses draws after its last token and after each of them.
    drawing: Vec<usize>,
    /// Rows whose token another step in flight was to draw.
    fed: Vec<(usize, InputToken)>,
    started: Instant,
}

/// A step's tokens that come from another one, while its batch is filled.
#[derive(Default)]
struct Fed {
    feeds: Vec<Feed>,
    rows: Vec<(usize, InputToken)>,
}

impl CudaExecutor {
    pub(super) fn new(runner: StepRunner<CudaDecoder>) -> CudaExecutor {
        CudaExecutor { runner, next_ticket: 0, flights: VecDeque::new(), batch: Batch::default(), last_end: None }
    }

    /// The decoder.
    pub fn decoder(&self) -> &CudaDecoder {
        self.runner.model()
    }

    /// Issues a step.
    fn issue(&mut self, ticket: Ticket, plan: StepPlan) -> Result<Issued, ExecutorError> {
        let started = Instant::now();
        let turn = (ticket.0 % MAX_IN_FLIGHT as u64) as usize;
        plan.moves.iter().try_for_each(|moved| self.runner.move_block(*moved)).map_err(failed)?;
        let mut fed = Fed::default();
        let rows = self.fill_batch(&plan, &mut fed);
        let computed = plan.rows.iter().enumerate().filter(|(index, _)| rows[*index] == RowOutput::Computed);
        let draws = computed.flat_map(|(index, row)| row_draws(row).map(move |draw| (index, draw)));
        let (drawing, draws): (Vec<usize>, Vec<RowDraw>) = draws.unzip();
        let CudaExecutor { runner, batch, .. } = self;
        runner.model_mut().step(batch, fed.feeds, turn, draws).map_err(failed)?;
        Ok(Issued { turn, plan: plan.rows, rows, drawing, fed: fed.rows, started })
    }

    /// Puts every sound row into the batch.
    fn fill_batch(&mut self, plan: &StepPlan, fed: &mut Fed) -> Vec<RowOutput> {
        self.batch.clear();
        let fill = |(index, row)| self.fill_row(index, row, fed).map_or_else(uncomputable, |()| RowOutput::Computed);
        plan.rows.iter().enumerate().map(fill).collect()
    }

    fn fill_row(&mut self, index: usize, row: &PlanRow, fed: &mut Fed) -> Result<(), String> {
        self.runner.check(row)?;
        let (mut tokens, mut feeds): (Vec<TokenId>, Vec<Feed>) = (Vec::with_capacity(row.tokens.len()), Vec::new());
        for &token in &row.tokens {
            match self.drawn_by(token)? {
                Some((turn, draw)) => {
                    feeds.push(Feed { token: self.batch.tokens().len() + tokens.len(), turn, draw });
                    fed.rows.push((index, token));
                    tokens.push(0);
                }
                None => tokens.push(self.runner.resolve(token)?),
            }
        }
        let none = DraftTree::default();
        let draft = row.draft().unwrap_or(&none);
        draft.nodes().iter().try_for_each(|guess| bounds::check_token(self.runner.geometry(), guess.token))?;
        fed.feeds.extend(feeds);
        let logits = if row.sample.is_some() { Logits::LAST } else { Logits::NONE };
        self.batch.push_drafted(tokens, draft, row.first_position, &row.blocks, logits);
        Ok(())
    }

    /// Where a step in flight draws a token: the step's turn, and which of its draws it is.
    fn drawn_by(&self, token: InputToken) -> Result<Option<(usize, usize)>, String> {
        let InputToken::SampledBy { ticket, row } = token else { return Ok(None) };
        let flight = self.flights.iter().find(|flight| flight.ticket == ticket);
        let Some(Flight { state: State::Issued(issued), .. }) = flight else { return Ok(None) };
        let mut draws = (0..issued.drawing.len()).filter(|&draw| issued.drawing[draw] == row as usize);
        match (draws.next(), draws.next()) {
            (Some(draw), None) => Ok(Some((issued.turn, draw))),
            // Which of several is the last is known once all are.
            (Some(_), Some(_)) => Err(format!("its input token follows the guesses in row {row} of step {}", ticket.0)),
            (None, _) => {
                Err(format!("its input token was to be sampled in row {row} of step {}, which sampled none", ticket.0))
            }
        }
    }

    /// Waits for the steps in flight.
    fn finish_all(&mut self) -> Result<(), ExecutorError> {
        (0..self.flights.len()).try_for_each(|index| self.finish(index))
    }

    /// Waits for a step in flight; those before it are finished.
    fn finish(&mut self, index: usize) -> Result<(), ExecutorError> {
        let Some(Flight { ticket, state: State::Issued(issued) }) = self.flights.get(index) else { return Ok(()) };
        let (ticket, mut rows) = (*ticket, issued.rows.clone());
        let drawn = self.decoder().drawn(issued.turn, issued.drawing.len()).map_err(failed)?;
        let (began, end) = (self.last_end.map_or(issued.started, |last| issued.started.max(last)), Instant::now());
        let draws: Vec<(usize, Drawn)> = issued.drawing.iter().copied().zip(drawn).collect();
        let mut scores = Vec::new();
        for draws in draws.chunk_by(|(row, _), (next, _)| row == next) {
            let (row, mut sampled) = (draws[0].0, Vec::new());
            rows[row] = output(&issued.plan[row], draws, &mut sampled).unwrap_or_else(RowOutput::Failed);
            scores.push(RowScores { row: row as u32, prompt: Vec::new(), sampled });
        }
        // What followed a token that did not come is worth nothing.
        for &(row, token) in &issued.fed {
            if let Err(why) = self.runner.resolve(token) {
                rows[row] = uncomputable(why);
            }
        }
        let is_told =
            |told: &RowScores| !told.sampled.is_empty() && !matches!(rows[told.row as usize], RowOutput::Failed(_));
        scores.retain(is_told);
        let busy_seconds = end.duration_since(began).as_secs_f64();
        self.last_end = Some(end);
        self.runner.keep(ticket, &rows);
        self.flights[index].state = State::Done(StepOutput { rows, scores, busy_seconds });
        Ok(())
    }
}

impl Executor for CudaExecutor {
    fn geometry(&self) -> Geometry {
        *self.runner.geometry()
    }

    fn submit(&mut self, plan: StepPlan) -> Result<Ticket, ExecutorError> {
        check(self.runner.geometry(), &plan, self.flights.len())?;
        let ticket = Ticket(self.next_ticket);
        let state = match plan.rows.iter().all(is_drawn_on_device) {
            true => State::Issued(self.issue(ticket, plan)?),
            false => {
                self.finish_all()?;
                State::Done(self.runner.run(ticket, &plan).map_err(failed)?)
            }
        };
        self.next_ticket += 1;
        self.flights.push_back(Flight { ticket, state });
        Ok(ticket)
    }

    fn collect(&mut self, ticket: Ticket) -> Result<StepOutput, ExecutorError> {
        check_oldest(ticket, self.flights.front().map(|flight| flight.ticket))?;
        self.finish(0)?;
        match self.flights.pop_front() {
            Some(Flight { state: State::Done(output), .. }) => Ok(output),
            _ => Err(ExecutorError("the step was not finished".into())),
        }
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

/// What a row gives: the token that was drawn after its last one, or what its guesses are worth. What is told of its tokens goes to
/// `sampled`.
fn output(
    row: &PlanRow,
    draws: &[(usize, Drawn)],
    sampled: &mut Vec<TokenLogprobs>,
) -> Result<RowOutput, SequenceFailure> {
    let mut read = |place: usize| {
        let (_, Drawn { token, logprobs }) = &draws[place];
        sampled.extend(logprobs.clone());
        drawn(*token)
    };
    match row.draft() {
        None => read(0).map(RowOutput::Sampled),
        Some(draft) => {
            let verdict = draft.judge(|guess| read(guess.map_or(0, |guess| guess as usize + 1)))?;
            Ok(RowOutput::Verified(verdict.tokens))
        }
    }
}

fn drawn(token: u32) -> Result<TokenId, SequenceFailure> {
    match token {
        NOT_FINITE => Err(SequenceFailure::Corrupted("the model gave a logit that is not finite".into())),
        ALL_BANNED => Err(SampleError::AllBanned.into()),
        token => Ok(token),
    }
}

/// What decides each of a row's draws, one after each token that gets logits.
fn row_draws(row: &PlanRow) -> impl Iterator<Item = RowDraw> {
    let first = row.first_position + row.tokens.len() as u32;
    row.sample.iter().flat_map(move |sample| {
        let positions = first..=first + sample.draft.len() as u32;
        positions.map(move |position| RowDraw::new(&sample.sampling, position, sample.logprobs))
    })
}

/// Whether the device draws this row's tokens by itself.
fn is_drawn_on_device(row: &PlanRow) -> bool {
    let sample = row.sample.as_ref();
    row.score.is_none()
        && sample.is_none_or(|SampleRow { sampling, banned, history, constraint, logprobs, draft: _ }| {
            let Sampling { typical_p, penalties, logit_bias, bad_words, allowed_tokens, .. } = sampling.as_ref();
            let alone = banned.is_empty() && history.is_none() && constraint.is_none() && logprobs.is_none_or(tells);
            let unedited = logit_bias.is_empty() && bad_words.is_empty() && allowed_tokens.is_empty();
            alone && unedited && *penalties == Penalties::NONE && *typical_p >= 1.0
        })
}
