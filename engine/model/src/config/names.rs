//! The tensor names of decoders, in each kind of checkpoint.

use windlass_checkpoint::HubFolder;

/// A tensor, or one in each layer, with its names in GGUF files and in Hugging Face checkpoints.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Name {
    gguf: &'static str,
    hub: &'static str,
}

const fn name(gguf: &'static str, hub: &'static str) -> Name {
    Name { gguf, hub }
}

pub(crate) const EMBEDDING: Name = name("token_embd", "model.embed_tokens");
pub(crate) const OUTPUT_NORM: Name = name("output_norm", "model.norm");
pub(crate) const OUTPUT: Name = name("output", "lm_head");
pub(crate) const ATTENTION_NORM: Name = name("attn_norm", "input_layernorm");
pub(crate) const QUERY: Name = name("attn_q", "self_attn.q_proj");
pub(crate) const KEY: Name = name("attn_k", "self_attn.k_proj");
pub(crate) const VALUE: Name = name("attn_v", "self_attn.v_proj");
pub(crate) const OUT: Name = name("attn_output", "self_attn.o_proj");
pub(crate) const QUERY_NORM: Name = name("attn_q_norm", "self_attn.q_norm");
pub(crate) const KEY_NORM: Name = name("attn_k_norm", "self_attn.k_norm");
pub(crate) const FEED_FORWARD_NORM: Name = name("ffn_norm", "post_attention_layernorm");
pub(crate) const GATE: Name = name("ffn_gate", "mlp.gate_proj");
pub(crate) const UP: Name = name("ffn_up", "mlp.up_proj");
pub(crate) const DOWN: Name = name("ffn_down", "mlp.down_proj");

/// Query, key and value in one matrix.
pub(crate) const FUSED_QKV: Name = name("attn_qkv", "self_attn.qkv_proj");
/// Gate and up in one matrix.
pub(crate) const FUSED_GATE_UP: Name = name("ffn_up", "mlp.gate_up_proj");
/// Families with norms after blocks have other names for the norm before the feed-forward block.
pub(crate) const POST_ATTENTION_NORM: Name = name("post_attention_norm", "post_attention_layernorm");
pub(crate) const PRE_FEED_FORWARD_NORM: Name = name("ffn_norm", "pre_feedforward_layernorm");
pub(crate) const POST_FEED_FORWARD_NORM: Name = name("post_ffw_norm", "post_feedforward_layernorm");
/// Rotary factors of GGUF files for long and for short sequences (LongRoPE).
pub(crate) const ROPE_FACTORS: [&str; 3] =
    ["rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"];

/// The tensors of a mixture of experts. GGUF files stack the matrices of all experts in one tensor; Hugging Face
/// checkpoints have a tensor each, with the index of the expert in place of `{}`.
#[derive(Debug, PartialEq)]
pub(crate) struct ExpertNames {
    pub router: Name,
    pub gate: Name,
    pub up: Name,
    pub down: Name,
    pub shared: [Name; 3],
    pub shared_gate: Name,
}

pub(crate) const QWEN_EXPERTS: ExpertNames = ExpertNames {
    router: name("ffn_gate_inp", "mlp.gate"),
    gate: name("ffn_gate_exps", "mlp.experts.{}.gate_proj"),
    up: name("ffn_up_exps", "mlp.experts.{}.up_proj"),
    down: name("ffn_down_exps", "mlp.experts.{}.down_proj"),
    shared: [
        name("ffn_gate_shexp", "mlp.shared_expert.gate_proj"),
        name("ffn_up_shexp", "mlp.shared_expert.up_proj"),
        name("ffn_down_shexp", "mlp.shared_expert.down_proj"),
    ],
    shared_gate: name("ffn_gate_inp_shexp", "mlp.shared_expert_gate"),
};

pub(crate) const MIXTRAL_EXPERTS: ExpertNames = ExpertNames {
    router: name("ffn_gate_inp", "block_sparse_moe.gate"),
    gate: name("ffn_gate_exps", "block_sparse_moe.experts.{}.w1"),
    up: name("ffn_up_exps", "block_sparse_moe.experts.{}.w3"),
    down: name("ffn_down_exps", "block_sparse_moe.experts.{}.w2"),
    ..QWEN_EXPERTS
};

/// Ends of names in Hugging Face checkpoints of tensors that are no weights.
const NO_WEIGHTS: [&str; 3] = [".rotary_emb.inv_freq", ".self_attn.k_scale", ".self_attn.v_scale"];

/// Starts of names of tensors that read images.
const OF_IMAGES: [&str; 4] =
    ["vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector."];

/// How a checkpoint names tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Naming {
    Gguf,
    Hub(Nesting),
}

/// Where a folder has the text decoder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Nesting {
    /// A text model: `model.layers`, `lm_head`.
    Alone,
    /// A whole model beside one that reads images: `language_model.model.layers`, `language_model.lm_head`.
    Beside,
    /// Within one model, as newer tools write it: `model.language_model.layers`, `lm_head`.
    Within,
}

impl Nesting {
    /// Where a folder of a model of more than text has it.
    pub fn of(folder: &HubFolder) -> Nesting {
        let within = folder.tensor(&Naming::Hub(Nesting::Within).once(EMBEDDING));
        if within.is_some() { Nesting::Within } else { Nesting::Beside }
    }

    /// The name of the tensor that is called `plain` in a text model.
    fn name(self, plain: String) -> String {
        match (self, plain.strip_prefix("model.")) {
            (Nesting::Beside, _) => format!("language_model.{plain}"),
            (Nesting::Within, Some(rest)) => format!("model.language_model.{rest}"),
            (Nesting::Within, None) | (Nesting::Alone, _) => plain,
        }
    }
}

impl Naming {
    /// Name of the weights that the decoder has once.
    pub fn once(self, name: Name) -> String {
        match self {
            Naming::Gguf => format!("{}.weight", name.gguf),
            Naming::Hub(nesting) => nesting.name(format!("{}.weight", name.hub)),
        }
    }

    /// Name of the weights in a layer.
    pub fn weight(self, layer: usize, name: Name) -> String {
        self.in_layer(layer, name, "weight")
    }

    /// Name of the bias in a layer.
    pub fn bias(self, layer: usize, name: Name) -> String {
        self.in_layer(layer, name, "bias")
    }

    /// Whether a tensor is not a weight of the decoder: tables that older checkpoints saved, tensors that the
    /// configuration reads, scales that were measured for a KV cache of eight-bit floats (rows have their own scales
    /// here), and weights that read images.
    pub fn is_no_weight(self, tensor: &str) -> bool {
        match self {
            Naming::Gguf => ROPE_FACTORS.contains(&tensor),
            Naming::Hub(nesting) => {
                let is_of_images = || OF_IMAGES.iter().any(|begin| tensor.starts_with(begin));
                NO_WEIGHTS.iter().any(|end| tensor.ends_with(end)) || nesting != Nesting::Alone && is_of_images()
            }
        }
    }

    fn in_layer(self, layer: usize, name: Name, what: &str) -> String {
        match self {
            Naming::Gguf => format!("blk.{layer}.{}.{what}", name.gguf),
            Naming::Hub(nesting) => nesting.name(format!("model.layers.{layer}.{}.{what}", name.hub)),
        }
    }
}
