//! The one thread that owns the engine, and how everybody else talks to it.
//!
//! Two crossings: commands go in over a bounded channel, each request's updates come out over a channel of its own,
//! bounded by how far behind a reader may be. The thread never waits for HTTP, and no lock is shared with it.

mod cancel;
mod handle;
mod live;
mod pace;
mod sleep;
mod step_loop;

pub use handle::{EngineHandle, Event, NotAccepted, RequestStream, channel};
pub use pace::RealTime;
pub use sleep::{Depth, Revive};
pub use step_loop::StepLoop;
