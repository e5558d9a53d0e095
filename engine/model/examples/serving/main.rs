//! Measures what the engine's choices cost or save on a real model: the scheduler over the CPU executor.
//!
//! ```text
//! cargo run --release -p windlass-engine-model --example serving -- MODEL.gguf speculation|stages|swap
//! ```
//! - `speculation`: tokens per second with draft tokens and without, on text that repeats its prompt and on text that does
//!   not, alone and in a batch; the answers are compared byte by byte.
//! - `stages`: tokens per second of a long prompt, of one answer and of sixteen: in one process, and in two that share the
//!   layers.
//! - `swap`: time to the first token of a conversation of 4096 tokens: computed, out of the pool, and back from memory
//!   and from a file.
//!
//! Ways take turns, so that a machine that slows down slows all of them; medians are printed.

mod speculation;
mod stages;
mod swap;

use std::error::Error;
use std::time::Instant;

use windlass_checkpoint::Checkpoint;
use windlass_engine_core::engine::{Engine, EngineConfig};
use windlass_engine_core::request::{Request, RequestId, TokenId};
use windlass_engine_model::CpuExecutor;

fn main() -> Result<(), Box<dyn Error>> {
    const USAGE: &str = "usage: serving MODEL.gguf speculation|stages|swap";
    let mut arguments = std::env::args().skip(1);
    let file = Checkpoint::open(arguments.next().ok_or(USAGE)?.as_ref())?;
    match arguments.next().as_deref() {
        Some("speculation") => speculation::measure(&file),
        Some("stages") => stages::measure(&file),
        Some("swap") => swap::measure(&file),
        _ => Err(USAGE.into()),
    }
}

/// Token ids of a page of prose under SmolLM2's tokenizer, a thousand of them.
fn prose() -> Vec<TokenId> {
    include_str!("../../tests/model/data/harbour.ids").split_whitespace().filter_map(|id| id.parse().ok()).collect()
}

/// Answers to some requests, and the seconds from the first token of the first to the last token of the last.
struct Run {
    answers: Vec<Vec<TokenId>>,
    first_seconds: f64,
    decode_seconds: f64,
    cached_tokens: u32,
}

fn run(engine: &mut Engine<CpuExecutor>, requests: &[Request]) -> Result<Run, Box<dyn Error>> {
    let began = Instant::now();
    for request in requests {
        engine.add(request.clone(), 0.0).map_err(|reason| reason.to_string())?;
    }
    let mut answers = vec![Vec::new(); requests.len()];
    let (mut first, mut cached_tokens) = (None, 0);
    while !engine.is_idle() {
        for update in engine.step(began.elapsed().as_secs_f64()).map_err(|error| error.to_string())?.updates {
            first = first.or(Some(began.elapsed().as_secs_f64()));
            cached_tokens = cached_tokens.max(update.cached_tokens);
            let index = requests.iter().position(|request| request.id == update.request).ok_or("an unknown request")?;
            answers[index].extend(update.tokens);
        }
    }
    let first_seconds = first.ok_or("no token came")?;
    Ok(Run { answers, first_seconds, decode_seconds: began.elapsed().as_secs_f64() - first_seconds, cached_tokens })
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// A request for a number of tokens and no fewer.
fn request(id: u64, prompt: Vec<TokenId>, tokens: u32) -> Request {
    Request::greedy(RequestId(id), prompt, tokens)
}

const PLAIN: EngineConfig = EngineConfig::PLAIN;
