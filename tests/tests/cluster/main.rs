//! Tests on a real cluster with the operator installed, one behaviour a file. `tests/run cluster` prepares it.

mod autoscaling;
mod charts;
mod chat;
mod deletion;
mod examples;
mod external;
mod faults;
mod https_source;
mod installation;
mod leftovers;
mod monitoring;
mod network;
mod operator_restart;
mod placement;
mod pod_killed;
mod quota;
mod refused;
mod rest;
mod rollout;
mod room;
mod scale_in;
mod spot;
mod tls;
mod unreachable_model;
