//! Spec and cluster in, writes out.

mod children;
mod convergence;
mod fit;
mod hpa;
mod refusals;
mod revision;
mod rollout;
mod standby;
