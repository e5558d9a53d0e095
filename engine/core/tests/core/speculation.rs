//! Speculative decoding: it changes no token, and verifies as many draft tokens as pay.

use std::collections::HashSet;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::support::{
    Auditor, CONFIG, GEOMETRY, Oracle, TestEngine, VOCABULARY, With, alone, drain, engine, request, step, text,
};
use windlass_engine_core::constraint::{Constraint, MaskUnavailable, TokenSet};
use windlass_engine_core::draft::{DraftRequest, DraftTree, PromptLookup, Proposer, SuffixAutomaton};
use windlass_engine_core::engine::{Engine, EngineConfig};
use windlass_engine_core::executor::Geometry;
use windlass_engine_core::plan::SequenceFailure;
use windlass_engine_core::request::{FinishReason, Request, RequestId};
use windlass_engine_core::sim::{SimExecutor, StepTime, Unpaced};
use windlass_engine_core::update::DraftStats;

const WIDE: Geometry = Geometry { blocks: 1200, max_sequence_tokens: 600, max_step_logits: 32, ..GEOMETRY };

/// A device on which draft tokens cost little compared with a step.
const CHEAP_DRAFTS: StepTime =
    StepTime { base_us: 4000.0, prefill_token_us: 20.0, decode_row_us: 10.0, context_token_us: 0.0 };
/// A device on which a draft token costs as much as a token.
const COSTLY_DRAFTS: StepTime =
    StepTime { base_us: 0.0, prefill_token_us: 1000.0, decode_row_us: 1000.0, context_token_us: 0.0 };

fn drafting(geometry: Geometry, step_time: StepTime, proposer: impl Proposer + 'static, most: u32) -> TestEngine {
    let sim = SimExecutor::new(geometry, step_time, VOCABULARY, Unpaced);
    Engine::new(Auditor::new(sim), CONFIG).with_proposer(Box::new(proposer), most)
}

/// Tokens and finish reason of a request alone in a large engine without speculative decoding.
fn whole(request: &Request) -> (Vec<u32>, Option<FinishReason>) {
    let mut plain = engine(WIDE, CONFIG);
    plain.add(request.clone(), 0.0).unwrap();
    text(&drain(&mut plain), request.id.0)
}

fn oracle(requests: &[Request], errs_one_in: u64) -> Oracle {
    let oracle = Oracle::new(errs_one_in);
    for request in requests {
        oracle.tell(request.id, [&request.prompt[..], &whole(request).0].concat());
    }
    oracle
}

/// Seconds that `sequences` sequences take for 300 tokens each, and the statistics of their draft tokens.
fn measure(step_time: StepTime, errs_one_in: u64, sequences: u64) -> (f64, DraftStats) {
    let requests: Vec<Request> = (0..sequences).map(|id| request(id, 5).max(300)).collect();
    let mut engine = drafting(WIDE, step_time, oracle(&requests, errs_one_in), 8);
    requests.iter().for_each(|request| engine.add(request.clone(), 0.0).unwrap());
    let mut seconds = 0.0;
    while !engine.is_idle() {
        seconds += step(&mut engine, 0.0).step.map_or(0.0, |step| step.busy_seconds);
    }
    (seconds, engine.stats().drafts)
}

#[test]
fn draft_tokens_change_no_token_and_save_steps_where_they_are_accepted() {
    let requests: Vec<Request> = (0..4).map(|id| request(id, 5 + id as usize).max(100)).collect();
    for errs_one_in in [0, 1, 3] {
        let mut engine = drafting(WIDE, CHEAP_DRAFTS, oracle(&requests, errs_one_in), 5);
        requests.iter().for_each(|request| engine.add(request.clone(), 0.0).unwrap());
        let updates = drain(&mut engine);
        for request in &requests {
            assert_eq!(text(&updates, request.id.0), whole(request), "one wrong draft in {errs_one_in}");
        }
        let most = updates.iter().map(|update| update.tokens.len()).max().unwrap();
        assert_eq!(most > 1, errs_one_in != 1, "updates of {most} tokens");
    }
}

#[test]
fn drafting_goes_as_far_as_it_pays_and_no_further() {
    let (plain, wrong) = measure(CHEAP_DRAFTS, 1, 1);
    assert!(wrong.tokens < 40 && wrong.accepted == 0, "where nothing holds: {wrong:?}");
    let (seconds, right) = measure(CHEAP_DRAFTS, 0, 1);
    assert!(seconds < 0.25 * plain, "{seconds} s with right draft tokens, {plain} s with wrong ones");
    assert!(right.accepted == right.tokens && right.accepted_by_position[7] > 10, "{right:?}");
    assert_eq!(right.accepted_by_position.iter().sum::<u64>(), right.accepted);
    let (_, dear) = measure(COSTLY_DRAFTS, 3, 4);
    assert!(dear.tokens < 120, "where a draft costs what a token does: {dear:?}");
}

