//! End-to-end tests, their harness and the demo: real cluster, real clients, real models.
//!
//! Files, in the order in which a run meets them:
//!
//! | | |
//! |---|---|
//! | [`command`], [`wait`], [`progress`] | run a program; wait for a condition; say what is going on |
//! | [`workspace`] | where things are: the checkout, its binaries, the cache |
//! | [`linked`], [`licences`], [`sbom`] | crates in a program; their notices; the bill of materials |
//! | [`image`] | the two images, staged and built |
//! | [`cluster`], [`kubectl`] | the user's cluster or our own (`tests/cluster/cluster`) and its command-line client |
//! | [`operator`] | the charts, installed |
//! | [`model`] | SmolLM2, fetched, checked, and put into a claim |
//! | [`namespace`], [`service`] | a namespace that enforces *restricted*; an InferenceService in it |
//! | [`chat`], [`load`] | one request; many of them |
//! | [`process`], [`prometheus`] | a program that runs beside a test; Prometheus as the chart sets it up |
//! | [`dashboard`] | the queries of the chart's dashboard |
//! | [`audit`], [`rights`] | what the API server saw the operator do, against what it may do |
//! | [`host`], [`fault`], [`life`], [`sieve`] | an operator on this machine, what befalls it, what it is to do, and both |
//! | [`api`], [`subject`], [`state`], [`lanes`] | plain HTTP to the API; a service by it; what it leaves; many at a time |
//! | [`leaves`] | every field of the resource, and a change for each |
//! | [`argocd`] | Argo CD, and a repository for it to follow |
//! | [`go_module`] | sources of other projects, downloaded |
//! | [`kwok`] | nodes and pods that only the API server knows |
//! | [`network`] | what NetworkPolicies allow |
//!
//! Everything here is synchronous and talks to Kubernetes through `kubectl` and `helm`, as users do; what is looked at
//! often, through [`api`]. Nothing here knows how operator or engine work inside: it sees objects, HTTP and text.

pub mod api;
pub mod argocd;
pub mod audit;
pub mod chat;
pub mod cluster;
pub mod command;
pub mod dashboard;
pub mod fault;
pub mod go_module;
pub mod host;
pub mod image;
pub mod kubectl;
pub mod kwok;
pub mod lanes;
pub mod leaves;
pub mod licences;
pub mod life;
pub mod linked;
pub mod load;
pub mod model;
pub mod namespace;
pub mod network;
pub mod operator;
pub mod process;
pub mod progress;
pub mod prometheus;
pub mod rights;
pub mod sbom;
pub mod service;
pub mod sieve;
pub mod state;
pub mod subject;
pub mod wait;
pub mod workspace;
