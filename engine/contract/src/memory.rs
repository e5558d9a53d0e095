//! Memory as arithmetic: bytes of weights, KV cache and workspace from a shape, before anything is allocated.

use std::iter::Sum;

use crate::shape::ModelShape;

/// How the KV cache holds keys and values.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum KvDataType {
    /// Brain floats of 2 bytes.
    #[default]
    Bf16,
    /// Half-precision floats of 2 bytes.
    F16,
    /// Floats of one byte (e4m3), with a float of 4 bytes for each token and head.
    Fp8,
    /// Bytes, with a float of 4 bytes for each token and head.
    Int8,
    /// Half bytes, with a float of 4 bytes for each token and head.
    Int4,
}

impl KvDataType {
    /// Every one.
    pub const ALL: [KvDataType; 5] =
        [KvDataType::Bf16, KvDataType::F16, KvDataType::Fp8, KvDataType::Int8, KvDataType::Int4];

    /// The type of this name, as `--kv-cache-dtype` spells it, vLLM's names included.
    pub fn named(name: &str) -> Option<KvDataType> {
        match name {
            "auto" | "bf16" | "bfloat16" => Some(KvDataType::Bf16),
            "f16" | "fp16" | "float16" => Some(KvDataType::F16),
            "fp8" | "fp8_e4m3" | "fp8_per_token_head" => Some(KvDataType::Fp8),
            "int8" | "int8_per_token_head" => Some(KvDataType::Int8),
            "int4" | "int4_per_token_head" => Some(KvDataType::Int4),
            _ => None,
        }
    }

    /// Bytes of a key or value of one head.
    pub fn head_bytes(self, head_dim: u32) -> u64 {
        match self {
            KvDataType::Bf16 | KvDataType::F16 => 2 * u64::from(head_dim),
            KvDataType::Fp8 | KvDataType::Int8 => u64::from(head_dim) + 4,
            KvDataType::Int4 => u64::from(head_dim.div_ceil(2)) + 4,
        }
    }

    /// As `--kv-cache-dtype` spells it.
    pub fn name(self) -> &'static str {
        match self {
            KvDataType::Bf16 => "bf16",
            KvDataType::F16 => "f16",
            KvDataType::Fp8 => "fp8",
            KvDataType::Int8 => "int8",
            KvDataType::Int4 => "int4",
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
    /// Blocks outside the pool, in memory.
    pub swap: u64,
    /// Activations and logits of the largest step.
    pub workspace: u64,
}

impl Ledger {
    /// Everything together.
    pub fn total(&self) -> u64 {
        self.weights + self.kv + self.swap + self.workspace
    }
}

impl Sum for Ledger {
    fn sum<I: Iterator<Item = Ledger>>(ledgers: I) -> Ledger {
        let add = |sum: Ledger, ledger: Ledger| Ledger {
            weights: sum.weights + ledger.weights,
            kv: sum.kv + ledger.kv,
            swap: sum.swap + ledger.swap,
            workspace: sum.workspace + ledger.workspace,
        };
        ledgers.fold(Ledger::default(), add)
    }
}

/// Bytes of K and V of one token over all layers.
pub fn kv_bytes_per_token(shape: &ModelShape, data_type: KvDataType) -> u64 {
    2 * u64::from(shape.layers) * u64::from(shape.kv_heads) * data_type.head_bytes(shape.head_dim)
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
    use crate::fixture::llama_8b;

    /// Llama-3.1-8B: 128 KiB of bf16 KV per token, the figure published for it.
    #[test]
    fn kv_of_llama_8b_is_128_kib_per_token() {
        let shape = llama_8b();
        assert_eq!(kv_bytes_per_token(&shape, KvDataType::Bf16), 131_072);
        assert_eq!(kv_block_bytes(&shape, KvDataType::Bf16, 16), 2 << 20);
        assert_eq!(kv_bytes_per_token(&shape, KvDataType::Int8), 131_072 / 2 + 2 * 32 * 8 * 4);
        assert_eq!(kv_bytes_per_token(&shape, KvDataType::Int4), 131_072 / 4 + 2 * 32 * 8 * 4);
        let names: Vec<&str> = KvDataType::ALL.map(KvDataType::name).to_vec();
        assert_eq!(names, ["bf16", "f16", "fp8", "int8", "int4"]);
        assert!(KvDataType::ALL.iter().all(|kind| KvDataType::named(kind.name()) == Some(*kind)));
    }
}
