//! An encoder on this machine's CPU.

use super::engine_thread::EngineEnd;
use super::tokenizer_failure;
use crate::clock::Clock;
use crate::config::{Config, EncoderConfig};
use crate::encoding::{Batcher, EncoderHandle};
use crate::failure::Failure;
use crate::fingerprint;
use crate::machine;
use crate::monitor::{Built, Monitor};
use crate::text::encoder_text::EncoderText;
use std::sync::Arc;
use tokio::sync::oneshot;
use windlass_checkpoint::HubFolder;
use windlass_engine_contract::memory::Ledger;
use windlass_engine_contract::stats::{EffectiveConfig, StartPhases};
use windlass_engine_contract::termination::Reason;
use windlass_engine_model::{Encoder, EncoderError, EncoderInput, EncoderShape};

/// An encoder that has read a text, with all that serving it takes.
pub struct StartedEncoder {
    /// Submits texts.
    pub handle: EncoderHandle,
    /// Tells how its thread ends.
    pub end: EngineEnd,
    /// Its tokenizer.
    pub text: EncoderText,
    /// Its vectors may be cut.
    pub cuttable: bool,
    /// What was built.
    pub built: Built,
}

/// Loads weights and tokenizer, then reads a text.
pub fn start(
    config: &Config,
    encoder: &EncoderConfig,
    monitor: &Arc<Monitor>,
    clock: Clock,
) -> Result<StartedEncoder, Failure> {
    let began = clock.seconds();
    let failed = |error| Failure::new(reason(&error), error);
    let folder = HubFolder::open(&encoder.model).map_err(|error| failed(error.into()))?;
    check_memory(&folder)?;
    let text = EncoderText::read(&folder).map_err(tokenizer_failure)?;
    let model = Encoder::load(&folder).map_err(failed)?;
    let load_seconds = clock.seconds() - began;
    let began = clock.seconds();
    model.run(&[EncoderInput { tokens: vec![0], types: Vec::new() }]).map_err(failed)?;
    let warm_seconds = clock.seconds() - began;
    let tensors: Vec<_> = folder.tensors().collect();
    let tokens = fingerprint::text(&folder.text("tokenizer.json").ok().flatten().unwrap_or_default());
    let built = Built {
        fingerprint: fingerprint::word(fingerprint::tensors_digest(&tensors), tokens, Vec::new(), "cpu"),
        effective: effective(config, encoder, model.shape()),
        simulated: false,
        ledger: Some(Ledger { weights: model.shape().weight_bytes, kv: 0, swap: 0, workspace: 0 }),
        start: StartPhases { download_seconds: 0.0, load_seconds, warm_seconds },
    };
    let (handle, batcher) = Batcher::new(model, encoder.limits, monitor.clone(), clock);
    let (ended, end) = oneshot::channel();
    let run = move || {
        batcher.run();
        // Nobody waits for the end of a server that is gone.
        let _ = ended.send(Ok(()));
    };
    std::thread::Builder::new().name("encoder".to_owned()).spawn(run).map_err(Failure::internal)?;
    Ok(StartedEncoder { handle, end: EngineEnd::of(end), text, cuttable: is_cuttable(&folder), built })
}

/// Trained so that the first numbers of a vector say the most (Kusupati et al., Matryoshka Representation Learning).
fn is_cuttable(folder: &HubFolder) -> bool {
    let config = folder.config();
    config["is_matryoshka"] == true || config["matryoshka_dimensions"].is_array()
}

/// Weights are kept as f32, and a copy of them is made on the way.
fn check_memory(folder: &HubFolder) -> Result<(), Failure> {
    let bytes: u64 = folder.tensors().map(|tensor| tensor.dims.iter().product::<u64>().saturating_mul(4)).sum();
    match machine::free_memory_bytes() {
        Some(free) if bytes.saturating_mul(2) > free => {
            let message =
                format!("the encoder's weights take {bytes} bytes, twice that while loading, and {free} are free");
            Err(Failure::new(Reason::OutOfMemory, message))
        }
        _ => Ok(()),
    }
}

fn effective(config: &Config, encoder: &EncoderConfig, shape: &EncoderShape) -> EffectiveConfig {
    EffectiveConfig {
        device: "cpu".to_owned(),
        tensor_parallel: 1,
        pipeline_parallel: 1,
        quantization: "f32".to_owned(),
        kv_cache_data_type: "none".to_owned(),
        max_model_tokens: shape.max_tokens,
        max_sequences: encoder.limits.max_texts as u32,
        kv_blocks: 0,
        block_tokens: 0,
        served_names: config.served_names.clone(),
        kernels: "candle".to_owned(),
    }
}

fn reason(error: &EncoderError) -> Reason {
    match error {
        EncoderError::Unsupported(_) | EncoderError::Classes(_) | EncoderError::Pooling(_) => Reason::Unsupported,
        EncoderError::Config(_) | EncoderError::Tensors(_) => Reason::ModelInvalid,
        EncoderError::Hub(_) => Reason::ModelInvalid,
        EncoderError::Compute(_) => Reason::DeviceFailed,
    }
}
