//! Memory as arithmetic: bytes of weights, KV cache and workspace from a shape, before anything is allocated.

use std::iter::Sum;

use crate::shape::ModelShape;

/// Element type of the KV cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KvDataType {
    /// Brain float, 2 bytes.
    Bf16,
    /// Half float, 2 bytes.
    F16,
    /// Single float, 4 bytes.
    F32,
}

impl KvDataType {
    /// Bytes of one element.
    pub fn bytes(self) -> u64 {
        match self {
            KvDataType::Bf16 | KvDataType::F16 => 2,
            KvDataType::F32 => 4,
        }
    }

    /// As `--kv-cache-dtype` spells it.
    pub fn name(self) -> &'static str {
        match self {
            KvDataType::Bf16 => "bf16",
            KvDataType::F16 => "f16",
            KvDataType::F32 => "f32",
        }
    }
}

/// The ledger of one engine, or of one of its ranks, bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Ledger {
    /// All weights.
    pub weights: u64,
    /// The KV pool.
    pub kv: u64,
    /// Activations and logits of the largest step.
    pub workspace: u64,
}

impl Ledger {
    /// Everything together.
    pub fn total(&self) -> u64 {
        self.weights + self.kv + self.workspace
    }
}

impl Sum for Ledger {
    fn sum<I: Iterator<Item = Ledger>>(ledgers: I) -> Ledger {
        let add = |sum: Ledger, ledger: Ledger| Ledger {
            weights: sum.weights + ledger.weights,
            kv: sum.kv + ledger.kv,
            workspace: sum.workspace + ledger.workspace,
        };
        ledgers.fold(Ledger::default(), add)
    }
}

/// Bytes of K and V of one token over all layers.
pub fn kv_bytes_per_token(shape: &ModelShape, data_type: KvDataType) -> u64 {
    2 * u64::from(shape.layers) * u64::from(shape.kv_heads) * u64::from(shape.head_dim) * data_type.bytes()
}

/// Bytes of one KV block of `block_tokens` tokens over all layers.
pub fn kv_block_bytes(shape: &ModelShape, data_type: KvDataType, block_tokens: u32) -> u64 {
    kv_bytes_per_token(shape, data_type) * u64::from(block_tokens)
}

/// Bytes of activations for a step of `step_tokens`, of which `logit_rows` rows are sampled.
///
/// Residual, its norm and what is added to it, q, k, v and attention output, gate, up and their product, and logits, all
/// in f32; one int8 copy of the widest input.
pub fn workspace_bytes(shape: &ModelShape, step_tokens: u32, logit_rows: u32) -> u64 {
    let [hidden, ffn, vocabulary] = [shape.hidden, shape.feed_forward, shape.vocabulary].map(u64::from);
    let query = u64::from(shape.heads) * u64::from(shape.head_dim);
    let kv = u64::from(shape.kv_heads) * u64::from(shape.head_dim);
    let per_token = 4 * (3 * hidden + 2 * query + 2 * kv + 3 * ffn) + 2 * hidden.max(ffn);
    u64::from(step_tokens) * per_token + u64::from(logit_rows) * vocabulary * 4
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Llama-3.1-8B: 128 KiB of bf16 KV per token, the figure published for it.
    #[test]
    fn kv_of_llama_8b_is_128_kib_per_token() {
        let shape = ModelShape {
            architecture: "llama".into(),
            layers: 32,
            hidden: 4096,
            feed_forward: 14_336,
            heads: 32,
            kv_heads: 8,
            head_dim: 128,
            vocabulary: 128_256,
            context_tokens: 131_072,
            weight_bytes: 16_060_522_496,
        };
        assert_eq!(kv_bytes_per_token(&shape, KvDataType::Bf16), 131_072);
        assert_eq!(kv_block_bytes(&shape, KvDataType::Bf16, 16), 2 << 20);
    }
}
