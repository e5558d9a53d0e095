//! The ops, one per file: shape checks, then the computation on the pool.

mod activation;
mod attention;
mod matmul;
mod norm;
mod rope;
mod select;

pub use activation::{add, gelu_mul, silu_mul, soft_cap};
pub use attention::{ATTENTION_TILE_KEYS, AttentionRow, Scoring, append_kv, paged_attention};
pub use matmul::{Product, matmul, matmul_many};
pub use norm::{add_rms_norm, rms_norm};
pub use rope::{RopePairing, RopeTable, rope};
pub use select::{argmax, softmax, top_k};
