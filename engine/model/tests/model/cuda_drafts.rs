//! Draft tokens on a GPU.

use std::slice;
use std::sync::Arc;

use crate::common::driver::{Job, generate, sample_row};
use crate::common::rows::{plan, row, tables};
use crate::common::tiny::Tiny;
use crate::cuda::{
    BLOCKS, NEAR_TIE, VOCABULARY, checkpoint, device, executor, family, most_regret, options, step, tiny,
};
use serde_json::json;
use windlass_checkpoint::Checkpoint;
use windlass_engine_contract::memory::KvDataType;
use windlass_engine_core::draft::{DraftTree, PromptLookup, Proposer};
use windlass_engine_core::engine::{Engine, EngineConfig};
use windlass_engine_core::executor::{Executor, KvGroups};
use windlass_engine_core::plan::{BlockId, History, InputToken, PlanRow, RowOutput, SampleRow, StepOutput};
use windlass_engine_core::request::{Request, RequestId, Sampling};
use windlass_engine_core::sampling::Penalties;
use windlass_engine_model::cuda::{CudaExecutor, CudaModel, Replay};
use windlass_engine_model::{DecoderConfig, DraftModel, KvBudget, LoadOptions, load};
use windlass_kernels::WeightType;

/// Draft tokens that are all accepted, all rejected, and accepted up to one; sampled on the device and, with a bias, on
/// the host.
#[test]
fn draft_tokens_are_verified_by_what_is_drawn_without_them() {
    let checkpoint = checkpoint(Tiny { tied: false, ..tiny(WeightType::BF16) });
    let random = Sampling { temperature: 0.8, top_p: 0.9, top_k: 20, seed: 3, ..Sampling::GREEDY };
    let biased = Sampling { logit_bias: vec![(5, 0.5)], ..random.clone() };
    for sampling in [Sampling::GREEDY, random, biased] {
        let mut executor = roomy(&checkpoint, Replay::Graphs);
        let job = Job { prompt: vec![1], sampling: sampling.clone() };
        let text = generate(&mut executor, slice::from_ref(&job), 4, 32, 1).remove(0);
        let wrong = |token: u32| (token + 1) % VOCABULARY;
        for (draft_tokens, expected) in [
            (vec![text[0], text[1], text[2]], &text[..]),
            (vec![text[0], wrong(text[1]), text[2]], &text[..2]),
            (vec![wrong(text[0]), text[1]], &text[..1]),
        ] {
            let sample =
                SampleRow { draft: DraftTree::chain(draft_tokens), logprobs: Some(0), ..sample_row(&sampling) };
            let drafting = PlanRow { sample: Some(sample), ..row(InputToken::Known(1), 0) };
            let other = PlanRow { blocks: [BlockId(2)].into(), ..row(InputToken::Known(1), 0) };
            let ticket = executor.submit(plan(vec![drafting, other])).unwrap();
            let StepOutput { rows, scores, .. } = executor.collect(ticket).unwrap();
            let RowOutput::Verified(found) = &rows[0] else { panic!("{rows:?}") };
            assert_eq!(found, expected);
            let told: Vec<u32> = scores[0].sampled.iter().map(|told| told.chosen.token).collect();
            assert_eq!((told, scores.len()), (expected.to_vec(), 1), "of those that hold alone");
            assert_eq!(rows[1], step(&mut executor, plan(vec![row(InputToken::Known(1), 0)]))[0]);
        }
    }
}

/// A token and its draft tokens are computed as single tokens are: the texts are equal, and the graphs are the same.
#[test]
fn texts_with_draft_tokens_are_those_without() {
    let checkpoint = checkpoint(Tiny { tied: false, ..tiny(WeightType::BF16) });
    for replay in [Replay::Graphs, Replay::Eager] {
        draft_tokens_change_nothing(|| roomy(&checkpoint, replay));
    }
}

/// An executor whose steps have room for a token and its draft tokens as rows of their own.
fn roomy(checkpoint: &Checkpoint, replay: Replay) -> CudaExecutor {
    let options = LoadOptions { max_sequences: 8, ..options() };
    let model = CudaModel::load(checkpoint, &options, &[device(7)]).unwrap();
    model.start(options.kv, replay).unwrap().executor
}

