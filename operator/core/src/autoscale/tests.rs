//! The rule, term by term, and whole traces.

mod rule;
mod trace;