#[test]
fn a_batch_that_fills_the_device_drafts_less() {
    const FULL: StepTime = StepTime { prefill_token_us: 700.0, ..CHEAP_DRAFTS };
    let drafts = |sequences| measure(FULL, 4, sequences).1.tokens as f64 / sequences as f64;
    let (alone, together) = (drafts(1), drafts(8));
    assert!(together < 0.5 * alone, "{alone} draft tokens a sequence alone, {together} of eight");
}

#[test]
fn a_stop_token_among_the_drafts_ends_the_text_at_it() {
    let longer = request(1, 5).max(60);
    let asked = Request { logprobs: Some(1), ..longer.clone().stop(&[3]) };
    let (expected, reason) = whole(&asked);
    assert_eq!(reason, Some(FinishReason::Stop));
    let mut engine = drafting(WIDE, CHEAP_DRAFTS, oracle(&[longer], 0), 8);
    engine.add(asked, 0.0).unwrap();
    let updates = drain(&mut engine);
    assert_eq!(text(&updates, 1), (expected.clone(), reason));
    assert_eq!(crate::support::logprobs(&updates, 1)[1].len(), expected.len(), "a log probability for each token");
    assert!(engine.stats().drafts.accepted > 0);
}

#[test]
fn before_min_tokens_no_draft_lets_a_stop_token_through() {
    let asked = request(2, 5).max(60).min(30).stop(&[1, 2, 3]);
    let expected = whole(&asked);
    assert!(expected.0.len() > 30);
    let mut engine = drafting(WIDE, CHEAP_DRAFTS, oracle(std::slice::from_ref(&asked), 0), 8);
    engine.add(asked, 0.0).unwrap();
    assert_eq!(text(&drain(&mut engine), 2), expected);
    assert!(engine.stats().drafts.accepted > 10);
}

/// A costly proposer that proposes nothing, and records the length of each sequence that it is asked about.
#[derive(Clone, Debug, Default)]
struct Noting(Arc<Mutex<Vec<usize>>>);

