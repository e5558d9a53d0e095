//! One decoding step over and over: logits of its graph are the same bits each time, those of a step without a graph, and
//! those of a sequence that is alone.

use windlass_engine_core::executor::Executor;
use windlass_engine_core::plan::{BlockId, InputToken, PlanRow, StepPlan};
use windlass_engine_core::request::{RequestId, Sampling};
use windlass_engine_model::cuda::CudaExecutor;

use crate::Outcome;
use crate::driver::sample_row;
use crate::finding::Finding;
use crate::noise;
use crate::parts::Tell;

/// Tokens of each sequence's prompt. With the one that is decoded they are a block's at most.
const PROMPT: usize = 40;

/// Repeats a step of each number of sequences, of which the first is 1, `replays` times by graphs, and once without.
pub fn compare(
    [graphs, eager]: [&mut CudaExecutor; 2],
    batches: &[usize],
    replays: usize,
    tell: &mut Tell<'_>,
) -> Outcome<()> {
    let vocabulary = graphs.geometry().vocabulary as usize;
    let mut alone = None;
    for &sequences in batches {
        [&mut *graphs, &mut *eager].into_iter().try_for_each(|executor| read_prompts(executor, sequences))?;
        let expected = decode(graphs, sequences)?;
        let replayed = (1..replays).map(|_| decode(graphs, sequences)).collect::<Outcome<Vec<_>>>()?;
        let mut check = |name: String, same: bool| tell(Finding::check(format!("{sequences} sequences: {name}"), same));
        let same = replayed.iter().all(|logits| *logits == expected);
        check(format!("{replays} replays give the same logits, bit by bit"), same);
        check("a step without a graph gives them, too".to_owned(), decode(eager, sequences)? == expected);
        let own = expected[..vocabulary].to_vec();
        match &alone {
            None => alone = Some(own),
            Some(alone) => check("the first has the logits that it has alone".to_owned(), own == *alone),
        }
    }
    Ok(())
}

/// Takes in each sequence's prompt, which lies in a block of its own.
fn read_prompts(executor: &mut CudaExecutor, sequences: usize) -> Outcome<()> {
    for sequence in 0..sequences {
        let tokens = prompt(sequence, executor.geometry().vocabulary);
        let row = PlanRow { sample: None, ..row(sequence, &tokens, 0) };
        step(executor, vec![row])?;
    }
    Ok(())
}

/// Logits' bits behind a token of each sequence.
fn decode(executor: &mut CudaExecutor, sequences: usize) -> Outcome<Vec<u32>> {
    step(executor, (0..sequences).map(|sequence| row(sequence, &[7], PROMPT as u32)).collect())?;
    Ok(executor.decoder().logits(sequences)?.into_iter().map(f32::to_bits).collect())
}

fn step(executor: &mut CudaExecutor, rows: Vec<PlanRow>) -> Outcome<()> {
    let ticket = executor.submit(StepPlan { rows, ..StepPlan::default() })?;
    executor.collect(ticket)?;
    Ok(())
}

fn row(sequence: usize, tokens: &[u32], first_position: u32) -> PlanRow {
    PlanRow {
        request: RequestId(sequence as u64),
        tokens: tokens.iter().map(|&token| InputToken::Known(token)).collect(),
        first_position,
        blocks: [BlockId(sequence as u32)].into(),
        sample: Some(sample_row(&Sampling::GREEDY)),
        score: None,
    }
}

fn prompt(sequence: usize, vocabulary: u32) -> Vec<u32> {
    noise::bytes(PROMPT).into_iter().map(|byte| (u32::from(byte) + sequence as u32) % vocabulary).collect()
}
