//! A conversation that comes back after its blocks were needed for others.

use std::error::Error;

use super::{PLAIN, median, prose, request, run};
use windlass_checkpoint::Checkpoint;
use windlass_engine_core::engine::{Engine, EngineConfig};
use windlass_engine_core::request::TokenId;
use windlass_engine_model::{KvBudget, LoadOptions, SwapSpace, load};

const CONVERSATION_TOKENS: usize = 4096;
const BLOCK_TOKENS: u32 = 16;
/// Room for one conversation and a little more.
const BLOCKS: u32 = CONVERSATION_TOKENS as u32 / BLOCK_TOKENS + 8;
const ROUNDS: usize = 3;

/// Prints a row for each place that blocks may go to.
pub fn measure(file: &Checkpoint) -> Result<(), Box<dyn Error>> {
    let folder = std::env::temp_dir();
    let space = |folder| Some(SwapSpace { bytes: 1 << 30, folder });
    println!("A conversation of {CONVERSATION_TOKENS} tokens, gone from the pool and asked for again:\n");
    println!("| swap space | first token, ms | tokens found |\n|---|---|---|");
    let mut computed = None;
    for (name, swap) in [("none", None), ("memory", space(None)), ("file", space(Some(folder)))] {
        let (seconds, found) = returning(file, swap)?;
        let faster = *computed.get_or_insert(seconds) / seconds;
        println!("| {name} | {:.0} ({faster:.1}×) | {found} |", seconds * 1e3);
    }
    Ok(())
}

/// Seconds to the first token of a conversation that another one drove out of the pool, and what was found of it.
fn returning(file: &Checkpoint, swap: Option<SwapSpace>) -> Result<(f64, u32), Box<dyn Error>> {
    let options = LoadOptions {
        kv: KvBudget::Blocks(BLOCKS),
        swap,
        max_model_tokens: Some(CONVERSATION_TOKENS as u32 + 8),
        ..LoadOptions::default()
    };
    let config = EngineConfig { enable_prefix_cache: true, ..PLAIN };
    let mut engine = Engine::new(load(file, &options)?.executor, config);
    let (mut seconds, mut found) = (Vec::new(), 0);
    for round in 0..2 * (ROUNDS as u64 + 1) {
        let result = run(&mut engine, &[request(round, conversation(round as usize % 2), 2)])?;
        if round >= 2 {
            seconds.push(result.first_seconds);
            found = result.cached_tokens;
        }
    }
    Ok((median(seconds), found))
}

/// One of two texts that have no block in common.
fn conversation(number: usize) -> Vec<TokenId> {
    let prose = prose();
    (0..CONVERSATION_TOKENS)
        .map(|index| prose[(index * (number + 1) + number * 7 + index / 997) % prose.len()])
        .collect()
}
