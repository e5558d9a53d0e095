//! An encoder on this machine's CPU, or a simulated one.

use super::engine_thread::EngineEnd;
use super::tokenizer_failure;
use crate::clock::Clock;
use crate::config::{Config, EncoderConfig, EncoderModel, SimConfig};
use crate::encoding::{BatchLimits, Batcher, DIMENSIONS, Encode, EncoderHandle, SimEncoder};
use crate::failure::Failure;
use crate::fingerprint;
use crate::machine;
use crate::monitor::{Built, Monitor};
use crate::text::encoder_text::EncoderText;
use std::path::Path;
use std::sync::Arc;
use tokio::sync::oneshot;
use windlass_checkpoint::HubFolder;
use windlass_engine_contract::memory::Ledger;
use windlass_engine_contract::stats::{EffectiveConfig, StartPhases};
use windlass_engine_contract::termination::Reason;
use windlass_engine_model::{Encoder, EncoderError, EncoderInput, EncoderShape, Purpose};

/// Longest text of a simulated encoder where the flags give none.
const SIMULATED_TOKENS: u32 = 512;

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

/// An encoder that has read nothing yet.
struct Loaded {
    model: Box<dyn Encode>,
    text: EncoderText,
    cuttable: bool,
    /// What the largest batch takes.
    workspace: u64,
    /// Digests of weights and tokenizer.
    digests: [String; 2],
    /// As `--device` names it, and what computes there.
    on: [&'static str; 2],
}

/// Loads weights and tokenizer, then reads a text.
pub fn start(
    config: &Config,
    encoder: &EncoderConfig,
    monitor: &Arc<Monitor>,
    clock: Clock,
) -> Result<StartedEncoder, Failure> {
    let began = clock.seconds();
    let loaded = match &encoder.model {
        EncoderModel::Folder(path) => load(path, &encoder.limits)?,
        EncoderModel::Sim { sim, scores } => simulate(sim, *scores, config.batching.max_model_tokens)?,
    };
    let Loaded { model, text, cuttable, workspace, digests: [weights, tokens], on: [device, kernels] } = loaded;
    let load_seconds = clock.seconds() - began;
    let began = clock.seconds();
    model.run(&[EncoderInput { tokens: vec![0], types: Vec::new() }]).map_err(failed)?;
    let warm_seconds = clock.seconds() - began;
    let weight_bytes = model.shape().weight_bytes;
    let simulated = matches!(encoder.model, EncoderModel::Sim { .. });
    let built = Built {
        fingerprint: fingerprint::word(weights, tokens, Vec::new(), device),
        effective: effective(config, encoder, model.shape(), [device, kernels]),
        simulated,
        ledger: (!simulated).then_some(Ledger { weights: weight_bytes, workspace, ..Ledger::default() }),
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
    Ok(StartedEncoder { handle, end: EngineEnd::of(end), text, cuttable, built })
}

fn load(path: &Path, limits: &BatchLimits) -> Result<Loaded, Failure> {
    let folder = HubFolder::open(path).map_err(|error| failed(error.into()))?;
    check_memory(&folder)?;
    let text = EncoderText::read(&folder).map_err(tokenizer_failure)?;
    let model = Encoder::load(&folder).map_err(failed)?;
    let tensors: Vec<_> = folder.tensors().collect();
    let tokens = fingerprint::text(&folder.text("tokenizer.json").ok().flatten().unwrap_or_default());
    Ok(Loaded {
        workspace: model.workspace_bytes(limits.max_texts, limits.max_tokens),
        model: Box::new(model),
        text,
        cuttable: is_cuttable(&folder),
        digests: [fingerprint::tensors_digest(&tensors), tokens],
        on: ["cpu", "candle"],
    })
}

/// One without weights, which reads the simulator's words unless the model is a folder with a tokenizer.
fn simulate(sim: &SimConfig, scores: bool, max_tokens: Option<u32>) -> Result<Loaded, Failure> {
    let text = match &sim.tokenizer {
        Some(path) => {
            let folder = HubFolder::open(path).map_err(|error| failed(error.into()))?;
            EncoderText::read(&folder).map_err(tokenizer_failure)?
        }
        None => EncoderText::words(),
    };
    std::thread::sleep(sim.load_time);
    let purpose = if scores { Purpose::Scores } else { Purpose::Vectors { dimensions: DIMENSIONS } };
    let max_tokens = max_tokens.unwrap_or(SIMULATED_TOKENS);
    let shape = EncoderShape { purpose, max_tokens, vocabulary: text.vocabulary(), weight_bytes: 0 };
    let digests = ["sim", "words"].map(fingerprint::text);
    let model = Box::new(SimEncoder::new(shape, sim.step_time));
    Ok(Loaded { model, text, cuttable: false, workspace: 0, digests, on: ["sim", "sim"] })
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

fn effective(
    config: &Config,
    encoder: &EncoderConfig,
    shape: &EncoderShape,
    [device, kernels]: [&str; 2],
) -> EffectiveConfig {
    EffectiveConfig {
        device: device.to_owned(),
        tensor_parallel: 1,
        pipeline_parallel: 1,
        quantization: "f32".to_owned(),
        kv_cache_data_type: "none".to_owned(),
        max_model_tokens: shape.max_tokens,
        max_sequences: encoder.limits.max_texts as u32,
        kv_blocks: 0,
        block_tokens: 0,
        served_names: config.served_names.clone(),
        kernels: kernels.to_owned(),
    }
}

fn failed(error: EncoderError) -> Failure {
    Failure::new(reason(&error), error)
}

fn reason(error: &EncoderError) -> Reason {
    match error {
        EncoderError::Unsupported(_) | EncoderError::Classes(_) | EncoderError::Pooling(_) => Reason::Unsupported,
        EncoderError::Config(_) | EncoderError::Tensors(_) => Reason::ModelInvalid,
        EncoderError::Hub(_) => Reason::ModelInvalid,
        EncoderError::Compute(_) => Reason::DeviceFailed,
    }
}
