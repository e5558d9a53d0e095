//! Scheduler, KV block pool, prefix cache, request life cycle and a simulated executor.
//!
//! This crate is pure: it has no tensors, HTTP, text or clock. Time, randomness and limits are parameters.
//!
//! One step, in order: [`Engine::step`](engine::Engine::step) asks the scheduler for a [`StepPlan`](plan::StepPlan),
//! which makes every decision; submits it to the [`Executor`](executor::Executor), which computes and decides
//! nothing; collects an earlier step; and lets the scheduler turn that step's output into
//! [`RequestUpdate`](update::RequestUpdate)s.
//!
//! `engine/GLOSSARY.md` defines the terms.
//!
//! | Module | Subject |
//! |---|---|
//! | [`request`], [`sampling`] | requests, their finish and rejection reasons; sampling parameters and logprobs |
//! | [`constraint`] | token masks for constrained decoding |
//! | [`policy`] | the order in which requests are served |
//! | [`draft`] | draft tokens, their verification, and proposers |
//! | [`plan`], [`executor`] | one step as data; the trait of everything that computes steps |
//! | [`engine`] | scheduler and executor together, with steps in flight |
//! | `scheduler` | batching, chunked prefill, admission, preemption, speculation |
//! | `sequence` | the tokens of one request, waiting or running |
//! | `kv` | block tables, block pool, prefix cache, swap space |
//! | [`update`] | outputs of one engine step; engine statistics |
//! | [`sim`] | an executor without a model |

pub mod constraint;
pub mod draft;
pub mod engine;
pub mod executor;
mod kv;
pub mod plan;
pub mod policy;
pub mod request;
pub mod sampling;
mod scheduler;
mod sequence;
pub mod sim;
pub mod update;
