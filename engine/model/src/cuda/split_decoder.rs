//! A decoder of two stages in one process: the first layers on the CPU, the last ones and the head on a GPU.

use std::io;

use windlass_engine_core::executor::Prepared;
use windlass_engine_core::plan::{BlockId, PlanRow, SlotId};

use super::CudaError;
use super::decoder::CudaDecoder;
use crate::backend::TokenMove;
use crate::batch::Batch;
use crate::cpu::CpuBackend;
use crate::pipeline::StageModel;
use crate::ranks::Ranks;
use crate::sampler::{Drawn, RowTask, SampleError};
use crate::step::Model;
use crate::tier::Tier;

/// Both stages. Each has the keys and values of its own layers in blocks of the same numbers.
pub(super) struct SplitDecoder {
    pub first: Ranks<CpuBackend>,
    pub last: CudaDecoder,
}

impl Model for SplitDecoder {
    type Error = CudaError;

    fn settle(&self) {
        self.first.settle();
    }

    fn prepare(&mut self) -> Result<Prepared, CudaError> {
        self.last.prepare()
    }

    fn hold_kv(&mut self, held: bool) -> Result<(), CudaError> {
        self.first.hold_kv(held);
        self.last.hold_kv(held)
    }

    fn check(row: &PlanRow) -> Result<(), String> {
        CudaDecoder::check(row)
    }

    fn forward(&mut self, batch: &Batch) -> Result<(), CudaError> {
        self.first.forward(batch);
        self.last.forward_from(batch, &self.first.activations(batch.tokens().len()))
    }

    fn sample(&mut self, tasks: &[RowTask<'_>]) -> Result<Vec<Result<Drawn, SampleError>>, CudaError> {
        self.last.sample(tasks)
    }

    fn copy_block(&mut self, from: BlockId, to: BlockId) -> Result<(), CudaError> {
        self.first.copy_block(from, to);
        self.last.copy_block(from, to)
    }

    fn store_block(&mut self, tier: &mut dyn Tier, block: BlockId, slot: SlotId) -> io::Result<()> {
        self.last.store_block(tier, block, slot)
    }

    fn load_block(&mut self, tier: &mut dyn Tier, slot: SlotId, block: BlockId) -> io::Result<()> {
        self.last.load_block(tier, slot, block)
    }

    fn move_tokens(&mut self, moves: &[TokenMove]) -> Result<(), CudaError> {
        self.first.move_tokens(moves);
        self.last.move_tokens(moves)
    }
}
