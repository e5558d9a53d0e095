//! The encoder as HTTP tasks see it.

use crate::clock::Clock;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{self, Receiver, SendError, Sender};
use tokio::sync::oneshot;
use windlass_engine_model::{EncoderInput, EncoderShape};

/// A text on its way.
#[derive(Debug)]
pub(super) struct Job {
    pub(super) text: EncoderInput,
    pub(super) arrival_seconds: f64,
    pub(super) answer: oneshot::Sender<Result<Vec<f32>, Failed>>,
}

/// What waits, counted on both sides.
#[derive(Debug, Default)]
pub(super) struct Backlog {
    pub(super) texts: AtomicU64,
    pub(super) tokens: AtomicU64,
    /// Tokens computed in a second, so far.
    pub(super) tokens_per_second: AtomicU64,
}

/// Texts are not taken: too many wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{tokens} tokens wait to be read, and at most {limit_tokens} may")]
pub struct Refused {
    /// What waits, with the refused ones.
    pub tokens: u64,
    /// What may.
    pub limit_tokens: u64,
    /// When there is likely to be room.
    pub retry_after_seconds: u32,
}

/// A text could not be computed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Failed(pub String);

/// Submits texts. Cheap to clone.
#[derive(Clone)]
pub struct EncoderHandle {
    jobs: Sender<Job>,
    backlog: Arc<Backlog>,
    limit_tokens: u64,
    clock: Clock,
    shape: Arc<EncoderShape>,
}

/// The thread's end.
pub(super) struct Jobs {
    pub(super) receiver: Receiver<Job>,
    pub(super) backlog: Arc<Backlog>,
}

/// Both ends of the way to the encoder.
pub(super) fn channel(shape: EncoderShape, limit_tokens: u64, clock: Clock) -> (EncoderHandle, Jobs) {
    // What may wait is bounded by its tokens, and every text has one.
    let (jobs, receiver) = mpsc::channel();
    let backlog = Arc::new(Backlog::default());
    let handle = EncoderHandle { jobs, backlog: backlog.clone(), limit_tokens, clock, shape: Arc::new(shape) };
    (handle, Jobs { receiver, backlog })
}

impl EncoderHandle {
    /// What the encoder takes and gives.
    pub fn shape(&self) -> &EncoderShape {
        &self.shape
    }

    /// Computes texts, all or none of them. Never waits to be admitted.
    pub async fn run(&self, texts: Vec<EncoderInput>) -> Result<Result<Vec<Vec<f32>>, Failed>, Refused> {
        self.admit(texts.iter().map(|text| text.len() as u64).sum())?;
        let answers: Vec<_> = texts.into_iter().map(|text| self.send(text)).collect();
        let mut vectors = Vec::with_capacity(answers.len());
        for answer in answers {
            match answer.await.unwrap_or_else(|_| Err(Failed("the encoder has ended".to_owned()))) {
                Ok(vector) => vectors.push(vector),
                Err(failed) => return Ok(Err(failed)),
            }
        }
        Ok(Ok(vectors))
    }

    fn admit(&self, tokens: u64) -> Result<(), Refused> {
        self.backlog.take(tokens, self.limit_tokens).map_err(|waiting| {
            let speed = self.backlog.tokens_per_second.load(Ordering::Relaxed).max(1);
            let retry_after_seconds = (waiting / speed).clamp(1, 60) as u32;
            Refused { tokens: waiting + tokens, limit_tokens: self.limit_tokens, retry_after_seconds }
        })
    }

    /// Sends a text whose tokens are admitted.
    fn send(&self, text: EncoderInput) -> oneshot::Receiver<Result<Vec<f32>, Failed>> {
        let (answer, receiver) = oneshot::channel();
        self.backlog.texts.fetch_add(1, Ordering::Relaxed);
        let job = Job { text, arrival_seconds: self.clock.seconds(), answer };
        // Its answer ends with the job where the thread has ended.
        if let Err(SendError(job)) = self.jobs.send(job) {
            self.backlog.forget(job.text.len() as u64);
        }
        receiver
    }
}

impl Backlog {
    /// Lets tokens wait, or says how many wait already. A request alone is always taken: it could never be sent
    /// otherwise.
    fn take(&self, tokens: u64, limit: u64) -> Result<(), u64> {
        let fits = |waiting: u64| (waiting == 0 || waiting + tokens <= limit).then_some(waiting + tokens);
        self.tokens.fetch_update(Ordering::Relaxed, Ordering::Relaxed, fits).map(|_| ())
    }

    /// A text waits no longer.
    pub(super) fn forget(&self, tokens: u64) {
        self.texts.fetch_sub(1, Ordering::Relaxed);
        self.tokens.fetch_sub(tokens, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_waits_stays_below_its_limit_whoever_comes_at_once() {
        const LIMIT: u64 = 100;
        let backlog = Backlog::default();
        assert_eq!(backlog.take(1000, LIMIT), Ok(()), "alone it may be longer");
        assert_eq!(backlog.take(1, LIMIT), Err(1000));
        backlog.texts.fetch_add(1, Ordering::Relaxed);
        backlog.forget(1000);
        let come = || {
            for _ in 0..20_000 {
                if backlog.take(30, LIMIT).is_ok() {
                    assert!(backlog.tokens.load(Ordering::Relaxed) <= LIMIT);
                    backlog.texts.fetch_add(1, Ordering::Relaxed);
                    backlog.forget(30);
                }
            }
        };
        std::thread::scope(|scope| (0..8).for_each(|_| drop(scope.spawn(come))));
        assert_eq!(backlog.tokens.load(Ordering::Relaxed), 0);
    }
}
