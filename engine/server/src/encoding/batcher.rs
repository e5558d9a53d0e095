//! The thread that owns the encoder.

use super::handle::{EncoderHandle, Failed, Job, Jobs, channel};
use crate::clock::Clock;
use crate::monitor::{Encoded, Monitor};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::RecvTimeoutError;
use std::time::Duration;
use windlass_engine_model::{Encoder, EncoderError, EncoderInput, EncoderShape};

/// What computes batches of texts.
pub trait Encode: Send {
    /// What it takes and gives.
    fn shape(&self) -> &EncoderShape;

    /// A vector, or a score of its own, for each text, of which each is what [`shape`](Self::shape) takes.
    fn run(&self, texts: &[EncoderInput]) -> Result<Vec<Vec<f32>>, EncoderError>;
}

impl Encode for Encoder {
    fn shape(&self) -> &EncoderShape {
        Encoder::shape(self)
    }

    fn run(&self, texts: &[EncoderInput]) -> Result<Vec<Vec<f32>>, EncoderError> {
        Encoder::run(self, texts)
    }
}

/// How texts are put together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BatchLimits {
    /// Longest time that a text waits for others.
    pub max_wait: Duration,
    /// Most texts.
    pub max_texts: usize,
    /// Most tokens, padding counted: texts times the longest of them. One text is always taken.
    pub max_tokens: usize,
    /// Most tokens that may wait.
    pub max_queue_tokens: u64,
}

/// The encoder with everything that its thread owns.
pub struct Batcher {
    encoder: Box<dyn Encode>,
    jobs: Jobs,
    limits: BatchLimits,
    monitor: Arc<Monitor>,
    clock: Clock,
    /// A text that did not fit into the last batch.
    held: Option<Job>,
}

impl Batcher {
    /// An encoder that has nothing to do yet.
    pub fn new(
        encoder: Box<dyn Encode>,
        limits: BatchLimits,
        monitor: Arc<Monitor>,
        clock: Clock,
    ) -> (EncoderHandle, Batcher) {
        let (handle, jobs) = channel(encoder.shape().clone(), limits.max_queue_tokens, monitor.clone(), clock);
        (handle, Batcher { encoder, jobs, limits, monitor, clock, held: None })
    }

    /// Runs until every handle is gone.
    pub fn run(mut self) {
        while let Some(first) = self.first() {
            let batch = self.gather(first);
            self.compute(batch);
            self.show_running(0);
        }
    }

    /// Waits for work.
    fn first(&mut self) -> Option<Job> {
        if let Some(held) = self.held.take() {
            return Some(held);
        }
        let ready = self.jobs.receiver.try_recv().ok();
        if ready.is_some() {
            return ready;
        }
        self.monitor.idle();
        let job = self.jobs.receiver.recv().ok();
        self.monitor.woke();
        job
    }

    /// The first text and what comes in time and fits beside it.
    fn gather(&mut self, first: Job) -> Vec<Job> {
        let arrival = first.arrival_seconds;
        let mut longest = first.text.len();
        let mut batch = vec![first];
        while batch.len() < self.limits.max_texts {
            let left = left(self.limits.max_wait, arrival, self.clock.seconds());
            let job = match self.jobs.receiver.recv_timeout(left) {
                Ok(job) => job,
                Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => break,
            };
            let padded = longest.max(job.text.len());
            if padded * (batch.len() + 1) > self.limits.max_tokens {
                self.held = Some(job);
                break;
            }
            longest = padded;
            batch.push(job);
        }
        batch
    }

    fn compute(&mut self, batch: Vec<Job>) {
        let batch: Vec<Job> = batch.into_iter().filter(|job| !job.answer.is_closed()).collect();
        if batch.is_empty() {
            return;
        }
        self.show_running(batch.len());
        let texts: Vec<EncoderInput> = batch.iter().map(|job| job.text.clone()).collect();
        let began = self.clock.seconds();
        self.monitor.turn_began(began);
        let computed = self.encoder.run(&texts);
        let ended = self.clock.seconds();
        self.monitor.turn_ended(began, ended);
        self.learn(&texts, ended - began);
        let results = match computed {
            Ok(vectors) => vectors.into_iter().map(Ok).collect(),
            Err(error) => vec![Err(Failed(error.to_string())); batch.len()],
        };
        let share = batch.len() as f64 / self.limits.max_texts as f64;
        for (job, result) in batch.into_iter().zip(results) {
            let tokens = job.text.len() as u32;
            drop(job.place);
            let times = Encoded { tokens, arrival: job.arrival_seconds, began, ended, failed: result.is_err() };
            self.monitor.encoded(&times, share);
            // Nobody waits for it any more.
            let _ = job.answer.send(result);
        }
    }

    /// How fast it is, as a mean that forgets.
    fn learn(&self, texts: &[EncoderInput], seconds: f64) {
        let tokens: usize = texts.iter().map(EncoderInput::len).sum();
        let now = tokens as f64 / seconds.max(1e-6);
        let known = &self.jobs.backlog.tokens_per_second;
        let before = known.load(Ordering::Relaxed) as f64;
        let mean = if before == 0.0 { now } else { 0.8 * before + 0.2 * now };
        known.store(mean as u64, Ordering::Relaxed);
    }

    fn show_running(&self, texts: usize) {
        self.jobs.backlog.running.store(texts as u64, Ordering::Relaxed);
        self.jobs.backlog.show(&self.monitor);
    }
}

/// How much longer a text that came at `arrival` waits for others; the time that an earlier batch took counts.
fn left(max_wait: Duration, arrival: f64, now: f64) -> Duration {
    max_wait.saturating_sub(Duration::try_from_secs_f64(now - arrival).unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_wait_counts_from_the_arrival() {
        let milliseconds = Duration::from_millis;
        for (now, expected) in [(7.0, 500), (7.125, 375), (7.5, 0), (9.0, 0), (6.9, 500)] {
            assert_eq!(left(milliseconds(500), 7.0, now), milliseconds(expected), "{now}");
        }
    }
}
