//! Measures a GGUF file on this machine: tokens per second of prefill, of decode alone and in a batch, at any context.
//!
//! ```text
//! cargo run --release -p windlass-engine-model --example throughput -- MODEL.gguf [OPTION=VALUE]... [TEST]...
//! ```
//! Options are `threads=` (all processors), `repeats=` (3, the best counts: other work only ever slows a run),
//! `kernels=` (the fastest), `kv=` (bf16; how keys and values are held), `deterministic=` (true). Tests are `pp512`, `tg128` (as
//! `llama-bench -p 512 -n 128`), `tg64x16@128` (as `llama-batched-bench -npp 128 -ntg 64 -npl 16`), with other numbers too; these
//! three are run when none is named, and
//! `machine` says what the machine reads and multiplies at best. One line is printed for each: its name and figures.

mod test;

use std::env;
use std::error::Error;
use std::time::Instant;

use test::Test;
use windlass_checkpoint::Checkpoint;
use windlass_engine_contract::memory::KvDataType;
use windlass_engine_core::plan::BlockId;
use windlass_engine_model::{Batch, Built, KvBudget, LoadOptions, Logits, build};
use windlass_kernels::{Kernels, PackedMatrix, Pool, machine};

const BLOCK_TOKENS: usize = 16;
/// Most tokens in a step.
const STEP_TOKENS: usize = 512;
const DEFAULT_TESTS: [&str; 3] = ["pp512", "tg128", "tg64x16@128"];
/// Well above the last-level cache.
const MEMORY_BYTES: usize = 512 << 20;

struct Arguments {
    path: String,
    threads: usize,
    repeats: usize,
    kernels: Kernels,
    kv_data_type: KvDataType,
    batch_invariant: bool,
    machine: bool,
    tests: Vec<Test>,
}

fn main() -> Result<(), Box<dyn Error>> {
    let arguments = Arguments::parse(env::args().skip(1))?;
    if arguments.machine {
        print_machine(&arguments)?;
    }
    let mut model = load(&arguments)?;
    print_model(&model);
    for test in &arguments.tests {
        let best = (0..arguments.repeats).map(|_| measure(&mut model, test)).fold(0.0, f64::max);
        println!("{} {best:.2} tok/s", test.name);
    }
    Ok(())
}

impl Arguments {
    fn parse(mut words: impl Iterator<Item = String>) -> Result<Arguments, Box<dyn Error>> {
        let path = words.next().ok_or(
            "usage: throughput MODEL.gguf [threads=N] [repeats=N] [kernels=NAME] [kv=TYPE] [deterministic=BOOL] [TEST]...",
        )?;
        let (threads, kernels) = (LoadOptions::default().threads, Kernels::detect());
        let mut arguments = Arguments {
            path,
            threads,
            repeats: 3,
            kernels,
            kv_data_type: KvDataType::default(),
            batch_invariant: true,
            machine: false,
            tests: Vec::new(),
        };
        for word in words {
            match word.split_once('=') {
                Some(("threads", value)) => arguments.threads = value.parse()?,
                Some(("repeats", value)) => arguments.repeats = value.parse()?,
                Some(("kernels", value)) => arguments.kernels = Kernels::named(value)?,
                Some(("kv", value)) => {
                    arguments.kv_data_type = KvDataType::named(value).ok_or("kv is bf16, f16, fp8, int8 or int4")?;
                }
                Some(("deterministic", value)) => arguments.batch_invariant = value.parse()?,
                _ if word == "machine" => arguments.machine = true,
                _ => arguments.tests.push(word.parse()?),
            }
        }
        if arguments.tests.is_empty() && !arguments.machine {
            arguments.tests = DEFAULT_TESTS.into_iter().map(str::parse).collect::<Result<_, _>>()?;
        }
        Ok(arguments)
    }
}

fn print_machine(arguments: &Arguments) -> Result<(), Box<dyn Error>> {
    let pool = Pool::with_kernels(arguments.threads, arguments.kernels)?;
    println!("memory {:.2} GB/s", machine::read_bytes_per_second(&pool, MEMORY_BYTES) / 1e9);
    println!("int8 {:.2} Gop/s", machine::int8_operations_per_second(&pool) / 1e9);
    Ok(())
}

