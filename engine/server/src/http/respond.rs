//! How an endpoint writes its answers, apart from when.

use super::door::Door;
use super::error::ApiError;
use crate::answer::Piece;
use crate::tenants::Lease;
use serde::Serialize;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};
use windlass_engine_api::usage::Usage;

/// What every event and body of one response shares.
pub struct Head {
    /// Names the request.
    pub id: String,
    /// Seconds since 1970.
    pub created: u64,
    /// The name the client used.
    pub model: String,
    /// What answers depend on besides the request.
    pub fingerprint: Arc<str>,
}

impl Head {
    /// The response to a request; `prefix` is OpenAI's for ids of this kind.
    pub fn new(prefix: &str, lease: &Lease, door: &Door, model: String) -> Head {
        let (id, fingerprint) = (format!("{prefix}-{}", lease.request()), door.fingerprint.clone());
        Head { id, created: unix_seconds(), model, fingerprint }
    }
}

/// Seconds since 1970.
pub fn unix_seconds() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

/// Writes the events of one endpoint's streams.
pub trait Events: Send + 'static {
    /// What `piece` adds to choice `index`; `usage` where the client wants it in every event.
    fn piece(&mut self, index: u32, piece: &Piece, usage: Option<Usage>, out: &mut EventBuffer);

    /// The event after the last choice.
    fn usage(&self, usage: Usage, out: &mut EventBuffer);

    /// What follows a complete answer.
    fn done(&self, out: &mut EventBuffer) {
        out.done();
    }

    /// What ends an incomplete one.
    fn error(&self, error: ApiError, out: &mut EventBuffer) {
        out.event(&error.envelope());
    }
}

/// Server-sent events being put together.
#[derive(Debug, Default)]
pub struct EventBuffer(pub Vec<u8>);

impl EventBuffer {
    /// Adds an event with `data` as JSON.
    pub fn event(&mut self, data: &impl Serialize) {
        self.0.extend_from_slice(b"data: ");
        // Writing plain structs to memory does not fail.
        let _ = serde_json::to_writer(&mut self.0, data);
        self.0.extend_from_slice(b"\n\n");
    }

    /// Adds the event that ends every complete stream.
    pub fn done(&mut self) {
        self.0.extend_from_slice(b"data: [DONE]\n\n");
    }
}
