//! The program `windlass-engine`: HTTP, tokenizer, chat template, streaming, and the thread that owns the engine.
//!
//! A chat request passes, in order: [`http::api`] (routes) → `http::chat` (wire to validated request) →
//! [`text`] (template, tokens) → [`driver`] (over a channel to the engine's thread, which turns
//! `windlass_engine_core`'s engine) → [`answer`] (tokens to text, stop strings) → `http::stream` (events) or one body.
//! [`serve`] puts it together, [`start`] builds the engine, [`lifecycle`] says when to stop, [`monitor`] is what probes
//! and metrics read. It is a library so that tests can start the server in their own process.

pub mod answer;
pub mod attach;
pub mod batch;
pub mod bench;
pub mod cache_scopes;
pub mod chat;
pub mod cli;
pub mod client;
pub mod clock;
pub mod config;
pub mod dialogue;
pub mod driver;
pub mod encoding;
pub mod eval;
pub mod failure;
pub mod fetch;
pub mod fingerprint;
pub mod fit;
pub mod generation;
pub mod gpus;
pub mod http;
pub mod inspect;
pub mod kernels;
pub mod lifecycle;
pub mod listen;
pub mod machine;
pub mod monitor;
pub mod reply;
pub mod serve;
pub mod signals;
pub mod small_file;
pub mod speculation;
pub mod start;
pub mod structure;
pub mod telemetry;
pub mod tenants;
pub mod text;
pub mod text_log;
pub mod tools;
pub mod traces;
pub mod vllm_flags;
