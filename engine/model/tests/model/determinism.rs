//! The real model under the scheduler: a request gets the same tokens with the same log probabilities, bit by bit,
//! whether it is preempted, found in the prefix cache or swap space, forked, divided into chunks, or has draft tokens.

use std::collections::HashMap;

use crate::common::harbour_tokens;
use crate::common::way::Way;
use windlass_checkpoint::Checkpoint;
use windlass_checkpoint::testing::real_model;
use windlass_engine_contract::memory::KvDataType;
use windlass_engine_core::draft::SuffixAutomaton;
use windlass_engine_core::engine::Engine;
use windlass_engine_core::request::{Request, RequestId, Sampling};
use windlass_engine_core::update::EngineStats;
use windlass_engine_model::load;

/// Tokens and log probabilities of a request.
type Answer = Vec<(u32, f32)>;

/// Prompts with a common start of two blocks; every other one equals the one before.
fn requests() -> Vec<Request> {
    let tokens = harbour_tokens();
    let request = |id: u64| {
        let tail = 40 + (id as usize / 2) * 11;
        let prompt = [&tokens[..32], &tokens[tail..tail + 9 + id as usize / 2]].concat();
        let sampling = Sampling { top_p: 0.9, seed: id, ..Sampling::RANDOM };
        let fork_of = (id % 2 == 1).then(|| RequestId(id - 1));
        Request { sampling, logprobs: Some(0), fork_of, ..Request::greedy(RequestId(id), prompt, 40) }
    };
    (0..8).map(request).collect()
}

const ROOMY: Way = Way::plain(64, 64);
/// Eight sequences that grow to six blocks, and blocks for four of them.
const SHORT: Way = Way { blocks: 24, caches: true, ..ROOMY };
/// Everything at once, as in a server.
const ALL: Way = Way { max_step_tokens: 16, swaps: true, drafts: true, ..SHORT };

/// The answers to `requests`, and the final statistics of the engine.
fn answers(file: &Checkpoint, way: Way, requests: Vec<Request>) -> (Vec<Answer>, EngineStats) {
    let mut engine = Engine::new(load(file, &way.load_options()).unwrap().executor, way.engine_config());
    if way.drafts {
        engine = engine.with_proposer(Box::new(SuffixAutomaton::new(1)), 8);
    }
    let count = requests.len() as u64;
    requests.into_iter().for_each(|request| engine.add(request, 0.0).unwrap());
    let mut answers: HashMap<u64, Answer> = HashMap::new();
    while !engine.is_idle() {
        for update in engine.step(0.0).unwrap().updates {
            assert_eq!(update.failure, None);
            let told = update.logprobs.iter().map(|scores| scores.chosen.logprob);
            answers.entry(update.request.0).or_default().extend(update.tokens.iter().copied().zip(told));
        }
    }
    ((0..count).map(|id| answers.remove(&id).unwrap()).collect(), engine.stats())
}

/// The answers to requests that run alone.
fn alone(file: &Checkpoint, kv: KvDataType) -> Vec<Answer> {
    let answer = |request| {
        let only = Request { id: RequestId(0), fork_of: None, ..request };
        answers(file, Way { kv, ..ROOMY }, vec![only]).0.remove(0)
    };
    requests().into_iter().map(answer).collect()
}

#[test]
fn preemption_prefix_hits_forks_chunks_swaps_and_draft_tokens_change_no_bit() {
    let Some(path) = real_model() else { return };
    let file = Checkpoint::open(&path).unwrap();
    let alone = alone(&file, ROOMY.kv);
    assert!(alone.iter().all(|answer| answer.len() == 40));
    let ways = [
        ("together", ROOMY),
        ("in chunks", Way { max_step_tokens: 9, ..ROOMY }),
        ("short of blocks", SHORT),
        ("with a swap space", Way { swaps: true, ..SHORT }),
        ("with draft tokens", Way { drafts: true, ..ROOMY }),
        ("with all of it", ALL),
    ];
    for (name, way) in ways {
        let (found, stats) = answers(&file, way, requests());
        let drafts = stats.drafts;
        println!(
            "{name}: {} preemptions, {} tokens found, {} blocks outside, {} of {} draft tokens accepted",
            stats.preemptions, stats.prefix_hit_tokens, stats.kv.swapped, drafts.accepted, drafts.tokens
        );
        assert_eq!(found, alone, "{name}");
        assert_eq!(stats.preemptions > 0 && stats.prefix_hit_tokens > 0, way.caches, "{name}: {stats:?}");
        assert_eq!((stats.kv.swapped > 0, drafts.tokens > 0), (way.swaps, way.drafts), "{name}: {stats:?}");
    }
}

#[test]
fn keys_and_values_of_any_type_change_no_bit_either() {
    let Some(path) = real_model() else { return };
    let file = Checkpoint::open(&path).unwrap();
    for kv in KvDataType::ALL.into_iter().filter(|kv| *kv != ROOMY.kv) {
        let (found, stats) = answers(&file, Way { kv, ..ALL }, requests());
        assert_eq!(found, alone(&file, kv), "{kv:?}");
        assert!(stats.preemptions > 0 && stats.prefix_hit_tokens > 0 && stats.kv.swapped > 0, "{kv:?}: {stats:?}");
    }
}
