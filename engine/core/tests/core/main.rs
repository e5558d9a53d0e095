//! Tests of the engine without a model. They are one program, which builds in a third of the time of several.

#![allow(clippy::unwrap_used)] // in a test, a failed unwrap is the failure

mod beams;
mod deferred;
mod policies;
mod random_life;
mod retry_after;
mod scheduling;
mod sim;
mod speculation;
mod stages;
mod support;
mod swapping;
mod windows;
