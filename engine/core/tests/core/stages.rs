//! Pipeline stages: one step in flight for each.

use crate::support::{
    Auditor, CONFIG, GEOMETRY, Oracle, TestClock, TestEngine, VOCABULARY, With, alone, drain, request, staged, step,
    text,
};
use windlass_engine_core::engine::{Engine, EngineConfig, InterTokenLimit};
use windlass_engine_core::executor::Geometry;
use windlass_engine_core::plan::InputToken;
use windlass_engine_core::request::Request;
use windlass_engine_core::sim::{Pace, SimExecutor, StepTime, Unpaced};

fn with(stages: usize, requests: impl IntoIterator<Item = Request>) -> TestEngine {
    let mut engine = staged(Geometry { max_step_tokens: 16, ..GEOMETRY }, CONFIG, stages);
    requests.into_iter().for_each(|request| engine.add(request, 0.0).unwrap());
    engine
}

/// The next plans that are submitted, as (request, first position, tokens) by row.
fn plans(engine: &mut TestEngine, count: usize) -> Vec<Vec<(u64, u32, usize)>> {
    let mut plans = Vec::new();
    while plans.len() < count {
        let submitted = engine.executor().submitted();
        step(engine, 0.0);
        if engine.executor().submitted() > submitted {
            let rows = &engine.executor().last_plan().rows;
            plans.push(rows.iter().map(|row| (row.request.0, row.first_position, row.tokens.len())).collect());
        }
    }
    plans
}

#[test]
fn what_decodes_is_divided_among_the_stages() {
    let mut engine = with(2, (0..5).map(|id| request(id, 2).max(3)));
    let plans = plans(&mut engine, 5);
    assert_eq!(plans[0].len(), 5, "all prompts fit");
    let first: Vec<_> = [0, 1, 2].map(|id| (id, 2, 1)).into();
    let second: Vec<_> = [3, 4].map(|id| (id, 2, 1)).into();
    assert_eq!(plans[1..3], [first, second]);
    // The first three decode again as soon as their tokens are known, while the others are computed.
    let first: Vec<_> = [0, 1, 2].map(|id| (id, 3, 1)).into();
    assert_eq!(plans[3], first);
    assert_eq!(engine.executor().in_flight(), 1);
}

#[test]
fn chunks_of_a_prompt_follow_each_other_through_the_stages() {
    for stages in [2, 3] {
        let mut engine = with(stages, [request(1, 40)]);
        let chunks = plans(&mut engine, 3);
        assert_eq!(chunks, [vec![(1, 0, 16)], vec![(1, 16, 16)], vec![(1, 32, 8)]], "{stages}");
        assert_eq!(engine.executor().in_flight(), stages - 1, "each stage had one before the first was collected");
    }
}

/// Once the duration of steps is measured: here 24 tokens take as long as the constant part of a step.
#[test]
fn a_prompt_that_fits_a_step_is_cut_where_that_is_worth_it() {
    let step_time = StepTime { base_us: 240.0, prefill_token_us: 10.0, decode_row_us: 10.0, context_token_us: 0.0 };
    let geometry = Geometry { max_step_tokens: 1000, max_sequence_tokens: 2000, blocks: 800, ..GEOMETRY };
    let longest_chunks = |stages: usize| {
        let sim = SimExecutor::new(geometry, step_time, VOCABULARY, Unpaced).with_stages(stages);
        let mut engine = Engine::new(Auditor::new(sim), CONFIG);
        let mut longest = Vec::new();
        for (id, prompt_tokens) in [(0, 30), (1, 900), (2, 900), (3, 90), (4, 200)] {
            engine.add(request(id, prompt_tokens).max(12), 0.0).unwrap();
            let mut most = 0;
            while !engine.is_idle() {
                step(&mut engine, 0.0);
                most = most.max(engine.executor().last_plan().token_count());
            }
            longest.push(most);
        }
        longest
    };
    assert_eq!(longest_chunks(1), [30, 900, 900, 90, 200]);
    for (stages, cut) in [(2, 225), (3, 150)] {
        let longest = longest_chunks(stages);
        assert_eq!(longest[..3], [30, cut, cut]);
        // 72 tokens make a step four times as long as one without prefill; the measured value is near.
        assert!(longest[3..].iter().all(|tokens| (70..75).contains(tokens)), "{longest:?}");
    }
}

