//! An executor without a model: time comes from a formula, tokens from a hash.
//!
//! In place of K and V it keeps in each block one state per token, which depends on all tokens before it; and a
//! sampled token depends on every block that its row names. So a token is a function of its sequence alone, whatever
//! the batch, the chunks and the preemptions, and a scheduler that reused a block too early would change the text.
//! There are no logits: of the sampling parameters it knows the seed, greedy sampling, and which tokens are allowed.
//! Its probabilities are one half for the sampled token, a quarter for the next one, and so on.
//!
//! It has no clock: a [`Pace`] lets the modelled time pass, or does not.

use std::collections::VecDeque;
use std::time::Duration;

use crate::constraint::{MaskUnavailable, TokenSet};
use crate::draft::DraftTree;
use crate::executor::{Executor, ExecutorError, Geometry, MAX_IN_FLIGHT};
use crate::plan::{
    BlockId, BlockMove, InputToken, PlanRow, RowLogprobs, RowOutput, SampleRow, SequenceFailure, StepOutput, StepPlan,
    Ticket,
};
use crate::request::TokenId;
use crate::sampling::{TokenLogprob, TokenLogprobs};

/// Duration of a step, as a sum of microseconds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepTime {
    /// Every step: reading the weights, launching kernels.
    pub base_us: f64,
    /// Each token of a row with several tokens, and each draft token.
    pub prefill_token_us: f64,
    /// Each row with one token.
    pub decode_row_us: f64,
    /// Each token that a row attends to.
    pub context_token_us: f64,
}

impl StepTime {
    /// A model of 135 million parameters at four bits on two CPU cores: about 80 tokens a second alone.
    pub const SMALL_CPU: StepTime =
        StepTime { base_us: 10_000.0, prefill_token_us: 1_000.0, decode_row_us: 1_500.0, context_token_us: 1.0 };

    /// A model of 8 billion parameters in bf16 on a GPU with 4.8 TB/s: about 250 tokens a second alone.
    pub const LARGE_GPU: StepTime =
        StepTime { base_us: 3_900.0, prefill_token_us: 20.0, decode_row_us: 10.0, context_token_us: 0.03 };

    /// How long the device would be busy with `plan`.
    pub fn of(&self, plan: &StepPlan) -> Duration {
        let rows = plan.rows.iter().map(|row| self.row_us(row)).sum::<f64>();
        Duration::from_secs_f64((self.base_us + rows) * 1e-6)
    }

    fn row_us(&self, row: &PlanRow) -> f64 {
        let computed = match row.tokens.len() {
            1 => self.decode_row_us,
            tokens => self.prefill_token_us * tokens as f64,
        };
        let drafted = self.prefill_token_us * row.draft().map_or(0, DraftTree::len) as f64;
        computed + drafted + self.context_token_us * (f64::from(row.first_position) + row.tokens.len() as f64)
    }
}

/// The tokens that the simulator samples.
#[derive(Clone, Copy, Debug)]
pub struct SimVocabulary {
    /// Maps a random number to a token. Its range should leave out the tokens that end a text.
    pub word: fn(u64) -> TokenId,
    /// How texts end by themselves; with `None` they run to `max_tokens`.
    pub stop: Option<SimStop>,
}

/// Samples a stop token now and then.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SimStop {
    /// The stop token.
    pub token: TokenId,
    /// One sample in this many is the stop token.
    pub one_in: u64,
}

/// Makes modelled time pass.
pub trait Pace: Send {
    /// Time since any fixed moment.
    fn now(&mut self) -> Duration;
    /// Returns once `now` has reached `time`.
    fn sleep_until(&mut self, time: Duration);
}

/// Time stands still: steps take no time, and only report the modelled one.
#[derive(Clone, Copy, Debug, Default)]
pub struct Unpaced;

impl Pace for Unpaced {
    fn now(&mut self) -> Duration {
        Duration::ZERO
    }

    fn sleep_until(&mut self, _: Duration) {}
}

/// The simulated device: it computes one step after the other, each for as long as [`StepTime`] says. With several
/// pipeline stages each step passes through all of them, and each stage computes one step after the other.
#[derive(Debug)]
pub struct SimExecutor<P> {
    geometry: Geometry,
    step_time: StepTime,
    vocabulary: SimVocabulary,
    pace: P,
    /// In place of K and V: for each block and offset, a hash of the token there and all before it.
    states: Vec<u64>,
    /// The same for the swap slots.
    swapped: Vec<u64>,
    in_flight: VecDeque<SimStep>,
    submitted: u64,
    /// When each stage finishes the last submitted step.
    busy_until: Vec<Duration>,
}

