//! Beam search in the scheduler: which sequence holds which beam, how many blocks they take, and how a group
//! finishes.
//!
//! The simulator's most likely token has a probability of one half, the next of a quarter, and so on, so that beams
//! differ by the ranks of their tokens alone.

use std::collections::HashSet;

use crate::support::{CONFIG, GEOMETRY, TestEngine, With, drain, engine, request, staged, step, text};
use windlass_engine_core::engine::EngineConfig;
use windlass_engine_core::executor::Geometry;
use windlass_engine_core::plan::BlockMove;
use windlass_engine_core::request::{BeamSearch, FinishReason, Request, RequestId};
use windlass_engine_core::update::RequestUpdate;

/// A search of `width` beams, as requests `first ..`.
fn search(first: u64, width: u32, prompt_tokens: usize, tokens: u32) -> Vec<Request> {
    let beams = BeamSearch { leader: RequestId(first), width, length_penalty: 1.0 };
    let prompt = request(first, prompt_tokens).prompt;
    let one =
        |id| Request { beams: Some(beams), logprobs: Some(0), ..request(id, 1).prompt(prompt.clone()).max(tokens) };
    (first..first + u64::from(width)).map(one).collect()
}

fn add(engine: &mut TestEngine, requests: &[Request]) {
    requests.iter().for_each(|request| engine.add(request.clone(), 0.0).unwrap());
}

type Text = (Vec<u32>, Option<FinishReason>);

fn texts(updates: &[RequestUpdate], requests: &[Request]) -> Vec<Text> {
    requests.iter().map(|request| text(updates, request.id.0)).collect()
}

/// The answers of an engine with enough blocks.
fn answers(requests: &[Request]) -> Vec<Text> {
    let mut engine = engine(Geometry { blocks: 256, ..GEOMETRY }, CONFIG);
    add(&mut engine, requests);
    texts(&drain(&mut engine), requests)
}

fn likelihood(updates: &[RequestUpdate], id: u64) -> f32 {
    crate::support::logprobs(updates, id)[1].iter().map(|scores| scores.chosen.logprob).sum()
}

#[test]
fn answers_differ_and_the_best_comes_first() {
    let requests = search(1, 4, 10, 12);
    let mut engine = engine(Geometry { blocks: 256, max_step_logits: 32, ..GEOMETRY }, CONFIG);
    add(&mut engine, &requests);
    let updates = drain(&mut engine);
    let found = texts(&updates, &requests);
    assert!(found.iter().all(|(tokens, reason)| tokens.len() == 12 && *reason == Some(FinishReason::Length)));
    assert_eq!(found.iter().map(|(tokens, _)| tokens).collect::<HashSet<_>>().len(), 4);
    let scores: Vec<f32> = (1..=4).map(|id| likelihood(&updates, id)).collect();
    assert!(scores.is_sorted_by(|a, b| a >= b), "{scores:?}");
    // The greedy answer is the most likely one if every first choice has the same probability.
    assert_eq!(found[0], text(&crate::support::updates_alone(&Request { beams: None, ..requests[0].clone() }, 4), 1));
    assert_eq!(updates.len(), 4, "nothing is told before the end");
}

/// Beams of one group may be in different steps.
#[test]
fn the_same_beams_are_found_where_stages_compute_a_step_each() {
    let requests = search(1, 5, 10, 12);
    let found = |stages: usize| {
        let mut engine = staged(Geometry { blocks: 256, max_step_logits: 32, ..GEOMETRY }, CONFIG, stages);
        add(&mut engine, &requests);
        texts(&drain(&mut engine), &requests)
    };
    let [one, two, three] = [1, 2, 3].map(found);
    assert_eq!(one.iter().map(|(tokens, _)| tokens.len()).collect::<Vec<_>>(), [12; 5]);
    assert_eq!([&two, &three], [&one; 2]);
}

#[test]
fn answers_come_with_as_many_alternatives_as_were_asked_for() {
    for told in [0, 2] {
        let ask = |request: Request| Request { logprobs: Some(told), ..request };
        let requests: Vec<Request> = search(1, 2, 10, 4).into_iter().map(ask).collect();
        let mut engine = engine(GEOMETRY, CONFIG);
        add(&mut engine, &requests);
        let updates = drain(&mut engine);
        let scores: Vec<_> = updates.iter().flat_map(|update| &update.logprobs).collect();
        assert_eq!(scores.len(), 2 * 4);
        assert!(scores.iter().all(|scores| scores.top.len() == told as usize), "{told}: {scores:?}");
    }
}

#[test]
fn beams_share_the_prompts_blocks_and_copy_what_both_would_write() {
    let requests = search(1, 3, 30, 6);
    let mut engine = engine(Geometry { blocks: 256, ..GEOMETRY }, CONFIG);
    add(&mut engine, &requests);
    let (mut copies, mut most_held) = (0, 0);
    while !engine.is_idle() {
        let before = engine.executor().submitted();
        step(&mut engine, 0.0);
        if engine.executor().submitted() > before {
            let plan = engine.executor().last_plan();
            copies += plan.moves.iter().filter(|moved| matches!(moved, BlockMove::Copy { .. })).count();
            let named: HashSet<_> = plan.rows.iter().flat_map(|row| row.blocks.iter()).collect();
            most_held = most_held.max(named.len());
            assert!(plan.rows.iter().skip(1).all(|row| row.tokens.len() == 1), "a beam computes its prompt again");
        }
    }
    // Seven full blocks of the prompt for all, and two or three for each beam.
    assert!((8..=7 + 3 * 3).contains(&most_held), "{most_held} blocks");
    assert!(copies >= 2, "{copies} copies");
}

