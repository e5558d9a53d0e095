//! How much is measured.

use windlass_kernels::cuda::ops::{Heads, Mixture};

use crate::generated::Shape;
use crate::model::Model;

/// Sizes of everything.
pub struct Scale {
    /// Of each of two buffers that are copied: on a GPU many times any cache.
    pub copy_bytes: usize,
    /// Second-level caches that the operands of a measurement fill, so that each is gone when its turn comes.
    pub cold_caches: usize,
    /// Seconds that a measurement goes on for, so that what a clock and a launch cost vanishes.
    pub seconds: f64,
    /// Rows, columns and tokens of the product that is the ceiling of others.
    pub ceiling_side: usize,
    /// Rows and columns of a matrix.
    pub matrix: [usize; 2],
    /// Tokens of products that memory bounds.
    pub few: &'static [usize],
    /// Tokens of products that arithmetic bounds.
    pub many: &'static [usize],
    /// Of attention.
    pub heads: Heads,
    /// Sequences that decode, and the tokens that each has.
    pub contexts: &'static [(usize, usize)],
    /// Tokens of prompts that attention reads.
    pub prompts: &'static [usize],
    /// Values of a token's activations, and of its gated ones.
    pub widths: [usize; 2],
    /// Tokens of what goes through each by itself.
    pub tokens: &'static [usize],
    pub vocabulary: usize,
    /// Rows of logits that are drawn from.
    pub draws: &'static [usize],
    pub mixture: Mixture,
    /// Values of a token, and of an expert's inside.
    pub expert: [usize; 2],
    /// Tokens that go through experts.
    pub routed: &'static [usize],
    /// Tokens of a real text whose logits are compared.
    pub text_tokens: usize,
    /// Tokens of each text that is continued.
    pub answer_tokens: usize,
    /// Times that one step is repeated, and in which batches.
    pub replays: usize,
    pub replayed: &'static [usize],
    /// Sequences of the small model that decode together.
    pub sequences: &'static [u32],
    /// Tokens that each of them gets.
    pub decoded: usize,
    /// Tokens of the small model's prompt.
    pub prompt: usize,
    /// The large model, and a few layers of it.
    pub llama: Shape,
    pub layers: Shape,
    pub llama_sequences: &'static [u32],
    pub llama_prompts: &'static [usize],
}

impl Scale {
    pub fn of(model: &Model) -> &'static Scale {
        if model.is_dry() { &Scale::DRY } else { &Scale::FULL }
    }

    /// For a GPU: shapes of Llama-3.1-8B, experts of Qwen3-30B-A3B.
    const FULL: Scale = Scale {
        copy_bytes: 1 << 30,
        cold_caches: 3,
        seconds: 0.1,
        ceiling_side: 8192,
        matrix: [14_336, 4096],
        few: &[1, 4, 8, 16, 32],
        many: &[128, 512, 2048],
        heads: Heads { heads: 32, kv_heads: 8, dim: 128 },
        contexts: &[(1, 2048), (1, 32_768), (8, 8192), (32, 2048), (32, 8192), (256, 1024)],
        prompts: &[512, 2048, 8192],
        widths: [4096, 14_336],
        tokens: &[1, 32, 512, 4096],
        vocabulary: 128_256,
        draws: &[1, 32, 256],
        mixture: Mixture { count: 128, first: 0, held: 128, used: 8, shared: false, sum_to_one: true },
        expert: [2048, 768],
        routed: &[1, 8, 32, 256, 2048],
        text_tokens: 384,
        answer_tokens: 64,
        replays: 100,
        replayed: &[1, 8, 32],
        sequences: &[1, 8, 32, 64],
        decoded: 64,
        prompt: 384,
        llama: Shape::LLAMA_8B,
        layers: Shape { layers: 2, vocabulary: 32_000, ..Shape::LLAMA_8B },
        llama_sequences: &[1, 8, 32, 128, 256],
        llama_prompts: &[128, 512, 2048],
    };
    /// For the shim.
    const DRY: Scale = Scale {
        copy_bytes: 1 << 16,
        cold_caches: 0,
        seconds: 0.0,
        ceiling_side: 128,
        matrix: [64, 256],
        few: &[3],
        many: &[130],
        heads: Heads { heads: 4, kv_heads: 2, dim: 64 },
        contexts: &[(2, 130)],
        prompts: &[70],
        widths: [64, 96],
        tokens: &[3],
        vocabulary: 320,
        draws: &[2],
        mixture: Mixture { count: 4, first: 0, held: 4, used: 2, shared: false, sum_to_one: true },
        expert: [64, 32],
        routed: &[5, 256],
        text_tokens: 40,
        answer_tokens: 4,
        replays: 2,
        replayed: &[1, 3],
        sequences: &[1, 3],
        decoded: 3,
        prompt: 40,
        llama: Shape::TINY,
        layers: Shape::TINY,
        llama_sequences: &[1, 3],
        llama_prompts: &[40],
    };
}
