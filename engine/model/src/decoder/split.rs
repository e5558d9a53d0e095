//! A decoder of two stages in one process, on two devices: the first has the first layers, the second the last layers
//! and the head.

use std::io;

use windlass_engine_core::executor::Prepared;
use windlass_engine_core::plan::{BlockId, PlanRow, SwapSlotId};

use super::model::{Model, StageModel, TokenMove};
use crate::batch::Batch;
use crate::sampler::{Drawn, RowTask, SampleError};
use crate::tier::Tier;

/// The two stages. Each has K and V of its own layers, in blocks of the same ids.
pub struct SplitDecoder<F, L> {
    /// The first layers.
    pub first: F,
    /// The last layers and the head.
    pub last: L,
}

impl<F: StageModel, L: StageModel<Error: From<F::Error>>> Model for SplitDecoder<F, L> {
    type Error = L::Error;

    fn confine(&self) {
        self.first.confine();
    }

    fn prepare(&mut self) -> Result<Prepared, L::Error> {
        self.last.prepare()
    }

    fn hold_kv(&mut self, held: bool) -> Result<(), L::Error> {
        self.first.hold_kv(held)?;
        self.last.hold_kv(held)
    }

    fn check(row: &PlanRow) -> Result<(), String> {
        F::check(row)?;
        L::check(row)
    }

    fn forward(&mut self, batch: &Batch) -> Result<(), L::Error> {
        self.first.forward(batch)?;
        let activations = self.first.activations(batch.tokens().len())?;
        self.last.forward_from(batch, &activations)
    }

    fn sample(&mut self, tasks: &[RowTask<'_>]) -> Result<Vec<Result<Drawn, SampleError>>, L::Error> {
        self.last.sample(tasks)
    }

    fn copy_block(&mut self, from: BlockId, to: BlockId) -> Result<(), L::Error> {
        self.first.copy_block(from, to)?;
        self.last.copy_block(from, to)
    }

    /// Always an error: a swap slot has no room for the parts of both devices.
    fn store_block(&mut self, _tier: &mut dyn Tier, _block: BlockId, _slot: SwapSlotId) -> io::Result<()> {
        Err(unswapped())
    }

    /// Always an error, as [`store_block`](Model::store_block).
    fn load_block(&mut self, _tier: &mut dyn Tier, _slot: SwapSlotId, _block: BlockId) -> io::Result<()> {
        Err(unswapped())
    }

    fn move_tokens(&mut self, moves: &[TokenMove]) -> Result<(), L::Error> {
        self.first.move_tokens(moves)?;
        self.last.move_tokens(moves)
    }
}

fn unswapped() -> io::Error {
    io::Error::new(io::ErrorKind::Unsupported, "blocks of two devices are not swapped")
}
