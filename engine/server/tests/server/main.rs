//! The server as its clients and its users meet it: one program of tests, since each would link the whole server.

#![allow(clippy::unwrap_used)] // helpers of tests

mod accounting;
mod answers;
mod choices;
mod commands;
mod common;
mod costs;
mod decoding;
mod dialects;
mod documents;
mod encoders;
mod eval;
mod fetch;
mod hostile;
mod images;
mod incoming;
mod inspect;
mod life;
mod llama;
mod logs;
mod mirror;
mod parallel;
mod real_model;
mod refusals;
mod revisions;
mod scheduling;
mod schema_suite;
mod security;
mod sleep;
mod soak;
mod sources;
mod structured;
mod templates;
mod tokenizer;
mod tools;
mod traces;
