//! The only seam between scheduling and computing.
//!
//! Asynchronous: a step is submitted, and the next may be submitted before the first is collected. An executor
//! knows blocks and tokens; it knows nothing of requests' limits, streams or queues.

pub use windlass_engine_contract::kv_groups::KvGroups;

use crate::plan::{StepOutput, StepPlan, Ticket};

/// Steps that may be submitted and not collected, where one is computed at a time.
pub const MAX_IN_FLIGHT: usize = 2;

/// What an executor has built, fixed for its life.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    /// Tokens in a KV block.
    pub block_tokens: u32,
    /// KV blocks in the pool, each for the layers of one group.
    pub blocks: u32,
    /// Longest sequence, tokens.
    pub max_sequence_tokens: u32,
    /// Places for blocks outside the pool.
    pub swap_slots: u32,
    /// Most rows in one step.
    pub max_step_rows: u32,
    /// Most tokens in one step.
    pub max_step_tokens: u32,
    /// Most rows of logits in one step; at least `max_step_rows`.
    pub max_step_logits: u32,
    /// Ids are below this.
    pub vocabulary: u32,
    /// How layers share blocks. What lies before the window of a group may be given to others.
    pub groups: KvGroups,
}

/// How far an executor is with what it makes ahead of the steps that need it, such as a CUDA graph for each size of a step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Prepared {
    /// Pieces that are there.
    pub done: u32,
    /// Pieces that steps may need: none where steps need nothing.
    pub all: u32,
    /// Whether one was made now: there may be another to make.
    pub advanced: bool,
}

/// Computes steps. `submit` and `collect` are called by one thread, tickets are collected in order of submission,
/// and a block named by a submitted plan is not reused before that plan is collected.
pub trait Executor: Send {
    /// Sizes that plans must keep.
    fn geometry(&self) -> Geometry;

    /// Steps that are computed at a time, each by a stage of its own. Where there are several, a plan names no token that is
    /// still being sampled: the first stage would wait for what the last one draws.
    fn stages(&self) -> usize {
        1
    }

    /// Starts a step and returns at once. At most [`MAX_IN_FLIGHT`] are outstanding, or one for each stage where those are
    /// more.
    fn submit(&mut self, plan: StepPlan) -> Result<Ticket, ExecutorError>;

    /// Waits for the oldest outstanding step, which must be `ticket`.
    fn collect(&mut self, ticket: Ticket) -> Result<StepOutput, ExecutorError>;

    /// Makes one piece of what a later step would wait for, where one is missing and has room. Nothing is outstanding, and
    /// memory is held; what comes meanwhile waits for this piece at most.
    fn prepare(&mut self) -> Result<Prepared, ExecutorError> {
        Ok(Prepared::default())
    }

    /// Takes the memory of keys and values, or gives it back with everything in it. Nothing is outstanding, and no step
    /// is submitted while it is given back. An executor without such memory does nothing. When this returns it is done on
    /// every GPU: another process may want the memory.
    fn hold_kv(&mut self, held: bool) -> Result<(), ExecutorError> {
        let _ = held;
        Ok(())
    }

    /// Bytes of the host's memory that [`Executor::hold_weights`] would take to move weights there: none where weights stay
    /// where they are. `None` where they can leave a device only with the executor.
    fn weights_to_move(&self) -> Option<u64> {
        Some(0)
    }

    /// Takes memory of devices for the weights again, with what they were, or moves them to the host's memory. Otherwise as
    /// [`Executor::hold_kv`].
    fn hold_weights(&mut self, held: bool) -> Result<(), ExecutorError> {
        let _ = held;
        Ok(())
    }
}

/// The device or its worker is gone: every sequence is lost and the process should end.
#[derive(Debug, thiserror::Error)]
#[error("the executor failed: {0}")]
pub struct ExecutorError(pub String);
