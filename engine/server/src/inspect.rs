//! `windlass-engine inspect`: what a model is and takes, as JSON, from its header alone.

mod remote;

use crate::cli::{FitDevice, InspectArgs};
use crate::failure::{Failure, last_word};
use crate::start::{load_failure, open};
use remote::RemoteModel;
use serde::Serialize;
use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;
use windlass_checkpoint::Checkpoint;
use windlass_engine_contract::inspection::Inspection;
use windlass_engine_contract::memory::{KvDataType, kv_bytes_per_token};
use windlass_engine_contract::shape::ModelShape;
use windlass_engine_model::{Quantization, survey};

/// The document that is printed.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Document {
    #[serde(flatten)]
    inspection: Inspection,
    /// Tensors and bytes by element type.
    #[serde(skip_serializing_if = "Option::is_none")]
    tensors: Option<BTreeMap<&'static str, TensorSum>>,
}

#[derive(Debug, Default, Serialize)]
struct TensorSum {
    count: u64,
    bytes: u64,
}

/// Prints the inspection of one model, and leaves it as the process's last word.
pub fn run(args: &InspectArgs, first_pause: Duration) -> Result<(), Failure> {
    let document = if remote::is_address(&args.model) {
        let model = RemoteModel::find(args, first_pause)?;
        model.inspect(|file, revision| document(file, args.summary, Some(revision)))?
    } else {
        document(&open(Path::new(&args.model))?, args.summary, None)?
    };
    println!("{}", serde_json::to_string_pretty(&document).map_err(Failure::internal)?);
    let summary = serde_json::to_string(&document.inspection).map_err(Failure::internal)?;
    last_word(&summary, args.process.termination_log.as_deref());
    Ok(())
}

/// The shape of one checkpoint, as a device has it in memory; `quantization` is that of `serve`'s flag.
pub fn shape(model: &Path, quantization: Option<&str>, device: FitDevice) -> Result<ModelShape, Failure> {
    let found = survey(&open(model)?, quantization.and_then(Quantization::named)).map_err(load_failure)?;
    Ok(match device {
        FitDevice::Cpu => found.shape,
        FitDevice::Cuda => ModelShape { weight_bytes: found.gpu_weight_bytes, ..found.shape },
    })
}

/// `revision`: what the source calls the version that was read; `None` for a source that tells none.
fn document(file: &Checkpoint, summary: bool, revision: Option<Option<String>>) -> Result<Document, Failure> {
    let stored = survey(file, None).map_err(load_failure)?;
    // Weights that are integers already cannot be converted, which is no failure of an inspection.
    let converted = |to| survey(file, Some(to)).ok().map(|converted| converted.shape.weight_bytes);
    let inspection = Inspection {
        kv_bytes_per_token: kv_bytes_per_token(&stored.shape, KvDataType::Bf16),
        weight_type: stored.weight_type.to_owned(),
        int8_bytes: converted(Quantization::INT8),
        fp8_bytes: converted(Quantization::FP8),
        int4_bytes: converted(Quantization::INT4),
        gpu_bytes: Some(stored.gpu_weight_bytes),
        revision: revision.flatten(),
        shape: stored.shape,
    };
    Ok(Document { inspection, tensors: (!summary).then(|| sum_by_type(file)) })
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
