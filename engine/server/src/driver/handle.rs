//! The engine as HTTP tasks see it: submit a request, read its updates; dropping the stream ends the request.

use super::cancel::{Cancel, CancelCount};
use super::sleep::Depth;
use crate::clock::Clock;
use crate::failure::Failure;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use tokio::sync::mpsc::error::TrySendError;
use tokio::sync::mpsc::{self, Receiver, Sender};
use tokio::sync::oneshot;
use windlass_engine_core::request::{FinishReason, RejectReason, Request, RequestId};
use windlass_engine_core::update::RequestUpdate;

/// Commands that may wait for the engine's thread, which takes all of them before every step.
const COMMAND_CAPACITY: usize = 1024;

/// Events of one request that may wait for its reader, who is far behind by then: the request ends.
const UNREAD_EVENTS: usize = 4096;

/// What the engine's thread is told.
pub(super) enum Command {
    /// A new request.
    Submit(Box<Submission>),
    /// Every live request ends now, with this message.
    EndAll(String),
    /// Every live request ends, and memory is given back.
    Sleep(Depth, oneshot::Sender<()>),
    /// Memory is taken again.
    Wake(oneshot::Sender<Result<(), Failure>>),
}

/// A request on its way to the engine.
pub(super) struct Submission {
    pub(super) request: Request,
    pub(super) arrival_seconds: f64,
    pub(super) events: Sender<Event>,
    pub(super) cancel: Cancel,
}

/// What a request's stream carries: one answer to the submission, then updates up to the one with a finish, unless it
/// is given up before.
#[derive(Debug)]
pub enum Event {
    /// It waits for its turn.
    Admitted,
    /// It was refused.
    Rejected {
        /// Why.
        reason: RejectReason,
        /// When a full queue is likely to have room.
        retry_after_seconds: u32,
    },
    /// News.
    Update(RequestUpdate),
    /// It was ended, for this reason.
    GivenUp(String),
}

/// A submission that did not reach the engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NotAccepted {
    /// The engine has more commands waiting than it can take.
    Busy,
    /// The engine's thread has ended.
    Gone,
}

/// Submits requests. Cheap to clone.
#[derive(Clone)]
pub struct EngineHandle {
    commands: mpsc::Sender<Command>,
    ids: Arc<AtomicU64>,
    cancels: CancelCount,
    clock: Clock,
}

/// The engine's end of the channel.
pub struct Commands {
    pub(super) receiver: mpsc::Receiver<Command>,
    pub(super) cancels: CancelCount,
}

/// Both ends of the way to the engine.
pub fn channel(clock: Clock) -> (EngineHandle, Commands) {
    let (commands, receiver) = mpsc::channel(COMMAND_CAPACITY);
    let cancels = CancelCount::default();
    let handle = EngineHandle { commands, ids: Arc::default(), cancels: cancels.clone(), clock };
    (handle, Commands { receiver, cancels })
}

impl EngineHandle {
    /// Sends a request; `with_id` makes it from the id that it gets. Never waits.
    pub fn submit(&self, with_id: impl FnOnce(RequestId) -> Request) -> Result<RequestStream, NotAccepted> {
        let (events, receiver) = mpsc::channel(UNREAD_EVENTS);
        let cancel = self.cancels.new_request();
        let submission = Submission {
            request: with_id(RequestId(self.ids.fetch_add(1, Ordering::Relaxed))),
            arrival_seconds: self.clock.seconds(),
            events,
            cancel: cancel.clone(),
        };
        match self.commands.try_send(Command::Submit(Box::new(submission))) {
            Ok(()) => Ok(RequestStream { events: receiver, cancel, ended: false }),
            Err(TrySendError::Full(_)) => Err(NotAccepted::Busy),
            Err(TrySendError::Closed(_)) => Err(NotAccepted::Gone),
        }
    }

    /// Requests sent and not yet seen by the engine.
    pub fn unseen(&self) -> u32 {
        (self.commands.max_capacity() - self.commands.capacity()) as u32
    }

    /// Gives memory back; whatever is live ends. Returns when it is done.
    pub async fn sleep(&self, depth: Depth) -> Result<(), NotAccepted> {
        let (asleep, done) = oneshot::channel();
        self.commands.send(Command::Sleep(depth, asleep)).await.map_err(|_| NotAccepted::Gone)?;
        done.await.map_err(|_| NotAccepted::Gone)
    }

    /// Takes memory again and generates a token.
    pub async fn wake(&self) -> Result<(), Failure> {
        let gone = || Failure::internal("the engine's thread has ended");
        let (woken, done) = oneshot::channel();
        self.commands.send(Command::Wake(woken)).await.map_err(|_| gone())?;
        done.await.map_err(|_| gone())?
    }

    /// Ends every live request; each stream gets `message` as its error.
    pub async fn end_all(&self, message: &str) {
        // The thread is gone: then so are its requests.
        let _ = self.commands.send(Command::EndAll(message.to_owned())).await;
    }
}

/// The updates of one request. Dropped before its end, it aborts the request before the next step.
#[derive(Debug)]
pub struct RequestStream {
    events: Receiver<Event>,
    cancel: Cancel,
    ended: bool,
}

impl RequestStream {
    /// The next event; `None` after the last update, or if the engine's thread has ended.
    pub async fn next(&mut self) -> Option<Event> {
        let event = self.events.recv().await;
        self.note_end(event.as_ref());
        event
    }

    /// The answer is complete before the engine knows it.
    pub fn stop(&mut self) {
        if !self.ended {
            self.ended = true;
            self.cancel.stop();
        }
    }

    /// The request was ended because too much of it was left unread.
    pub fn overrun(&self) -> bool {
        self.cancel.reason() == Some(FinishReason::Abort)
    }

    fn note_end(&mut self, event: Option<&Event>) {
        self.ended |= match event {
            None | Some(Event::Rejected { .. } | Event::GivenUp(_)) => true,
            Some(Event::Admitted) => false,
            Some(Event::Update(update)) => update.finish.is_some(),
        };
    }
}

impl Drop for RequestStream {
    fn drop(&mut self) {
        if !self.ended {
            self.cancel.abandon();
        }
    }
}
