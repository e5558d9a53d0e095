//! From a configuration to an engine that has generated a token: read, load, warm.

mod again;
mod cpu;
mod cuda;
mod encoder;
mod engine_thread;
mod sim;
#[cfg(test)]
mod testing;

use crate::clock::Clock;
use crate::config::{Config, CpuConfig, ExecutorConfig};
use crate::failure::Failure;
use crate::fingerprint;
use crate::monitor::{Built, Monitor};
use crate::small_file;
use crate::text::chat_template::{ChatTemplate, TemplateError};
use crate::text::hub;
use crate::text::renderers::Renderers;
use crate::text::tokenizer::{SpecialTokens, Tokenizer, TokenizerError};
pub use cpu::load_failure;
pub use encoder::StartedEncoder;
pub use engine_thread::{EngineEnd, EngineThread};
use std::path::Path;
use std::sync::Arc;
use tracing::{info, warn};
use windlass_checkpoint::{Checkpoint, HubError, OpenError};
use windlass_engine_contract::memory::{Ledger, process_bytes, process_bytes_with};
use windlass_engine_contract::stats::EffectiveConfig;
use windlass_engine_contract::termination::Reason;
use windlass_engine_core::executor::Geometry;
use windlass_engine_model::DecoderConfig;

/// Processes that render conversations at most: two keep up with any engine on a machine.
const RENDERERS: usize = 2;

/// Largest file with a chat template, bytes: ten times what models have.
const MAX_TEMPLATE_BYTES: u64 = 1 << 20;

/// What was started.
pub enum Started {
    /// A model that generates.
    Model(Box<StartedModel>),
    /// One that reads.
    Encoder(Box<StartedEncoder>),
}

impl Started {
    /// What was built.
    pub fn built(&self) -> &Built {
        match self {
            Started::Model(model) => &model.built,
            Started::Encoder(encoder) => &encoder.built,
        }
    }

    /// Enters into the ledger, if there is one, what the process takes beside the model.
    fn with_process(mut self) -> Started {
        let (built, process) = match &mut self {
            Started::Model(model) => (&mut model.built, process_bytes(model.tokenizer.vocabulary().len())),
            Started::Encoder(encoder) => (&mut encoder.built, process_bytes_with(encoder.text.vocabulary(), 0)),
        };
        if let Some(ledger) = &mut built.ledger {
            ledger.process = process;
        }
        self
    }
}

/// An engine that has generated a token, with all that serving it takes.
pub struct StartedModel {
    /// The engine's thread.
    pub engine: EngineThread,
    /// The model's tokenizer.
    pub tokenizer: Tokenizer,
    /// The model's chat template, if it has one.
    pub template: Option<ChatTemplate>,
    /// What was built.
    pub built: Built,
}

/// Does all of it; takes as long as loading takes.
pub fn start(config: &Config, monitor: &Arc<Monitor>, clock: Clock) -> Result<Started, Failure> {
    let explain = |failure| match &config.incoming {
        Some(incoming) => incoming.explain(failure),
        None => failure,
    };
    let started = start_executor(config, monitor, clock).map_err(explain)?.with_process();
    let (phases, effective) = (&started.built().start, &started.built().effective);
    info!(seconds = phases.download_seconds, "start: download");
    info!(
        seconds = phases.load_seconds,
        quantization = effective.quantization,
        kernels = effective.kernels,
        "start: load"
    );
    info!(seconds = phases.warm_seconds, kv_blocks = effective.kv_blocks, "start: first token");
    if let Some(Ledger { weights, kv, swap, workspace, process }) = started.built().ledger {
        info!(weights, kv, swap, workspace, process, "start: bytes of memory");
    }
    Ok(started)
}

fn start_executor(config: &Config, monitor: &Arc<Monitor>, clock: Clock) -> Result<Started, Failure> {
    Ok(match &config.executor {
        ExecutorConfig::Cpu(cpu) => Started::Model(Box::new(match cuda::find(cpu)? {
            Some(devices) => cuda::start(config, cpu, &devices, monitor, clock)?,
            None => cpu::start(config, cpu, monitor, clock)?,
        })),
        ExecutorConfig::Sim(sim) => Started::Model(Box::new(sim::start(config, sim, monitor, clock)?)),
        ExecutorConfig::Encoder(encoder) => {
            Started::Encoder(Box::new(encoder::start(config, encoder, monitor, clock)?))
        }
    })
}

