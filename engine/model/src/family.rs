//! The model families: which parts of the common decoder each uses, and the names it goes by. Another name of a family
//! is one more word in this table.

use windlass_kernels::ops::RopePairing;

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
}

const LLAMA: Family = Family {
    gguf: &["llama"],
    hub: &["llama", "mistral"],
    biases: false,
    head_norms: false,
    // The converter reorders the q and k rows of Llama checkpoints so that neighbours turn together.
    gguf_pairing: RopePairing::Adjacent,
    still_interval: None,
};

const FAMILIES: &[Family] = &[
    LLAMA,
    Family { gguf: &["smollm3"], hub: &["smollm3"], still_interval: Some(4), ..LLAMA },
    Family { gguf: &["qwen2"], hub: &["qwen2"], biases: true, gguf_pairing: RopePairing::HalfSplit, ..LLAMA },
    Family { gguf: &["qwen3"], hub: &["qwen3"], head_norms: true, gguf_pairing: RopePairing::HalfSplit, ..LLAMA },
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
        let mut names: Vec<&str> = names.copied().collect();
        names.sort_unstable();
        names.dedup();
        names.join(", ")
    }
}
