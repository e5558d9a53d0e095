//! The server as its clients and its users meet it: one program of tests, since each would link the whole server.

#![allow(clippy::unwrap_used)] // helpers of tests

mod answers;
mod choices;
mod commands;
mod common;
mod dialects;
mod documents;
mod eval;
mod fetch;
mod hostile;
mod life;
mod parallel;
mod real_model;
mod refusals;
mod scheduling;
mod security;
mod structured;
mod tokenizer;
