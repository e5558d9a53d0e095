//! Models with sliding windows in some or all layers: blocks before a window are released, and no bit of an answer
//! changes.

use crate::common::hub::{Family, VOCABULARY, config, llama_oracle};
use crate::common::way::Way;
use serde_json::{Value, json};
use windlass_checkpoint::Checkpoint;
use windlass_engine_core::draft::{DraftRequest, DraftTree, Proposer};
use windlass_engine_core::engine::{Engine, EngineConfig};
use windlass_engine_core::executor::{Executor, ExecutorError, Geometry, KvGroups};
use windlass_engine_core::plan::{StepOutput, StepPlan, Ticket};
use windlass_engine_core::request::{Request, RequestId};
use windlass_engine_core::update::EngineStats;
use windlass_engine_model::{CpuExecutor, KvBudget, LoadOptions, Reader, load};

const WINDOW: u32 = 20;
/// Tokens of a window, and of the tile of 64 keys in which it starts.
const READ_BACK: u32 = WINDOW + 63;
const PROMPT: u32 = 150;
const ANSWER: u32 = 90;
/// Blocks for these in one group.
const ONE: u32 = (PROMPT + ANSWER) / 16;

/// A decoder with windows in all layers, or in those that `more` says.
fn windowed(model_type: &str, more: Value) -> Checkpoint {
    let mut keys = json!({"head_dim": 64, "sliding_window": WINDOW, "tie_word_embeddings": false});
    keys.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    let head_norms = model_type == "gemma3_text";
    let family = Family { config: config(model_type, keys), biases: false, head_norms, oracle: llama_oracle };
    family.open(&family.safetensors())
}

/// Four layers, the third with full attention: one group of it, and three groups of one layer with a window.
fn gemma() -> Checkpoint {
    gemma_with(json!({"sliding_window_pattern": 3}))
}

fn gemma_with(more: Value) -> Checkpoint {
    let mut keys = json!({"hidden_act": null, "hidden_activation": "gelu_pytorch_tanh", "attention_bias": false,
        "query_pre_attn_scalar": 64, "rope_local_base_freq": 1000.0});
    keys.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    windowed("gemma3_text", keys)
}

/// Two groups of two layers each.
fn halves() -> Checkpoint {
    gemma_with(json!({"sliding_window_pattern": 2}))
}

const GEMMA_GROUPS: KvGroups = KvGroups { full: 1, windowed: 3, read_back_tokens: READ_BACK };

const PLAIN: Way = Way::plain(320, 32);

fn executor(checkpoint: &Checkpoint, way: Way) -> CpuExecutor {
    let options = LoadOptions { max_model_tokens: Some(PROMPT + ANSWER), ..way.load_options() };
    load(checkpoint, &options).unwrap().executor
}

/// An executor that does not declare its windows.
#[derive(Debug)]
struct Hoarding(CpuExecutor);

impl Executor for Hoarding {
    fn geometry(&self) -> Geometry {
        let geometry = self.0.geometry();
        Geometry { groups: KvGroups { full: geometry.groups.count(), ..KvGroups::ONE }, ..geometry }
    }

    fn submit(&mut self, plan: StepPlan) -> Result<Ticket, ExecutorError> {
        self.0.submit(plan)
    }

    fn collect(&mut self, ticket: Ticket) -> Result<StepOutput, ExecutorError> {
        self.0.collect(ticket)
    }
}

/// Results of a run.
struct Run {
    /// Tokens of each request with their log probabilities.
    answers: Vec<Vec<(u32, f32)>>,
    most_held: u32,
    stats: EngineStats,
}

/// Prompts with a common start; the second of each pair equals the first and shares its blocks if it can.
fn prompt(id: u32) -> Vec<u32> {
    let factor = |index| if index < 64 { 11 } else { 13 + 2 * (id / 2) };
    (0..PROMPT).map(|index| (index * factor(index) + 7) % VOCABULARY as u32).collect()
}

/// Proposes draft tokens from texts that it knows; now and then it errs.
#[derive(Debug)]
struct Knowing(Vec<Vec<u32>>);

impl Proposer for Knowing {
    fn propose(&mut self, asks: &[DraftRequest<'_>]) -> Vec<DraftTree> {
        let draft = |ask: &DraftRequest<'_>| {
            let (mut tree, mut parent) = (DraftTree::default(), None);
            let next = self.0[ask.request.0 as usize].iter().enumerate().skip(ask.tokens.len());
            for (index, token) in next.take(ask.max_tokens) {
                parent = Some(tree.push((token + 2 * u32::from(index % 7 == 0)) % VOCABULARY as u32, parent));
            }
            tree
        };
        asks.iter().map(draft).collect()
    }

    fn is_free(&self) -> bool {
        true
    }

