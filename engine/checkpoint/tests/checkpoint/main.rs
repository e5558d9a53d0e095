//! Files as they come from others, sound and not: one program of tests.

#![allow(clippy::unwrap_used)] // in a test, a failed unwrap is the failure

mod arriving;
mod gguf;
mod hostile;
mod hub;
