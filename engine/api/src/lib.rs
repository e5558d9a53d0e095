//! Wire types: what a client may send, and what it gets back.
//!
//! A request body is read field by field ([`fields::Fields`]): a field the engine acts on is taken with its type, and
//! every other one must hold a value listed in [`unsupported`], so nothing is ignored in silence. Whether a value makes
//! sense for the model being served is the server's question; this crate knows no model, no tokens and no HTTP.

pub mod body;
pub mod chat;
pub mod completions;
pub mod encoders;
pub mod error;
pub mod fields;
pub mod generation;
pub mod logprobs;
pub mod models;
pub mod native;
pub mod prompts;
pub mod structure;
pub mod tgi;
pub mod tools;
pub mod unsupported;
pub mod usage;