#[derive(Debug)]
struct SimStep {
    ticket: Ticket,
    is_complete_at: Duration,
    output: StepOutput,
}

impl<P: Pace> SimExecutor<P> {
    /// An idle device. It takes 8 bytes of memory for each token of the pool.
    pub fn new(geometry: Geometry, step_time: StepTime, vocabulary: SimVocabulary, pace: P) -> SimExecutor<P> {
        SimExecutor {
            geometry,
            step_time,
            vocabulary,
            pace,
            states: vec![0; geometry.blocks as usize * geometry.block_tokens as usize],
            swapped: vec![0; geometry.swap_slots as usize * geometry.block_tokens as usize],
            in_flight: VecDeque::new(),
            submitted: 0,
            busy_until: vec![Duration::ZERO],
        }
    }

    /// The same with this many pipeline stages.
    pub fn with_stages(self, stages: usize) -> SimExecutor<P> {
        SimExecutor { busy_until: vec![Duration::ZERO; stages.max(1)], ..self }
    }

    /// When a step that takes `busy` in all stages together leaves the last one.
    fn finish_time(&mut self, busy: Duration) -> Duration {
        let part = busy / self.busy_until.len() as u32;
        let now = self.pace.now();
        self.busy_until.iter_mut().fold(now, |came, until| {
            *until = came.max(*until) + part;
            *until
        })
    }

    /// Moves the states of a block.
    fn move_block(&mut self, moved: BlockMove) {
        let tokens = self.block_tokens();
        let place = |index: u32| index as usize * tokens..(index as usize + 1) * tokens;
        match moved {
            BlockMove::Copy { from, to } => self.states.copy_within(place(from.0), place(to.0).start),
            BlockMove::SwapOut { block, slot } => {
                self.swapped[place(slot.0)].copy_from_slice(&self.states[place(block.0)])
            }
            BlockMove::SwapIn { slot, block } => {
                self.states[place(block.0)].copy_from_slice(&self.swapped[place(slot.0)])
            }
        }
    }

    /// Computes a row: its states, then its token.
    fn compute(&mut self, row: &PlanRow, mask_timeout: Duration) -> RowOutput {
        for (position, token) in (row.first_position as usize..).zip(&row.tokens) {
            match self.resolve(*token) {
                Ok(token) => self.write_state(row, position, token),
                Err(output) => return output,
            }
        }
        match &row.sample {
            None => RowOutput::Computed,
            Some(sample) if sample.draft.is_empty() => {
                self.sample(row, sample, &[], mask_timeout).map_or_else(RowOutput::from, RowOutput::Sampled)
            }
            Some(sample) => self.verify(row, sample, mask_timeout).map_or_else(RowOutput::from, RowOutput::Verified),
        }
    }

    /// Verifies the draft tokens of a row. Accepted ones leave their states after those of the row; the other places
    /// that draft tokens took are overwritten with rubbish, as on a device.
    fn verify(
        &mut self,
        row: &PlanRow,
        sample: &SampleRow,
        mask_timeout: Duration,
    ) -> Result<Vec<TokenId>, MaskUnavailable> {
        let end = row.first_position as usize + row.tokens.len();
        let mut accepted: Vec<TokenId> = Vec::new();
        let verification = sample.draft.verify(|after| {
            if let Some(node) = after {
                accepted.push(sample.draft.nodes()[node as usize].token);
                self.write_state(row, end + accepted.len() - 1, accepted[accepted.len() - 1]);
            }
            self.sample(row, sample, &accepted, mask_timeout)
        })?;
        for position in end + accepted.len()..end + sample.draft.len() {
            self.write_state(row, position, TokenId::MAX);
        }
        Ok(verification.tokens)
    }

    /// Writes the state of a token, in each group of layers.
    fn write_state(&mut self, row: &PlanRow, position: usize, token: TokenId) {
        for (group, table) in (0..).zip(row.tables(&self.geometry.groups)) {
            // Groups start with different hashes, so that a block of one group is useless to another.
            let before = position.checked_sub(1).map_or(group, |previous| self.states[self.slot(table, previous)]);
            let slot = self.slot(table, position);
            self.states[slot] = mix(before, u64::from(token));
        }
    }

