//! What operator and engine agree on: ports, paths, flags, metric names, `/stats`, the termination
//! message, revisions, model shape, how it is divided among ranks, and memory arithmetic.
//!
//! The only edge between the two halves. It holds data and arithmetic: no I/O, no clock, serde alone.

pub mod fingerprint;
pub mod fixture;
pub mod flags;
pub mod inspection;
pub mod kv_groups;
pub mod memory;
pub mod metrics;
pub mod paths;
pub mod revision;
pub mod shape;
pub mod sharding;
pub mod stats;
pub mod termination;

/// Port of the OpenAI API, in every engine pod and Service.
pub const API_PORT: u16 = 8000;
/// Port of probes, `/metrics`, `/stats` and `/drain`. In no Service: the operator reaches pods by address.
pub const ADMIN_PORT: u16 = 8001;
/// Where the first node of a replica that several share waits for the others.
pub const PIPELINE_PORT: u16 = 29_501;
