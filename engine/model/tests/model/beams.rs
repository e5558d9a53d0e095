//! Beam search on a real decoder against a search that reads every beam from its first token.

use crate::common::tiny::Tiny;
use windlass_checkpoint::Checkpoint;
use windlass_engine_core::engine::{Engine, EngineConfig};
use windlass_engine_core::request::{BeamSearch, FinishReason, Request, RequestId};
use windlass_engine_model::{KvBudget, LoadOptions, Reader, load};
use windlass_kernels::WeightType;

const TOKENS: usize = 7;

/// An answer: its tokens, the logarithm of its probability, and whether it ended by itself.
type Answer = (Vec<u32>, f64, bool);

fn tiny() -> Checkpoint {
    Checkpoint::from_bytes(Tiny::of(WeightType::Q8_0).build().build()).unwrap()
}

fn prompt() -> Vec<u32> {
    (0..21).map(|index| index * 11 % 320).collect()
}

fn options() -> LoadOptions {
    LoadOptions { threads: 1, kv: KvBudget::Blocks(64), max_step_tokens: 64, ..LoadOptions::default() }
}

/// vLLM's search, spelled out: each step continues each beam by its `2 · width` likeliest tokens.
fn reference(width: usize, length_penalty: f64, stop: u32) -> Vec<Answer> {
    let mut reader = Reader::load(&tiny(), 64, &options()).unwrap();
    let prompt = prompt();
    let mut next = |answer: &[u32]| -> Vec<(u32, f64)> {
        let text = [&prompt[..], answer].concat();
        let logits = reader.read(&text, 0);
        let last = &logits[logits.len() - 320..];
        let max = last.iter().copied().fold(f32::MIN, f32::max);
        let total: f64 = last.iter().map(|logit| f64::from(logit - max).exp()).sum();
        let mut scores: Vec<(u32, f64)> =
            (0..).zip(last).map(|(token, logit)| (token, f64::from(logit - max) - total.ln())).collect();
        scores.sort_by(|a, b| b.1.total_cmp(&a.1));
        scores
    };
    let (mut beams, mut ended): (Vec<Answer>, Vec<Answer>) = (vec![(Vec::new(), 0.0, false)], Vec::new());
    for _ in 0..TOKENS {
        let mut all = Vec::new();
        for (tokens, score, _) in &beams {
            for (token, logprob) in next(tokens).into_iter().take(2 * width) {
                let longer = ([&tokens[..], &[token]].concat(), score + logprob, token == stop);
                if token == stop { ended.push(longer) } else { all.push(longer) }
            }
        }
        all.sort_by(|a, b| b.1.total_cmp(&a.1));
        all.truncate(width);
        beams = all;
    }
    ended.extend(beams);
    let rank = |(tokens, score, stopped): &Answer| {
        score / ((prompt.len() + tokens.len() - usize::from(*stopped)) as f64).powf(length_penalty)
    };
    ended.sort_by(|a, b| rank(b).total_cmp(&rank(a)));
    ended.truncate(width);
    ended
}

/// The same by the engine.
fn found(width: usize, length_penalty: f64, stop: u32, blocks: u32) -> Vec<Answer> {
    let options = LoadOptions { kv: KvBudget::Blocks(blocks), max_model_tokens: Some(40), ..options() };
    let mut engine = Engine::new(load(&tiny(), &options).unwrap().executor, EngineConfig::PLAIN);
    let beams = Some(BeamSearch { leader: RequestId(0), width: width as u32, length_penalty });
    for id in 0..width as u64 {
        let greedy = Request::greedy(RequestId(id), prompt(), TOKENS as u32);
        engine.add(Request { beams, logprobs: Some(0), stop_tokens: vec![stop], ..greedy }, 0.0).unwrap();
    }
    let mut answers = vec![None; width];
    while !engine.is_idle() {
        for update in engine.step(0.0).unwrap().updates {
            let score = update.logprobs.iter().map(|scores| f64::from(scores.chosen.logprob)).sum();
            let stopped = update.finish == Some(FinishReason::Stop);
            answers[update.request.0 as usize] = Some((update.tokens, score, stopped));
        }
    }
    answers.into_iter().map(Option::unwrap).collect()
}

#[test]
fn the_search_finds_what_reading_every_beam_finds() {
    let common = reference(1, 1.0, 1000)[0].0[2];
    let mut ended = 0;
    for width in [1, 2, 3, 5] {
        for length_penalty in [0.0, 1.0, 2.0] {
            for (stop, blocks) in [(1000, 64), (common, 64), (common, 5)] {
                let (expected, found) =
                    (reference(width, length_penalty, stop), found(width, length_penalty, stop, blocks));
                for (expected, found) in expected.iter().zip(&found) {
                    assert_eq!((&expected.0, expected.2), (&found.0, found.2), "{width} beams, {length_penalty}");
                    assert!((expected.1 - found.1).abs() < 1e-3, "{expected:?} {found:?}");
                    ended += usize::from(found.2);
                }
                assert_eq!(expected.len(), found.len());
            }
        }
    }
    assert!(ended > 5, "{ended} answers ended by themselves");
}
