//! A whole small model: what it says beside the CPU's executor, over and over, across graphs and sleep; and how fast it is.

use std::slice;
use std::time::Instant;

use windlass_checkpoint::Checkpoint;
use windlass_engine_contract::memory::KvDataType;
use windlass_engine_core::executor::Executor;
use windlass_engine_model::cuda::{CudaModel, Device, LoadedCuda, Replay, SplitModel};
use windlass_engine_model::{CpuExecutor, KvBudget, LoadOptions, load};

use crate::agreement::{self, tell_agreement};
use crate::driver::{Job, generate};
use crate::finding::{Figure, Finding};
use crate::model::Model;
use crate::parts::Tell;
use crate::rates::{self, Running};
use crate::scale::Scale;
use crate::{Outcome, replays};

/// A way to compute, and the largest mean KL from the CPU's logits that it may have.
#[derive(Clone, Copy)]
struct Way {
    name: &'static str,
    kv_data_type: KvDataType,
    batch_invariant: bool,
    replay: Replay,
    most_kl: f64,
}

/// As a server computes that is told nothing.
const PLAIN: Way = Way {
    name: "bf16 cache",
    kv_data_type: KvDataType::Bf16,
    batch_invariant: true,
    replay: Replay::Graphs,
    most_kl: 1e-3,
};
const WAYS: [Way; 4] = [
    PLAIN,
    Way { name: "fp8 cache", kv_data_type: KvDataType::Fp8, most_kl: 1e-2, ..PLAIN },
    Way { name: "int8 cache", kv_data_type: KvDataType::Int8, most_kl: 1e-2, ..PLAIN },
    Way { name: "--no-deterministic", batch_invariant: false, ..PLAIN },
];

/// A model's file, and a device for it.
struct Small<'a> {
    checkpoint: &'a Checkpoint,
    device: &'a Device,
    scale: &'static Scale,
}

pub fn measure(model: &Model, tell: &mut Tell<'_>) -> Outcome<()> {
    let checkpoint = &model.checkpoint()?;
    let load = |device: &Device| Ok(Running::new(loaded(checkpoint, device, PLAIN)?, 0));
    let (device, mut running, start) = rates::start(model, load)?;
    tell(start.into());
    let small = Small { checkpoint, device: &device, scale: Scale::of(model) };
    small.compare_logits(model.is_trained(), tell)?;
    small.compare_steps(&mut running, tell)?;
    small.compare_texts(&mut running, tell)?;
    small.tell_rates(&mut running, tell)
}

fn options(way: Way) -> LoadOptions {
    LoadOptions {
        block_tokens: 64,
        kv: KvBudget::Blocks(512),
        kv_data_type: way.kv_data_type,
        batch_invariant: way.batch_invariant,
        max_model_tokens: Some(512),
        ..LoadOptions::default()
    }
}

fn loaded(checkpoint: &Checkpoint, device: &Device, way: Way) -> Outcome<LoadedCuda> {
    let options = options(way);
    Ok(CudaModel::load(checkpoint, &options, slice::from_ref(device))?.start(options.kv, way.replay)?)
}

