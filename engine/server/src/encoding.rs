//! The encoder's thread: texts that arrive about together are computed together.
//!
//! A batch goes when it is full, by texts or by tokens with their padding, or when its first text has waited for so
//! long. What nobody waits for any more is not computed.

mod batcher;
mod handle;
mod sim;

pub use batcher::{BatchLimits, Batcher, Encode};
pub use handle::{EncoderHandle, Failed, Refused};
pub use sim::{DIMENSIONS, SimEncoder};
