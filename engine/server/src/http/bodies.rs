//! The memory that the bodies of all requests may take together, and the threads that read the long ones.

use super::body_bytes::BodyBytes;
use super::error::ApiError;
use axum::http::StatusCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use tokio::sync::{Semaphore, SemaphorePermit};
use windlass_engine_api::body::{Body, Limits};
use windlass_engine_api::fields::Parse;

/// Bodies up to this are read in place, and pass where longer ones fill their part.
const SHORT_BYTES: usize = 64 << 10;
/// Bytes that reading a body takes beside each of its own: what is made of it, and the room to make it.
const BESIDE: usize = 3;
/// The memory in parts: [`READING`] for the long body that is being read, [`LONG`] for those that come or were read, and
/// what is left for short ones.
const PARTS: usize = 8;
const READING: usize = 3;
const LONG: usize = 3;
/// Of the memory that is free once the model stands, the part that bodies may take.
const PART_OF_FREE: u64 = 4;
/// The least and the most of it. The most has room for the largest body.
const BYTES: std::ops::RangeInclusive<u64> = 16 << 20..=256 << 20;

/// What is left, for all requests.
#[derive(Clone)]
pub struct Bodies(Arc<Shared>);

struct Shared {
    most: usize,
    /// Taken by bodies that come or were read.
    held: AtomicUsize,
    /// One long body is read at a time.
    turn: Arc<Semaphore>,
    /// The rest of one that is refused is passed over at a time.
    passing: Semaphore,
}

/// What one request took.
pub struct Room {
    bodies: Bodies,
    bytes: usize,
}

/// As much as may be taken where so much is free.
pub fn share_of(free_bytes: Option<u64>) -> usize {
    let share = free_bytes.map_or(*BYTES.end(), |free| free / PART_OF_FREE);
    share.clamp(*BYTES.start(), *BYTES.end()) as usize
}

impl Bodies {
    /// Nothing is taken of `most` bytes.
    pub fn new(most: usize) -> Bodies {
        let (turn, passing) = (Arc::new(Semaphore::new(1)), Semaphore::new(1));
        Bodies(Arc::new(Shared { most, held: AtomicUsize::new(0), turn, passing }))
    }

    /// For a request that takes nothing yet.
    pub fn room(&self) -> Room {
        Room { bodies: self.clone(), bytes: 0 }
    }

    /// How much may be held, all together, where a body of so many bytes takes more.
    fn most(&self, bytes: usize) -> usize {
        let parts = if bytes <= SHORT_BYTES { PARTS - READING } else { LONG };
        self.0.most / PARTS * parts
    }

    /// Whoever passes over the rest of a refused body waits here, so that what comes for nothing takes little of the
    /// threads that serve.
    pub async fn pass(&self) -> Option<SemaphorePermit<'_>> {
        // The semaphore is never closed.
        self.0.passing.acquire().await.ok()
    }

    /// Reads a body by `parse`: a long one on a thread that may block, after those before it. What stays taken is what
    /// was made of it.
    pub async fn read<T: Send + 'static>(
        &self,
        bytes: BodyBytes,
        mut room: Room,
        limits: Limits,
        parse: Parse<T>,
    ) -> Result<(T, Room), ApiError> {
        let length = bytes.len();
        if length <= SHORT_BYTES {
            room.set(length, length + BESIDE * length)?;
            return read_now(bytes, room, limits, parse);
        }
        // The semaphore is never closed.
        let turn = self.0.turn.clone().acquire_owned().await;
        let read = tokio::task::spawn_blocking(move || {
            // Held until it is read, though nobody may wait for it any more.
            let _turn = turn;
            read_now(bytes, room, limits, parse)
        });
        let failed = |_| ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, "internal_error", "reading the body failed");
        read.await.map_err(failed)?
    }
}

fn read_now<T>(bytes: BodyBytes, mut room: Room, limits: Limits, parse: Parse<T>) -> Result<(T, Room), ApiError> {
    let body = Body::new(&*bytes).within(limits);
    let read = parse(&body)?;
    room.set(bytes.len(), bytes.len() + body.free_bytes())?;
    Ok((read, room))
}