#[test]
fn a_stop_token_ends_one_answer_and_not_the_search() {
    let greedy = answers(&search(1, 1, 10, 12)).remove(0).0;
    let stopped: Vec<Request> = search(1, 3, 10, 12).into_iter().map(|request| request.stop(&greedy[4..5])).collect();
    let found = answers(&stopped);
    assert!(
        found.iter().any(|(tokens, reason)| *reason == Some(FinishReason::Stop) && tokens.last() == Some(&greedy[4]))
    );
    for (tokens, reason) in &found {
        let stops = tokens.iter().filter(|token| **token == greedy[4]).count();
        assert_eq!(stops, usize::from(*reason == Some(FinishReason::Stop)), "{tokens:?}");
    }
}

#[test]
fn the_length_penalty_chooses_between_short_and_long_answers() {
    let greedy = answers(&search(1, 1, 10, 12)).remove(0).0;
    let with = |length_penalty: f64| {
        let one = |request: Request| {
            let beams = request.beams.map(|beams| BeamSearch { length_penalty, ..beams });
            Request { beams, ..request.stop(&greedy[1..2]) }
        };
        answers(&search(1, 2, 10, 12).into_iter().map(one).collect::<Vec<_>>()).remove(0).0.len()
    };
    assert_eq!(with(0.0), 2, "the fewer tokens, the likelier");
    assert_eq!(with(10.0), 12, "length is all that counts");
}

#[test]
fn a_pool_that_holds_one_beam_finds_the_same_answers() {
    let requests = search(1, 4, 10, 14);
    let expected = answers(&requests);
    for blocks in [6, 7, 9, 12, 16] {
        for enable_prefix_cache in [false, true] {
            let config = EngineConfig { enable_prefix_cache, ..CONFIG };
            let mut engine = engine(Geometry { blocks, ..GEOMETRY }, config);
            add(&mut engine, &requests);
            add(&mut engine, &[request(50, 9).max(10)]);
            let updates = drain(&mut engine);
            assert_eq!(texts(&updates, &requests), expected, "{blocks} blocks");
            assert_eq!(engine.stats().kv.held, 0);
        }
    }
}

#[test]
#[should_panic(expected = "already live")]
fn a_beam_that_waits_for_the_others_is_live() {
    let mut engine = engine(GEOMETRY, CONFIG);
    add(&mut engine, &search(1, 3, 10, 14));
    add(&mut engine, &[request(2, 4)]);
}

#[test]
fn a_beam_that_gives_up_its_blocks_is_counted_as_preempted() {
    let requests = search(1, 4, 10, 14);
    let mut engine = engine(Geometry { blocks: 6, ..GEOMETRY }, CONFIG);
    add(&mut engine, &requests);
    drain(&mut engine);
    assert!(engine.stats().preemptions > 0);
}

#[test]
fn what_a_search_finds_tells_how_long_answers_are() {
    let predicted_seconds = |requests: &[Request]| {
        let mut engine = engine(Geometry { blocks: 256, max_step_rows: 4, ..GEOMETRY }, CONFIG);
        add(&mut engine, requests);
        drain(&mut engine);
        (50..54).for_each(|id| add(&mut engine, &[request(id, 4).max(100)]));
        (0..10).for_each(|_| _ = step(&mut engine, 0.0));
        engine.stats().predicted_ttft_seconds.expect("steps were measured")
    };
    // They stop by themselves: answers that were cut at their limit would not tell how long others are.
    let stop = |request: Request| request.stop(&[1, 3, 5]);
    let searched = predicted_seconds(&search(1, 2, 20, 100).into_iter().map(stop).collect::<Vec<_>>());
    let plain = predicted_seconds(&[1, 2].map(|id| stop(request(id, 20).max(100))));
    let unknown = predicted_seconds(&[]);
    assert!((0.5..2.0).contains(&(searched / plain)), "{searched} s after a search, {plain} s after other answers");
    assert!(plain < 0.5 * unknown, "{plain} s after short answers, {unknown} s after none");
}

#[test]
fn more_beams_than_rows_share_them() {
    let requests = search(1, 6, 10, 8);
    let mut engine = engine(Geometry { blocks: 256, max_step_rows: 2, ..GEOMETRY }, CONFIG);
    add(&mut engine, &requests);
    assert_eq!(texts(&drain(&mut engine), &requests), answers(&requests));
}

#[test]
fn a_group_ends_together_whoever_ends_it() {
    for steps in [0, 1, 3, 8, 15] {
        for ended in [1, 3] {
            let requests = search(1, 3, 10, 14);
            let mut engine = engine(GEOMETRY, CONFIG);
            add(&mut engine, &requests);
            (0..steps).for_each(|_| _ = step(&mut engine, 0.0));
            let last = engine.finish(RequestId(ended), FinishReason::Abort).expect("it is live");
            assert_eq!((last.request, last.finish), (RequestId(ended), Some(FinishReason::Abort)));
            let updates = drain(&mut engine);
            let others: Vec<_> = updates.iter().filter_map(|update| update.finish).collect();
            assert_eq!(others, [FinishReason::Abort; 2], "after {steps} steps");
            assert_eq!(engine.stats().kv.held, 0);
        }
    }
    let requests = search(1, 3, 10, 14);
    let mut engine = engine(GEOMETRY, CONFIG);
    add(&mut engine, &requests);
    engine.executor().poison(RequestId(1));
    let updates = drain(&mut engine);
    assert_eq!(updates.iter().filter(|update| update.finish == Some(FinishReason::Error)).count(), 3);
}