/// If there is no room for all as rows of one token, they are computed as prompts are. If the two best tokens are as
/// close as the rounding of bf16, either may be sampled.
#[test]
fn texts_with_more_draft_tokens_than_there_are_rows_are_the_models() {
    let checkpoint = checkpoint(Tiny { tied: false, ..tiny(WeightType::BF16) });
    let text = text_with_draft_tokens(executor(&checkpoint, Replay::Graphs), 4);
    let regret = most_regret(&mut load(&checkpoint, &options()).unwrap().executor, &repeated(), &text);
    assert!(regret <= NEAR_TIE, "{text:?} is {regret} from the CPU's choices");
}

/// A draft model beside the large model, on the same GPU. Here it is the same model, so every draft token is accepted.
#[test]
fn a_draft_model_on_the_gpu_changes_no_token() {
    let (checkpoint, device) = (checkpoint(Tiny { tied: false, ..tiny(WeightType::BF16) }), device(7));
    let prompt: Vec<u32> = (0..50).map(|index| index * 7 % VOCABULARY).collect();
    let requests = [1, 2].map(|id| Request::greedy(RequestId(id), prompt.clone(), 30));
    let texts = |proposer: Option<Box<dyn Proposer>>| {
        let options = LoadOptions { max_sequences: 8, ..options() };
        let model = CudaModel::load(&checkpoint, &options, slice::from_ref(&device)).unwrap();
        let mut engine = Engine::new(model.start(options.kv, Replay::Graphs).unwrap().executor, EngineConfig::PLAIN);
        if let Some(proposer) = proposer {
            engine = engine.with_proposer(proposer, 3);
        }
        requests.iter().for_each(|request| engine.add(request.clone(), 0.0).unwrap());
        let mut texts = [const { Vec::new() }; 2];
        while !engine.is_idle() {
            for update in engine.step(0.0).unwrap().updates {
                texts[update.request.0 as usize - 1].extend(update.tokens);
            }
        }
        (texts, engine.stats().drafts)
    };
    let (expected, _) = texts(None);
    // A pool that has room for only one of the two sequences, and one that has room for both.
    for blocks in [2, 4] {
        let free = || device.driver().memory().unwrap().free_bytes as u64;
        let (options, before) =
            (LoadOptions { kv: KvBudget::Blocks(blocks), max_model_tokens: Some(128), ..options() }, free());
        let draft = DraftModel::load_on(&checkpoint, &options, &device).unwrap();
        let (taken, ledger) = (before - free(), DraftModel::ledger_on(&checkpoint, &options).unwrap());
        assert!(taken <= ledger.total() + (64 << 10), "{taken} bytes, and {ledger:?}");
        let (found, drafts) = texts(Some(Box::new(draft)));
        assert_eq!(found, expected, "{blocks} blocks");
        assert!(drafts.accepted > 20 && drafts.accepted * 10 >= drafts.tokens * 9, "{drafts:?}");
    }
}

fn repeated() -> Vec<u32> {
    [7, 3, 9, 4, 8].repeat(4)
}

/// Log probabilities are equal to the last bit, within a block and across the border of two.
#[test]
fn draft_tokens_are_computed_as_tokens_one_after_the_other() {
    let checkpoint = checkpoint(Tiny { tied: false, ..tiny(WeightType::BF16) });
    let executor = || roomy(&checkpoint, Replay::Graphs);
    let prompt: Vec<u32> = (0..PROMPT_TOKENS as u32).map(|token| token * 37 % VOCABULARY).collect();
    let mut alone = executor();
    let mut text = Text::read(&mut alone, &prompt, &Sampling::GREEDY);
    let expected: Vec<_> = (0..24).map(|_| text.draw(&mut alone, DraftTree::default(), &[]).remove(0)).collect();
    let mut drafting = executor();
    let mut text = Text::read(&mut drafting, &prompt, &Sampling::GREEDY);
    for right in expected.chunks(4) {
        let draft_tokens = right[..3].iter().map(|(token, _)| *token);
        assert_eq!(text.draw(&mut drafting, DraftTree::chain(draft_tokens), &[]), right);
    }
    assert_eq!(drafting.decoder().graphs(), 1, "that of four rows");
}

pub fn draft_tokens_change_nothing<E: Executor>(executor: impl Fn() -> E) {
    let [drafted, plain] = [4, 0].map(|draft_tokens| text_with_draft_tokens(executor(), draft_tokens));
    assert_eq!(drafted, plain);
}

