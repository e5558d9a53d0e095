//! Measures a GGUF file on this machine: tokens per second of prefill, of decode alone, and of decode in a batch.
//!
//! ```text
//! cargo run --release -p windlass-engine-model --example throughput -- MODEL.gguf [THREADS] [REPEATS] [KERNELS]
//! ```
//! The figures are those of `llama-bench -p 512 -n 128` (pp512, tg128) and of `llama-batched-bench` with 16 sequences;
//! each is the best of REPEATS (3), since other work on the machine only ever slows a run.

use std::env;
use std::error::Error;
use std::path::Path;
use std::time::Instant;

use windlass_checkpoint::GgufFile;
use windlass_engine_core::plan::BlockId;
use windlass_engine_model::{Batch, Built, KvBudget, LoadOptions, Logits, build};
use windlass_kernels::Kernels;

const BLOCK_TOKENS: usize = 16;
const PREFILL: usize = 512;
const DECODE: usize = 128;
const SEQUENCES: usize = 16;
/// Blocks of one sequence of the longest run.
const BLOCKS: usize = PREFILL / BLOCK_TOKENS;

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = env::args().skip(1);
    let path = arguments.next().ok_or("usage: throughput MODEL.gguf [THREADS] [REPEATS] [KERNELS]")?;
    let threads = arguments.next().map_or(Ok(LoadOptions::default().threads), |count| count.parse())?;
    let repeats = arguments.next().map_or(Ok(3), |count| count.parse())?;
    let kernels = arguments.next().map_or(Ok(Kernels::detect()), |name| Kernels::named(&name))?;
    let mut model = load(Path::new(&path), threads, kernels)?;
    let best =
        |model: &mut Built, measure: fn(&mut Built) -> f64| (0..repeats).map(|_| measure(model)).fold(0.0, f64::max);
    println!("prefill of {PREFILL} tokens       {:9.1} tok/s", best(&mut model, prefill));
    println!("decode of {DECODE} tokens        {:9.1} tok/s", best(&mut model, decode));
    println!("decode of {SEQUENCES} sequences      {:9.1} tok/s", best(&mut model, decode_batch));
    Ok(())
}

fn load(path: &Path, threads: usize, kernels: Kernels) -> Result<Built, Box<dyn Error>> {
    let options = LoadOptions {
        threads,
        kernels,
        block_tokens: BLOCK_TOKENS as u32,
        kv: KvBudget::Blocks((SEQUENCES * BLOCKS) as u32),
        max_sequences: SEQUENCES as u32,
        max_step_tokens: PREFILL as u32,
        ..LoadOptions::default()
    };
    let started = Instant::now();
    let model = build(&GgufFile::open(path)?, &options)?;
    let (name, seconds) = (model.decoder.backend().kernels(), started.elapsed().as_secs_f64());
    println!("{} with {threads} threads on {name}, loaded in {seconds:.3} s", model.weight_type);
    Ok(model)
}

fn blocks_of(sequence: usize) -> Vec<BlockId> {
    (sequence * BLOCKS..(sequence + 1) * BLOCKS).map(|block| BlockId(block as u32)).collect()
}

/// Any tokens do: the work does not depend on them.
fn token(model: &Built, index: usize) -> u32 {
    index as u32 * 7919 % model.geometry.vocabulary
}

fn prefill(model: &mut Built) -> f64 {
    let mut batch = Batch::default();
    let tokens: Vec<u32> = (0..PREFILL).map(|index| token(model, index)).collect();
    batch.push(tokens, 0, &blocks_of(0), Logits::Last);
    let started = Instant::now();
    model.decoder.forward(&batch);
    PREFILL as f64 / started.elapsed().as_secs_f64()
}

fn decode(model: &mut Built) -> f64 {
    decode_sequences(model, 1)
}

fn decode_batch(model: &mut Built) -> f64 {
    decode_sequences(model, SEQUENCES)
}

/// Tokens per second of all sequences together, each from an empty context.
fn decode_sequences(model: &mut Built, sequences: usize) -> f64 {
    let mut batch = Batch::default();
    let started = Instant::now();
    for position in 0..DECODE {
        batch.clear();
        for sequence in 0..sequences {
            batch.push([token(model, position + sequence)], position as u32, &blocks_of(sequence), Logits::Last);
        }
        model.decoder.forward(&batch);
    }
    (sequences * DECODE) as f64 / started.elapsed().as_secs_f64()
}
