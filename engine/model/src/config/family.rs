//! The model families: which parts of the common decoder each uses, and the names it goes by. Another name of a family
//! is one more word in this table.

mod wrapper;

use windlass_kernels::ops::RopePairing;

use crate::config::Activation;
use crate::config::names::{self, ExpertNames};
use wrapper::WRAPPERS;
pub(crate) use wrapper::Wrapper;

/// What distinguishes a family from the plain Llama.
#[derive(Debug)]
pub(crate) struct Family {
    /// `general.architecture` of GGUF files.
    gguf: &'static [&'static str],
    /// `model_type` of `config.json`.
    hub: &'static [&'static str],
    /// Queries, keys and values have biases.
    pub biases: bool,
    /// Each head of queries and keys is normed before it turns.
    pub head_norms: bool,
    /// Which values of a head turn together in GGUF files; on the hub it is always those half a head apart.
    pub gguf_pairing: RopePairing,
    /// Each so many layers, the last one's heads do not turn.
    pub still_interval: Option<usize>,
    /// Queries, keys and values are one matrix, gate and up another.
    pub fused: bool,
    /// What the attention and the feed-forward block give is normed before it is added.
    pub post_norms: bool,
    /// The embedding is multiplied with the root of its width.
    pub scaled_embedding: bool,
    /// The hub's norms multiply with one more than their weights; in GGUF files it was added.
    pub norms_above_one: bool,
    /// Of the feed-forward block's gate.
    pub activation: Activation,
    /// Which layers see a window of keys, where a checkpoint has one.
    pub local: LocalLayers,
    /// What the layers of a mixture of experts are called; absent where the family has none.
    pub experts: Option<&'static ExpertNames>,
    /// How the weights of a token's experts are scaled where the checkpoint does not say.
    pub experts_sum_to_one: bool,
}

/// The layers of a family that see only a window of keys.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum LocalLayers {
    /// Every one.
    All,
    /// Every one but the last of each so many.
    AllButEvery {
        /// So many.
        interval: usize,
        /// The base of their rotary frequencies where it is another one than the other layers'.
        rope_theta: Option<f32>,
    },
    /// Those from `max_window_layers` on, where `use_sliding_window` says so.
    Upper,
}

const LLAMA: Family = Family {
    gguf: &["llama"],
    hub: &["llama"],
    biases: false,
    head_norms: false,
    // The converter reorders the q and k rows of Llama checkpoints so that neighbours turn together.
    gguf_pairing: RopePairing::Adjacent,
    still_interval: None,
    fused: false,
    post_norms: false,
    scaled_embedding: false,
    norms_above_one: false,
    activation: Activation::Silu,
    local: LocalLayers::All,
    experts: Some(&names::MIXTRAL_EXPERTS),
    experts_sum_to_one: true,
};

const QWEN: Family = Family { gguf_pairing: RopePairing::HalfSplit, local: LocalLayers::Upper, experts: None, ..LLAMA };

const GEMMA: Family = Family {
    gguf: &["gemma"],
    hub: &["gemma"],
    gguf_pairing: RopePairing::HalfSplit,
    scaled_embedding: true,
    norms_above_one: true,
    activation: Activation::GeluTanh,
    experts: None,
    ..LLAMA
};

const FAMILIES: &[Family] = &[
    LLAMA,
    Family { gguf: &[], hub: &["mistral", "mixtral"], ..LLAMA },
    Family { gguf: &["smollm3"], hub: &["smollm3"], still_interval: Some(4), experts: None, ..LLAMA },
    Family { gguf: &["qwen2"], hub: &["qwen2"], biases: true, ..QWEN },
    Family { gguf: &["qwen3"], hub: &["qwen3"], head_norms: true, ..QWEN },
    Family {
        gguf: &["qwen2moe"],
        hub: &["qwen2_moe"],
        biases: true,
        experts: Some(&names::QWEN_EXPERTS),
        experts_sum_to_one: false,
        ..QWEN
    },
    Family { gguf: &["qwen3moe"], hub: &["qwen3_moe"], head_norms: true, experts: Some(&names::QWEN_EXPERTS), ..QWEN },
    Family {
        gguf: &["phi3"],
        hub: &["phi3"],
        gguf_pairing: RopePairing::HalfSplit,
        fused: true,
        experts: None,
        ..LLAMA
    },
    GEMMA,
    Family {
        gguf: &["gemma2"],
        hub: &["gemma2"],
        post_norms: true,
        local: LocalLayers::AllButEvery { interval: 2, rope_theta: None },
        ..GEMMA
    },
    Family {
        gguf: &["gemma3"],
        hub: &["gemma3_text"],
        post_norms: true,
        head_norms: true,
        local: LocalLayers::AllButEvery { interval: 6, rope_theta: Some(10_000.0) },
        ..GEMMA
    },
];

impl Family {
    /// The family of a GGUF file's architecture.
    pub fn of_gguf(architecture: &str) -> Option<&'static Family> {
        FAMILIES.iter().find(|family| family.gguf.contains(&architecture))
    }

    /// The family of a `config.json`'s model type.
    pub fn of_hub(model_type: &str) -> Option<&'static Family> {
        FAMILIES.iter().find(|family| family.hub.contains(&model_type))
    }

    /// All names, comma-separated.
    pub fn known() -> String {
        let names = FAMILIES.iter().flat_map(|family| family.hub.iter().chain(family.gguf));
        let mut names: Vec<&str> = names.copied().chain(WRAPPERS.iter().map(|wrapper| wrapper.name)).collect();
        names.sort_unstable();
        names.dedup();
        names.join(", ")
    }
}
