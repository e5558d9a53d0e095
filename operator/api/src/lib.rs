//! The InferenceService types, their defaults, rules and status; renders the CRD.
//!
//! One noun per file, in the order of the resource. This crate knows nothing of pods, of decisions or of a client:
//! it says what a user may write and what the operator answers in `status`. A field is here only when it acts.
//!
//! A field added later takes no OpenAPI default: the operator hashes the stored spec to see whether a pod template
//! must change, and a default that appears on read would roll every service at an upgrade.

pub mod accelerator;
pub mod access;
pub mod autoscaling;
pub mod crd;
pub mod engine;
pub mod inference_service;
pub mod model;
pub mod reference;
pub mod rollout;
pub mod scheduling;
mod schema;
pub mod spot;
pub mod status;

pub use inference_service::{InferenceService, InferenceServiceSpec};
pub use status::InferenceServiceStatus;

/// API group of the resource.
pub const GROUP: &str = "windlass.dev";
/// Longest resource name, characters: the longest derived name adds 13 and a Service name may have 63.
pub const MAX_NAME_CHARS: usize = 50;