impl Small<'_> {
    fn loaded(&self, way: Way) -> Outcome<LoadedCuda> {
        loaded(self.checkpoint, self.device, way)
    }

    /// Only the last layer is on the GPU.
    fn split(&self) -> Outcome<CpuExecutor> {
        let options = options(PLAIN);
        let model = SplitModel::load(self.checkpoint, &options, 1, self.device)?;
        Ok(model.start(options.kv, Replay::Graphs)?.executor)
    }

    /// Where a token's logits hang on how many are computed together, three quarters of the text are.
    fn compare_logits(&self, is_trained: bool, tell: &mut Tell<'_>) -> Outcome<()> {
        let mut reference = None;
        for way in WAYS {
            let mut gpu = self.loaded(way)?.executor;
            let vocabulary = gpu.geometry().vocabulary;
            let text = agreement::text(self.scale.text_tokens, vocabulary);
            let ahead = if way.batch_invariant { 0 } else { 3 * text.len() / 4 };
            let found = agreement::on_gpu(&mut gpu, &text, ahead)?;
            let reference = match &mut reference {
                Some(logits) => logits,
                none => none.insert(agreement::on_cpu(self.checkpoint, &text)?),
            };
            let (name, vocabulary) = (format!("a text, {}", way.name), vocabulary as usize);
            let logits = [&reference[ahead * vocabulary..], &found];
            tell_agreement((&name, way.most_kl), logits, vocabulary, is_trained, tell);
        }
        Ok(())
    }

    fn compare_steps(&self, running: &mut Running, tell: &mut Tell<'_>) -> Outcome<()> {
        let mut eager = self.loaded(Way { replay: Replay::Eager, ..PLAIN })?.executor;
        let executors = [&mut running.executor, &mut eager];
        replays::compare(executors, self.scale.replayed, self.scale.replays, tell)
    }

    /// Greedy texts. Activations are bf16 on one side: they part from the CPU's at near ties, so that is told and not demanded.
    fn compare_texts(&self, running: &mut Running, tell: &mut Tell<'_>) -> Outcome<()> {
        let (tokens, jobs) = (self.scale.answer_tokens, self.jobs(running.executor.geometry().vocabulary));
        let answers = |executor: &mut dyn Executor| generate(executor, &jobs, tokens, 64, 2);
        let expected = answers(&mut load(self.checkpoint, &options(PLAIN))?.executor);
        let (whole, split) = (answers(&mut running.executor), answers(&mut self.split()?));
        let unit = "% before texts part";
        tell(Figure::new("greedy tokens as the CPU's", shared(&expected, &whole), unit).into());
        tell(Figure::new("the same with all layers but one on the CPU", shared(&expected, &split), unit).into());
        self.capture_ahead(running, tell)?;
        let same = answers(&mut running.executor) == whole;
        tell(Finding::check("graphs that were captured ahead give the same tokens", same));
        running.sleep_and_wake("", tell)?;
        tell(Finding::check("a sleeper gives the same tokens when it wakes", answers(&mut running.executor) == whole));
        Ok(())
    }

    /// All graphs that are missing, as an engine without work captures them: what one takes.
    fn capture_ahead(&self, running: &mut Running, tell: &mut Tell<'_>) -> Outcome<()> {
        let free = || self.device.driver().memory().map(|memory| memory.free_bytes as f64);
        let (before, started, mut graphs) = (free()?, Instant::now(), 0.0);
        while running.executor.prepare()?.advanced {
            graphs += 1.0;
        }
        let (seconds, bytes) = (started.elapsed().as_secs_f64(), before - free()?);
        tell(Figure::new("captured ahead", graphs, "graphs").into());
        tell(Figure::new("captured ahead, time of a graph", 1e3 * seconds / graphs.max(1.0), "ms").into());
        tell(Figure::new("captured ahead, memory of a graph", bytes.max(0.0) / graphs.max(1.0) / 1024.0, "KiB").into());
        Ok(())
    }

    fn jobs(&self, vocabulary: u32) -> Vec<Job> {
        let text = agreement::text(usize::MAX, vocabulary);
        (0..4).map(|index| Job::greedy(&text[100 * index..][..40 + 9 * index])).collect()
    }

    fn tell_rates(&self, running: &mut Running, tell: &mut Tell<'_>) -> Outcome<()> {
        for &sequences in self.scale.sequences {
            tell(running.decode(sequences, self.scale.decoded).into());
        }
        let prompt = self.scale.prompt;
        let seconds = running.first_token_seconds(prompt);
        tell(Figure::new(format!("time to first token, a prompt of {prompt}"), 1e3 * seconds, "ms").into());
        tell(Figure::new(format!("prefill of {prompt}"), prompt as f64 / seconds, "tokens/s").into());
        let rate = rates::tokens_per_second(&mut self.split()?, 1, self.scale.decoded);
        tell(Figure::new("decode, 1 sequence, all layers but one on the CPU", rate, "tokens/s").into());
        Ok(())
    }
}

/// Percent of tokens before texts part.
fn shared(one: &[Vec<u32>], other: &[Vec<u32>]) -> f64 {
    let same = |(one, other): (&Vec<u32>, &Vec<u32>)| one.iter().zip(other).take_while(|(a, b)| a == b).count();
    let all: usize = one.iter().map(Vec::len).sum();
    100.0 * one.iter().zip(other).map(same).sum::<usize>() as f64 / all as f64
}