    /// The id of an input token, or the output of its row if the row that samples the token has none.
    fn resolve(&self, token: InputToken) -> Result<TokenId, RowOutput> {
        let (ticket, row) = match token {
            InputToken::Known(token) => return Ok(token),
            InputToken::SampledBy { ticket, row } => (ticket, row),
        };
        let step = self.in_flight.iter().find(|step| step.ticket == ticket);
        match step.and_then(|step| step.output.rows.get(row as usize)) {
            Some(RowOutput::Sampled(token)) => Ok(*token),
            Some(RowOutput::Deferred) => Err(RowOutput::Deferred),
            _ => {
                let why = "the row that was to sample its input did not".into();
                Err(RowOutput::Failed(SequenceFailure::Uncomputable(why)))
            }
        }
    }

    /// Samples the token after the row and its accepted draft tokens: from its blocks, and from the seed unless
    /// sampling is greedy.
    fn sample(
        &self,
        row: &PlanRow,
        sample: &SampleRow,
        accepted: &[TokenId],
        mask_timeout: Duration,
    ) -> Result<TokenId, MaskUnavailable> {
        let seed = if sample.sampling.temperature > 0.0 { sample.sampling.seed } else { 0 };
        let context = self.context(row, row.tokens.len() + accepted.len(), seed);
        let allowed = self.allowed(row, sample, accepted, mask_timeout)?;
        let may_draw = |token: &TokenId| may_draw(sample, allowed.as_ref(), *token);
        let mut draws = (0..MAX_DRAWS).map(|draw| self.vocabulary.draw(mix(context, draw)));
        // If so few tokens are allowed that chance misses them, it is the first allowed one.
        let token = draws.find(may_draw).or_else(|| (0..self.geometry.vocabulary).find(may_draw));
        token.ok_or_else(|| SequenceFailure::Unsatisfiable("every token is banned".into()).into())
    }

    /// The token mask of the row's constraint, if it has one.
    fn allowed(
        &self,
        row: &PlanRow,
        sample: &SampleRow,
        accepted: &[TokenId],
        mask_timeout: Duration,
    ) -> Result<Option<TokenSet>, MaskUnavailable> {
        let (Some(constraint), Some(history)) = (&sample.constraint, &sample.history) else { return Ok(None) };
        let sampled = row.tokens.last().filter(|token| matches!(token, InputToken::SampledBy { .. }));
        let sampled = sampled.and_then(|token| self.resolve(*token).ok());
        let known = history.tokens[history.prompt_tokens..].iter().copied().chain(sampled);
        let generated: Vec<TokenId> = known.chain(accepted.iter().copied()).collect();
        constraint.allowed(&generated, mask_timeout).map(Some)
    }

    /// How long each row waits for its token mask; all masks are requested first.
    fn mask_timeout(&self, plan: &StepPlan) -> Duration {
        let asks = |row: &&PlanRow| row.sample.as_ref().is_some_and(|sample| sample.constraint.is_some());
        let asking = plan.rows.iter().filter(asks);
        for row in asking.clone() {
            let _ = row.sample.as_ref().map(|sample| self.allowed(row, sample, &[], Duration::ZERO));
        }
        plan.mask_timeout / (asking.count() as u32).max(1)
    }

    /// A hash over the blocks of the row's first `tokens` tokens and those before them, as far as each group of
    /// layers still reads them.
    fn context(&self, row: &PlanRow, tokens: usize, seed: u64) -> u64 {
        let end = row.first_position as usize + tokens;
        let groups = &self.geometry.groups;
        (0..).zip(row.tables(groups)).fold(seed, |hash, (group, table)| {
            let first_read = groups.read_back(group).map_or(0, |read| end.saturating_sub(read as usize));
            let last_of_each_block =
                (self.block_tokens()..end).step_by(self.block_tokens()).chain([end]).map(|end| end - 1);
            last_of_each_block
                .filter(|position| *position >= first_read)
                .fold(hash, |hash, position| mix(hash, self.states[self.slot(table, position)]))
        })
    }

