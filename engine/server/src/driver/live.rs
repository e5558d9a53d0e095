//! One live request as the engine's thread sees it: where its updates go and when its tokens came.

use super::cancel::Cancel;
use super::handle::Event;
use crate::monitor::RequestTimes;
use tokio::sync::mpsc::UnboundedSender;
use windlass_engine_core::update::RequestUpdate;

/// One live request.
pub(super) struct Live {
    pub(super) events: UnboundedSender<Event>,
    pub(super) cancel: Cancel,
    pub(super) times: RequestTimes,
}

impl Live {
    /// Passes an update on. A stream that nobody reads has cancelled the request already, so nothing is lost.
    pub(super) fn send(&self, update: RequestUpdate) {
        let _ = self.events.send(Event::Update(update));
    }
}
