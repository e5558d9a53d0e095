//! What is not computed on CUDA yet, refused by name before anything is loaded.

use windlass_engine_contract::memory::KvDataType;
use windlass_engine_core::plan::PlanRow;
use windlass_kernels::cuda::ops::PAGE_TOKENS;

use super::CudaError;
use crate::config::{Activation, DecoderConfig};
use crate::sizes::LoadOptions;

/// Values in a head that the attention kernels take.
const HEAD_DIMS: [usize; 4] = [32, 64, 96, 128];
/// Query heads that may share a key head.
const MAX_GROUP: usize = 16;

/// Refuses a decoder that the kernels do not compute.
pub(super) fn check_config(config: &DecoderConfig) -> Result<(), CudaError> {
    if let Some(found) = unknown(config) {
        return Err(CudaError::unsupported(found, "the CPU"));
    }
    let group = config.heads / config.kv_heads;
    if !HEAD_DIMS.contains(&config.head_dim) {
        let found = format!("a head of {} values", config.head_dim);
        return Err(CudaError::unsupported(found, "a model with heads of 32, 64, 96 or 128, or the CPU"));
    }
    if group > MAX_GROUP {
        let found = format!("{group} query heads that share a key head");
        return Err(CudaError::unsupported(found, format!("a model with at most {MAX_GROUP}, or the CPU")));
    }
    Ok(())
}

/// What only some families have.
fn unknown(config: &DecoderConfig) -> Option<&'static str> {
    let features = [
        (config.experts.is_some(), "a mixture of experts"),
        ((0..config.layers).any(|layer| config.window(layer).is_some()), "a window of attention"),
        (config.attention_soft_cap.is_some() || config.logit_soft_cap.is_some(), "a soft cap"),
        (config.post_norms, "a norm behind a block"),
        (config.activation != Activation::Silu, "an activation other than SiLU"),
        (config.embedding_scale != 1.0, "a scale of the token embedding"),
        (config.rope.long.is_some(), "LongRoPE"),
    ];
    features.into_iter().find_map(|(is_asked, name)| is_asked.then_some(name))
}

/// Refuses options that are for the CPU alone.
pub(super) fn check_options(options: &LoadOptions) -> Result<(), CudaError> {
    let refuse = |found: String, right: &str| Err(CudaError::unsupported(found, right));
    if options.tensor_parallel > 1 {
        return refuse(format!("a group of {} ranks", options.tensor_parallel), "one");
    }
    if options.block_tokens as usize != PAGE_TOKENS {
        return refuse(format!("a KV block of {} tokens", options.block_tokens), "blocks of 64");
    }
    if options.kv_data_type != KvDataType::Bf16 {
        return refuse(format!("a KV cache in {}", options.kv_data_type.name()), "bf16");
    }
    if options.swap.is_some() {
        return refuse("swap space".to_owned(), "none");
    }
    if let Some(quantization) = options.quantization {
        let found = format!("quantizing to {} at load", quantization.name());
        return refuse(found, "a checkpoint that is quantized, or bf16");
    }
    Ok(())
}

/// Refuses a row that asks for more.
pub(super) fn check_row(row: &PlanRow) -> Result<(), String> {
    match row.draft() {
        Some(_) => Err(CudaError::unsupported("guesses of what comes next", "no speculation").to_string()),
        None => Ok(()),
    }
}