impl Proposer for Noting {
    fn propose(&mut self, requests: &[DraftRequest<'_>]) -> Vec<DraftTree> {
        self.0.lock().unwrap().extend(requests.iter().map(|request| request.tokens.len()));
        vec![DraftTree::default(); requests.len()]
    }

    fn is_free(&self) -> bool {
        false
    }

    fn forget(&mut self, _: RequestId) {}
}

#[test]
fn costly_drafts_are_not_made_while_a_prompt_is_computed() {
    let noting = Noting::default();
    let mut engine = drafting(Geometry { max_step_tokens: 4, ..WIDE }, CHEAP_DRAFTS, noting.clone(), 8);
    engine.add(request(1, 20).max(8), 0.0).unwrap();
    drain(&mut engine);
    assert_eq!(noting.0.lock().unwrap().first(), Some(&21));
}

/// Allows the tokens 0, 1, … 12 in order, again and again.
#[derive(Debug)]
struct Counting;

impl Constraint for Counting {
    fn allowed(&self, generated: &[u32], _patience: Duration) -> Result<TokenSet, MaskUnavailable> {
        let right = generated.iter().zip(0..).all(|(token, index)| *token == index % 13);
        let mut set = TokenSet::default();
        set.insert(generated.len() as u32 % 13);
        right
            .then_some(set)
            .ok_or_else(|| SequenceFailure::Unsatisfiable(format!("{generated:?} is no counting")).into())
    }
}

#[test]
fn drafts_keep_to_a_constraint() {
    let asked = Request { constraint: Some(Arc::new(Counting)), ..request(1, 5).max(100) };
    for proposer in [Box::new(PromptLookup::new(1, 3)) as Box<dyn Proposer>, Box::new(SuffixAutomaton::new(1))] {
        let mut engine = engine(WIDE, CONFIG).with_proposer(proposer, 5);
        engine.add(asked.clone(), 0.0).unwrap();
        let counted = (0..100).map(|index| index % 13).collect();
        assert_eq!(text(&drain(&mut engine), 1), (counted, Some(FinishReason::Length)));
        let stats = engine.stats().drafts;
        assert!(stats.accepted > 50, "{stats:?}");
    }
}

#[test]
fn drafts_take_no_block_that_others_need() {
    let requests: Vec<Request> = (0..4).map(|id| request(id, 8).max(24)).collect();
    let mut engine = drafting(Geometry { blocks: 34, ..WIDE }, CHEAP_DRAFTS, oracle(&requests, 0), 8);
    requests.iter().for_each(|request| engine.add(request.clone(), 0.0).unwrap());
    let updates = drain(&mut engine);
    assert_eq!(engine.stats().preemptions, 0, "there are eight blocks for each, and two more");
    requests.iter().for_each(|request| assert_eq!(text(&updates, request.id.0), alone(request, 4)));
}

/// If a step has no room for all draft tokens, each sequence still gets its own token.
#[test]
fn drafts_leave_a_token_for_each_that_decodes() {
    let requests: Vec<Request> = (0..4).map(|id| request(id, 4).max(60)).collect();
    let mut engine = drafting(Geometry { max_step_tokens: 6, ..WIDE }, CHEAP_DRAFTS, oracle(&requests, 0), 8);
    requests.iter().for_each(|request| engine.add(request.clone(), 0.0).unwrap());
    let (mut begun, mut drafted) = (HashSet::new(), 0);
    loop {
        let outputs = step(&mut engine, 0.0);
        let all_decode = begun.len() == 4;
        begun.extend(outputs.updates.iter().map(|update| update.request));
        if outputs.updates.iter().any(|update| update.finish.is_some()) {
            break;
        }
        for step in outputs.step.iter().filter(|_| all_decode) {
            assert_eq!(step.decode_tokens, 4, "{step:?}");
            drafted += step.draft_tokens;
        }
    }
    assert!(drafted > 0);
}

#[test]
fn drafts_leave_half_of_a_step_to_prompts() {
    let [drafted, late] = [request(1, 4).max(200), request(2, 40).max(1)];
    let mut engine =
        drafting(Geometry { max_step_tokens: 8, ..WIDE }, CHEAP_DRAFTS, oracle(std::slice::from_ref(&drafted), 0), 8);
    engine.add(drafted, 0.0).unwrap();
    while engine.stats().drafts.tokens < 50 {
        step(&mut engine, 0.0);
    }
    engine.add(late, 0.0).unwrap();
    let mut steps = 0;
    while engine.stats().waiting > 0 || engine.stats().running > 1 {
        steps += step(&mut engine, 0.0).step.map_or(0, |_| 1);
    }
    assert!((6..=40 / 4 + 2).contains(&steps), "{steps} steps for 40 tokens");
}

/// Accepted draft tokens of the last step are cached like all other tokens.
#[test]
fn texts_that_were_drafted_are_found_again_to_their_end() {
    // The last token, which is not computed, begins a block and ends one.
    for tokens in [60, 59] {
        let asked = request(1, 5).max(tokens);
        let sim = SimExecutor::new(WIDE, CHEAP_DRAFTS, VOCABULARY, Unpaced);
        let config = EngineConfig { enable_prefix_cache: true, ..CONFIG };
        let mut engine =
            Engine::new(Auditor::new(sim), config).with_proposer(Box::new(oracle(std::slice::from_ref(&asked), 0)), 8);
        engine.add(asked.clone(), 0.0).unwrap();
        let updates = drain(&mut engine);
        assert!(updates.last().is_some_and(|last| last.tokens.len() > 1), "the last tokens were drafted");
        let known = [&asked.prompt[..], &text(&updates, 1).0].concat();
        engine.add(request(2, 0).prompt(known.iter().copied().chain([1])).max(1), 0.0).unwrap();
        // All but the last token were computed.
        assert_eq!(drain(&mut engine)[0].cached_tokens as usize, (known.len() - 1) / 4 * 4);
    }
}

#[test]
fn costly_drafts_are_tried_again_after_a_while() {
    let asked = request(1, 5).max(500);
    let costly = Oracle { free: false, ..oracle(std::slice::from_ref(&asked), 1) };
    let mut engine = drafting(WIDE, CHEAP_DRAFTS, costly, 4);
    engine.add(asked, 0.0).unwrap();
    let (mut tokens, mut drafted_at) = (0, Vec::new());
    while !engine.is_idle() {
        let outputs = step(&mut engine, 0.0);
        if outputs.step.is_some_and(|step| step.draft_tokens > 0) {
            drafted_at.push(tokens);
        }
        tokens += outputs.updates.iter().map(|update| update.tokens.len()).sum::<usize>();
    }
    let trials = drafted_at.windows(2).filter(|pair| pair[1] - pair[0] >= 100).count();
    assert!((2..=6).contains(&trials) && drafted_at.len() < 30, "{drafted_at:?}");
}
