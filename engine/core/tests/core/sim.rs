//! The simulator on its own: clock, vocabulary, errors; and the engine with executors that break the contract.

use std::sync::Arc;
use std::time::Duration;

use crate::support::{CONFIG, GEOMETRY, TestClock, VOCABULARY, With, request};

use windlass_engine_core::constraint::{Constraint, MaskUnavailable, TokenSet};
use windlass_engine_core::engine::Engine;
use windlass_engine_core::executor::{Executor, ExecutorError, Geometry};
use windlass_engine_core::plan::{RowOutput, SequenceFailure, StepOutput, StepPlan, Ticket};
use windlass_engine_core::request::{FinishReason, Request, Sampling};
use windlass_engine_core::sim::{Pace, SimExecutor, SimStop, SimVocabulary, StepTime, Unpaced, mix};

const STEP_TIME: StepTime =
    StepTime { base_us: 1000.0, prefill_token_us: 100.0, decode_row_us: 10.0, context_token_us: 1.0 };

fn sim<P: Pace>(vocabulary: SimVocabulary, pace: P) -> SimExecutor<P> {
    SimExecutor::new(GEOMETRY, STEP_TIME, vocabulary, pace)
}

/// Tokens and finish reason of one request on an engine of its own.
fn run(vocabulary: SimVocabulary, request: Request) -> (Vec<u32>, FinishReason) {
    let mut engine = Engine::new(sim(vocabulary, Unpaced), CONFIG);
    engine.add(request, 0.0).unwrap();
    let mut tokens = Vec::new();
    while !engine.is_idle() {
        for update in engine.step(0.0).unwrap().updates {
            tokens.extend(update.tokens);
            if let Some(reason) = update.finish {
                return (tokens, reason);
            }
        }
    }
    panic!("the request did not end");
}

#[test]
fn steps_run_back_to_back_for_the_modelled_time() {
    let clock = TestClock::default();
    let mut engine = Engine::new(sim(VOCABULARY, clock.clone()), CONFIG);
    engine.add(request(1, 4).max(3), 0.0).unwrap();
    let mut ends = Vec::new();
    while !engine.is_idle() {
        if let Some(step) = engine.step(0.0).unwrap().step {
            ends.push((clock.clone().now().as_micros(), (step.busy_seconds * 1e6).round() as u64));
        }
    }
    assert_eq!(ends, [(1404, 1404), (1404 + 1015, 1015), (1404 + 1015 + 1016, 1016)]);
}

#[test]
fn an_idle_device_starts_when_it_is_asked() {
    let mut clock = TestClock::default();
    let mut engine = Engine::new(sim(VOCABULARY, clock.clone()), CONFIG);
    clock.sleep_until(Duration::from_secs(1));
    engine.add(request(1, 1).max(1), 0.0).unwrap();
    while !engine.is_idle() {
        engine.step(0.0).unwrap();
    }
    assert_eq!(clock.now(), Duration::from_micros(1_000_000 + 1011));
}

#[test]
fn texts_end_by_themselves_only_where_that_is_asked() {
    let stop = SimStop { token: 77, one_in: 5 };
    let asked = request(1, 4).max(100).stop(&[77]);
    let (tokens, reason) = run(SimVocabulary { stop: Some(stop), ..VOCABULARY }, asked.clone());
    assert_eq!((tokens.last(), reason), (Some(&77), FinishReason::Stop));
    let (tokens, reason) = run(VOCABULARY, asked);
    assert_eq!((tokens.len(), reason), (100, FinishReason::Length));
}

#[test]
fn a_stop_token_comes_once_in_so_many_draws() {
    let stop = SimStop { token: 77, one_in: 5 };
    let (tokens, _) = run(SimVocabulary { stop: Some(stop), ..VOCABULARY }, request(1, 4).max(120));
    let stops = tokens.iter().filter(|token| **token == 77).count();
    assert!((12..=36).contains(&stops), "{stops} of {}", tokens.len());
}

#[test]
fn ranks_halve_in_probability() {
    let mut engine = Engine::new(sim(VOCABULARY, Unpaced), CONFIG);
    engine.add(Request { logprobs: Some(3), ..request(1, 4).max(1) }, 0.0).unwrap();
    let updates: Vec<_> = (0..2).flat_map(|_| engine.step(0.0).unwrap().updates).collect();
    let top = &updates[0].logprobs[0].top;
    let told: Vec<_> = top.iter().map(|of| (of.rank, of.logprob.exp())).collect();
    let near = |probability: f32, expected: f32| (probability - expected).abs() < 1e-6;
    assert!(
        matches!(told[..], [(1, a), (2, b), (3, c)] if near(a, 0.5) && near(b, 0.25) && near(c, 0.125)),
        "{told:?}"
    );
}

