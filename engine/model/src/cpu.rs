//! The CPU backend: `windlass_kernels` over vectors.

mod blocks;
mod collectives;
mod experts;
mod load;
mod loader;
mod ops;
mod rank;
mod workspace;

use windlass_engine_contract::kv_groups::READ_TILE_TOKENS;

pub use load::Built;
pub(crate) use load::CpuPlan;
pub(crate) use loader::CpuLoader;
pub use loader::{CpuExperts, CpuGated, CpuQkv};
pub(crate) use ops::{CpuOps, Share};
pub use rank::{CpuDecoder, CpuRank};
use workspace::Workspace;

// A windowed group keeps enough keys for the tiles of this device's attention.
const _: () = assert!(windlass_kernels::ops::ATTENTION_TILE_KEYS <= READ_TILE_TOKENS as usize);

/// A CPU, or the processors of one rank.
#[derive(Debug)]
pub struct CpuBackend {
    ops: CpuOps,
    work: Workspace,
}

impl CpuBackend {
    /// Makes a backend for steps of at most `tokens` tokens, of which at most `logit_rows` get logits.
    pub(crate) fn new(ops: CpuOps, tokens: usize, logit_rows: usize) -> CpuBackend {
        let work = Workspace::new(ops.config(), tokens, logit_rows);
        CpuBackend { ops, work }
    }

    /// The instruction set in use.
    pub fn kernels(&self) -> &'static str {
        self.ops.kernels()
    }
}
