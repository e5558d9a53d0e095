//! Rows and steps that a test makes by hand.

use std::sync::Arc;

use windlass_engine_core::executor::Executor;
use windlass_engine_core::plan::{BlockId, InputToken, PlanRow, StepPlan};
use windlass_engine_core::request::{RequestId, Sampling};

use super::driver::sample_row;

/// A row of sequence 0, whose tokens all lie in block 1.
pub fn row(token: InputToken, position: u32) -> PlanRow {
    PlanRow {
        request: RequestId(0),
        tokens: vec![token],
        first_position: position,
        blocks: [BlockId(1)].into(),
        sample: Some(sample_row(&Sampling::GREEDY)),
        score: None,
    }
}

pub fn plan(rows: Vec<PlanRow>) -> StepPlan {
    StepPlan { rows, ..StepPlan::default() }
}

/// Blocks for the longest sequence, or all there are, for each group of layers.
pub fn tables(executor: &dyn Executor) -> Arc<[BlockId]> {
    let geometry = executor.geometry();
    let (groups, longest) = (geometry.groups.count(), geometry.max_sequence_tokens.div_ceil(geometry.block_tokens));
    (0..groups * longest.min(geometry.blocks / groups)).map(BlockId).collect()
}
