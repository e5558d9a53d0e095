//! Replays request traces against scaling policies: ours, its peers, and any that speaks the protocol. Pure.
//!
//! | file | noun |
//! |---|---|
//! | [`trace`] | requests over time, and variants of them |
//! | [`engine`] | one engine: a queue and a step clock |
//! | [`world`], [`market`] | pods, gateway and bill; spot nodes |
//! | [`protocol`], [`stdio`] | what a policy sees and answers, also as lines of JSON |
//! | [`exposition`] | what a pod says as text |
//! | [`policy`], [`builtin`], [`peers`] | who decides |
//! | [`score`], [`report`] | what came of it |
//! | [`campaign`] | every policy on every variant |
//!
//! The policy `builtin` is the operator's own code, fed with the same readings. The peers are written from their
//! documentation with their defaults, for comparison only.

pub mod builtin;
pub mod campaign;
pub mod engine;
pub mod exposition;
pub mod market;
pub mod peers;
pub mod policy;
pub mod protocol;
pub mod report;
pub mod score;
pub mod stdio;
pub mod trace;
pub mod world;