/// Generates a text of 40 tokens whose prompt repeats, with up to `draft_tokens` draft tokens a step.
fn text_with_draft_tokens(executor: impl Executor, draft_tokens: u32) -> Vec<u32> {
    let proposer = Box::new(PromptLookup::new(1, 3));
    let mut engine = Engine::new(executor, EngineConfig::PLAIN).with_proposer(proposer, draft_tokens);
    engine.add(Request::greedy(RequestId(0), repeated(), 40), 0.0).unwrap();
    let mut text = Vec::new();
    while !engine.is_idle() {
        text.extend(engine.step(0.0).unwrap().updates.into_iter().flat_map(|update| update.tokens));
    }
    let stats = engine.stats().drafts;
    println!("{} of {} draft tokens accepted", stats.accepted, stats.tokens);
    assert!(text.len() == 40 && (stats.accepted > 0) == (draft_tokens > 0), "{stats:?}");
    text
}

/// Length of a prompt: the text after it crosses the border of two blocks.
const PROMPT_TOKENS: usize = 58;

/// A sequence of which all tokens but the last are computed.
struct Text {
    tokens: Vec<u32>,
    sampling: Sampling,
    blocks: Arc<[BlockId]>,
}

impl Text {
    fn read(executor: &mut dyn Executor, prompt: &[u32], sampling: &Sampling) -> Text {
        let blocks = tables(executor);
        for (chunk, tokens) in prompt[..prompt.len() - 1].chunks(20).enumerate() {
            let tokens = tokens.iter().copied().map(InputToken::Known).collect();
            let first = row(InputToken::Known(0), 20 * chunk as u32);
            step(executor, plan(vec![PlanRow { tokens, sample: None, blocks: blocks.clone(), ..first }]));
        }
        Text { tokens: prompt.to_vec(), sampling: sampling.clone(), blocks }
    }

    /// Samples with draft tokens, and returns the tokens, with log probabilities where they are asked for. `others` are
    /// in the same step.
    fn draw(&mut self, executor: &mut dyn Executor, draft: DraftTree, others: &[PlanRow]) -> Vec<(u32, f32)> {
        let (last, position) = (self.tokens[self.tokens.len() - 1], self.tokens.len() as u32 - 1);
        let reads = self.sampling.reads_history();
        let history = reads.then(|| History { tokens: self.tokens.clone(), prompt_tokens: PROMPT_TOKENS });
        let logprobs = self.is_told().then_some(0);
        let sample = Some(SampleRow { draft, history, logprobs, ..sample_row(&self.sampling) });
        let asked = PlanRow { sample, blocks: self.blocks.clone(), ..row(InputToken::Known(last), position) };
        let ticket = executor.submit(plan([&[asked], others].concat())).unwrap();
        let StepOutput { rows, scores, .. } = executor.collect(ticket).unwrap();
        let drawn = match &rows[0] {
            RowOutput::Sampled(token) => vec![*token],
            RowOutput::Verified(tokens) => tokens.clone(),
            other => panic!("{other:?}"),
        };
        self.tokens.extend(&drawn);
        let told = scores.first().map_or(&[][..], |scores| &scores.sampled);
        let logprob = |index: usize| told.get(index).map_or(0.0, |told| told.chosen.logprob);
        drawn.into_iter().enumerate().map(|(index, token)| (token, logprob(index))).collect()
    }

    /// No log probabilities with masks or penalties: the host would sample such rows, and here the device is to.
    fn is_told(&self) -> bool {
        !self.sampling.reads_history() && self.sampling.allowed_tokens.is_empty()
    }
}

/// Trees in which the right path comes after other branches, and how many of its draft tokens are accepted: one of two
/// at each position, a path after a wrong path, a path that turns wrong, and no right path.
fn trees(text: &[u32], vocabulary: u32) -> Vec<(DraftTree, usize)> {
    let wrong = |token: u32, by: u32| (token + by) % vocabulary;
    let mut trees = [(); 4].map(|()| DraftTree::default());
    let mut parents = [None; 4];
    let late = trees[1].push(wrong(text[0], 1), None);
    trees[1].push(text[1], Some(late));
    for (place, &token) in text[..3].iter().enumerate() {
        let [_, right, _] = [wrong(token, 1), token, wrong(token, 2)].map(|token| trees[0].push(token, parents[0]));
        parents[0] = Some(right);
        parents[1] = Some(trees[1].push(token, parents[1]));
        trees[2].push(wrong(token, 3), parents[2]);
        parents[2] = Some(trees[2].push(wrong(token, place as u32 / 2), parents[2]));
        trees[3].push(wrong(token, 1 + place as u32), None);
    }
    let accepted = [3, 3, 2, usize::from(trees[3].nodes().iter().any(|node| node.token == text[0]))];
    trees.into_iter().zip(accepted).collect()
}