fn load(arguments: &Arguments) -> Result<Built, Box<dyn Error>> {
    let blocks = arguments.tests.iter().map(|test| test.sequences * blocks_per_sequence(test)).max().unwrap_or(1);
    let options = LoadOptions {
        threads: arguments.threads,
        kernels: arguments.kernels,
        kv_data_type: arguments.kv_data_type,
        batch_invariant: arguments.batch_invariant,
        block_tokens: BLOCK_TOKENS as u32,
        kv: KvBudget::Blocks(blocks.max(STEP_TOKENS / BLOCK_TOKENS) as u32),
        max_sequences: arguments.tests.iter().map(|test| test.sequences).max().unwrap_or(1) as u32,
        max_step_tokens: arguments.tests.iter().map(|test| test.tokens).fold(STEP_TOKENS, usize::max) as u32,
        ..LoadOptions::default()
    };
    let started = Instant::now();
    let model = build(&Checkpoint::open(arguments.path.as_ref())?, &options)?;
    println!("load {:.3} s", started.elapsed().as_secs_f64());
    Ok(model)
}

/// What a token costs at least: the weights that are read for it, and the operations on them.
fn print_model(model: &Built) {
    let weights = model.decoder.weights();
    let operations = |matrix: &PackedMatrix| 2 * matrix.rows() * matrix.cols();
    println!("type {} on {}", model.weight_type, model.decoder.backend().kernels());
    println!("weights {} bytes", weights.products().map(PackedMatrix::bytes).sum::<usize>());
    println!("operations {} a token", weights.products().map(operations).sum::<usize>());
    println!("prompt_operations {} a token", weights.layer_matrices().map(operations).sum::<usize>());
}

fn blocks_per_sequence(test: &Test) -> usize {
    test.positions().div_ceil(BLOCK_TOKENS)
}

fn blocks_of(test: &Test, sequence: usize) -> Vec<BlockId> {
    let blocks = blocks_per_sequence(test);
    (sequence * blocks..(sequence + 1) * blocks).map(|block| BlockId(block as u32)).collect()
}

/// Any tokens do: the work does not depend on them.
fn token(model: &Built, index: usize) -> u32 {
    index as u32 * 7919 % model.geometry.vocabulary
}

/// Tokens per second of all sequences together.
fn measure(model: &mut Built, test: &Test) -> f64 {
    fill(model, test);
    let started = Instant::now();
    if test.prefill {
        prefill(model, test)
    } else {
        decode(model, test)
    }
    (test.sequences * test.tokens) as f64 / started.elapsed().as_secs_f64()
}

/// Writes every block's keys and values. What they are does not matter, so each stretch of a step's length is computed
/// as if it stood alone, which takes a time linear in the context.
fn fill(model: &mut Built, test: &Test) {
    let blocks: Vec<BlockId> = (0..test.sequences).flat_map(|sequence| blocks_of(test, sequence)).collect();
    let mut batch = Batch::default();
    for blocks in blocks.chunks(STEP_TOKENS / BLOCK_TOKENS) {
        let tokens: Vec<u32> = (0..blocks.len() * BLOCK_TOKENS).map(|index| token(model, index)).collect();
        batch.clear();
        batch.push(tokens, 0, blocks, Logits::LAST);
        model.decoder.forward(&batch);
    }
}

fn prefill(model: &mut Built, test: &Test) {
    let mut batch = Batch::default();
    for sequence in 0..test.sequences {
        let tokens: Vec<u32> = (test.depth..test.positions()).map(|index| token(model, index)).collect();
        batch.clear();
        batch.push(tokens, test.depth as u32, &blocks_of(test, sequence), Logits::LAST);
        model.decoder.forward(&batch);
    }
}

fn decode(model: &mut Built, test: &Test) {
    let mut batch = Batch::default();
    let blocks: Vec<Vec<BlockId>> = (0..test.sequences).map(|sequence| blocks_of(test, sequence)).collect();
    for position in test.depth..test.positions() {
        batch.clear();
        for (sequence, blocks) in blocks.iter().enumerate() {
            batch.push([token(model, position + sequence)], position as u32, blocks, Logits::LAST);
        }
        model.decoder.forward(&batch);
    }
}
