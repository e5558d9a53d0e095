//! Moves K and V of accepted draft tokens to the slots after the tokens that they follow.

use windlass_engine_core::plan::BlockId;
use windlass_kernels::cuda::ops::PAGE_TOKENS;
use windlass_kernels::cuda::{Device, DriverError, Event, Memory, Pinned, Stream};

use super::cache::Cache;
use super::metadata::StepSizes;
use crate::decoder::TokenMove;

/// A buffer for the moves of a step: pairs of source and target slots.
#[derive(Debug)]
pub(super) struct MoveBuffer {
    staging: Pinned<u32>,
    /// Signals the end of the copy to the device.
    copied: Event,
    memory: Memory<u32>,
}

impl MoveBuffer {
    pub fn new(device: &Device, sizes: &StepSizes) -> Result<MoveBuffer, DriverError> {
        let words = words(sizes);
        Ok(MoveBuffer { staging: device.pinned(words)?, copied: Event::new(device)?, memory: device.allocate(words)? })
    }

    /// Bytes on the device.
    pub fn bytes(sizes: &StepSizes) -> u64 {
        4 * words(sizes) as u64
    }

    /// Issues moves, which are made in order, after all issued work.
    pub fn issue(&mut self, moves: &[TokenMove], cache: &mut Cache, stream: &Stream) -> Result<(), DriverError> {
        let slots: Vec<u32> = moves.iter().flat_map(|moved| [moved.from, moved.to].map(slot)).collect();
        // An earlier copy may still read the buffer.
        self.copied.synchronize()?;
        self.staging.write(0, &slots);
        stream.copy_to_device(self.memory.slice_mut(0..slots.len()), &self.staging, 0)?;
        stream.mark(&self.copied)?;
        cache.move_tokens(self.memory.slice(0..slots.len()), stream)
    }
}

/// At most all tokens of a step move, each in every group of layers.
fn words(sizes: &StepSizes) -> usize {
    2 * sizes.groups * sizes.tokens
}

fn slot((block, offset): (BlockId, usize)) -> u32 {
    block.0 * PAGE_TOKENS as u32 + offset as u32
}
