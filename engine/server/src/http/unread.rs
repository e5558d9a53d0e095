//! A response body that gives up its request when its reader takes no more.
//!
//! On HTTP/1.1 a write that nobody takes ends the connection. On HTTP/2 a client closes the window of one stream and
//! the connection lives on; hyper then asks the body for nothing, so the body cannot notice by itself.

use axum::body::Bytes;
use futures::{Stream, StreamExt};
use std::io;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::time::{Instant, sleep};

/// The writes of one response.
pub struct Unread<S>(Arc<Mutex<Held<S>>>);

struct Held<S> {
    /// Absent once it was given up.
    writes: Option<S>,
    /// When a write was handed out and no further one was asked for since.
    unread_since: Option<Instant>,
}

/// Watches `writes`: when `limit` passes after one of them without the next being asked for, they are dropped.
pub fn watch<S: Stream<Item = Bytes> + Send + Unpin + 'static>(writes: S, limit: Duration) -> Unread<S> {
    let held = Arc::new(Mutex::new(Held { writes: Some(writes), unread_since: None }));
    tokio::spawn(give_up(Arc::downgrade(&held), limit));
    Unread(held)
}

async fn give_up<S>(held: Weak<Mutex<Held<S>>>, limit: Duration) {
    loop {
        sleep(limit / 4).await;
        let Some(held) = held.upgrade() else { return };
        let mut held = lock(&held);
        if held.unread_since.is_some_and(|since| since.elapsed() >= limit) {
            held.writes = None;
            return;
        }
    }
}

impl<S: Stream<Item = Bytes> + Unpin> Stream for Unread<S> {
    type Item = io::Result<Bytes>;

    fn poll_next(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<io::Result<Bytes>>> {
        let mut held = lock(&self.0);
        held.unread_since = None;
        let Some(writes) = &mut held.writes else {
            // An end without an error would look like a complete answer.
            return Poll::Ready(Some(Err(io::Error::new(io::ErrorKind::TimedOut, "the client stopped reading"))));
        };
        let write = writes.poll_next_unpin(context);
        if let Poll::Ready(Some(_)) = write {
            held.unread_since = Some(Instant::now());
        }
        write.map(|write| write.map(Ok))
    }
}

fn lock<S>(held: &Mutex<Held<S>>) -> MutexGuard<'_, Held<S>> {
    held.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures::channel::mpsc;

    #[tokio::test]
    async fn writes_are_dropped_only_where_the_reader_is_what_is_slow() {
        let limit = Duration::from_millis(200);
        let (mut sender, receiver) = mpsc::channel(8);
        let mut body = watch(receiver, limit);
        sender.try_send(Bytes::from_static(b"a")).unwrap();
        assert_eq!(body.next().await.unwrap().unwrap(), "a");
        // The reader waits, and what it waits for is slow.
        let late = async {
            sleep(3 * limit).await;
            sender.try_send(Bytes::from_static(b"b")).unwrap();
            sender
        };
        let (read, sender) = futures::join!(body.next(), late);
        assert_eq!(read.unwrap().unwrap(), "b");
        // Nobody asks for more.
        while !sender.is_closed() {
            sleep(limit / 20).await;
        }
        assert!(body.next().await.unwrap().is_err());
    }
}
