//! The interface between scheduling and computing.
//!
//! It is asynchronous: the next step may be submitted before the previous one is collected. An executor knows blocks
//! and tokens; it knows nothing of requests' limits, streams or queues.

pub use windlass_engine_contract::kv_groups::KvGroups;

use crate::plan::{StepOutput, StepPlan, Ticket};

/// Most steps in flight on an executor with one pipeline stage: one is computed, one waits.
pub const MAX_IN_FLIGHT: usize = 2;

/// Capacity of an executor, fixed for its life.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    /// Tokens in a KV block.
    pub block_tokens: u32,
    /// KV blocks in the pool. Each block serves the layers of one group.
    pub blocks: u32,
    /// Most tokens of a sequence, prompt and answer together.
    pub max_sequence_tokens: u32,
    /// Swap slots: places for blocks outside the pool.
    pub swap_slots: u32,
    /// Most rows (sequences) in one step.
    pub max_step_rows: u32,
    /// Most tokens in one step.
    pub max_step_tokens: u32,
    /// Most rows of logits in one step, at least `max_step_rows`.
    pub max_step_logits: u32,
    /// Size of the vocabulary: token ids are below it.
    pub vocabulary: u32,
    /// Groups of layers that share block tables. A group with a sliding window gives up the blocks before its window.
    pub groups: KvGroups,
}

/// Progress of what an executor builds ahead of the steps that need it, such as a CUDA graph for each batch size.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Prepared {
    /// Pieces built.
    pub done: u32,
    /// Pieces that steps may need; 0 where steps need none.
    pub all: u32,
    /// Whether this call built a piece: there may be another one to build.
    pub advanced: bool,
}

/// Computes steps. One thread calls `submit` and `collect`; tickets are collected in order of submission; and a block
/// named by a submitted plan is not reused before that plan is collected.
pub trait Executor: Send {
    /// Limits that plans keep.
    fn geometry(&self) -> Geometry;

    /// Pipeline stages, each of which computes a step of its own. With several stages no plan names a token that is
    /// still being sampled: the first stage would wait for the last one.
    fn stages(&self) -> usize {
        1
    }

    /// Starts a step and returns at once. At most [`MAX_IN_FLIGHT`] steps are in flight, or one for each stage if
    /// there are more stages.
    fn submit(&mut self, plan: StepPlan) -> Result<Ticket, ExecutorError>;

    /// Waits for the oldest step in flight, which must be `ticket`.
    fn collect(&mut self, ticket: Ticket) -> Result<StepOutput, ExecutorError>;

    /// Builds one missing piece of what a later step would wait for, if there is memory for it. No step is in flight,
    /// and KV memory is held. A request that arrives meanwhile waits for this one piece at most.
    fn prepare(&mut self) -> Result<Prepared, ExecutorError> {
        Ok(Prepared::default())
    }

    /// Allocates the memory of the KV cache, or frees it with its contents. No step is in flight, and none is
    /// submitted while the memory is freed. Executors without such memory do nothing. When this returns, it is done
    /// on every GPU: another process may take the memory.
    fn hold_kv(&mut self, held: bool) -> Result<(), ExecutorError> {
        let _ = held;
        Ok(())
    }

    /// Bytes of host memory that [`Executor::hold_weights`] needs to move the weights there; 0 where weights do not
    /// move. `None` where weights can leave a device only with the executor.
    fn weights_to_move(&self) -> Option<u64> {
        Some(0)
    }

    /// Moves the weights back to the devices, or to host memory. Otherwise as [`Executor::hold_kv`].
    fn hold_weights(&mut self, held: bool) -> Result<(), ExecutorError> {
        let _ = held;
        Ok(())
    }
}

/// The device or its worker is lost, and every sequence with it. The process should exit.
#[derive(Debug, thiserror::Error)]
#[error("the executor failed: {0}")]
pub struct ExecutorError(pub String);
