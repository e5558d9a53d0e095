//! Cost of scheduling: microseconds per step at 256 sequences, with an executor that computes nothing; and the cost
//! of predicting times to the first token.
//!
//! `cargo run --release -p windlass-engine-core --example scheduler_cost`. The goal is 100 µs.

mod common;

use std::hint::black_box;
use std::time::Instant;

use common::Nothing;
use windlass_engine_core::engine::{Engine, EngineConfig, InterTokenLimit, Policy, QueueLimits};
use windlass_engine_core::executor::{Geometry, KvGroups};
use windlass_engine_core::request::{Request, RequestDemand, RequestId};

/// The allocator of the server.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

const SEQUENCES: u32 = 256;
const WAITING: u32 = 1000;
const STEPS: u32 = 400;
const PREDICTIONS: u32 = 400;

const GEOMETRY: Geometry = Geometry {
    block_tokens: 16,
    blocks: 160_000,
    swap_slots: 0,
    max_sequence_tokens: 32_768,
    max_step_rows: SEQUENCES,
    max_step_tokens: 8192,
    max_step_logits: SEQUENCES,
    vocabulary: 50_000,
    groups: KvGroups::ONE,
};

fn request(id: u64, prompt_tokens: u32) -> Request {
    let prompt = (0..prompt_tokens).map(|i| (i + id as u32 * 1000) % 50_000).collect();
    Request { stop_tokens: vec![0, 2], ..Request::greedy(RequestId(id), prompt, 1000) }
}

/// A load to schedule.
#[derive(Clone, Copy, Debug)]
struct Load {
    prompt_tokens: u32,
    prefix_cache: bool,
    policy: Policy,
    /// Waiting requests.
    waiting: u32,
    /// Groups of layers.
    groups: KvGroups,
}

/// Microseconds while all sequences decode: of a step, median and 90th percentile; of the statistics, with their
/// predicted time to the first token; of the retry time of a rejected request.
fn measure(load: Load) -> [f64; 4] {
    let Load { prompt_tokens, prefix_cache: enable_prefix_cache, policy, waiting, groups } = load;
    let queue = QueueLimits {
        max_waiting_requests: WAITING,
        max_queued_prompt_tokens: u64::MAX,
        max_predicted_ttft_seconds: None,
    };
    let config = EngineConfig {
        queue,
        enable_prefix_cache,
        prefix_cache_ttl_seconds: Some(600.0),
        policy,
        inter_token_limit: InterTokenLimit::Seconds(0.05),
        ..EngineConfig::PLAIN
    };
    let mut engine = Engine::new(Nothing::new(Geometry { groups, ..GEOMETRY }), config);
    for id in 0..SEQUENCES {
        engine.add(request(id.into(), prompt_tokens), 0.0).expect("an admissible request");
    }
    while engine.stats().running < SEQUENCES || engine.step(0.0).is_ok_and(|outputs| outputs.updates.len() < 256) {
        engine.step(0.0).expect("this executor does not fail");
    }
    for id in SEQUENCES..SEQUENCES + waiting {
        engine.add(request(id.into(), prompt_tokens), 0.0).expect("an admissible request");
    }
    let mut micros: Vec<f64> = (0..STEPS).map(|_| timed_step(&mut engine)).collect();
    micros.sort_by(f64::total_cmp);
    let start = Instant::now();
    for _ in 0..PREDICTIONS {
        black_box(engine.stats());
    }
    let predicting = start.elapsed().as_secs_f64() * 1e6 / f64::from(PREDICTIONS);
    let start = Instant::now();
    for _ in 0..PREDICTIONS {
        black_box(
            engine
                .retry_after_seconds(RequestDemand { prompt_tokens, max_tokens: 1000, ..RequestDemand::MINIMAL }, 0.0),
        );
    }
    let promising = start.elapsed().as_secs_f64() * 1e6 / f64::from(PREDICTIONS);
    [micros[micros.len() / 2], micros[micros.len() * 9 / 10], predicting, promising]
}

#[inline(never)]
fn timed_step(engine: &mut Engine<Nothing>) -> f64 {
    let start = Instant::now();
    let outputs = engine.step(0.0).expect("this executor does not fail");
    let micros = start.elapsed().as_secs_f64() * 1e6;
    assert_eq!(outputs.updates.len(), SEQUENCES as usize);
    micros
}

fn main() {
    println!("{SEQUENCES} decoding sequences, µs per step (median, 90 % of {STEPS}):");
    let plain =
        Load { prompt_tokens: 1000, prefix_cache: true, policy: Policy::Fcfs, waiting: 0, groups: KvGroups::ONE };
    // Those of Gemma 2, and of Gemma 3 4B.
    let grouped =
        [(1, 4159), (6, 1087)].map(|(windowed, read_back_tokens)| KvGroups { full: 1, windowed, read_back_tokens });
    let priority = Policy::Priority { preemption_threshold: 0 };
    let queued = [Policy::Fcfs, priority, Policy::Fair, Policy::LongestPrefix];
    let loads = [
        Load { prompt_tokens: 128, prefix_cache: false, ..plain },
        Load { prefix_cache: false, ..plain },
        plain,
        Load { policy: priority, ..plain },
    ];
    let queued = queued.map(|policy| Load { policy, waiting: WAITING, ..plain });
    let grouped = grouped.map(|groups| Load { groups, ..plain });
    for load in loads.into_iter().chain(queued).chain(grouped) {
        let [median, most, predicting, promising] = measure(load);
        let Load { prompt_tokens, prefix_cache, policy, waiting, groups } = load;
        println!(
            "  prompts of {prompt_tokens:4} tokens, prefix cache {prefix_cache:5}, {policy:?}, {waiting:4} waiting, \
             {} groups: {median:6.1} {most:6.1}; state {predicting:6.1}, promise {promising:6.1}",
            groups.count()
        );
    }
}
