//! Drives an executor as a scheduler would: chunked prefill, continuous batching, two steps in flight.

use std::sync::Arc;

use windlass_engine_core::draft::DraftTree;
use windlass_engine_core::executor::Executor;
use windlass_engine_core::plan::{BlockId, History, InputToken, PlanRow, RowOutput, SampleRow, StepPlan, Ticket};
use windlass_engine_core::request::{RequestId, Sampling};

/// One prompt to continue.
#[derive(Clone)]
pub struct Job {
    pub prompt: Vec<u32>,
    pub sampling: Sampling,
}

impl Job {
    pub fn greedy(prompt: &[u32]) -> Job {
        Job { prompt: prompt.to_vec(), sampling: Sampling::GREEDY }
    }
}

struct Sequence {
    prompt: Vec<u32>,
    sampling: Sampling,
    blocks: Arc<[BlockId]>,
    /// Tokens whose K and V are computed or planned.
    planned: usize,
    last: Option<(Ticket, u32)>,
    generated: Vec<u32>,
    drawn: usize,
}

/// Continues every prompt by `count` tokens. Prompts go in chunks of `chunk` tokens; up to `in_flight` steps overlap,
/// and a token that is still being sampled is fed back by its ticket. Where there are several stages, its sequence waits.
pub fn generate(
    executor: &mut dyn Executor,
    jobs: &[Job],
    count: usize,
    chunk: usize,
    in_flight: usize,
) -> Vec<Vec<u32>> {
    let mut sequences = start(executor, jobs, count);
    let mut flying: Vec<(Ticket, Vec<Option<usize>>)> = Vec::new();
    loop {
        let step = plan(&mut sequences, count, chunk, executor);
        let idle = step.0.rows.is_empty();
        if !idle {
            let ticket = executor.submit(step.0).unwrap();
            for (row, index) in step.1.iter().enumerate() {
                if let Some(index) = *index {
                    sequences[index].last = Some((ticket, row as u32));
                }
            }
            flying.push((ticket, step.1));
        }
        if idle && flying.is_empty() {
            return sequences.into_iter().map(|sequence| sequence.generated).collect();
        }
        if idle || flying.len() == in_flight {
            let (ticket, rows) = flying.remove(0);
            collect(executor, ticket, &rows, &mut sequences);
        }
    }
}

fn start(executor: &dyn Executor, jobs: &[Job], count: usize) -> Vec<Sequence> {
    let geometry = executor.geometry();
    let mut next = 0;
    let sequence = |job: &Job| {
        let blocks = (job.prompt.len() + count).div_ceil(geometry.block_tokens as usize) as u32;
        let blocks = blocks * geometry.groups.count();
        // Every other block, from the end: a table that is neither contiguous nor ascending.
        let ids = (next..next + blocks).map(|block| BlockId(geometry.blocks - 1 - block)).collect();
        next += blocks;
        assert!(next <= geometry.blocks, "the test needs {next} blocks");
        let (prompt, sampling) = (job.prompt.clone(), job.sampling.clone());
        Sequence { prompt, sampling, blocks: ids, planned: 0, last: None, generated: Vec::new(), drawn: 0 }
    };
    jobs.iter().map(sequence).collect()
}

/// A step with something of every sequence that is not done, and which sequence each sampling row belongs to.
fn plan(
    sequences: &mut [Sequence],
    count: usize,
    chunk: usize,
    executor: &dyn Executor,
) -> (StepPlan, Vec<Option<usize>>) {
    let (mut rows, mut owners, mut left) = (Vec::new(), Vec::new(), executor.geometry().max_step_tokens as usize);
    let is_staged = executor.stages() > 1;
    for (index, sequence) in sequences.iter_mut().enumerate() {
        let waits = is_staged && sequence.drawn > sequence.generated.len();
        if sequence.drawn == count || waits || left == 0 {
            continue;
        }
        let row = sequence.next_row(index, chunk.min(left));
        left -= row.tokens.len();
        owners.push(row.sample.is_some().then_some(index));
        rows.push(row);
    }
    (StepPlan { rows, ..StepPlan::default() }, owners)
}

impl Sequence {
    fn next_row(&mut self, index: usize, chunk: usize) -> PlanRow {
        let (first, end) = (self.planned, self.prompt.len().min(self.planned + chunk));
        let tokens: Vec<InputToken> = match first < self.prompt.len() {
            true => self.prompt[first..end].iter().map(|&id| InputToken::Known(id)).collect(),
            false => vec![self.last_token()],
        };
        self.planned += tokens.len();
        let samples = self.planned >= self.prompt.len();
        self.drawn += usize::from(samples);
        let sample = samples.then(|| SampleRow { history: self.history(), ..sample_row(&self.sampling) });
        let blocks = self.blocks.clone();
        PlanRow { request: RequestId(index as u64), tokens, first_position: first as u32, blocks, sample, score: None }
    }

    /// What is known of the text, where drawing depends on it.
    fn history(&self) -> Option<History> {
        let tokens = || [&self.prompt[..], &self.generated[..]].concat();
        let prompt_tokens = self.prompt.len();
        self.sampling.reads_history().then(|| History { tokens: tokens(), prompt_tokens })
    }

    fn last_token(&self) -> InputToken {
        match (self.last, self.generated.get(self.drawn - 1)) {
            (_, Some(&id)) => InputToken::Known(id),
            (Some((ticket, row)), None) => InputToken::SampledBy { ticket, row },
            (None, None) => panic!("nothing was drawn"),
        }
    }
}

/// Draws and nothing else.
pub fn sample_row(sampling: &Sampling) -> SampleRow {
    SampleRow {
        sampling: Arc::new(sampling.clone()),
        banned: Vec::new(),
        history: None,
        constraint: None,
        logprobs: None,
        draft: DraftTree::default(),
    }
}

fn collect(executor: &mut dyn Executor, ticket: Ticket, owners: &[Option<usize>], sequences: &mut [Sequence]) {
    let output = executor.collect(ticket).unwrap();
    assert_eq!(output.rows.len(), owners.len());
    for (output, owner) in output.rows.iter().zip(owners) {
        match (output, owner) {
            (RowOutput::Sampled(id), Some(index)) => sequences[*index].generated.push(*id),
            (RowOutput::Computed, None) => {}
            other => panic!("unexpected output {other:?}"),
        }
    }
}
