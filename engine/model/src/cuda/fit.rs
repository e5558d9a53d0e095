//! The memory that a model takes of a GPU, by its checkpoint's headers.

use std::slice;

use windlass_engine_contract::memory::{Ledger, kv_bytes_per_token};
use windlass_engine_contract::shape::ModelShape;
use windlass_engine_contract::sharding::{Shard, Stage};
use windlass_engine_core::executor::KvGroups;

use super::loaded::step_bytes;
use crate::config::DecoderConfig;
use crate::error::LoadError;
use crate::sizes::{KvBudget, LoadOptions, Sizes};
use crate::weights::part::Parts;
use crate::weights::{Manifest, ShardError};

/// Bytes per value of an input that is rounded, reordered or copied for experts: an upper bound.
const INPUT_BYTES: u64 = 2;

/// The KV budget of one sequence of the greatest length, in the last `last` layers of a model.
pub(super) fn longest_sequence(config: &DecoderConfig, options: &LoadOptions, last: u32) -> KvBudget {
    let held = ModelShape { layers: last, windowed: None, ..config.shape(0) };
    let longest = options.max_model_tokens.unwrap_or(u32::MAX).min(held.context_tokens);
    let block = kv_bytes_per_token(&held, options.kv_data_type) * u64::from(options.block_tokens);
    KvBudget::Bytes(block * u64::from(longest.div_ceil(options.block_tokens.max(1)) + 1))
}

/// The memory that the last `last` layers of a model, its head, its steps and its KV cache take of a device.
pub(super) fn ledger_of_last(
    manifest: &Manifest<'_>,
    config: &DecoderConfig,
    options: &LoadOptions,
    last: u32,
) -> Result<Ledger, LoadError> {
    let whole = config.shape(0);
    let is_whole = last == whole.layers;
    let stage = if is_whole { Stage::WHOLE } else { Stage::split(last, &whole).map_err(ShardError::from)?[1] };
    let held = ModelShape { layers: last, windowed: None, ..whole.clone() };
    let asked = LoadOptions { memory_limit_bytes: None, ..options.clone() };
    let groups = KvGroups::undivided(&whole);
    let sizes = Sizes::decide(slice::from_ref(&held), config.rotary_dims(), groups, &asked)?;
    let (geometry, kv) = (sizes.geometry, sizes.ranks.iter().map(|ledger| ledger.kv).sum::<u64>());
    let by_expert = config.experts.as_ref().filter(|_| !options.batch_invariant);
    let by_expert = by_expert.map_or(0, |experts| experts.used * config.hidden);
    let widest = config.hidden.max(config.feed_forward).max(by_expert);
    let inputs = INPUT_BYTES * u64::from(geometry.max_step_tokens) * widest as u64;
    let weights = manifest.device_bytes(&Parts::of(&Shard::whole(&whole), config), stage);
    Ok(Ledger { weights, kv, workspace: step_bytes(config, true, inputs, &geometry), ..Ledger::default() })
}
