//! Scheduler, KV block pool, prefix cache, request life cycle and the simulated executor.
//!
//! Pure: no tensors, no HTTP, no text, no clock. Time, randomness and limits are parameters.
//!
//! One step, in order: [`Engine::step`](engine::Engine::turn) asks the scheduler for a
//! [`StepPlan`](plan::StepPlan) (decides everything), submits it to the [`Executor`](executor::Executor) (computes,
//! chooses nothing), collects an earlier step, and lets the scheduler turn its output into
//! [`RequestUpdate`](update::RequestUpdate)s.
//!
//! | Module | Subject |
//! |---|---|
//! | [`request`], [`sampling`] | what is asked, how it ends, why it is refused; how tokens are drawn |
//! | [`constraint`] | what a sequence may go on with |
//! | [`policy`] | who goes first |
//! | [`draft`] | what is drafted to come next, and who draft tokens |
//! | [`plan`], [`executor`] | one step as data; the seam to what computes it |
//! | [`engine`] | scheduler and executor, steps ahead of the results |
//! | `scheduler` | who runs, with how many tokens, in which blocks; admission; preemption |
//! | `sequence` | the tokens of one request, waiting or running |
//! | `kv` | block table, block pool, prefix cache |
//! | [`update`] | what a turn gives back; the engine's state in numbers |
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
