//! `windlass-engine inspect`: what a checkpoint is and takes, as JSON, from its header alone.

use crate::cli::InspectArgs;
use crate::failure::Failure;
use crate::start::open;
use serde::Serialize;
use std::collections::BTreeMap;
use std::path::Path;
use windlass_checkpoint::Checkpoint;
use windlass_engine_contract::memory::{KvDataType, kv_bytes_per_token};
use windlass_engine_contract::shape::ModelShape;
use windlass_engine_contract::termination::Reason;
use windlass_engine_model::{ConfigError, DecoderConfig};

/// The document that is printed.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Inspection {
    shape: ModelShape,
    /// Bytes of bf16 KV cache that a token takes.
    kv_bytes_per_token: u64,
    /// Tensors and bytes by element type.
    #[serde(skip_serializing_if = "Option::is_none")]
    tensors: Option<BTreeMap<&'static str, TensorSum>>,
}

#[derive(Debug, Default, Serialize)]
struct TensorSum {
    count: u64,
    bytes: u64,
}

/// Prints the inspection of one checkpoint.
pub fn run(args: &InspectArgs) -> Result<(), Failure> {
    let inspection = inspect(&open(&args.model)?, args.summary)?;
    println!("{}", serde_json::to_string_pretty(&inspection).map_err(Failure::internal)?);
    Ok(())
}

/// The shape of one checkpoint.
pub fn shape(model: &Path) -> Result<ModelShape, Failure> {
    Ok(inspect(&open(model)?, true)?.shape)
}

fn inspect(file: &Checkpoint, summary: bool) -> Result<Inspection, Failure> {
    let config = DecoderConfig::read(file).map_err(|error| {
        let unsupported = matches!(error, ConfigError::Unsupported(_));
        Failure::new(if unsupported { Reason::Unsupported } else { Reason::ModelInvalid }, error)
    })?;
    let tensors = sum_by_type(file);
    let shape = config.shape(tensors.values().map(|sum| sum.bytes).sum());
    let kv_bytes_per_token = kv_bytes_per_token(&shape, KvDataType::Bf16);
    Ok(Inspection { shape, kv_bytes_per_token, tensors: (!summary).then_some(tensors) })
}

fn sum_by_type(file: &Checkpoint) -> BTreeMap<&'static str, TensorSum> {
    let mut sums: BTreeMap<&'static str, TensorSum> = BTreeMap::new();
    for tensor in file.tensors() {
        let sum = sums.entry(tensor.kind.name()).or_default();
        sum.count += 1;
        sum.bytes += tensor.bytes.len() as u64;
    }
    sums
}
