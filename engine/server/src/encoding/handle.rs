//! The encoder as HTTP tasks see it.

use crate::clock::Clock;
use crate::monitor::Monitor;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{self, Receiver, Sender};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot};
use windlass_engine_model::{EncoderInput, EncoderShape};

/// A text on its way.
#[derive(Debug)]
pub(super) struct Job {
    pub(super) text: EncoderInput,
    pub(super) arrival_seconds: f64,
    pub(super) place: Place,
    pub(super) answer: oneshot::Sender<Result<Vec<f32>, Failed>>,
}

/// What was taken and not answered yet, counted on both sides.
#[derive(Debug)]
pub(super) struct Backlog {
    /// Room for tokens.
    room: Arc<Semaphore>,
    limit_tokens: u32,
    texts: AtomicU64,
    /// Texts of the batch that is computed.
    pub(super) running: AtomicU64,
    /// Tokens computed in a second, so far.
    pub(super) tokens_per_second: AtomicU64,
}

/// A text's place in the backlog, until it is dropped.
#[derive(Debug)]
pub(super) struct Place {
    backlog: Arc<Backlog>,
    _tokens: OwnedSemaphorePermit,
}

impl Drop for Place {
    fn drop(&mut self) {
        self.backlog.texts.fetch_sub(1, Ordering::Relaxed);
    }
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
    monitor: Arc<Monitor>,
    clock: Clock,
    shape: Arc<EncoderShape>,
}

/// The thread's end.
pub(super) struct Jobs {
    pub(super) receiver: Receiver<Job>,
    pub(super) backlog: Arc<Backlog>,
}

/// Both ends of the way to the encoder.
pub(super) fn channel(
    shape: EncoderShape,
    limit_tokens: u64,
    monitor: Arc<Monitor>,
    clock: Clock,
) -> (EncoderHandle, Jobs) {
    // What may wait is bounded by its tokens, and every text has one.
    let (jobs, receiver) = mpsc::channel();
    let backlog = Arc::new(Backlog::new(limit_tokens));
    let handle = EncoderHandle { jobs, backlog: backlog.clone(), monitor, clock, shape: Arc::new(shape) };
    (handle, Jobs { receiver, backlog })
}

impl EncoderHandle {
    /// What the encoder takes and gives.
    pub fn shape(&self) -> &EncoderShape {
        &self.shape
    }

    /// Computes texts, all or none of them. Never waits to be admitted.
    pub async fn run(&self, texts: Vec<EncoderInput>) -> Result<Result<Vec<Vec<f32>>, Failed>, Refused> {
        let mut room = self.admit(texts.iter().map(|text| text.len() as u64).sum())?;
        let answers: Vec<_> = texts.into_iter().map(|text| self.send(text, &mut room)).collect();
        let mut vectors = Vec::with_capacity(answers.len());
        for answer in answers {
            match answer.await.unwrap_or_else(|_| Err(Failed("the encoder has ended".to_owned()))) {
                Ok(vector) => vectors.push(vector),
                Err(failed) => return Ok(Err(failed)),
            }
        }
        Ok(Ok(vectors))
    }

    fn admit(&self, tokens: u64) -> Result<OwnedSemaphorePermit, Refused> {
        self.backlog.take(tokens).ok_or_else(|| {
            let speed = self.backlog.tokens_per_second.load(Ordering::Relaxed).max(1);
            let waiting = self.backlog.tokens();
            let retry_after_seconds = (waiting / speed).clamp(1, 60) as u32;
            Refused { tokens: waiting + tokens, limit_tokens: self.backlog.limit_tokens.into(), retry_after_seconds }
        })
    }

    /// Sends a text, whose place is cut off `room`.
    fn send(&self, text: EncoderInput, room: &mut OwnedSemaphorePermit) -> oneshot::Receiver<Result<Vec<f32>, Failed>> {
        let (answer, receiver) = oneshot::channel();
        let place = self.backlog.place(text.len(), room);
        self.backlog.show(&self.monitor);
        // Where the thread has ended, the job ends here, and its answer with it.
        let _ = self.jobs.send(Job { text, arrival_seconds: self.clock.seconds(), place, answer });
        receiver
    }
}

impl Backlog {
    fn new(limit_tokens: u64) -> Backlog {
        // With none, requests would not even count.
        let limit_tokens = limit_tokens.clamp(1, u32::MAX.into()) as u32;
        Backlog {
            room: Arc::new(Semaphore::new(limit_tokens as usize)),
            limit_tokens,
            texts: AtomicU64::new(0),
            running: AtomicU64::new(0),
            tokens_per_second: AtomicU64::new(0),
        }
    }

    /// Room for so many tokens, if there is. For more than ever fit there is when nothing else waits: they could never be
    /// sent otherwise.
    fn take(&self, tokens: u64) -> Option<OwnedSemaphorePermit> {
        let tokens = tokens.min(self.limit_tokens.into()) as u32;
        self.room.clone().try_acquire_many_owned(tokens).ok()
    }

    /// A text's place in the room that was taken for it and others.
    fn place(self: &Arc<Self>, tokens: usize, room: &mut OwnedSemaphorePermit) -> Place {
        self.texts.fetch_add(1, Ordering::Relaxed);
        let tokens = room.split(tokens.min(room.num_permits())).expect("no more than is left");
        Place { backlog: self.clone(), _tokens: tokens }
    }

    /// Tokens that were taken, up to the limit.
    fn tokens(&self) -> u64 {
        u64::from(self.limit_tokens) - self.room.available_permits() as u64
    }

    /// Tells the metrics what is computed and what waits.
    pub(super) fn show(&self, monitor: &Monitor) {
        let [texts, running] = [&self.texts, &self.running].map(|of| of.load(Ordering::Relaxed));
        monitor.encoding(running, texts.saturating_sub(running), self.tokens());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_waits_stays_below_its_limit_and_more_is_taken_alone() {
        let backlog = Arc::new(Backlog::new(100));
        let mut room = backlog.take(1000).expect("alone it may be longer");
        assert!(backlog.take(1).is_none());
        let places = [600, 400].map(|tokens| backlog.place(tokens, &mut room));
        drop(room);
        assert_eq!((backlog.tokens(), backlog.texts.load(Ordering::Relaxed)), (100, 2));
        drop(places);
        assert_eq!((backlog.tokens(), backlog.texts.load(Ordering::Relaxed)), (0, 0));
        let rooms = [60, 40].map(|tokens| backlog.take(tokens));
        assert!(rooms.iter().all(Option::is_some) && backlog.take(1).is_none());
        drop(rooms);
        assert!(backlog.take(101).is_some() && backlog.take(100).is_some());
        let one_at_a_time = Backlog::new(0);
        let room = one_at_a_time.take(7);
        assert!(room.is_some() && one_at_a_time.take(1).is_none());
    }
}
