//! How an engine is made and told to work: answers must not tell which way it was.

use windlass_engine_contract::memory::KvDataType;
use windlass_engine_core::engine::EngineConfig;
use windlass_engine_model::{KvBudget, LoadOptions, SwapSpace};

/// Room for the blocks of every test.
const SWAP_BYTES: u64 = 1 << 28;

/// How an engine is made and told to work.
#[derive(Clone, Copy, Debug)]
pub struct Way {
    pub blocks: u32,
    pub max_step_tokens: u32,
    pub caches: bool,
    pub swaps: bool,
    pub drafts: bool,
    pub kv: KvDataType,
}

impl Way {
    /// So many blocks, steps of so many tokens, and nothing besides.
    pub const fn plain(blocks: u32, max_step_tokens: u32) -> Way {
        Way { blocks, max_step_tokens, caches: false, swaps: false, drafts: false, kv: KvDataType::Bf16 }
    }

    pub fn load_options(self) -> LoadOptions {
        LoadOptions {
            threads: 2,
            kv: KvBudget::Blocks(self.blocks),
            kv_data_type: self.kv,
            swap: self.swaps.then_some(SwapSpace { bytes: SWAP_BYTES, folder: None }),
            max_sequences: 8,
            max_step_tokens: self.max_step_tokens,
            ..LoadOptions::default()
        }
    }

    pub fn engine_config(self) -> EngineConfig {
        EngineConfig { enable_prefix_cache: self.caches, ..EngineConfig::PLAIN }
    }
}
