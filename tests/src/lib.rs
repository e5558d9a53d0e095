//! End-to-end tests, their harness and the demo: real cluster, real clients, real models.
//!
//! Files, in the order in which a run meets them:
//!
//! | | |
//! |---|---|
//! | [`command`], [`wait`], [`progress`] | run a program; wait for a condition; say what is going on |
//! | [`workspace`] | where things are: the checkout, its binaries, the cache |
//! | [`licences`], [`image`] | notices of what is linked; the two images, staged and built |
//! | [`cluster`], [`kubectl`] | the user's cluster or our own (`tests/cluster/cluster`) and its command-line client |
//! | [`operator`] | the charts, installed |
//! | [`model`] | SmolLM2, fetched, checked, and put into a claim |
//! | [`namespace`], [`service`] | a namespace that enforces *restricted*; an InferenceService in it |
//! | [`chat`], [`load`] | one request; many of them |
//! | [`audit`] | what the API server saw the operator do |
//!
//! Everything here is synchronous and talks to Kubernetes through `kubectl` and `helm`, as users do. Nothing here
//! knows how operator or engine work inside: it sees objects, HTTP and text.

pub mod audit;
pub mod chat;
pub mod cluster;
pub mod command;
pub mod image;
pub mod kubectl;
pub mod licences;
pub mod load;
pub mod model;
pub mod namespace;
pub mod operator;
pub mod progress;
pub mod service;
pub mod wait;
pub mod workspace;