/// The first two outputs of SplitMix64 seeded with 0.
#[test]
fn words_are_mixed_as_published() {
    assert_eq!(mix(0, 0), 0xe220_a839_7b1d_cdaf);
    assert_eq!(mix(0, 0x9e37_79b9_7f4a_7c15), 0x6e78_9e6a_a1b9_65f4);
    assert_eq!(mix(1, 1 << 25), mix(0, 0));
}

#[test]
fn the_seed_matters_unless_the_request_is_greedy() {
    let with = |temperature, seed| {
        let sampling = Sampling { temperature, seed, ..Sampling::GREEDY };
        run(VOCABULARY, Request { sampling, ..request(1, 4).max(20) }).0
    };
    assert_eq!(with(0.0, 1), with(0.0, 2));
    assert_eq!(with(1.0, 1), with(1.0, 1));
    assert_ne!(with(1.0, 1), with(1.0, 2));
}

#[test]
fn a_row_that_may_draw_nothing_fails_alone() {
    let all: Vec<u32> = (0..GEOMETRY.vocabulary).collect();
    let (tokens, reason) = run(VOCABULARY, request(1, 4).max(5).min(2).stop(&all));
    assert_eq!((tokens, reason), (vec![], FinishReason::Error));
}

#[test]
fn only_allowed_tokens_are_drawn_even_where_no_word_is_among_them() {
    let sampling = Sampling { allowed_tokens: vec![98, 97], ..Sampling::GREEDY };
    let (tokens, _) = run(VOCABULARY, Request { sampling, ..request(1, 4).max(5) });
    assert_eq!(tokens, [97; 5]);
}

/// Allows the tokens 50, 51, … in order.
#[derive(Debug)]
struct Counting;

impl Constraint for Counting {
    fn allowed(&self, generated: &[u32], _patience: Duration) -> Result<TokenSet, MaskUnavailable> {
        let right = generated.iter().zip(50..).all(|(token, expected)| *token == expected);
        let mut set = TokenSet::default();
        set.insert(50 + generated.len() as u32);
        right.then_some(set).ok_or_else(|| SequenceFailure::Unsatisfiable(format!("{generated:?}")).into())
    }
}

#[test]
fn a_constraint_sees_every_token_before_the_one_it_allows() {
    let request = Request { constraint: Some(Arc::new(Counting)), ..request(1, 6).max(9) };
    assert_eq!(run(VOCABULARY, request), ((50..59).collect(), FinishReason::Length));
}

#[test]
fn what_breaks_the_contract_is_refused() {
    let mut sim = sim(VOCABULARY, Unpaced);
    sim.submit(StepPlan::default()).unwrap();
    let second = sim.submit(StepPlan::default()).unwrap();
    assert!(sim.submit(StepPlan::default()).is_err(), "a third step");
    assert!(sim.collect(second).is_err(), "out of order");
}

/// Returns the same rows for every plan.
struct Liar(Vec<RowOutput>);

impl Executor for Liar {
    fn geometry(&self) -> Geometry {
        GEOMETRY
    }

    fn submit(&mut self, _: StepPlan) -> Result<Ticket, ExecutorError> {
        Ok(Ticket(0))
    }

    fn collect(&mut self, _: Ticket) -> Result<StepOutput, ExecutorError> {
        Ok(StepOutput { rows: self.0.clone(), scores: Vec::new(), busy_seconds: 0.0 })
    }
}

#[test]
fn results_that_do_not_fit_the_plan_are_the_executors_failure() {
    let wrong = [
        (4, vec![]),
        (4, vec![RowOutput::Computed]),
        (4, vec![RowOutput::Sampled(1), RowOutput::Sampled(1)]),
        // There was no draft token to verify, and nothing to sample after the first chunk of a long prompt.
        (4, vec![RowOutput::Verified(vec![1])]),
        (40, vec![RowOutput::Sampled(1)]),
    ];
    for (prompt_tokens, rows) in wrong {
        let mut engine = Engine::new(Liar(rows.clone()), CONFIG);
        engine.add(request(1, prompt_tokens).max(1), 0.0).unwrap();
        let outcome = (0..2).map(|_| engine.step(0.0)).find(|outcome| outcome.is_err());
        assert!(outcome.is_some(), "{rows:?}");
    }
}
