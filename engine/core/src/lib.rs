//! Scheduler, KV block pool, prefix cache, request life cycle and the simulated executor.
//!
//! Pure: no tensors, no HTTP, no text, no clock. Time, randomness and limits are parameters.

pub mod executor;
pub mod plan;
pub mod request;
