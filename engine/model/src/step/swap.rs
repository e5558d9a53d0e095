//! Swaps blocks out of the pool and back, as plans say, and fails the rows whose blocks could not be swapped in.

use std::collections::HashMap;

use windlass_engine_core::executor::Geometry;
use windlass_engine_core::plan::{BlockId, PlanRow, SwapSlotId};

use crate::decoder::Model;
use crate::tier::Tier;

/// The tier of a decoder's pool.
pub(crate) struct Swapper {
    tier: Box<dyn Tier>,
    /// Slots whose block could not be stored, and why.
    empty: HashMap<SwapSlotId, String>,
    /// Blocks that could not be loaded, and why, until they are overwritten.
    lost: HashMap<BlockId, String>,
}

impl Swapper {
    pub fn new(tier: Box<dyn Tier>) -> Swapper {
        Swapper { tier, empty: HashMap::new(), lost: HashMap::new() }
    }

    /// Forgets every block and frees the room. Room that cannot be freed is kept for later blocks.
    pub fn clear(&mut self) {
        let _ = self.tier.clear();
        self.empty.clear();
        self.lost.clear();
    }

    /// Whether all blocks that a row reads are there; else why not. A row that starts in a block overwrites it.
    pub fn check(&mut self, row: &PlanRow, geometry: &Geometry) -> Result<(), String> {
        if self.lost.is_empty() {
            return Ok(());
        }
        let read = row.first_position.div_ceil(geometry.block_tokens) as usize;
        let written = row.tables(&geometry.groups).flat_map(|table| table.iter().skip(read));
        written.for_each(|block| _ = self.lost.remove(block));
        match row.blocks.iter().find_map(|block| self.lost.get(block)) {
            Some(error) => Err(format!("its cached prompt could not be read back: {error}")),
            None => Ok(()),
        }
    }

    /// Stores a block. If that fails, loading it fails later.
    pub fn store<M: Model>(&mut self, model: &mut M, block: BlockId, slot: SwapSlotId) {
        let stored = match self.lost.get(&block) {
            Some(why) => Err(why.clone()),
            None => model.store_block(&mut *self.tier, block, slot).map_err(|error| error.to_string()),
        };
        match stored {
            Ok(()) => self.empty.remove(&slot),
            Err(why) => self.empty.insert(slot, why),
        };
    }

    /// Loads a block. If that fails, the rows that name the block fail.
    pub fn load<M: Model>(&mut self, model: &mut M, slot: SwapSlotId, block: BlockId) {
        let loaded = match self.empty.get(&slot) {
            Some(why) => Err(format!("it could not be stored: {why}")),
            None => model.load_block(&mut *self.tier, slot, block).map_err(|error| error.to_string()),
        };
        match loaded {
            Ok(()) => self.lost.remove(&block),
            Err(error) => self.lost.insert(block, error),
        };
    }
}
