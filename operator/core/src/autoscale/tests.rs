//! The rule, term by term, what is learned, and whole traces.

mod learning;
mod rule;
mod situation;
mod trace;
