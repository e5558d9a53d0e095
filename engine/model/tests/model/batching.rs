//! The real model's greedy tokens do not depend on what else is in the batch, on how prompts are cut, on how many steps
//! are in flight, or on the number of threads.

use crate::common::driver::{Job, generate};
use crate::common::harbour_tokens;
use windlass_checkpoint::Checkpoint;
use windlass_checkpoint::testing::real_model;
use windlass_engine_core::request::Sampling;
use windlass_engine_model::{CpuExecutor, KvBudget, LoadOptions, load};

const SEQUENCES: usize = 16;
const GENERATED: usize = 24;

/// Prompts of different lengths, none a multiple of a block.
fn jobs() -> Vec<Job> {
    let tokens = harbour_tokens();
    (0..SEQUENCES).map(|index| Job::greedy(&tokens[index * 37..][..19 + index * 3])).collect()
}

fn executor(file: &Checkpoint, threads: usize) -> CpuExecutor {
    let options = LoadOptions { threads, kv: KvBudget::Blocks(128), max_step_tokens: 256, ..LoadOptions::default() };
    load(file, &options).unwrap().executor
}

#[test]
fn greedy_tokens_are_the_same_alone_and_in_any_batch() {
    let Some(path) = real_model() else { return };
    let file = Checkpoint::open(&path).unwrap();
    let mut executor = executor(&file, 2);
    let alone: Vec<Vec<u32>> =
        jobs().chunks(1).flat_map(|job| generate(&mut executor, job, GENERATED, 256, 1)).collect();
    assert!(alone.iter().all(|tokens| tokens.len() == GENERATED));
    for (chunk, in_flight) in [(256, 1), (256, 2), (7, 2), (16, 1)] {
        let together = generate(&mut executor, &jobs(), GENERATED, chunk, in_flight);
        assert_eq!(together, alone, "prompts in chunks of {chunk}, {in_flight} steps in flight");
    }
    let mut executor = self::executor(&file, 1);
    assert_eq!(generate(&mut executor, &jobs(), GENERATED, 64, 2), alone, "on one thread");
}

#[test]
fn sampled_tokens_depend_on_seed_and_position_alone() {
    let Some(path) = real_model() else { return };
    let mut executor = executor(&Checkpoint::open(&path).unwrap(), 2);
    let sampling = |seed| Sampling { top_p: 0.95, seed, ..Sampling::RANDOM };
    let job = |seed: usize| Job { prompt: jobs()[3].prompt.clone(), sampling: sampling(seed as u64) };
    let seeded: Vec<Job> = (0..SEQUENCES).map(job).collect();
    let together = generate(&mut executor, &seeded, GENERATED, 11, 2);
    let alone = generate(&mut executor, &seeded[5..6], GENERATED, 256, 1);
    assert_eq!(together[5], alone[0]);
    let mut distinct = together;
    distinct.sort();
    distinct.dedup();
    assert_eq!(distinct.len(), SEQUENCES, "seeds draw apart");
}
