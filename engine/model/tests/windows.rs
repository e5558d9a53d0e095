//! Sequences of a model whose layers all have windows: what lies before them is given up, and no token changes.

#![allow(clippy::unwrap_used)] // in a test, a failed unwrap is the failure

mod common;

use common::hub::{Family, VOCABULARY, config, llama_oracle};
use serde_json::{Value, json};
use windlass_checkpoint::Checkpoint;
use windlass_engine_core::engine::{Engine, EngineConfig};
use windlass_engine_core::executor::{Executor, ExecutorError, Geometry};
use windlass_engine_core::plan::{StepOutput, StepPlan, Ticket};
use windlass_engine_core::request::{Request, RequestId};
use windlass_engine_model::{CpuExecutor, KvBudget, LoadOptions, load};

const WINDOW: usize = 20;
const PROMPT: u32 = 150;
const ANSWER: u32 = 90;

/// A decoder with windows in all layers, or in those that `more` says.
fn windowed(model_type: &str, more: Value) -> Checkpoint {
    let mut keys = json!({"head_dim": 64, "sliding_window": WINDOW, "tie_word_embeddings": false});
    keys.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    let family = Family { config: config(model_type, keys), biases: false, head_norms: false, oracle: llama_oracle };
    family.open(&family.safetensors())
}

fn executor(checkpoint: &Checkpoint, blocks: u32) -> CpuExecutor {
    let options = LoadOptions {
        threads: 2,
        kv: KvBudget::Blocks(blocks),
        max_step_tokens: 32,
        max_sequences: 8,
        max_model_tokens: Some(PROMPT + ANSWER),
        ..LoadOptions::default()
    };
    load(checkpoint, &options).unwrap().executor
}

/// An executor that does not say what it no longer reads.
#[derive(Debug)]
struct Hoarding(CpuExecutor);

impl Executor for Hoarding {
    fn geometry(&self) -> Geometry {
        Geometry { read_back_tokens: None, ..self.0.geometry() }
    }

    fn submit(&mut self, plan: StepPlan) -> Result<Ticket, ExecutorError> {
        self.0.submit(plan)
    }

    fn collect(&mut self, ticket: Ticket) -> Result<StepOutput, ExecutorError> {
        self.0.collect(ticket)
    }
}

/// What a run came to.
struct Run {
    texts: Vec<Vec<u32>>,
    most_held: u32,
    preemptions: u64,
}

/// Five requests, one after the other where blocks are short.
fn run(executor: impl Executor, enable_prefix_cache: bool) -> Run {
    let mut engine = Engine::new(executor, EngineConfig { enable_prefix_cache, ..EngineConfig::PLAIN });
    for id in 0..5 {
        let prompt = (0..PROMPT).map(|index| (index * (11 + 2 * (id / 2)) + 7) % VOCABULARY as u32).collect();
        engine.add(Request::greedy(RequestId(id.into()), prompt, ANSWER), 0.0).unwrap();
    }
    let mut found = Run { texts: vec![Vec::new(); 5], most_held: 0, preemptions: 0 };
    while !engine.is_idle() {
        for update in engine.turn(0.0).unwrap().updates {
            found.texts[update.request.0 as usize].extend(update.tokens);
        }
        engine.audit().unwrap();
        found.most_held = found.most_held.max(engine.stats().kv.held);
    }
    found.preemptions = engine.stats().preemptions;
    found
}

#[test]
fn blocks_before_the_windows_are_given_up_and_no_token_changes() {
    let checkpoint = windowed("mistral", json!({}));
    let expected = run(Hoarding(executor(&checkpoint, 80)), false);
    assert!(expected.texts.iter().all(|text| text.len() == ANSWER as usize));
    assert!(expected.most_held > 70, "{} blocks of sequences of 15 each", expected.most_held);
    for (blocks, caching) in [(80, false), (80, true), (32, false), (32, true)] {
        let found = run(executor(&checkpoint, blocks), caching);
        assert_eq!(found.texts, expected.texts, "{blocks} blocks");
        assert_eq!(found.preemptions, 0, "{blocks} blocks");
        assert!(found.most_held <= 60, "{} of {blocks} blocks", found.most_held);
    }
    // Without giving up, as many blocks hold two sequences of 15 and make others wait or start anew.
    assert!(run(Hoarding(executor(&checkpoint, 32)), false).most_held >= 30);
}

#[test]
fn a_model_says_what_it_reads_back_where_every_layer_has_a_window() {
    let read_back = |checkpoint| executor(&checkpoint, 20).geometry().read_back_tokens;
    // The tile of 64 keys in which the window begins is read whole.
    assert_eq!(read_back(windowed("mistral", json!({}))), Some(WINDOW as u32 + 63));
    assert_eq!(read_back(windowed("mistral", json!({"sliding_window": null}))), None);
    let types = ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"];
    assert_eq!(read_back(windowed("mistral", json!({"layer_types": types}))), None);
}