/// Also if the decoding sequences are in another step than the prefill.
#[test]
fn prompts_are_cut_to_what_tokens_may_wait() {
    let step_time = StepTime { base_us: 240.0, prefill_token_us: 10.0, decode_row_us: 10.0, context_token_us: 0.0 };
    let geometry = Geometry { max_step_tokens: 1000, max_sequence_tokens: 2000, blocks: 800, ..GEOMETRY };
    let sim = SimExecutor::new(geometry, step_time, VOCABULARY, Unpaced).with_stages(2);
    let config = EngineConfig { inter_token_limit: InterTokenLimit::Seconds(400e-6), ..CONFIG };
    let mut engine = Engine::new(Auditor::new(sim), config);
    for (id, prompt_tokens) in [(0, 900), (1, 300)] {
        engine.add(request(id, prompt_tokens).max(12), 0.0).unwrap();
        drain(&mut engine);
    }
    engine.add(request(2, 4).max(60), 0.0).unwrap();
    plans(&mut engine, 2);
    engine.add(request(3, 400), 0.0).unwrap();
    // A step gets half of 400 µs; it takes 120 and 5 for each token on each device.
    for plan in plans(&mut engine, 20) {
        let prompt: usize = plan.iter().filter(|row| row.0 == 3).map(|row| row.2).sum();
        assert!(prompt <= 18, "{plan:?}");
    }
}

#[test]
fn a_sequence_waits_for_its_token_and_nobody_else_does() {
    let mut engine = with(3, [request(1, 4).max(4)]);
    assert_eq!(plans(&mut engine, 2), [[(1, 0, 4)], [(1, 4, 1)]]);
    assert_eq!(engine.executor().in_flight(), 1, "the prompt was collected for its token");
    assert!(matches!(engine.executor().last_plan().rows[0].tokens[..], [InputToken::Known(_)]));
    engine.add(request(2, 4), 0.0).unwrap();
    assert_eq!(plans(&mut engine, 1), [[(2, 0, 4)]]);
    let updates = drain(&mut engine);
    assert_eq!(text(&updates, 2), alone(&request(2, 4), 4));
}

#[test]
fn steps_with_drafts_overlap_where_they_are_of_different_sequences() {
    let oracle = Oracle::new(0);
    let requests = [1, 2].map(|id| request(id, 4).max(20));
    for request in &requests {
        oracle.tell(request.id, [&request.prompt[..], &alone(request, 4).0].concat());
    }
    let mut engine = with(2, requests).with_proposer(Box::new(oracle), 4);
    let mut drafted = 0;
    while !engine.is_idle() {
        let (submitted, in_flight) = (engine.executor().submitted(), engine.executor().in_flight());
        step(&mut engine, 0.0);
        let plan = engine.executor().last_plan();
        let drafts = plan.rows.iter().any(|row| row.draft().is_some());
        drafted += usize::from(drafts && in_flight > 0 && engine.executor().submitted() > submitted);
    }
    assert!(drafted > 2, "{drafted}");
}

/// In modelled time the speedup is near the number of stages; only the first and last steps leave stages idle.
#[test]
fn stages_work_at_the_same_time() {
    let work: [(&str, Vec<Request>); 2] = [
        ("a long prompt", vec![request(1, 112).max(1)]),
        ("answers", (0..8).map(|id| request(id, 2).max(60)).collect()),
    ];
    // Reading the weights takes no time here: otherwise dividing decodes among stages gains nothing.
    let step_time = StepTime { base_us: 0.0, prefill_token_us: 1000.0, decode_row_us: 1000.0, context_token_us: 0.0 };
    let geometry = Geometry { max_step_tokens: 8, blocks: 256, ..GEOMETRY };
    for (what, requests) in work {
        let seconds = |stages: usize| {
            let clock = TestClock::default();
            let sim = SimExecutor::new(geometry, step_time, VOCABULARY, clock.clone()).with_stages(stages);
            let mut engine = Engine::new(sim, CONFIG);
            requests.iter().for_each(|request| engine.add(request.clone(), 0.0).unwrap());
            while !engine.is_idle() {
                engine.step(0.0).unwrap();
            }
            clock.clone().now().as_secs_f64()
        };
        let [one, two, four] = [1, 2, 4].map(seconds);
        assert!(one / two > 1.8 && one / four > 3.0, "{what}: {one} s, {two} s and {four} s");
    }
}
