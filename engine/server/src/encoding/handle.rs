//! The encoder as HTTP tasks see it.

use crate::clock::Clock;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{self, Receiver, SyncSender, TrySendError};
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
    jobs: SyncSender<Job>,
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
    // Every text has a token, so the tokens' limit is met first.
    let (jobs, receiver) = mpsc::sync_channel(usize::try_from(limit_tokens).unwrap_or(usize::MAX).min(1 << 20));
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
        let tokens = texts.iter().map(|text| text.len() as u64).sum();
        self.admit(tokens)?;
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
        let waiting = self.backlog.tokens.load(Ordering::Relaxed);
        let total = waiting + tokens;
        // A request alone is always taken: it could never be sent otherwise.
        if waiting > 0 && total > self.limit_tokens {
            let speed = self.backlog.tokens_per_second.load(Ordering::Relaxed).max(1);
            let retry_after_seconds = (waiting / speed).clamp(1, 60) as u32;
            return Err(Refused { tokens: total, limit_tokens: self.limit_tokens, retry_after_seconds });
        }
        Ok(())
    }

    fn send(&self, text: EncoderInput) -> oneshot::Receiver<Result<Vec<f32>, Failed>> {
        let (answer, receiver) = oneshot::channel();
        let tokens = text.len() as u64;
        self.backlog.texts.fetch_add(1, Ordering::Relaxed);
        self.backlog.tokens.fetch_add(tokens, Ordering::Relaxed);
        let job = Job { text, arrival_seconds: self.clock.seconds(), answer };
        if let Err(TrySendError::Full(job) | TrySendError::Disconnected(job)) = self.jobs.try_send(job) {
            self.backlog.forget(tokens);
            let _ = job.answer.send(Err(Failed("the encoder takes no more texts; try again".to_owned())));
        }
        receiver
    }
}

impl Backlog {
    /// A text waits no longer.
    pub(super) fn forget(&self, tokens: u64) {
        self.texts.fetch_sub(1, Ordering::Relaxed);
        self.tokens.fetch_sub(tokens, Ordering::Relaxed);
    }
}
