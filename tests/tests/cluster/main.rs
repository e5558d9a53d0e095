//! Tests on a real cluster with the operator installed, one behaviour a file. `tests/run cluster` prepares it.

mod autoscaling;
mod charts;
mod chat;
mod deletion;
mod examples;
mod https_source;
mod operator_restart;
mod placement;
mod pod_killed;
mod quota;
mod refused;
mod rest;
mod rollout;
mod scale_in;
mod tls;
mod unreachable_model;
