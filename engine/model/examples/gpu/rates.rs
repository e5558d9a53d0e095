//! How fast a running model is, as whoever waits for its tokens sees it.

use std::time::Instant;

use windlass_engine_core::executor::Executor;
use windlass_engine_model::cuda::{CudaExecutor, Device, LoadedCuda};

use crate::driver::{Job, generate};
use crate::finding::{Ceiling, Figure};
use crate::model::Model;
use crate::parts::Tell;
use crate::{Outcome, noise, rig};

/// A model on a device, and what a decoding step reads of it.
pub struct Running {
    pub executor: CudaExecutor,
    weight_bytes: f64,
    kv_bytes_per_token: f64,
}

impl Running {
    /// Steps read all weights but so many bytes.
    pub fn new(loaded: LoadedCuda, unread_bytes: u64) -> Running {
        let (ledger, geometry) = (loaded.ledger(), loaded.executor.geometry());
        Running {
            executor: loaded.executor,
            weight_bytes: (ledger.weights - unread_bytes) as f64,
            kv_bytes_per_token: ledger.kv as f64 / f64::from(geometry.blocks * geometry.block_tokens),
        }
    }

    /// Tokens a second that so many sequences get together, each `tokens` behind a prompt of one, and the bytes that are read for
    /// them.
    pub fn decode(&mut self, sequences: u32, tokens: usize) -> Figure {
        let rate = tokens_per_second(&mut self.executor, sequences, tokens);
        let read = f64::from(sequences) * self.kv_bytes_per_token * tokens as f64 / 2.0;
        let bytes_per_second = (self.weight_bytes + read) * rate / f64::from(sequences);
        let figure = Figure::new(format!("decode, {sequences} sequences"), rate, "tokens/s");
        figure.reaching(Ceiling::Copy, bytes_per_second)
    }

    /// Seconds from the moment that a prompt of so many tokens is there to its first token, with nothing beside it.
    pub fn first_token_seconds(&mut self, prompt: usize) -> f64 {
        let job = Job::greedy(&prompt_of(&self.executor, prompt));
        let chunk = self.executor.geometry().max_step_tokens as usize;
        // The first time loads what is loaded at first use.
        generate(&mut self.executor, std::slice::from_ref(&job), 1, chunk, 2);
        let started = Instant::now();
        generate(&mut self.executor, &[job], 1, chunk, 2);
        started.elapsed().as_secs_f64()
    }

    /// Has the model sleep and wake twice: the first time its weights are copied to the host. Nothing where no memory is mapped.
    /// `wanted` is of waking.
    pub fn sleep_and_wake(&mut self, wanted: &str, tell: &mut Tell<'_>) -> Outcome<()> {
        if self.executor.weights_to_move().is_none() {
            return Ok(());
        }
        for turn in ["first", "second"] {
            let seconds = [timed(|| self.hold(false))?, timed(|| self.hold(true))?];
            for ((what, wanted), seconds) in [("sleep", None), ("wake", Some(wanted))].into_iter().zip(seconds) {
                let (rate, figure) =
                    (self.weight_bytes / seconds / 1e9, Figure::new(format!("{turn} {what}"), seconds, "s"));
                tell(if let Some(wanted) = wanted { figure.wanted(wanted, None) } else { figure }.into());
                tell(Figure::new(format!("{turn} {what}, weights a second"), rate, "GB/s").into());
            }
        }
        Ok(())
    }

    /// As the server has it: what was taken last is given back first.
    fn hold(&mut self, held: bool) -> Outcome<()> {
        match held {
            true => {
                self.executor.hold_weights(true)?;
                self.executor.hold_kv(true)?;
            }
            false => {
                self.executor.hold_kv(false)?;
                self.executor.hold_weights(false)?;
            }
        }
        Ok(())
    }
}

/// A device and a model on it, and how long both took to a first token.
pub fn start(model: &Model, load: impl FnOnce(&Device) -> Outcome<Running>) -> Outcome<(Device, Running, Figure)> {
    let started = Instant::now();
    let device = rig::device(model)?;
    let mut running = load(&device)?;
    generate(&mut running.executor, &[Job::greedy(&[1])], 1, 1, 1);
    let seconds = started.elapsed().as_secs_f64();
    Ok((device, running, Figure::new("start to first token, the file in the page cache", seconds, "s")))
}

/// Tokens a second that so many sequences get together, prompts of one token among them.
pub fn tokens_per_second(executor: &mut dyn Executor, sequences: u32, tokens: usize) -> f64 {
    let jobs: Vec<Job> = (0..sequences).map(|index| Job::greedy(&[1 + index % 250])).collect();
    // The first time captures the graphs.
    generate(executor, &jobs, 4, 64, 2);
    let started = Instant::now();
    generate(executor, &jobs, tokens, 64, 2);
    (sequences as usize * tokens) as f64 / started.elapsed().as_secs_f64()
}

/// Tokens of no sense.
fn prompt_of(executor: &dyn Executor, tokens: usize) -> Vec<u32> {
    let vocabulary = executor.geometry().vocabulary;
    noise::bytes(4 * tokens).as_chunks().0.iter().map(|bytes| u32::from_le_bytes(*bytes) % vocabulary).collect()
}

fn timed(act: impl FnOnce() -> Outcome<()>) -> Outcome<f64> {
    let started = Instant::now();
    act()?;
    Ok(started.elapsed().as_secs_f64())
}
