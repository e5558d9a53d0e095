use std::sync::{Arc, Mutex};

use super::super::tests::GEOMETRY;
use super::*;
use crate::engine::EngineConfig;
use crate::plan::Ticket;
use crate::request::{CacheScope, FinishReason, Request};
use crate::sequence::{RunId, Sequence};
use crate::update::StepStats;

/// Proposes nothing, and records which requests it was asked about and told to forget.
#[derive(Clone, Debug, Default)]
struct Recorder {
    free: bool,
    asked: Arc<Mutex<Vec<u64>>>,
    forgotten: Arc<Mutex<Vec<u64>>>,
}

impl Proposer for Recorder {
    fn propose(&mut self, requests: &[DraftRequest<'_>]) -> Vec<DraftTree> {
        self.asked.lock().expect("no test panics here").extend(requests.iter().map(|request| request.request.0));
        vec![DraftTree::default(); requests.len()]
    }

    fn is_free(&self) -> bool {
        self.free
    }

    fn forget(&mut self, request: RequestId) {
        self.forgotten.lock().expect("no test panics here").push(request.0);
    }
}

fn scheduler(recorder: &Recorder) -> Scheduler {
    let mut scheduler = Scheduler::new(GEOMETRY, EngineConfig::PLAIN);
    scheduler.set_proposer(Box::new(recorder.clone()), 8);
    scheduler
}

fn speculation(free: bool) -> Speculation {
    let proposer = Box::new(Recorder { free, ..Recorder::default() });
    Speculation { proposer, max_tokens: 8, acceptance_rate: INITIAL_ACCEPTANCE, stats: DraftStats::default() }
}

/// Adds a sequence with `prompt` and `answer` tokens, `computed` of which are computed, and with draft tokens.
fn enter(scheduler: &mut Scheduler, [prompt, answer, computed]: [usize; 3], max_tokens: u32) -> usize {
    let (index, tokens) = (scheduler.running.len(), vec![1; prompt]);
    let mut sequence = Sequence::new(Request::greedy(RequestId(index as u64), tokens, max_tokens), 0.0);
    sequence.tokens.extend(vec![2; answer]);
    let table = scheduler.kv.allocate(&sequence.tokens, CacheScope::SHARED, 0).expect("blocks are free");
    let mut run = Running::new(RunId(index as u64), sequence, table, computed);
    run.draft.tree = DraftTree::chain([7, 8]);
    scheduler.running.push(run);
    index
}

const DECODING: [usize; 3] = [3, 1, 3];
/// Sequences that do not decode: two tokens to compute; a prompt of one, and of three tokens, not computed.
const OTHERS: [[usize; 3]; 3] = [[3, 2, 3], [1, 0, 0], [3, 0, 0]];

fn near(value: Option<f64>, expected: f64) -> bool {
    value.is_some_and(|value| (value - expected).abs() < 1e-9)
}

#[test]
fn each_observed_draft_token_moves_the_acceptance_rates() {
    let mut speculation = speculation(true);
    let mut draft = DraftState { tree: DraftTree::chain([7, 8]), ..DraftState::default() };
    speculation.observe(&mut draft, 7);
    assert!(near(draft.acceptance_rate, 0.55) && near(Some(speculation.acceptance_rate), 0.51), "{draft:?}");
    speculation.observe(&mut draft, 9);
    assert!(near(draft.acceptance_rate, 0.495) && near(Some(speculation.acceptance_rate), 0.4998), "{draft:?}");
    speculation.observe(&mut draft, 9);
    assert!(draft.tree.is_empty() && near(draft.acceptance_rate, 0.495), "nothing was drafted");
}

#[test]
fn a_sequence_without_proposals_is_tried_less_and_less() {
    let mut draft = DraftState::default();
    let pauses = [(); 7].map(|()| {
        draft.set_free(DraftTree::default(), 100);
        draft.resume_at - 100
    });
    assert_eq!(pauses, [1, 2, 4, 8, 16, 16, 16]);
    draft.set_free(DraftTree::chain([1]), 100);
    assert_eq!(draft.resume_at, 101);
    draft.set_costly(DraftTree::default(), 100);
    assert_eq!(draft.resume_at, 228);
}

#[test]
fn drafts_are_counted_by_step_and_by_position() {
    let mut stats = DraftStats::default();
    [(3, 2), (4, 1)].into_iter().for_each(|(drafted, accepted)| stats.count(drafted, accepted));
    assert_eq!(
        (stats.drafts, stats.tokens, stats.accepted, &stats.accepted_by_position[..3]),
        (2, 7, 3, &[2, 1, 0][..])
    );
    let mut scheduler = scheduler(&Recorder::default());
    let index = enter(&mut scheduler, DECODING, 9);
    scheduler.record_verification(index, &[7], 0);
    assert_eq!(scheduler.draft_stats(), DraftStats::default(), "none was computed");
}

#[test]
fn a_draft_pays_where_its_time_gives_fewer_tokens_without_it() {
    assert_eq!(Scheduler::new(GEOMETRY, EngineConfig::PLAIN).min_acceptance(), f64::INFINITY);
    let min_acceptance = |seconds: [f64; 3], decoding: usize| {
        let mut scheduler = scheduler(&Recorder::default());
        for step in 0..90_u32 {
            let (prompt, rows, drafts) = (u32::from(step % 3 == 0), step % 5 + 1, step % 7);
            let [step, row, draft] = seconds;
            let taken = step + row * f64::from(rows) + draft * f64::from(drafts);
            scheduler.step_time.observe(prompt, rows, drafts, taken);
        }
        (0..decoding).for_each(|_| _ = enter(&mut scheduler, DECODING, 9));
        enter(&mut scheduler, OTHERS[0], 9);
        scheduler.min_acceptance()
    };
    // A step of four rows takes 6 ms, four draft tokens 2.
    for (seconds, decoding, expected) in [
        ([4e-3, 0.5e-3, 0.5e-3], 4, MARGIN / 3.0),
        ([4e-3, 0.5e-3, 0.5e-3], 0, MARGIN / 9.0),
        ([4e-3, 0.5e-3, 0.0], 4, MARGIN * MIN_COST),
        ([0.0, 0.0, 0.0], 4, MARGIN * INITIAL_COST),
    ] {
        let min_acceptance = min_acceptance(seconds, decoding);
        assert!((min_acceptance / expected - 1.0).abs() < 0.02, "{min_acceptance}, not {expected}, of {seconds:?}");
    }
    assert!(near(Some(scheduler(&Recorder::default()).min_acceptance()), MARGIN * INITIAL_COST));
}

#[test]
fn a_step_waits_for_drafts_of_who_decodes_and_may_have_them() {
    let mut scheduler = scheduler(&Recorder::default());
    let decoding = enter(&mut scheduler, DECODING, 9);
    let others = OTHERS.map(|other| enter(&mut scheduler, other, 9));
    let at_its_end = enter(&mut scheduler, DECODING, 2);
    let (free, costly) = (speculation(true), speculation(false));
    let [low, high] = [0.49, INITIAL_ACCEPTANCE];
    let run = &mut scheduler.running[decoding];
    assert!(free.wants_draft(run, low) && !free.wants_draft(run, high), "made, and it pays or not");
    assert!(costly.wants_draft(run, low) && costly.wants_draft(run, high), "made, so it is computed");
    run.draft.tree = DraftTree::default();
    run.draft.resume_at = 4;
    assert!(!free.wants_draft(run, low), "none was made");
    assert!(costly.wants_draft(run, high), "it is due");
    run.draft.resume_at = 5;
    assert!(costly.wants_draft(run, low) && !costly.wants_draft(run, high), "it pays or not");
    for other in others.into_iter().chain([at_its_end]) {
        let run = &scheduler.running[other];
        assert!(!free.wants_draft(run, low) && !costly.wants_draft(run, low), "{other}");
    }
}

#[test]
fn free_drafts_are_due_where_they_are_of_use_and_none_is_left() {
    let mut scheduler = scheduler(&Recorder::default());
    let decoding = enter(&mut scheduler, DECODING, 9);
    let without_prompt = enter(&mut scheduler, OTHERS[1], 9);
    let at_its_end = enter(&mut scheduler, DECODING, 2);
    let is_due = |index: usize, draft: DraftState| draft.is_due(&scheduler.running[index]);
    let (none, made) = (DraftState::default(), DraftState { tree: DraftTree::chain([7]), ..DraftState::default() });
    assert!(is_due(decoding, none.clone()) && !is_due(decoding, made));
    assert!(is_due(decoding, DraftState { resume_at: 4, ..DraftState::default() }));
    assert!(!is_due(decoding, DraftState { resume_at: 5, ..DraftState::default() }));
    assert!(!is_due(without_prompt, none.clone()) && !is_due(at_its_end, none));
}

#[test]
fn drafts_go_as_deep_as_they_pay_and_one_that_was_costly_is_computed() {
    let draft = DraftState { tree: DraftTree::chain([7, 8, 9]), ..DraftState::default() };
    let counts =
        |free: bool| [0.6, 0.3, 0.25, 0.2].map(|min_acceptance| speculation(free).count(&draft, min_acceptance));
    assert_eq!((counts(true), counts(false)), ([0, 1, 1, 2], [1, 1, 1, 2]));
}

#[test]
fn only_who_decodes_and_draws_nothing_is_drafted_for() {
    let mut scheduler = scheduler(&Recorder { free: true, ..Recorder::default() });
    let decoding = enter(&mut scheduler, DECODING, 9);
    let others = OTHERS.map(|other| enter(&mut scheduler, other, 9));
    let drawing = enter(&mut scheduler, DECODING, 9);
    scheduler.running[drawing].submit(4, true, Ticket(0), 0);
    for other in others.into_iter().chain([drawing]) {
        assert_eq!(scheduler.draft(other, 8, 0.0), DraftTree::default(), "{other}");
    }
    assert_eq!(scheduler.draft(decoding, 8, 0.0), DraftTree::chain([7, 8]));
    let longer = enter(&mut scheduler, [5, 1, 5], 9);
    assert_eq!(scheduler.draft(longer, 8, 0.0).len(), 2);
    assert_eq!(scheduler.running[longer].table.covered_blocks(), 2, "for a token and two draft tokens behind five");
    assert_eq!(scheduler.draft(decoding, 1, 0.0).len(), 1);
}

#[test]
fn half_of_a_step_is_left_to_prompts() {
    let mut scheduler = scheduler(&Recorder::default());
    enter(&mut scheduler, DECODING, 9);
    assert_eq!(scheduler.reserved_for_prompts(), 0);
    enter(&mut scheduler, OTHERS[2], 9);
    assert_eq!(scheduler.reserved_for_prompts(), 8);
}

#[test]
fn a_step_waits_for_those_with_drafts() {
    for (draft_tokens, waits) in [(0, false), (3, true)] {
        let mut scheduler = scheduler(&Recorder { free: true, ..Recorder::default() });
        let stats = StepStats { draft_tokens, ..StepStats::default() };
        scheduler.submitted(Ticket(0), Vec::new(), &[], stats);
        assert_eq!(scheduler.waits_for_results(), waits, "{draft_tokens}");
    }
}

#[test]
fn costly_drafts_are_asked_for_once_and_forgotten_with_their_request() {
    let recorder = Recorder::default();
    let mut scheduler = scheduler(&recorder);
    [DECODING, DECODING, OTHERS[0]].into_iter().for_each(|state| _ = enter(&mut scheduler, state, 9));
    scheduler.running[1].draft = DraftState::default();
    scheduler.running[2].draft = DraftState::default();
    scheduler.propose_costly_drafts();
    assert_eq!(*recorder.asked.lock().expect("no test panics here"), [1], "who decodes and has none");
    scheduler.finish(RequestId(1), FinishReason::Abort).expect("it is live");
    assert_eq!(*recorder.forgotten.lock().expect("no test panics here"), [1]);
}
