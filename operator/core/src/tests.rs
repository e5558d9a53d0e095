//! Spec and cluster in, writes out.

mod children;
mod convergence;
mod refusals;
mod rollout;