    /// The logprobs that a computed row asked for.
    fn row_logprobs(&self, index: usize, row: &PlanRow, output: &RowOutput) -> Option<RowLogprobs> {
        let top = row.sample.as_ref().and_then(|sample| sample.logprobs);
        let drawn: &[TokenId] = match output {
            RowOutput::Failed(_) => return None,
            RowOutput::Sampled(token) => std::slice::from_ref(token),
            RowOutput::Verified(tokens) => tokens,
            RowOutput::Computed | RowOutput::Deferred => &[],
        };
        let told = top.iter().flat_map(|&top| (row.tokens.len()..).zip(drawn).map(move |place| (top, place)));
        let sampled: Vec<_> =
            told.map(|(top, (tokens, token))| self.logprobs(self.context(row, tokens, 0), *token, top)).collect();
        let scored = row.score.iter().flat_map(|score| (1..).zip(&score.targets).map(|target| (score.top, target)));
        let prompt = scored.map(|(top, (tokens, target))| self.logprobs(self.context(row, tokens, 0), *target, top));
        let prompt: Vec<_> = prompt.collect();
        (!sampled.is_empty() || !prompt.is_empty()).then_some(RowLogprobs { row: index as u32, prompt, sampled })
    }

    /// `token` first, then others; the nth has probability 2^-n.
    fn logprobs(&self, context: u64, token: TokenId, top: u32) -> TokenLogprobs {
        let mut tokens = vec![token];
        for draw in (0..MAX_DRAWS).map(|draw| self.vocabulary.draw(mix(context, draw))) {
            if tokens.len() >= top as usize {
                break;
            }
            if !tokens.contains(&draw) {
                tokens.push(draw);
            }
        }
        let logprob = |(rank, token): (u32, TokenId)| TokenLogprob { token, logprob: rank as f32 * 0.5f32.ln(), rank };
        let ranked: Vec<TokenLogprob> = (1..).zip(tokens).map(logprob).collect();
        TokenLogprobs { chosen: ranked[0], top: ranked.into_iter().take(top as usize).collect() }
    }

    fn slot(&self, table: &[BlockId], position: usize) -> usize {
        let block = table[position / self.block_tokens()];
        block.0 as usize * self.block_tokens() + position % self.block_tokens()
    }

    fn block_tokens(&self) -> usize {
        self.geometry.block_tokens as usize
    }
}

/// Random samples before the first allowed token is taken.
const MAX_DRAWS: u64 = 1000;

fn may_draw(sample: &SampleRow, constraint: Option<&TokenSet>, token: TokenId) -> bool {
    let allowed = &sample.sampling.allowed_tokens;
    let fits = constraint.is_none_or(|set| set.contains(token));
    fits && !sample.banned.contains(&token) && (allowed.is_empty() || allowed.contains(&token))
}

impl<P: Pace> Executor for SimExecutor<P> {
    fn geometry(&self) -> Geometry {
        self.geometry
    }

    fn stages(&self) -> usize {
        self.busy_until.len()
    }

    fn submit(&mut self, plan: StepPlan) -> Result<Ticket, ExecutorError> {
        let most = self.stages().max(MAX_IN_FLIGHT);
        if self.in_flight.len() == most {
            return Err(ExecutorError(format!("{most} steps are in flight already")));
        }
        let busy = self.step_time.of(&plan);
        plan.moves.iter().for_each(|moved| self.move_block(*moved));
        // Token masks are computed while the device computes.
        let is_complete_at = self.finish_time(busy);
        let mask_timeout = self.mask_timeout(&plan);
        let rows: Vec<RowOutput> = plan.rows.iter().map(|row| self.compute(row, mask_timeout)).collect();
        let computed = plan.rows.iter().zip(&rows).enumerate();
        let scores = computed.filter_map(|(index, (row, output))| self.row_logprobs(index, row, output)).collect();
        let ticket = Ticket(self.submitted);
        let output = StepOutput { rows, scores, busy_seconds: busy.as_secs_f64() / self.stages() as f64 };
        self.in_flight.push_back(SimStep { ticket, is_complete_at, output });
        self.submitted += 1;
        Ok(ticket)
    }

    fn collect(&mut self, ticket: Ticket) -> Result<StepOutput, ExecutorError> {
        let Some(step) = self.in_flight.pop_front().filter(|step| step.ticket == ticket) else {
            return Err(ExecutorError(format!("{ticket:?} is not the oldest step in flight")));
        };
        self.pace.sleep_until(step.is_complete_at);
        Ok(step.output)
    }
}

impl SimVocabulary {
    fn draw(&self, number: u64) -> TokenId {
        match self.stop {
            Some(stop) if number.is_multiple_of(stop.one_in) => stop.token,
            _ => (self.word)(number),
        }
    }
}

/// One round of the SplitMix64 finalizer (Steele, Lea and Flood 2014) over two words.
pub fn mix(hash: u64, word: u64) -> u64 {
    let mut z = (hash.rotate_left(25) ^ word).wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}
