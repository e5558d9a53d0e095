//! Prefix cache hits on a trace of conversations: the share of blocks that need not be computed.
//!
//! `zcat mooncake_synthetic_trace.jsonl.gz | cargo run --release -p windlass-engine-core --example prefix_hits`
//!
//! Each line has `"hash_ids": [...]`, one id for 512 tokens; tokens are derived from it. One request at a time, with
//! blocks for all. The trace's publishers report 63.96 % (Mooncake, FAST '25, synthetic trace); the command fails if
//! this engine differs from that by more than 0.05 points.

mod common;

use std::io::{BufRead, stdin};
use std::process::ExitCode;

use common::Nothing;
use windlass_engine_core::engine::{Engine, EngineConfig, QueueLimits};
use windlass_engine_core::executor::{Geometry, KvGroups};
use windlass_engine_core::request::{Request, RequestId, TokenId};

const BLOCK_TOKENS: u32 = 512;
const PUBLISHED_PERCENT: f64 = 63.96;
const TOLERANCE_POINTS: f64 = 0.05;

const GEOMETRY: Geometry = Geometry {
    block_tokens: BLOCK_TOKENS,
    blocks: 1 << 20,
    swap_slots: 0,
    max_sequence_tokens: 1 << 20,
    max_step_rows: 1,
    max_step_tokens: 1 << 20,
    max_step_logits: 1,
    vocabulary: u32::MAX,
    groups: KvGroups::ONE,
};

/// The ids of a line's blocks.
fn blocks(line: &str) -> Vec<u32> {
    let list = line.split("\"hash_ids\"").nth(1).and_then(|rest| rest.split(['[', ']']).nth(1)).unwrap_or_default();
    list.split(',').filter_map(|id| id.trim().parse().ok()).collect()
}

/// The tokens of the blocks, and one more: the last token of a prompt is always computed.
fn prompt(blocks: &[u32]) -> Vec<TokenId> {
    let token =
        |block: u32, index: u32| block.wrapping_mul(0x9e37_79b1).wrapping_add(index.wrapping_mul(0x85eb_ca6b)) >> 1;
    blocks.iter().flat_map(|&block| (0..BLOCK_TOKENS).map(move |index| token(block, index))).chain([0]).collect()
}

fn main() -> ExitCode {
    let queue = QueueLimits { max_waiting_requests: 1, max_queued_prompt_tokens: 0, max_predicted_ttft_seconds: None };
    let config = EngineConfig { queue, enable_prefix_cache: true, ..EngineConfig::PLAIN };
    let mut engine = Engine::new(Nothing::new(GEOMETRY), config);
    let (mut requests, mut all) = (0, 0);
    for line in stdin().lock().lines().map_while(Result::ok) {
        let blocks = blocks(&line);
        (requests, all) = (requests + 1, all + blocks.len());
        engine.add(Request::greedy(RequestId(requests), prompt(&blocks), 1), 0.0).expect("a request that fits");
        while !engine.is_idle() {
            engine.step(0.0).expect("this executor does not fail");
        }
    }
    let found = engine.stats().prefix_hit_tokens / u64::from(BLOCK_TOKENS);
    let percent = 100.0 * found as f64 / all.max(1) as f64;
    println!("{found} of {all} blocks of {requests} requests: {percent:.3} %, published {PUBLISHED_PERCENT} %");
    ExitCode::from(u8::from((percent - PUBLISHED_PERCENT).abs() > TOLERANCE_POINTS))
}