/// What a model that generates was built with: `config` as far as it decides, and what came of it on a device.
fn effective(config: &Config, geometry: &Geometry, device: BuiltOn<'_>) -> EffectiveConfig {
    let BuiltOn { device, tensor_parallel, pipeline_parallel, quantization, kernels } = device;
    EffectiveConfig {
        device: device.to_owned(),
        tensor_parallel,
        pipeline_parallel,
        quantization: quantization.to_owned(),
        kv_cache_data_type: config.batching.kv_data_type.name().to_owned(),
        max_model_tokens: geometry.max_sequence_tokens,
        max_sequences: geometry.max_step_rows,
        kv_blocks: geometry.blocks,
        block_tokens: geometry.block_tokens,
        served_names: config.served_names.clone(),
        kernels: kernels.to_owned(),
    }
}

/// What a device made of a model.
struct BuiltOn<'a> {
    /// As `--device` names it.
    device: &'a str,
    tensor_parallel: u32,
    /// Processes that have joined, this one among them.
    pipeline_parallel: u32,
    /// The type of most weights.
    quantization: &'a str,
    kernels: &'a str,
}

/// Computes a stage of a pipeline until its leader ends.
pub fn work(config: &Config, monitor: &Arc<Monitor>) -> Result<(), Failure> {
    match &config.executor {
        ExecutorConfig::Cpu(cpu @ CpuConfig { pipeline: Some(pipeline), .. }) => match cuda::find(cpu)? {
            Some(devices) => cuda::work(config, cpu, pipeline, &devices, monitor),
            None => cpu::work(config, cpu, pipeline),
        },
        _ => Err(Failure::internal("this process is no stage of a pipeline")),
    }
}

/// Opens a checkpoint.
pub fn open(path: &Path) -> Result<Checkpoint, Failure> {
    Checkpoint::open(path).map_err(open_failure)
}

/// Opens the checkpoint that is served, which may still be on its way, and reads what its decoder is.
fn open_served(config: &Config, path: &Path) -> Result<(Checkpoint, DecoderConfig), Failure> {
    let file = config.incoming.as_ref().map_or_else(|| open(path), |incoming| incoming.open())?;
    let decoder = DecoderConfig::read(&file).map_err(|error| load_failure(error.into()))?;
    if decoder.is_of_more_than_text() {
        warn!("the model reads images, too: its text is served and images are not");
    }
    Ok((file, decoder))
}

/// Why a checkpoint was not opened, for the exit code.
pub fn open_failure(error: OpenError) -> Failure {
    let reason = match error {
        OpenError::Hub(HubError::Io { .. } | HubError::Missing { .. } | HubError::NoWeights { .. }) => {
            Reason::ModelUnavailable
        }
        OpenError::Invalid { .. } | OpenError::Hub(_) => Reason::ModelInvalid,
        _ => Reason::ModelUnavailable,
    };
    Failure::new(reason, format!("cannot open the model: {error}"))
}

/// The tokenizer of a checkpoint.
pub fn tokenizer(checkpoint: &Checkpoint) -> Result<Tokenizer, Failure> {
    let tokenizer = match checkpoint {
        Checkpoint::Gguf(file) => Tokenizer::from_metadata(file.metadata()),
        Checkpoint::Hub(folder) => Tokenizer::from_folder(folder),
    };
    tokenizer.map_err(tokenizer_failure)
}

/// What is read of a checkpoint while its weights are loaded.
struct ReadBeside {
    tokenizer: Tokenizer,
    template: Option<ChatTemplate>,
    /// The weights' digest.
    weights: String,
}

