//! The simulator behind the same server.

use super::engine_thread::launch;
use super::{
    BuiltOn, RENDERERS, ReadBeside, StartedModel, effective, named_template, open, read_text, template_failure,
};
use crate::clock::Clock;
use crate::config::{Batching, Config, SimConfig};
use crate::driver::RealTime;
use crate::failure::Failure;
use crate::fingerprint;
use crate::monitor::{Built, Monitor};
use crate::text::chat_template::ChatTemplate;
use crate::text::renderers::Renderers;
use crate::text::tokenizer::Tokenizer;
use crate::text::words;
use std::sync::Arc;
use windlass_engine_contract::memory::StepDefaults;
use windlass_engine_contract::stats::StartPhases;
use windlass_engine_core::executor::{Geometry, KvGroups};
use windlass_engine_core::request::TokenId;
use windlass_engine_core::sim::{SimExecutor, SimStop, SimVocabulary};
use windlass_engine_model::KvBudget;

/// Longest sequence where the flags give none.
const DEFAULT_MODEL_TOKENS: u32 = 8192;
/// KV blocks where the flags give none.
const DEFAULT_BLOCKS: u32 = 4096;
/// Bytes of KV that a token would take in a model of 8 billion parameters: what `--kv-cache-memory-bytes` is divided by.
const KV_BYTES_PER_TOKEN: u64 = 128 << 10;
/// What a conversation looks like to the simulator.
const TEMPLATE: &str = "{% for message in messages %}{{ message.role }} {{ message.content }} {% endfor %}";

/// Starts the simulated device and generates a token.
pub fn start(config: &Config, sim: &SimConfig, monitor: &Arc<Monitor>, clock: Clock) -> Result<StartedModel, Failure> {
    let began = clock.seconds();
    let (tokenizer, template) = match &sim.tokenizer {
        Some(path) => read_text(&open(path)?, config)?,
        None => {
            let tokenizer = Tokenizer::words();
            let template = words_template(config, &tokenizer)?;
            (tokenizer, Some(template))
        }
    };
    let read = ReadBeside { tokenizer, template, weights: fingerprint::text("sim") };
    std::thread::sleep(sim.load_time);
    let geometry = geometry(&config.batching, read.tokenizer.vocabulary().len());
    let (step_time, words, load_time) = (sim.step_time, vocabulary(sim, &read.tokenizer), sim.load_time);
    let executor = SimExecutor::new(geometry, step_time, words, RealTime::start());
    let reload = move || {
        std::thread::sleep(load_time);
        Ok(SimExecutor::new(geometry, step_time, words, RealTime::start()))
    };
    let load_seconds = clock.seconds() - began;
    let speculation = config.speculation.clone();
    let guess =
        move || speculation.as_ref().map(|speculation| speculation.proposer_without_model("the simulator")).transpose();
    let (engine, warm_seconds) = launch(executor, reload, guess, &config.batching, monitor, clock)?;
    let flags = vec![format!("mean-answer-tokens={:?}", sim.mean_answer_tokens)];
    let on = BuiltOn {
        device: "sim",
        tensor_parallel: sim.tensor_parallel,
        pipeline_parallel: 1,
        quantization: &sim.quantization,
        kernels: "sim",
    };
    let built = Built {
        fingerprint: read.fingerprint(config, flags, "sim"),
        effective: effective(config, &geometry, on),
        simulated: true,
        ledger: None,
        start: StartPhases { download_seconds: 0.0, load_seconds, warm_seconds },
    };
    Ok(StartedModel { engine, tokenizer: read.tokenizer, template: read.template, built })
}

fn words_template(config: &Config, tokenizer: &Tokenizer) -> Result<ChatTemplate, Failure> {
    let renderers = Renderers::new(config.program.clone(), RENDERERS);
    match &config.dialogue.template {
        Some(path) => named_template(path, tokenizer.special(), &renderers),
        None => ChatTemplate::new(TEMPLATE, tokenizer.special(), &renderers).map_err(template_failure),
    }
}

fn geometry(batching: &Batching, vocabulary: u32) -> Geometry {
    let StepDefaults { sequences, tokens, block_tokens } = batching.steps(StepDefaults::CPU);
    let blocks = match batching.kv {
        None => DEFAULT_BLOCKS,
        Some(KvBudget::Blocks(blocks)) => blocks,
        Some(KvBudget::Bytes(bytes)) => slots(bytes, block_tokens).max(1),
    };
    let held = blocks.saturating_mul(block_tokens);
    Geometry {
        block_tokens,
        blocks,
        swap_slots: batching.swap.as_ref().map_or(0, |swap| slots(swap.bytes, block_tokens)),
        max_sequence_tokens: batching.max_model_tokens.unwrap_or(DEFAULT_MODEL_TOKENS).min(held),
        max_step_rows: sequences,
        max_step_tokens: tokens,
        max_step_logits: sequences.max(32).min(tokens),
        vocabulary,
        groups: KvGroups::ONE,
    }
}

/// Blocks that so many bytes would hold.
fn slots(bytes: u64, block_tokens: u32) -> u32 {
    u32::try_from(bytes / (KV_BYTES_PER_TOKEN * u64::from(block_tokens))).unwrap_or(u32::MAX)
}

/// Words of the tokenizer in use, and its end of sequence now and then.
fn vocabulary(sim: &SimConfig, tokenizer: &Tokenizer) -> SimVocabulary {
    let word = if sim.tokenizer.is_some() { frequent_token } else { words::draw };
    let end = tokenizer.special().ends.first().copied();
    let stop = sim.mean_answer_tokens.zip(end).map(|(one_in, token)| SimStop { token, one_in });
    SimVocabulary { word, stop }
}

/// A merge of high rank: in any byte-pair vocabulary of useful size these ids are frequent pieces of words.
fn frequent_token(number: u64) -> TokenId {
    const FREQUENT: std::ops::Range<u64> = 300..4000;
    (FREQUENT.start + number % (FREQUENT.end - FREQUENT.start)) as TokenId
}
