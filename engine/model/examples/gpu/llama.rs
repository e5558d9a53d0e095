//! A model in the shape of Llama-3.1-8B, from a file on: what is wanted of it is in DESIGN.md, for an H200.

use std::slice;

use windlass_checkpoint::Checkpoint;
use windlass_engine_model::cuda::{CudaModel, Device, Replay};
use windlass_engine_model::{KvBudget, LoadOptions};

use crate::driver::{Job, generate};
use crate::finding::{Bound, Ceiling, Figure, Finding};
use crate::generated::{self, Format};
use crate::model::Model;
use crate::parts::Tell;
use crate::rates::{self, Running};
use crate::scale::Scale;
use crate::{Outcome, rig};

/// Tokens of a block of keys and values.
const BLOCK_TOKENS: usize = 64;
const WANTED_START: &str = "5 s at most, 3 s the goal";

const WANTED_WAKE: &str = "about 1 s";

impl Format {
    /// What prompts are multiplied in: inputs are rounded, too, or weights become what inputs are.
    fn ceiling(self) -> Ceiling {
        if self == Format::Fp8 { Ceiling::Fp8 } else { Ceiling::Bf16 }
    }

    /// Share of the roofline that one sequence is to reach, in words and at least.
    fn wanted(self) -> (&'static str, Bound) {
        match self {
            Format::Bf16 => ("70 % at least, 89 % the goal", Bound::LeastShare(70.0)),
            Format::Fp8 => ("60 % at least, 83 % the goal", Bound::LeastShare(60.0)),
            Format::Int4 => ("50 % at least, 75 % the goal", Bound::LeastShare(50.0)),
        }
    }
}

/// Start, decode, prompts.
pub fn measure(format: Format, model: &Model, tell: &mut Tell<'_>) -> Outcome<()> {
    let mut running = decode(format, model, tell)?;
    tell_prompts(&mut running, Scale::of(model), format.ceiling(), tell);
    Ok(())
}

/// Start and decode alone.
pub fn measure_decode(format: Format, model: &Model, tell: &mut Tell<'_>) -> Outcome<()> {
    decode(format, model, tell).map(drop)
}

fn decode(format: Format, model: &Model, tell: &mut Tell<'_>) -> Outcome<Running> {
    let scale = Scale::of(model);
    let mut running = start(format, model, true, tell)?;
    for &sequences in scale.llama_sequences {
        let (figure, (words, bound)) = (running.decode(sequences, scale.decoded), format.wanted());
        tell(if sequences == 1 { figure.wanted(words, bound) } else { figure }.into());
    }
    Ok(running)
}

/// Weights go to the host and come back.
pub fn measure_sleep(model: &Model, tell: &mut Tell<'_>) -> Outcome<()> {
    start(Format::Bf16, model, true, tell)?.sleep_and_wake(WANTED_WAKE, tell)
}

/// A few layers of each format, whose kernels are launched one by one: for a profiler, which sees each of them.
pub fn measure_layers(model: &Model, tell: &mut Tell<'_>) -> Outcome<()> {
    let scale = Scale::of(model);
    for format in [Format::Int4, Format::Bf16, Format::Fp8] {
        let folder = tempfile::tempdir()?;
        generated::write(folder.path(), &scale.layers, format)?;
        let (device, options) = (rig::device(model)?, options(scale, true));
        let loaded = CudaModel::load(&Checkpoint::open(folder.path())?, &options, slice::from_ref(&device))?;
        let mut executor = loaded.start(options.kv, Replay::Eager)?.executor;
        for sequences in [1, 32.min(options.max_sequences)] {
            let jobs: Vec<Job> = (0..sequences).map(|index| Job::greedy(&[1 + index])).collect();
            generate(&mut executor, &jobs, 3, 64, 1);
        }
        tell(Finding::check(format!("{format:?}: a few layers computed"), true));
    }
    Ok(())
}

/// Prompts of the same in bf16 where a token may depend on what is computed beside it.
pub fn measure_wide(model: &Model, tell: &mut Tell<'_>) -> Outcome<()> {
    let mut running = start(Format::Bf16, model, false, tell)?;
    tell_prompts(&mut running, Scale::of(model), Ceiling::Bf16, tell);
    Ok(())
}

/// Writes a checkpoint, and starts it. Its pages are still in the cache.
fn start(format: Format, model: &Model, batch_invariant: bool, tell: &mut Tell<'_>) -> Outcome<Running> {
    let (scale, folder) = (Scale::of(model), tempfile::tempdir()?);
    generated::write(folder.path(), &scale.llama, format)?;
    let options = options(scale, batch_invariant);
    let load = |device: &Device| {
        let checkpoint = Checkpoint::open(folder.path())?;
        let loaded = CudaModel::load(&checkpoint, &options, slice::from_ref(device))?;
        Ok(Running::new(loaded.start(options.kv, Replay::Graphs)?, scale.llama.embedding_bytes()))
    };
    let (_, running, start) = rates::start(model, load)?;
    tell(start.wanted(WANTED_START, Bound::Most(5.0)).into());
    Ok(running)
}

/// Room for as many sequences as decode together, and for the longest prompt in one step.
pub fn options(scale: &Scale, batch_invariant: bool) -> LoadOptions {
    let most = |sizes: &[usize]| sizes.iter().copied().max().unwrap_or(1);
    let (sequences, prompt) = (scale.llama_sequences.iter().copied().max().unwrap_or(1), most(scale.llama_prompts));
    let blocks = |tokens: usize| (tokens + 1).div_ceil(BLOCK_TOKENS) as u32;
    LoadOptions {
        block_tokens: BLOCK_TOKENS as u32,
        kv: KvBudget::Blocks((sequences * blocks(1 + scale.decoded)).max(blocks(prompt + 1))),
        max_sequences: sequences,
        max_step_tokens: (prompt as u32).max(sequences),
        max_model_tokens: Some(prompt as u32 + BLOCK_TOKENS as u32),
        batch_invariant,
        ..LoadOptions::default()
    }
}

fn tell_prompts(running: &mut Running, scale: &Scale, ceiling: Ceiling, tell: &mut Tell<'_>) {
    for &prompt in scale.llama_prompts {
        let seconds = running.first_token_seconds(prompt);
        let operations = prompt as f64 * scale.llama.operations();
        tell(Figure::new(format!("time to first token, a prompt of {prompt}"), 1e3 * seconds, "ms").into());
        let figure = Figure::new(format!("prefill of {prompt}"), prompt as f64 / seconds, "tokens/s");
        tell(figure.reaching(ceiling, operations / seconds).into());
    }
}