impl ReadBeside {
    /// The word for what answers depend on: with this text and these weights go the device and those of its `flags`
    /// that change answers.
    fn fingerprint(&self, config: &Config, mut flags: Vec<String>, device: &str) -> String {
        flags.extend(fingerprint::dialogue(&config.dialogue));
        let template = self.template.as_ref().map(ChatTemplate::source);
        let text = fingerprint::tokenizer(self.tokenizer.vocabulary(), template);
        fingerprint::word(self.weights.clone(), text, flags, device)
    }
}

/// Loads, and reads the rest on threads of their own meanwhile. Of a model that is still on its way nothing is given out
/// before all of it is there and verified.
fn read_beside<T>(
    checkpoint: &Checkpoint,
    config: &Config,
    load: impl FnOnce() -> Result<T, Failure>,
) -> Result<(ReadBeside, T), Failure> {
    let load = || {
        let loaded = load();
        if let (Err(_), Some(incoming)) = (&loaded, &config.incoming) {
            incoming.give_up();
        }
        loaded
    };
    let (text, (weights, loaded)) = std::thread::scope(|scope| {
        let text = scope.spawn(|| read_text(checkpoint, config));
        let loaded = load_and_digest(checkpoint, load);
        (text.join(), loaded)
    });
    let loaded = loaded?;
    let (tokenizer, template) = text.map_err(|_| Failure::internal("reading the tokenizer panicked"))??;
    let weights = weights?;
    config.incoming.as_ref().map_or(Ok(()), |incoming| incoming.finish())?;
    Ok((ReadBeside { tokenizer, template, weights }, loaded))
}

/// The digest of a checkpoint's weights, which a thread of its own reads, and what `load` gives meanwhile.
fn load_and_digest<T>(
    checkpoint: &Checkpoint,
    load: impl FnOnce() -> Result<T, Failure>,
) -> (Result<String, Failure>, Result<T, Failure>) {
    let (weights, loaded) = std::thread::scope(|scope| {
        let weights = scope.spawn(|| fingerprint::weights(checkpoint));
        let loaded = load();
        (weights.join(), loaded)
    });
    (weights.map_err(|_| Failure::internal("reading the weights for their digest panicked")), loaded)
}

/// The text side of a checkpoint. A chat template that the flags name counts instead of its own.
fn read_text(checkpoint: &Checkpoint, config: &Config) -> Result<(Tokenizer, Option<ChatTemplate>), Failure> {
    let tokenizer = tokenizer(checkpoint)?;
    let renderers = Renderers::new(config.program.clone(), RENDERERS);
    let template = match &config.dialogue.template {
        Some(path) => Some(named_template(path, tokenizer.special(), &renderers)?),
        None => own_template(checkpoint, tokenizer.special(), &renderers)?,
    };
    Ok((tokenizer, template))
}

fn own_template(
    checkpoint: &Checkpoint,
    special: &SpecialTokens,
    renderers: &Arc<Renderers>,
) -> Result<Option<ChatTemplate>, Failure> {
    let source = match checkpoint {
        Checkpoint::Gguf(file) => {
            let source = file.metadata().str("tokenizer.chat_template").map_err(TokenizerError::from);
            source.map(|source| source.map(str::to_owned))
        }
        Checkpoint::Hub(folder) => hub::chat_template(folder),
    };
    let compile = |source: String| ChatTemplate::new(&source, special, renderers);
    source.map_err(tokenizer_failure)?.map(compile).transpose().map_err(template_failure)
}

fn named_template(path: &Path, special: &SpecialTokens, renderers: &Arc<Renderers>) -> Result<ChatTemplate, Failure> {
    let wrong = |why: String| Failure::configuration(format!("--chat-template {}: {why}", path.display()));
    let source = small_file::read_text(path, MAX_TEMPLATE_BYTES).map_err(|error| wrong(error.to_string()))?;
    ChatTemplate::new(&source, special, renderers).map_err(|error| wrong(error.to_string()))
}

fn tokenizer_failure(error: TokenizerError) -> Failure {
    let reason = if error.is_unsupported() { Reason::Unsupported } else { Reason::ModelInvalid };
    Failure::new(reason, error)
}

fn template_failure(error: TemplateError) -> Failure {
    let reason = if let TemplateError::NoProcess(_) = error { Reason::Internal } else { Reason::ModelInvalid };
    Failure::new(reason, error)
}
