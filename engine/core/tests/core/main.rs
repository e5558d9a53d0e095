//! The engine's core, driven by hand: one program of tests, which is built in a third of the time.

#![allow(clippy::unwrap_used)] // in a test, a failed unwrap is the failure

mod beams;
mod policies;
mod promises;
mod put_off;
mod random_life;
mod scheduling;
mod sim;
mod speculation;
mod stages;
mod support;
mod swapping;
mod windows;
