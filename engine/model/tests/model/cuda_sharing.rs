//! Sequences that begin with the same pages, on the stand-in for a GPU: the pages are read once for several.

use crate::common::driver::{Job, generate};
use crate::common::tiny::Tiny;
use crate::cuda::{APART, BLOCKS, GENERATED, VOCABULARY, checkpoint, device, most_regret, options, tiny};
use windlass_checkpoint::Checkpoint;
use windlass_engine_contract::memory::KvDataType;
use windlass_engine_core::engine::{Engine, EngineConfig};
use windlass_engine_core::request::{Request, RequestId};
use windlass_engine_model::cuda::{CudaExecutor, CudaModel, Replay};
use windlass_engine_model::{KvBudget, LoadOptions, load};
use windlass_kernels::WeightType;

/// Tokens that all prompts begin with: a split, and a page behind it.
const COMMON: u32 = 128 + 64;
const SEQUENCES: u32 = 5;

fn sharing_options(kv_data_type: KvDataType) -> LoadOptions {
    let kv = KvBudget::Blocks(SEQUENCES * BLOCKS);
    LoadOptions { kv_data_type, kv, max_sequences: SEQUENCES, ..options() }
}

/// Each with an end of its own, of a length of its own.
fn prompts() -> Vec<Vec<u32>> {
    let end = |sequence: u32| (0..3 + 5 * sequence).map(move |token| (token * 29 + sequence * 7 + 1) % VOCABULARY);
    (0..SEQUENCES)
        .map(|sequence| (0..COMMON).map(|token| token * 11 % VOCABULARY).chain(end(sequence)).collect())
        .collect()
}

fn executor(checkpoint: &Checkpoint, options: &LoadOptions) -> CudaExecutor {
    let model = CudaModel::load(checkpoint, options, &[device(7)]).unwrap();
    model.start(options.kv, Replay::Graphs).unwrap().executor
}

/// What each prompt is answered where the first one's pages are there when the others come, which decode beside it.
fn answers_with_one_prefix(executor: CudaExecutor) -> Vec<Vec<u32>> {
    let mut engine = Engine::new(executor, EngineConfig { enable_prefix_cache: true, ..EngineConfig::PLAIN });
    let mut answers = vec![Vec::new(); SEQUENCES as usize];
    let mut waiting = prompts().into_iter().enumerate();
    let mut add = |engine: &mut Engine<_>, count: usize| {
        for (id, prompt) in waiting.by_ref().take(count) {
            engine.add(Request::greedy(RequestId(id as u64), prompt, GENERATED as u32), 0.0).unwrap();
        }
    };
    add(&mut engine, 1);
    while !engine.is_idle() {
        for update in engine.step(0.0).unwrap().updates {
            answers[update.request.0 as usize].extend(update.tokens);
            add(&mut engine, SEQUENCES as usize);
        }
    }
    assert_eq!(engine.stats().prefix_hit_tokens, u64::from((SEQUENCES - 1) * COMMON));
    answers
}

#[test]
fn sequences_that_share_a_prompts_pages_say_what_they_say_alone_and_what_the_cpu_says() {
    for kind in [KvDataType::Bf16, KvDataType::Int8] {
        let (checkpoint, options) = (checkpoint(Tiny { tied: false, ..tiny(WeightType::BF16) }), sharing_options(kind));
        let together = answers_with_one_prefix(executor(&checkpoint, &options));
        let jobs: Vec<Job> = prompts().iter().map(|prompt| Job::greedy(prompt)).collect();
        let alone = generate(&mut executor(&checkpoint, &options), &jobs, GENERATED, 32, 2);
        assert_eq!(together, alone, "{}", kind.name());
        let mut cpu = load(&checkpoint, &options).unwrap().executor;
        for (job, answer) in jobs.iter().zip(&together) {
            let regret = most_regret(&mut cpu, &job.prompt, answer);
            assert!(regret <= APART, "{}: {answer:?} is {regret} from the CPU's choices", kind.name());
        }
    }
}