    fn forget(&mut self, _: RequestId) {}
}

/// Runs five requests, one after the other if blocks are scarce. `known` are their answers, which are proposed as draft
/// tokens.
fn run(executor: impl Executor, way: Way, known: &[Vec<(u32, f32)>]) -> Run {
    let mut engine = Engine::new(executor, way.engine_config());
    if way.drafts {
        let answer = |id: usize| known[id].iter().map(|(token, _)| *token);
        let text = |id| prompt(id).into_iter().chain(answer(id as usize)).collect();
        engine = engine.with_proposer(Box::new(Knowing((0..5).map(text).collect())), 8);
    }
    for id in 0..5 {
        let fork_of = (id % 2 == 1).then(|| RequestId(u64::from(id) - 1));
        let greedy = Request::greedy(RequestId(id.into()), prompt(id), ANSWER);
        engine.add(Request { logprobs: Some(0), fork_of, ..greedy }, 0.0).unwrap();
    }
    let mut found = Run { answers: vec![Vec::new(); 5], most_held: 0, stats: EngineStats::default() };
    while !engine.is_idle() {
        for update in engine.step(0.0).unwrap().updates {
            assert_eq!(update.failure, None);
            let told = update.logprobs.iter().map(|scores| scores.chosen.logprob);
            found.answers[update.request.0 as usize].extend(update.tokens.iter().copied().zip(told));
        }
        engine.audit().unwrap();
        found.most_held = found.most_held.max(engine.stats().kv.held);
    }
    found.stats = engine.stats();
    found
}

#[test]
fn blocks_before_the_windows_are_given_up_and_no_token_changes() {
    let checkpoint = windowed("mistral", json!({}));
    let expected = run(Hoarding(executor(&checkpoint, PLAIN)), PLAIN, &[]);
    assert!(expected.answers.iter().all(|answer| answer.len() == ANSWER as usize));
    // Three prompts are computed, and two share the blocks of another's.
    assert!(expected.most_held > 3 * ONE, "{} blocks of sequences of 15 each", expected.most_held);
    for way in [PLAIN, Way { caches: true, ..PLAIN }, Way { blocks: 32, ..PLAIN }] {
        let found = run(executor(&checkpoint, way), way, &expected.answers);
        assert_eq!(found.answers, expected.answers, "{way:?}");
        println!("{way:?}: {} blocks, {} without windows", found.most_held, expected.most_held);
        assert!(found.most_held < expected.most_held, "{way:?}");
    }
}

/// Groups, prefixes found, blocks taken away, brought back from outside, shared, and written by draft tokens: no answer
/// changes.
#[test]
fn layers_with_windows_beside_others_change_no_bit() {
    let checkpoint = gemma();
    let expected = run(Hoarding(executor(&checkpoint, PLAIN)), PLAIN, &[]);
    assert!(expected.most_held > 3 * 4 * ONE, "{} blocks of four groups", expected.most_held);
    let short = Way { blocks: 90, caches: true, ..PLAIN };
    for (name, way) in [
        ("together", PLAIN),
        ("in small chunks", Way { max_step_tokens: 9, ..PLAIN }),
        ("with a prefix cache", Way { caches: true, ..PLAIN }),
        ("short of blocks", short),
        ("as short as can be", Way { blocks: ONE + 3 * 7, ..short }),
        ("with a swap space", Way { swaps: true, ..short }),
        ("with draft tokens", Way { drafts: true, ..PLAIN }),
        ("with all of it", Way { swaps: true, drafts: true, max_step_tokens: 16, ..short }),
    ] {
        let found = run(executor(&checkpoint, way), way, &expected.answers);
        let Run { most_held, stats, .. } = &found;
        println!(
            "{name}: {most_held} blocks, {} preemptions, {} tokens found, {} of {} draft tokens accepted, {} tokens brought back",
            stats.preemptions,
            stats.prefix_hit_tokens,
            stats.drafts.accepted,
            stats.drafts.tokens,
            stats.swap.hit_tokens,
        );
        for (id, (found, expected)) in found.answers.iter().zip(&expected.answers).enumerate() {
            assert_eq!(found, expected, "{name}: request {id}");
        }
        assert_eq!(
            (stats.drafts.accepted > 0, stats.swap.hit_tokens > 0),
            (way.drafts, way.swaps),
            "{name}: {stats:?}"
        );
        // The number of draft tokens follows the time of steps, and with it whether blocks run short.
        assert!(way.drafts || (stats.preemptions > 0) == (way.blocks < PLAIN.blocks), "{name}: {stats:?}");
        assert!(way.blocks != short.blocks || stats.prefix_hit_tokens > 0, "{name}: {stats:?}");
    }
}

