//! One live request as the engine's thread sees it: where its updates go and when its tokens came.

use super::cancel::Cancel;
use super::handle::Event;
use crate::monitor::RequestTimes;
use tokio::sync::mpsc::Sender;
use tokio::sync::mpsc::error::TrySendError;

/// One live request.
pub(super) struct Live {
    pub(super) events: Sender<Event>,
    pub(super) cancel: Cancel,
    pub(super) times: RequestTimes,
}

impl Live {
    /// Passes an event on, unless the request is cancelled and nobody waits for it. A reader who is too far behind
    /// loses the event, which ends the request.
    pub(super) fn send(&self, event: Event) {
        if self.cancel.reason().is_some() {
            return;
        }
        if let Err(TrySendError::Full(_)) = self.events.try_send(event) {
            self.cancel.abandon();
        }
    }
}
