//! Guesses on a GPU.

use std::slice;

use crate::common::driver::{Job, generate, sample_row};
use crate::common::rows::{plan, row};
use crate::common::tiny::Tiny;
use crate::cuda::{NEAR_TIE, VOCABULARY, checkpoint, executor, most_regret, options, step, tiny};
use windlass_checkpoint::Checkpoint;
use windlass_engine_core::draft::{DraftTree, PromptLookup};
use windlass_engine_core::engine::{Engine, EngineConfig};
use windlass_engine_core::executor::Executor;
use windlass_engine_core::plan::{BlockId, InputToken, PlanRow, RowOutput, SampleRow, StepOutput};
use windlass_engine_core::request::{Request, RequestId, Sampling};
use windlass_engine_model::cuda::Replay;
use windlass_engine_model::load;
use windlass_kernels::WeightType;

/// Guesses that hold, that do not, and that do up to a place; drawn on the device and, with a bias, on the host.
#[test]
fn guesses_are_judged_by_what_is_drawn_without_them() {
    let checkpoint = checkpoint(Tiny { tied: false, ..tiny(WeightType::BF16) });
    let random = Sampling { temperature: 0.8, top_p: 0.9, top_k: 20, seed: 3, ..Sampling::GREEDY };
    let biased = Sampling { logit_bias: vec![(5, 0.5)], ..random.clone() };
    for sampling in [Sampling::GREEDY, random, biased] {
        let mut executor = executor(&checkpoint, Replay::Graphs);
        let job = Job { prompt: vec![1], sampling: sampling.clone() };
        let text = generate(&mut executor, slice::from_ref(&job), 4, 32, 1).remove(0);
        let wrong = |token: u32| (token + 1) % VOCABULARY;
        for (guesses, expected) in [
            (vec![text[0], text[1], text[2]], &text[..]),
            (vec![text[0], wrong(text[1]), text[2]], &text[..2]),
            (vec![wrong(text[0]), text[1]], &text[..1]),
        ] {
            let sample = SampleRow { draft: DraftTree::chain(guesses), logprobs: Some(0), ..sample_row(&sampling) };
            let guessing = PlanRow { sample: Some(sample), ..row(InputToken::Known(1), 0) };
            let other = PlanRow { blocks: [BlockId(2)].into(), ..row(InputToken::Known(1), 0) };
            let ticket = executor.submit(plan(vec![guessing, other])).unwrap();
            let StepOutput { rows, scores, .. } = executor.collect(ticket).unwrap();
            let RowOutput::Verified(found) = &rows[0] else { panic!("{rows:?}") };
            assert_eq!(found, expected);
            let told: Vec<u32> = scores[0].sampled.iter().map(|told| told.chosen.token).collect();
            assert_eq!((told, scores.len()), (expected.to_vec(), 1), "of those that hold alone");
            assert_eq!(rows[1], step(&mut executor, plan(vec![row(InputToken::Known(1), 0)]))[0]);
        }
    }
}

/// A whole text with guesses is one that the model gives: where the first two choices are as near as bf16 is coarse, attention
/// of several tokens may take the other one.
#[test]
fn texts_with_guesses_are_the_models() {
    let checkpoint = checkpoint(Tiny { tied: false, ..tiny(WeightType::BF16) });
    guesses_hold(executor(&checkpoint, Replay::Graphs), &checkpoint);
}

pub fn guesses_hold(executor: impl Executor, checkpoint: &Checkpoint) {
    let prompt: Vec<u32> = [7, 3, 9, 4, 8].repeat(4);
    let proposer = Box::new(PromptLookup::new(1, 3));
    let mut engine = Engine::new(executor, EngineConfig::PLAIN).with_proposer(proposer, 4);
    engine.add(Request::greedy(RequestId(0), prompt.clone(), 40), 0.0).unwrap();
    let mut text = Vec::new();
    while !engine.is_idle() {
        text.extend(engine.turn(0.0).unwrap().updates.into_iter().flat_map(|update| update.tokens));
    }
    let stats = engine.stats().drafts;
    println!("{} of {} guesses held", stats.accepted, stats.tokens);
    assert!(text.len() == 40 && stats.accepted > 0, "{stats:?}");
    let regret = most_regret(&mut load(checkpoint, &options()).unwrap().executor, &prompt, &text);
    assert!(regret <= NEAR_TIE, "{text:?} is {regret} from the CPU's choices");
}

#[test]
fn guesses_that_branch_fail_by_name_and_nothing_else_does() {
    let checkpoint = checkpoint(tiny(WeightType::BF16));
    let mut executor = executor(&checkpoint, Replay::Graphs);
    let mut draft = DraftTree::default();
    [4, 5].iter().for_each(|&token| _ = draft.push(token, None));
    let sample = SampleRow { draft, ..sample_row(&Sampling::GREEDY) };
    let branching = PlanRow { sample: Some(sample), ..row(InputToken::Known(1), 0) };
    let sample = SampleRow { draft: DraftTree::chain([VOCABULARY]), ..sample_row(&Sampling::GREEDY) };
    let outside = PlanRow { sample: Some(sample), blocks: [BlockId(3)].into(), ..row(InputToken::Known(1), 0) };
    let other = PlanRow { blocks: [BlockId(2)].into(), ..row(InputToken::Known(1), 0) };
    let rows = step(&mut executor, plan(vec![branching, outside, other]));
    assert!(
        matches!(&rows[..], [RowOutput::Failed(one), RowOutput::Failed(two), RowOutput::Sampled(_)]
            if one.to_string().contains("guesses that branch") && two.to_string().contains("outside the vocabulary")),
        "{rows:?}"
    );
}

/// Which of a row's tokens is its last is known when its guesses are judged.
#[test]
fn nothing_follows_a_row_with_guesses_before_they_are_judged() {
    let checkpoint = checkpoint(tiny(WeightType::BF16));
    let mut executor = executor(&checkpoint, Replay::Graphs);
    let sample = SampleRow { draft: DraftTree::chain([4]), ..sample_row(&Sampling::GREEDY) };
    let guessing = PlanRow { sample: Some(sample), ..row(InputToken::Known(1), 0) };
    let first = executor.submit(plan(vec![guessing])).unwrap();
    let second = executor.submit(plan(vec![row(InputToken::SampledBy { ticket: first, row: 0 }, 1)])).unwrap();
    executor.collect(first).unwrap();
    let rows = executor.collect(second).unwrap().rows;
    assert!(matches!(&rows[..], [RowOutput::Failed(why)] if why.to_string().contains("guesses")), "{rows:?}");
}
