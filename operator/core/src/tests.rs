//! Spec and cluster in, writes out.

mod children;
mod convergence;
mod fit;
mod hpa;
mod kstatus;
mod leader_worker_set;
mod overdue;
mod reasons;
mod refusals;
mod revision;
mod rollout;
mod scheduling;
mod standby;
mod workers;
mod written;
