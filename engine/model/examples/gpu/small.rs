//! A whole small model: what it says beside the CPU's executor, over and over, across graphs and sleep; and how fast it is.

use std::slice;

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
use crate::{Outcome, replays, rig};

/// How keys and values are held, and the largest mean KL from the CPU's that each may have.
const CACHES: [(&str, KvDataType, f64); 3] =
    [("bf16", KvDataType::Bf16, 1e-3), ("fp8", KvDataType::Fp8, 1e-2), ("int8", KvDataType::Int8, 1e-2)];

/// A model's file, and a device for it.
struct Small<'a> {
    checkpoint: &'a Checkpoint,
    device: &'a Device,
    scale: &'static Scale,
}

pub fn measure(model: &Model, tell: &mut Tell<'_>) -> Outcome<()> {
    let checkpoint = &model.checkpoint()?;
    let mut device = None;
    let (mut running, start) = rates::start(|| {
        let device = device.insert(rig::device(model)?);
        Ok(Running::new(loaded(checkpoint, device, KvDataType::Bf16, Replay::Graphs)?, 0))
    })?;
    tell(start.into());
    let Some(device) = &device else { return Err("no device was opened".into()) };
    let small = Small { checkpoint, device, scale: Scale::of(model) };
    small.compare_logits(model.is_trained(), tell)?;
    small.compare_steps(&mut running, tell)?;
    small.compare_texts(&mut running, tell)?;
    small.tell_rates(&mut running, tell)
}

fn options(kv_data_type: KvDataType) -> LoadOptions {
    LoadOptions {
        block_tokens: 64,
        kv: KvBudget::Blocks(512),
        kv_data_type,
        max_model_tokens: Some(512),
        ..LoadOptions::default()
    }
}

fn loaded(checkpoint: &Checkpoint, device: &Device, kv: KvDataType, replay: Replay) -> Outcome<LoadedCuda> {
    let options = options(kv);
    Ok(CudaModel::load(checkpoint, &options, slice::from_ref(device))?.start(options.kv, replay)?)
}

impl Small<'_> {
    fn loaded(&self, kv: KvDataType, replay: Replay) -> Outcome<LoadedCuda> {
        loaded(self.checkpoint, self.device, kv, replay)
    }

    /// Only the last layer is on the GPU.
    fn split(&self) -> Outcome<CpuExecutor> {
        let options = options(KvDataType::Bf16);
        let model = SplitModel::load(self.checkpoint, &options, 1, self.device)?;
        Ok(model.start(options.kv, Replay::Graphs)?.executor)
    }

    fn compare_logits(&self, is_trained: bool, tell: &mut Tell<'_>) -> Outcome<()> {
        let mut reference = None;
        for (name, kv, most_kl) in CACHES {
            let mut gpu = self.loaded(kv, Replay::Graphs)?.executor;
            let vocabulary = gpu.geometry().vocabulary;
            let text = agreement::text(self.scale.text_tokens, vocabulary);
            let found = agreement::on_gpu(&mut gpu, &text)?;
            let reference = match &mut reference {
                Some(logits) => logits,
                none => none.insert(agreement::on_cpu(self.checkpoint, &text)?),
            };
            let (bar, logits) = ((&*format!("a text, {name} cache"), most_kl), [&reference[..], &found]);
            tell_agreement(bar, logits, vocabulary as usize, is_trained, tell);
        }
        Ok(())
    }

    fn compare_steps(&self, running: &mut Running, tell: &mut Tell<'_>) -> Outcome<()> {
        let mut eager = self.loaded(KvDataType::Bf16, Replay::Eager)?.executor;
        let executors = [&mut running.executor, &mut eager];
        replays::compare(executors, self.scale.replayed, self.scale.replays, tell)
    }

    /// Greedy texts. Activations are bf16 on one side: they part from the CPU's at near ties, so that is told and not demanded.
    fn compare_texts(&self, running: &mut Running, tell: &mut Tell<'_>) -> Outcome<()> {
        let (tokens, jobs) = (self.scale.answer_tokens, self.jobs(running.executor.geometry().vocabulary));
        let answers = |executor: &mut dyn Executor| generate(executor, &jobs, tokens, 64, 2);
        let expected = answers(&mut load(self.checkpoint, &options(KvDataType::Bf16))?.executor);
        let (whole, split) = (answers(&mut running.executor), answers(&mut self.split()?));
        let unit = "% before texts part";
        tell(Figure::new("greedy tokens as the CPU's", shared(&expected, &whole), unit).into());
        tell(Figure::new("the same with all layers but one on the CPU", shared(&expected, &split), unit).into());
        running.sleep_and_wake("", tell)?;
        tell(Finding::check("a sleeper gives the same tokens when it wakes", answers(&mut running.executor) == whole));
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
