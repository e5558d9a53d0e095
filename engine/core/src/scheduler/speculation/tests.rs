use std::sync::{Arc, Mutex};

use super::super::tests::GEOMETRY;
use super::*;
use crate::engine::EngineConfig;
use crate::plan::Ticket;
use crate::request::{CacheScope, FinishReason, Request};
use crate::sequence::{Sequence, StayId};
use crate::update::StepStats;

/// Guesses nothing, and notes whom it was asked about and who was forgotten.
#[derive(Clone, Debug, Default)]
struct Noting {
    free: bool,
    asked: Arc<Mutex<Vec<u64>>>,
    forgotten: Arc<Mutex<Vec<u64>>>,
}

impl Proposer for Noting {
    fn propose(&mut self, asks: &[Ask<'_>]) -> Vec<DraftTree> {
        self.asked.lock().expect("no test panics here").extend(asks.iter().map(|ask| ask.request.0));
        vec![DraftTree::default(); asks.len()]
    }

    fn is_free(&self) -> bool {
        self.free
    }

    fn forget(&mut self, request: RequestId) {
        self.forgotten.lock().expect("no test panics here").push(request.0);
    }
}

fn scheduler(noting: &Noting) -> Scheduler {
    let mut scheduler = Scheduler::new(GEOMETRY, EngineConfig::PLAIN);
    scheduler.speculate(Box::new(noting.clone()), 8);
    scheduler
}

fn speculation(free: bool) -> Speculation {
    let proposer = Box::new(Noting { free, ..Noting::default() });
    Speculation { proposer, most: 8, held: FIRST_SHARE, stats: DraftStats::default() }
}

/// A sequence with a prompt and answer of so many tokens, of which so many are computed, and guesses for it.
fn enter(scheduler: &mut Scheduler, [prompt, answer, computed]: [usize; 3], max_tokens: u32) -> usize {
    let (index, tokens) = (scheduler.running.len(), vec![1; prompt]);
    let mut sequence = Sequence::new(Request::greedy(RequestId(index as u64), tokens, max_tokens), 0.0);
    sequence.tokens.extend(vec![2; answer]);
    let table = scheduler.kv.open(&sequence.tokens, CacheScope::SHARED, 0).expect("blocks are free");
    let mut run = Running::new(StayId(index as u64), sequence, table, computed);
    run.guess.tree = DraftTree::chain([7, 8]);
    scheduler.running.push(run);
    index
}

const DECODING: [usize; 3] = [3, 1, 3];
/// With two tokens to compute, with none of a prompt of one computed, and with none of one of three.
const OTHERS: [[usize; 3]; 3] = [[3, 2, 3], [1, 0, 0], [3, 0, 0]];

fn near(value: Option<f64>, expected: f64) -> bool {
    value.is_some_and(|value| (value - expected).abs() < 1e-9)
}

#[test]
fn each_guess_that_was_scored_moves_what_is_known_of_guesses() {
    let mut speculation = speculation(true);
    let mut guess = Guess { tree: DraftTree::chain([7, 8]), ..Guess::default() };
    speculation.learn(&mut guess, 7);
    assert!(near(guess.held, 0.55) && near(Some(speculation.held), 0.51), "{guess:?}");
    speculation.learn(&mut guess, 9);
    assert!(near(guess.held, 0.495) && near(Some(speculation.held), 0.4998), "{guess:?}");
    speculation.learn(&mut guess, 9);
    assert!(guess.tree.is_empty() && near(guess.held, 0.495), "nothing was guessed");
}

#[test]
fn who_had_no_guess_is_asked_about_less_and_less() {
    let mut guess = Guess::default();
    let pauses = [(); 7].map(|()| {
        guess.made(DraftTree::default(), 100);
        guess.resume_at - 100
    });
    assert_eq!(pauses, [1, 2, 4, 8, 16, 16, 16]);
    guess.made(DraftTree::chain([1]), 100);
    assert_eq!(guess.resume_at, 101);
    guess.tried(DraftTree::default(), 100);
    assert_eq!(guess.resume_at, 228);
}

#[test]
fn guesses_are_counted_by_step_and_by_place() {
    let mut stats = DraftStats::default();
    [(3, 2), (4, 1)].into_iter().for_each(|(drafted, accepted)| stats.count(drafted, accepted));
    assert_eq!(
        (stats.drafts, stats.tokens, stats.accepted, &stats.accepted_by_position[..3]),
        (2, 7, 3, &[2, 1, 0][..])
    );
    let mut scheduler = scheduler(&Noting::default());
    let index = enter(&mut scheduler, DECODING, 9);
    scheduler.judge(index, &[7], 0);
    assert_eq!(scheduler.draft_stats(), DraftStats::default(), "none was computed");
}

#[test]
fn a_guess_pays_where_its_time_gives_fewer_tokens_without_it() {
    assert_eq!(Scheduler::new(GEOMETRY, EngineConfig::PLAIN).bar(), f64::INFINITY);
    let bar = |seconds: [f64; 3], decoding: usize| {
        let mut scheduler = scheduler(&Noting::default());
        for step in 0..90_u32 {
            let (prompt, rows, guesses) = (u32::from(step % 3 == 0), step % 5 + 1, step % 7);
            let [step, row, guess] = seconds;
            let taken = step + row * f64::from(rows) + guess * f64::from(guesses);
            scheduler.step_time.observe(prompt, rows, guesses, taken);
        }
        (0..decoding).for_each(|_| _ = enter(&mut scheduler, DECODING, 9));
        enter(&mut scheduler, OTHERS[0], 9);
        scheduler.bar()
    };
    // A step of four rows takes 6 ms, four guesses 2.
    for (seconds, decoding, expected) in [
        ([4e-3, 0.5e-3, 0.5e-3], 4, MARGIN / 3.0),
        ([4e-3, 0.5e-3, 0.5e-3], 0, MARGIN / 9.0),
        ([4e-3, 0.5e-3, 0.0], 4, MARGIN * LEAST_COST),
        ([0.0, 0.0, 0.0], 4, MARGIN * FIRST_COST),
    ] {
        let bar = bar(seconds, decoding);
        assert!((bar / expected - 1.0).abs() < 0.02, "{bar}, not {expected}, of {seconds:?}");
    }
    assert!(near(Some(scheduler(&Noting::default()).bar()), MARGIN * FIRST_COST));
}

#[test]
fn a_step_waits_for_guesses_of_who_decodes_and_may_have_them() {
    let mut scheduler = scheduler(&Noting::default());
    let decoding = enter(&mut scheduler, DECODING, 9);
    let others = OTHERS.map(|other| enter(&mut scheduler, other, 9));
    let at_its_end = enter(&mut scheduler, DECODING, 2);
    let (free, costly) = (speculation(true), speculation(false));
    let [low, high] = [0.49, FIRST_SHARE];
    let run = &mut scheduler.running[decoding];
    assert!(free.wants(run, low) && !free.wants(run, high), "made, and it pays or not");
    assert!(costly.wants(run, low) && costly.wants(run, high), "made, so it is computed");
    run.guess.tree = DraftTree::default();
    run.guess.resume_at = 4;
    assert!(!free.wants(run, low), "none was made");
    assert!(costly.wants(run, high), "it is due");
    run.guess.resume_at = 5;
    assert!(costly.wants(run, low) && !costly.wants(run, high), "it pays or not");
    for other in others.into_iter().chain([at_its_end]) {
        let run = &scheduler.running[other];
        assert!(!free.wants(run, low) && !costly.wants(run, low), "{other}");
    }
}

#[test]
fn free_guesses_are_due_where_they_are_of_use_and_none_is_left() {
    let mut scheduler = scheduler(&Noting::default());
    let decoding = enter(&mut scheduler, DECODING, 9);
    let without_prompt = enter(&mut scheduler, OTHERS[1], 9);
    let at_its_end = enter(&mut scheduler, DECODING, 2);
    let is_due = |index: usize, guess: Guess| guess.is_due(&scheduler.running[index]);
    let (none, made) = (Guess::default(), Guess { tree: DraftTree::chain([7]), ..Guess::default() });
    assert!(is_due(decoding, none.clone()) && !is_due(decoding, made));
    assert!(is_due(decoding, Guess { resume_at: 4, ..Guess::default() }));
    assert!(!is_due(decoding, Guess { resume_at: 5, ..Guess::default() }));
    assert!(!is_due(without_prompt, none.clone()) && !is_due(at_its_end, none));
}

#[test]
fn guesses_go_as_deep_as_they_pay_and_one_that_was_costly_is_computed() {
    let guess = Guess { tree: DraftTree::chain([7, 8, 9]), ..Guess::default() };
    let counts = |free: bool| [0.6, 0.3, 0.25, 0.2].map(|bar| speculation(free).count(&guess, bar));
    assert_eq!((counts(true), counts(false)), ([0, 1, 1, 2], [1, 1, 1, 2]));
}

#[test]
fn only_who_decodes_and_draws_nothing_is_drafted_for() {
    let mut scheduler = scheduler(&Noting { free: true, ..Noting::default() });
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
    assert_eq!(scheduler.running[longer].table.covered_blocks(), 2, "for a token and two guesses behind five");
    assert_eq!(scheduler.draft(decoding, 1, 0.0).len(), 1);
}

#[test]
fn half_of_a_step_is_left_to_prompts() {
    let mut scheduler = scheduler(&Noting::default());
    enter(&mut scheduler, DECODING, 9);
    assert_eq!(scheduler.reserved_for_prompts(), 0);
    enter(&mut scheduler, OTHERS[2], 9);
    assert_eq!(scheduler.reserved_for_prompts(), 8);
}

#[test]
fn a_step_waits_for_those_with_guesses() {
    for (draft_tokens, waits) in [(0, false), (3, true)] {
        let mut scheduler = scheduler(&Noting { free: true, ..Noting::default() });
        let stats = StepStats { draft_tokens, ..StepStats::default() };
        scheduler.submitted(Ticket(0), Vec::new(), &[], stats);
        assert_eq!(scheduler.waits_for_results(), waits, "{draft_tokens}");
    }
}

#[test]
fn costly_guesses_are_asked_for_once_and_forgotten_with_their_request() {
    let noting = Noting::default();
    let mut scheduler = scheduler(&noting);
    [DECODING, DECODING, OTHERS[0]].into_iter().for_each(|state| _ = enter(&mut scheduler, state, 9));
    scheduler.running[1].guess = Guess::default();
    scheduler.running[2].guess = Guess::default();
    scheduler.guess_at_cost();
    assert_eq!(*noting.asked.lock().expect("no test panics here"), [1], "who decodes and has none");
    scheduler.finish(RequestId(1), FinishReason::Abort).expect("it is live");
    assert_eq!(*noting.forgotten.lock().expect("no test panics here"), [1]);
}