/// Verifies one tree after the other, each after the accepted tokens of the one before: tokens and log probabilities
/// are those without draft tokens. The text crosses the border of two blocks. If two tokens are as close as the
/// rounding of bf16, the other one may be sampled: in at most `strayed` of six trees, the number on the shim. The text
/// then goes on with the right tokens.
pub fn branching_draft_tokens_are_accepted(
    executor: &mut dyn Executor,
    vocabulary: u32,
    sampling: &Sampling,
    strayed: usize,
) {
    let prompt: Vec<u32> = (0..PROMPT_TOKENS as u32).map(|token| token * 37 % vocabulary).collect();
    let mut plain = Text::read(executor, &prompt, sampling);
    let draw = |_| plain.draw(executor, DraftTree::default(), &[]).remove(0);
    let expected: Vec<(u32, f32)> = (0..24).map(draw).collect();
    let tokens: Vec<u32> = expected.iter().map(|&(token, _)| token).collect();
    let mut text = Text::read(executor, &prompt, sampling);
    let (mut found, mut turn, mut astray) = (0, 0, Vec::new());
    while found < 20 {
        let (tree, accepted) = trees(&tokens[found..], vocabulary)[turn % 4].clone();
        let others = if executor.geometry().groups.count() == 1 { others() } else { Vec::new() };
        let drawn = text.draw(executor, tree, &others);
        let right = &expected[found..=found + accepted];
        (found, turn) = (found + right.len(), turn + 1);
        if !is_right(&drawn, right, sampling) {
            astray.push(turn);
            text = Text::read(executor, &[&prompt, &tokens[..found]].concat(), sampling);
        }
    }
    println!("{astray:?} of {turn} trees gave another token, {sampling:?}");
    assert!(astray.len() <= strayed, "{astray:?} of {turn} trees gave another token, {sampling:?}");
}

/// Whether all right tokens were sampled. If not, another token was, never just fewer or more tokens. Log probabilities
/// must be right up to there, and so must that of the best token that was sampled instead.
fn is_right(drawn: &[(u32, f32)], right: &[(u32, f32)], sampling: &Sampling) -> bool {
    let same = drawn.iter().zip(right).take_while(|(one, other)| one.0 == other.0).count();
    let is_right = same == drawn.len().min(right.len());
    assert!(!is_right || drawn.len() == right.len(), "{drawn:?} instead of {right:?}, {sampling:?}");
    let compared = if sampling.temperature == 0.0 { same + 1 } else { same };
    let apart = drawn.iter().zip(right).take(compared).map(|(one, other)| (one.1 - other.1).abs()).fold(0.0, f32::max);
    assert!(apart < NEAR_TIE, "{drawn:?} instead of {right:?}, {sampling:?}");
    is_right
}

/// A chain of draft tokens, and a prompt, in blocks of their own.
fn others() -> Vec<PlanRow> {
    let sample = SampleRow { draft: DraftTree::chain([4, 5]), ..sample_row(&Sampling::GREEDY) };
    let chain = PlanRow { sample: Some(sample), blocks: [BlockId(2)].into(), ..row(InputToken::Known(1), 0) };
    let tokens = (1..6).map(InputToken::Known).collect();
    vec![chain, PlanRow { tokens, sample: None, blocks: [BlockId(3)].into(), ..row(InputToken::Known(1), 0) }]
}

/// Sampled on the device, with a mask and penalties too, and with a bias on the host.
#[test]
fn branching_draft_tokens_change_no_token() {
    let checkpoint = checkpoint(Tiny { tied: false, ..tiny(WeightType::BF16) });
    let random = Sampling { temperature: 0.8, top_p: 0.9, top_k: 20, seed: 2, ..Sampling::GREEDY };
    let biased = Sampling { logit_bias: vec![(5, 0.5)], ..random.clone() };
    let masked = Sampling { allowed_tokens: (0..VOCABULARY).step_by(2).collect(), ..random.clone() };
    let penalties = Penalties { repetition: 1.2, frequency: 0.7, presence: 0.3 };
    let penalized = Sampling { penalties, ..random.clone() };
    for (sampling, strayed) in [(Sampling::GREEDY, 2), (random, 0), (biased, 1), (masked, 1), (penalized, 2)] {
        branching_draft_tokens_are_accepted(&mut executor(&checkpoint, Replay::Graphs), VOCABULARY, &sampling, strayed);
    }
}