impl Room {
    /// Refuses a body that would never fit.
    pub fn check(&self, bytes: usize) -> Result<(), ApiError> {
        let most = self.bodies.0.most / PARTS * READING / BESIDE;
        if bytes <= most {
            return Ok(());
        }
        let message = format!("the body has {bytes} bytes; this server has the memory to read {most}");
        Err(ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, "body_too_large", message))
    }

    /// Takes as much as makes it `bytes` for a body of so many, or gives back what is more.
    pub fn set(&mut self, body_bytes: usize, bytes: usize) -> Result<(), ApiError> {
        let (shared, most) = (&self.bodies.0, self.bodies.most(body_bytes));
        let change = |held: usize| Some(held - self.bytes + bytes).filter(|sum| bytes <= self.bytes || *sum <= most);
        let taken = shared.held.fetch_update(Ordering::AcqRel, Ordering::Acquire, change);
        taken.map_err(|_| full())?;
        self.bytes = bytes;
        Ok(())
    }
}

fn full() -> ApiError {
    let message = "other requests fill the memory for bodies; try again";
    ApiError::new(StatusCode::TOO_MANY_REQUESTS, "queue_full", message).retry_after(1)
}

impl Drop for Room {
    fn drop(&mut self) {
        self.bodies.0.held.fetch_sub(self.bytes, Ordering::AcqRel);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use windlass_engine_api::completions::CompletionRequest;

    const MIB: usize = 1 << 20;

    fn status(refused: Result<(), ApiError>) -> u16 {
        refused.err().unwrap().status().as_u16()
    }

    fn held(bodies: &Bodies) -> usize {
        bodies.0.held.load(Ordering::Relaxed)
    }

    #[test]
    fn all_bodies_share_one_memory_and_long_ones_leave_some_to_short_ones() {
        let bodies = Bodies::new(16 * MIB);
        let (mut long, mut other, mut short) = (bodies.room(), bodies.room(), bodies.room());
        long.set(2 * MIB, 6 * MIB).ok().unwrap();
        assert_eq!(status(other.set(MIB, MIB)), 429, "long ones have three eighths");
        short.set(SHORT_BYTES, 4 * MIB).ok().unwrap();
        assert_eq!(status(short.set(SHORT_BYTES, 4 * MIB + 1)), 429, "short ones have the rest");
        assert_eq!(status(other.check(2 * MIB + 1)), 413, "one that never fits");
        long.set(2 * MIB, MIB).ok().unwrap();
        other.set(MIB, MIB).ok().unwrap();
        drop((long, other, short));
        assert_eq!(held(&bodies), 0);
    }

    async fn read(bodies: &Bodies, text: &str) -> Result<(CompletionRequest, Room), ApiError> {
        bodies.read(text.into(), bodies.room(), Limits::default(), CompletionRequest::from_body).await
    }

    #[tokio::test]
    async fn what_was_read_takes_its_bytes_and_what_was_made_of_free_values() {
        let bodies = Bodies::new(16 * MIB);
        let text = format!("{{\"model\":\"m\",\"prompt\":\"{}\"}}", "a".repeat(MIB));
        let (_, room) = read(&bodies, &text).await.ok().unwrap();
        assert_eq!(held(&bodies), text.len());
        drop(room);
        let many = "0,".repeat(10_000);
        let text = format!("{{\"model\":\"m\",\"prompt\":\"a\",\"guided_json\":{{\"a\":[{many}0]}}}}");
        let (_, _room) = read(&bodies, &text).await.ok().unwrap();
        assert!(held(&bodies) > 10_000 * 72);
    }

    #[tokio::test]
    async fn a_refused_body_gives_all_back() {
        let bodies = Bodies::new(16 * MIB);
        for text in ["{".to_owned(), format!("{{\"model\":\"{}\"}}", "a".repeat(MIB))] {
            assert!(read(&bodies, &text).await.is_err());
            assert_eq!(held(&bodies), 0);
        }
    }

    #[test]
    fn the_memory_is_a_part_of_what_is_free() {
        let free = [Some(0), Some(256 << 20), Some(1 << 40), None];
        assert_eq!(free.map(share_of), [16, 64, 256, 256].map(|mib| mib * MIB));
    }
}
