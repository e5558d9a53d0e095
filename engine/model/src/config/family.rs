//! Model families: the parts of the common decoder that each uses, and its names. To support another name of a family,
//! add it to this table.

mod wrapper;

use windlass_kernels::ops::RopePairing;

use crate::config::Activation;
use crate::config::names::{self, ExpertNames};
use wrapper::WRAPPERS;
pub(crate) use wrapper::Wrapper;

/// The differences of a family from Llama.
#[derive(Debug)]
pub(crate) struct Family {
    /// `general.architecture` of GGUF files.
    gguf: &'static [&'static str],
    /// `model_type` of `config.json`.
    hub: &'static [&'static str],
    /// Whether queries, keys and values have biases.
    pub biases: bool,
    /// Whether each query and key head is normed before rotation.
    pub head_norms: bool,
    /// Which values form a rotary pair in GGUF files; in Hugging Face checkpoints they are always half a head apart.
    pub gguf_pairing: RopePairing,
    /// The heads of every n-th layer are not rotated.
    pub still_interval: Option<usize>,
    /// Whether queries, keys and values are one matrix, and gate and up another.
    pub fused: bool,
    /// Whether the outputs of attention and of the feed-forward block are normed before they are added.
    pub post_norms: bool,
    /// Whether the embedding is multiplied with the square root of its width.
    pub scaled_embedding: bool,
    /// Whether Hugging Face checkpoints store the weights of norms minus one; GGUF files store them whole.
    pub norms_above_one: bool,
    /// Activation of the feed-forward block's gate.
    pub activation: Activation,
    /// The layers with a window, if the checkpoint has one.
    pub local: LocalLayers,
    /// Tensor names of a mixture of experts; `None` if the family has none.
    pub experts: Option<&'static ExpertNames>,
    /// Whether the weights of a token's experts are scaled to a sum of one, unless the checkpoint says otherwise.
    pub experts_sum_to_one: bool,
}

/// The layers of a family with a window.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum LocalLayers {
    /// All layers.
    All,
    /// All layers but every n-th.
    AllButEvery {
        /// The interval.
        interval: usize,
        /// Base of their rotary frequencies, if it differs from that of other layers.
        rope_theta: Option<f32>,
    },
    /// The layers from `max_window_layers` on, if `use_sliding_window` is true.
    Upper,
}

const LLAMA: Family = Family {
    gguf: &["llama"],
    hub: &["llama"],
    biases: false,
    head_norms: false,
    // The converter reorders the q and k rows of Llama checkpoints so that the values of a pair are neighbours.
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
