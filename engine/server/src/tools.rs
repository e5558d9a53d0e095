//! How models write calls of tools, and how they are read while they are written.
//!
//! One file for each format, behind one trait ([`format::Format`]): text goes in as it comes, calls and plain text come
//! out as soon as they are certain. What only looks like a call, or calls what nobody offered, stays text.

mod call;
mod deepseek;
mod describe;
mod format;
mod grammar;
mod hermes;
mod listed;
mod llama;
mod mistral;
mod named;
mod parts;
mod python_literal;
mod pythonic;
mod search;
mod strict;

pub use describe::described;
pub use format::{Format, ToolFormat};
pub use grammar::forced;
pub use listed::Listed;
pub use named::Named;
pub use parts::{Part, Parts};
pub use search::{next_word, take_until};
pub use strict::strict;
