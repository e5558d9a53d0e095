//! The real model under the scheduler: preempted, found in the prefix cache, forked or left alone, a request gets the
//! same tokens with the same log probabilities, bit by bit.

#![allow(clippy::unwrap_used)] // in a test, a failed unwrap is the failure

mod common;

use std::collections::HashMap;

use common::harbour_tokens;
use windlass_checkpoint::Checkpoint;
use windlass_checkpoint::testing::real_model;
use windlass_engine_core::engine::{Engine, EngineConfig, Policy, QueueLimits};
use windlass_engine_core::request::{Request, RequestId, Sampling};
use windlass_engine_core::update::EngineStats;
use windlass_engine_model::{KvBudget, LoadOptions, load};

const CONFIG: EngineConfig = EngineConfig {
    queue: QueueLimits {
        max_waiting_requests: 100,
        max_queued_prompt_tokens: 100_000,
        max_predicted_ttft_seconds: None,
    },
    enable_prefix_cache: false,
    prefix_cache_ttl_seconds: None,
    policy: Policy::Fcfs,
    target_inter_token_seconds: None,
};

/// Tokens and log probabilities of a request.
type Answer = Vec<(u32, f32)>;

/// Prompts that begin alike for two blocks; every other one shares the whole prompt of the one before.
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

/// What each of `requests` gets from an engine of so many blocks, and the engine's state afterwards.
fn answers(file: &Checkpoint, blocks: u32, config: EngineConfig, requests: Vec<Request>) -> (Vec<Answer>, EngineStats) {
    let options =
        LoadOptions { threads: 2, kv: KvBudget::Blocks(blocks), max_step_tokens: 64, ..LoadOptions::default() };
    let mut engine = Engine::new(load(file, &options).unwrap().executor, config);
    let count = requests.len() as u64;
    requests.into_iter().for_each(|request| engine.add(request, 0.0).unwrap());
    let mut answers: HashMap<u64, Answer> = HashMap::new();
    while !engine.is_idle() {
        for update in engine.turn(0.0).unwrap().updates {
            assert_eq!(update.error, None);
            let told = update.logprobs.iter().map(|scores| scores.chosen.logprob);
            answers.entry(update.request.0).or_default().extend(update.tokens.iter().copied().zip(told));
        }
    }
    ((0..count).map(|id| answers.remove(&id).unwrap()).collect(), engine.stats())
}

#[test]
fn preemption_prefix_hits_and_forks_change_no_bit() {
    let Some(path) = real_model() else { return };
    let file = Checkpoint::open(&path).unwrap();
    let alone: Vec<Answer> = requests()
        .into_iter()
        .map(|request| {
            let only = Request { id: RequestId(0), fork_of: None, ..request };
            answers(&file, 64, CONFIG, vec![only]).0.remove(0)
        })
        .collect();
    assert!(alone.iter().all(|answer| answer.len() == 40));
    // Eight sequences of six blocks in the end, and blocks for four of them.
    let caching = EngineConfig { enable_prefix_cache: true, ..CONFIG };
    let (together, stats) = answers(&file, 24, caching, requests());
    println!("{} preemptions, {} tokens found", stats.preemptions, stats.prefix_hit_tokens);
    assert!(stats.preemptions > 0 && stats.prefix_hit_tokens > 0, "{stats:?}");
    assert_eq!(together, alone);
}