/// One table for all layers with nothing released, read as a text.
#[test]
fn layers_in_groups_compute_what_layers_in_one_do() {
    [gemma(), halves()].iter().for_each(agrees_with_one_group);
}

fn agrees_with_one_group(checkpoint: &Checkpoint) {
    let answer = run(executor(checkpoint, PLAIN), PLAIN, &[]).answers.remove(0);
    let text: Vec<u32> = prompt(0).into_iter().chain(answer.iter().map(|(token, _)| *token)).collect();
    let mut reader = Reader::load(checkpoint, text.len(), &PLAIN.load_options()).unwrap();
    let mut logits: Vec<Vec<f32>> = Vec::new();
    for chunk in text.chunks(Reader::STEP_TOKENS) {
        let read = reader.read(chunk, logits.len());
        logits.extend(read.chunks_exact(VOCABULARY as usize).map(<[f32]>::to_vec));
    }
    for ((token, logprob), logits) in answer.iter().zip(&logits[PROMPT as usize - 1..]) {
        let sum: f64 = logits.iter().map(|logit| f64::from(*logit).exp()).sum();
        let expected = f64::from(logits[*token as usize]) - sum.ln();
        assert!((expected - f64::from(*logprob)).abs() < 1e-4, "{expected} and {logprob}");
        assert!(logits.iter().all(|logit| *logit <= logits[*token as usize]));
    }
}

/// Blocks of one sequence while it generates, and at most.
#[test]
fn a_long_sequence_holds_what_its_full_layers_read_and_the_windows() {
    const TOKENS: u32 = 512;
    const LAYER: u32 = TOKENS / 16;
    let way = Way { blocks: 4 * LAYER, max_step_tokens: 16, ..PLAIN };
    let held = |executor: &dyn Fn() -> Box<dyn FnMut() -> Option<(u32, bool)>>| {
        let (mut next, mut most, mut generating) = (executor(), 0, 0);
        while let Some((held, generates)) = next() {
            most = most.max(held);
            generating = if generates { held } else { generating };
        }
        (most, generating)
    };
    fn steps(executor: impl Executor + 'static) -> Box<dyn FnMut() -> Option<(u32, bool)>> {
        let mut engine = Engine::new(executor, EngineConfig::PLAIN);
        let prompt = (0..TOKENS - 40).map(|index| index * 7 % VOCABULARY as u32).collect();
        engine.add(Request::greedy(RequestId(0), prompt, 40), 0.0).unwrap();
        Box::new(move || {
            let updates = engine.step(0.0).unwrap().updates;
            (!engine.is_idle()).then(|| (engine.stats().kv.held, !updates.is_empty()))
        })
    }
    let checkpoint = gemma();
    let load = || load(&checkpoint, &way.load_options()).unwrap().executor;
    assert_eq!(load().geometry().max_sequence_tokens, TOKENS);
    let (all, _) = held(&|| steps(Hoarding(load())));
    let (most, generating) = held(&|| steps(load()));
    println!("{all} blocks without giving any up; {most} at most with it, {generating} in the end");
    assert_eq!(all, 4 * LAYER);
    // A window of 83 tokens is in seven blocks at most; two steps in flight and one that was just collected have more.
    assert!(generating <= LAYER + 3 * 7 && most <= LAYER + 3 * (7 + 3), "{most} and {generating} blocks");
}

#[test]
fn a_model_says_how_its_layers_are_grouped() {
    let groups = |checkpoint| executor(&checkpoint, PLAIN).geometry().groups;
    assert_eq!(groups(windowed("mistral", json!({}))), KvGroups::one_windowed(READ_BACK));
    assert_eq!(groups(windowed("mistral", json!({"sliding_window": null}))), KvGroups::ONE);
    assert_eq!(groups(gemma()), GEMMA_GROUPS);
    assert_eq!(groups(halves()), KvGroups { full: 1, windowed: 1, read_back_tokens: READ_BACK });
}

/// The same bytes have room for more of the longest sequences, and for a longer one.
#[test]
fn the_same_memory_holds_more_sequences() {
    let options = LoadOptions { kv: KvBudget::Bytes(1 << 20), ..PLAIN.load_options() };
    let sequences = |checkpoint: &Checkpoint| {
        let geometry = load(checkpoint, &options).unwrap().executor.geometry();
        let one = geometry.groups.sequence_blocks(geometry.max_sequence_tokens.into(), geometry.block_tokens);
        (geometry.max_sequence_tokens, f64::from(geometry.blocks) / one as f64)
    };
    let types = ["full_attention"; 4];
    let (windowed, full) = (sequences(&gemma()), sequences(&windowed("mistral", json!({"layer_types": types}))));
    assert_eq!((windowed.0, full.0), (512, 512));
    assert!(windowed.1 > 2.0 * full.1, "{windowed:?} and {full:?}");
}