#[test]
fn branching_draft_tokens_change_no_token_in_windows_and_in_pages_of_bytes() {
    let gemma = json!({"sliding_window": 20, "sliding_window_pattern": 2, "rope_local_base_freq": 1000.0,
        "hidden_act": null, "hidden_activation": "gelu_pytorch_tanh", "head_dim": 48, "query_pre_attn_scalar": 256,
        "final_logit_softcapping": null, "num_hidden_layers": 4});
    for (checkpoint, kv_data_type, strayed) in [
        (family("mistral", false, json!({"sliding_window": 20, "tie_word_embeddings": false})), KvDataType::Bf16, 1),
        (family("gemma3_text", true, gemma), KvDataType::Bf16, 1),
        (checkpoint(Tiny { tied: false, ..tiny(WeightType::BF16) }), KvDataType::Fp8, 0),
        (checkpoint(Tiny { tied: false, ..tiny(WeightType::BF16) }), KvDataType::Int8, 1),
    ] {
        let shape = DecoderConfig::read(&checkpoint).unwrap().shape(0);
        let groups = KvGroups::of(&shape, options().max_model_tokens.unwrap()).count();
        let options = LoadOptions { kv: KvBudget::Blocks(groups * BLOCKS), kv_data_type, ..options() };
        let model = CudaModel::load(&checkpoint, &options, &[device(7)]).unwrap();
        let mut executor = model.start(options.kv, Replay::Graphs).unwrap().executor;
        branching_draft_tokens_are_accepted(&mut executor, shape.vocabulary, &Sampling::GREEDY, strayed);
    }
}

#[test]
fn too_many_branching_draft_tokens_fail_by_name_and_nothing_else_does() {
    let checkpoint = checkpoint(tiny(WeightType::BF16));
    let options = LoadOptions { max_step_tokens: 64, max_sequences: 64, ..options() };
    let model = CudaModel::load(&checkpoint, &options, &[device(7)]).unwrap();
    let mut executor = model.start(options.kv, Replay::Graphs).unwrap().executor;
    let mut draft = DraftTree::default();
    (0..33).for_each(|token| _ = draft.push(token, None));
    let sample = SampleRow { draft, ..sample_row(&Sampling::GREEDY) };
    let branching = PlanRow { sample: Some(sample), ..row(InputToken::Known(1), 0) };
    let sample = SampleRow { draft: DraftTree::chain([VOCABULARY]), ..sample_row(&Sampling::GREEDY) };
    let outside = PlanRow { sample: Some(sample), blocks: [BlockId(3)].into(), ..row(InputToken::Known(1), 0) };
    let other = PlanRow { blocks: [BlockId(2)].into(), ..row(InputToken::Known(1), 0) };
    let rows = step(&mut executor, plan(vec![branching, outside, other]));
    assert!(
        matches!(&rows[..], [RowOutput::Failed(one), RowOutput::Failed(two), RowOutput::Sampled(_)]
            if one.to_string().contains("33 guesses that branch") && two.to_string().contains("outside the vocabulary")),
        "{rows:?}"
    );
}

/// The last token of a row is known only when its draft tokens are verified.
#[test]
fn nothing_follows_a_row_with_draft_tokens_before_they_are_verified() {
    let checkpoint = checkpoint(tiny(WeightType::BF16));
    let mut executor = executor(&checkpoint, Replay::Graphs);
    let sample = SampleRow { draft: DraftTree::chain([4]), ..sample_row(&Sampling::GREEDY) };
    let drafting = PlanRow { sample: Some(sample), ..row(InputToken::Known(1), 0) };
    let first = executor.submit(plan(vec![drafting])).unwrap();
    let second = executor.submit(plan(vec![row(InputToken::SampledBy { ticket: first, row: 0 }, 1)])).unwrap();
    executor.collect(first).unwrap();
    let rows = executor.collect(second).unwrap().rows;
    assert!(matches!(&rows[..], [RowOutput::Failed(why)] if why.to_string().contains("guesses")), "{rows:?}");
}
