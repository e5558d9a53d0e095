//! Decisions of the scheduler, case by case.

use crate::support::{CONFIG, GEOMETRY, TestEngine, With, alone, drain, engine, logprobs, request, step, text};
use windlass_engine_core::engine::{EngineConfig, QueueLimits};
use windlass_engine_core::executor::Geometry;
use windlass_engine_core::plan::{BlockMove, InputToken, PlanRow, SequenceFailure};
use windlass_engine_core::request::{FinishReason, RejectReason, Request, RequestId};
use windlass_engine_core::update::RequestUpdate;

const CACHING: EngineConfig = EngineConfig { enable_prefix_cache: true, ..CONFIG };

fn queue(max_waiting_requests: u32, max_queued_prompt_tokens: u64) -> EngineConfig {
    EngineConfig {
        queue: QueueLimits { max_waiting_requests, max_queued_prompt_tokens, max_predicted_ttft_seconds: None },
        ..CONFIG
    }
}

fn add(engine: &mut TestEngine, request: Request) {
    engine.add(request, 0.0).expect("an admissible request");
}

/// The plan that the next step submits, as (request, first position, tokens) by row.
fn next_plan(engine: &mut TestEngine) -> Vec<(u64, u32, usize)> {
    step(engine, 0.0);
    let rows = &engine.executor().last_plan().rows;
    rows.iter().map(|row| (row.request.0, row.first_position, row.tokens.len())).collect()
}

/// Steps until a sequence is preempted.
fn until_preempted(engine: &mut TestEngine) -> Vec<RequestUpdate> {
    let mut updates = Vec::new();
    while engine.stats().preemptions == 0 {
        assert!(!engine.is_idle(), "nothing was preempted");
        updates.extend(step(engine, 0.0).updates);
    }
    updates
}

fn last_row(engine: &TestEngine) -> &PlanRow {
    &engine.executor().last_plan().rows[0]
}

#[test]
fn a_step_takes_decodes_first_then_chunks_then_new_requests_within_its_tokens() {
    let mut engine = engine(Geometry { max_step_tokens: 10, ..GEOMETRY }, CONFIG);
    add(&mut engine, request(1, 6).max(20));
    assert_eq!(next_plan(&mut engine), [(1, 0, 6)]);
    add(&mut engine, request(2, 15));
    add(&mut engine, request(3, 5));
    assert_eq!(next_plan(&mut engine), [(1, 6, 1), (2, 0, 9)]);
    assert_eq!(next_plan(&mut engine), [(1, 7, 1), (2, 9, 6), (3, 0, 3)]);
    assert_eq!(next_plan(&mut engine), [(1, 8, 1), (2, 15, 1), (3, 3, 2)]);
    assert_eq!(next_plan(&mut engine), [(1, 9, 1), (2, 16, 1), (3, 5, 1)]);
}

#[test]
fn only_the_chunk_that_ends_the_prompt_samples() {
    let mut engine = engine(Geometry { max_step_tokens: 4, ..GEOMETRY }, CONFIG);
    add(&mut engine, request(1, 8));
    step(&mut engine, 0.0);
    assert!(last_row(&engine).sample.is_none());
    step(&mut engine, 0.0);
    assert!(last_row(&engine).sample.is_some());
}

#[test]
fn the_next_step_is_submitted_before_the_last_one_is_collected() {
    let mut engine = engine(GEOMETRY, CONFIG);
    add(&mut engine, request(1, 3));
    assert_eq!(step(&mut engine, 0.0).step, None);
    let second = step(&mut engine, 0.0);
    assert!(matches!(last_row(&engine).tokens[..], [InputToken::SampledBy { row: 0, .. }]));
    assert_eq!(second.updates.len(), 1, "the first step was collected behind the second");
}

#[test]
fn nothing_is_computed_beyond_max_tokens() {
    for max_tokens in 1..5 {
        let mut engine = engine(GEOMETRY, CONFIG);
        add(&mut engine, request(1, 3).max(max_tokens));
        let mut computed = 0;
        while !engine.is_idle() {
            computed += step(&mut engine, 0.0).step.map_or(0, |step| step.tokens());
        }
        assert_eq!(computed, 3 + max_tokens - 1);
    }
}

#[test]
fn a_step_counts_prompt_tokens_and_generated_ones() {
    let mut engine = engine(GEOMETRY, CONFIG);
    add(&mut engine, request(1, 3).max(3));
    step(&mut engine, 0.0);
    add(&mut engine, request(2, 1).max(1));
    let steps: Vec<_> = (0..3).filter_map(|_| step(&mut engine, 0.0).step).collect();
    let counts = steps.iter().map(|step| (step.rows, step.prefill_tokens, step.decode_tokens));
    assert_eq!(counts.collect::<Vec<_>>(), [(1, 3, 0), (2, 1, 1), (1, 0, 1)]);
    assert!(steps.iter().all(|step| step.busy_seconds > 0.0));
}

#[test]
fn the_latest_arrival_is_preempted_and_comes_back_first() {
    // Five blocks of four tokens: three sequences begin with one each, and grow to two, then three.
    let mut engine = engine(Geometry { blocks: 5, ..GEOMETRY }, CONFIG);
    let requests = [1, 2, 3].map(|id| request(id, 4).max(8));
    requests.iter().for_each(|request| add(&mut engine, request.clone()));
    add(&mut engine, request(4, 4).max(1));
    let mut updates = until_preempted(&mut engine);
    assert_eq!(
        engine.finish(RequestId(4), FinishReason::Abort).map(|update| update.first_scheduled_seconds),
        Some(None)
    );
    assert_eq!((engine.stats().running, engine.stats().waiting, engine.stats().queued_prompt_tokens), (2, 1, 4));
    updates.extend(drain(&mut engine));
    let stats = engine.stats();
    assert_eq!(stats.recomputed_tokens, 4 * stats.preemptions, "a prompt each time, and no answer");
    let ends = updates.iter().filter(|update| update.finish.is_some()).map(|update| update.request.0);
    assert_eq!(ends.collect::<Vec<_>>(), [1, 2, 3]);
    for request in &requests {
        assert_eq!(text(&updates, request.id.0), alone(request, 4), "{request:?}");
    }
}

#[test]
fn one_preemption_serves_all_whose_blocks_it_frees() {
    // At their fifth decode all four need a block, none is free, and the last one holds three.
    let mut engine = engine(Geometry { blocks: 10, ..GEOMETRY }, CONFIG);
    for (id, prompt_tokens) in [(1, 4), (2, 4), (3, 8), (4, 8)] {
        add(&mut engine, request(id, prompt_tokens).max(8));
    }
    until_preempted(&mut engine);
    assert_eq!(engine.stats().preemptions, 1);
    assert_eq!(next_plan(&mut engine), [(1, 8, 1), (2, 8, 1), (3, 12, 1)]);
}

#[test]
fn as_many_are_preempted_as_blocks_are_needed() {
    // At their fifth decode the first three need a block, and none is free. The last two hold two each.
    let mut engine = engine(Geometry { blocks: 10, ..GEOMETRY }, CONFIG);
    for (id, prompt_tokens) in [(1, 4), (2, 4), (3, 4), (4, 2), (5, 2)] {
        add(&mut engine, request(id, prompt_tokens).max(8));
    }
    until_preempted(&mut engine);
    assert_eq!(engine.stats().preemptions, 2);
    assert_eq!(next_plan(&mut engine), [(1, 8, 1), (2, 8, 1), (3, 8, 1)]);
}

#[test]
fn a_sequence_whose_last_token_is_in_flight_is_not_preempted() {
    // The first needs a block when the second, which holds the others, is about to end.
    let mut engine = engine(Geometry { blocks: 3, ..GEOMETRY }, CONFIG);
    add(&mut engine, request(1, 3).max(5));
    add(&mut engine, request(2, 4).max(2));
    drain(&mut engine);
    assert_eq!(engine.stats().preemptions, 0);
}

#[test]
fn a_preempted_request_still_reports_what_it_first_found() {
    let mut engine = engine(Geometry { blocks: 5, ..GEOMETRY }, CACHING);
    (1..=3).for_each(|id| add(&mut engine, request(id, 4).max(8)));
    let updates = drain(&mut engine);
    assert!(updates.iter().all(|update| update.cached_tokens == 0));
    let stats = engine.stats();
    assert!(stats.preemptions > 0);
    assert_eq!((stats.prefix_query_tokens, stats.prefix_hit_tokens), (12, 0));
}

#[test]
fn admission_leaves_each_running_sequence_its_next_block() {
    let mut engine = engine(Geometry { blocks: 4, ..GEOMETRY }, CONFIG);
    add(&mut engine, request(1, 4).max(8));
    add(&mut engine, request(2, 12).max(1));
    assert_eq!(next_plan(&mut engine), [(1, 0, 4)], "three blocks are free, and one of them is spoken for");
    engine.finish(RequestId(2), FinishReason::Abort);
    add(&mut engine, request(3, 4).max(1));
    assert_eq!(next_plan(&mut engine), [(1, 4, 1), (3, 0, 4)], "two are free, and one of them is spoken for");
    assert_eq!(engine.stats().preemptions, 0);
}

#[test]
fn what_can_never_be_served_is_refused_with_its_numbers() {
    let geometry = Geometry { blocks: 8, max_sequence_tokens: 40, ..GEOMETRY };
    let cases = [
        (request(1, 0), Err(RejectReason::EmptyPrompt)),
        (request(1, 33).max(0), Err(RejectReason::NeverFits { needed_blocks: 9, total_blocks: 8 })),
        (request(1, 32).max(0), Ok(())),
        (request(1, 1).prompt([5, 100]), Err(RejectReason::UnknownToken { token: 100, vocabulary: 100 })),
        (request(1, 30).max(11), Err(RejectReason::TooLong { prompt_tokens: 30, max_tokens: 11, limit_tokens: 40 })),
        (
            request(1, 30).max(u32::MAX),
            Err(RejectReason::TooLong { prompt_tokens: 30, max_tokens: u32::MAX, limit_tokens: 40 }),
        ),
        (request(1, 30).max(10), Err(RejectReason::NeverFits { needed_blocks: 10, total_blocks: 8 })),
        (request(1, 30).max(4), Err(RejectReason::NeverFits { needed_blocks: 9, total_blocks: 8 })),
        (request(1, 30).max(3), Ok(())),
    ];
    for (request, expected) in cases {
        let mut engine = engine(geometry, CONFIG);
        assert_eq!(engine.add(request, 0.0), expected);
        drain(&mut engine);
    }
}

#[test]
fn the_queue_is_bounded_by_requests_beyond_the_free_places() {
    let mut engine = engine(Geometry { max_step_rows: 2, ..GEOMETRY }, queue(1, 1000));
    (1..=3).for_each(|id| add(&mut engine, request(id, 5)));
    let full = RejectReason::QueueFull { waiting: 3, queued_tokens: 15 };
    assert_eq!(engine.add(request(4, 5), 0.0), Err(full));
    step(&mut engine, 0.0);
    assert_eq!(engine.add(request(4, 5), 0.0), Err(RejectReason::QueueFull { waiting: 1, queued_tokens: 5 }));
    drain(&mut engine);
    add(&mut engine, request(4, 5));
}

#[test]
fn the_queue_is_bounded_by_prompt_tokens_and_a_lone_long_prompt_may_wait() {
    let mut engine = engine(GEOMETRY, queue(100, 10));
    add(&mut engine, request(1, 50));
    assert_eq!(engine.add(request(2, 1), 0.0), Err(RejectReason::QueueFull { waiting: 1, queued_tokens: 50 }));
    step(&mut engine, 0.0);
    (2..=3).for_each(|id| add(&mut engine, request(id, 5)));
    assert_eq!(engine.add(request(4, 1), 0.0), Err(RejectReason::QueueFull { waiting: 2, queued_tokens: 10 }));
}

#[test]
fn a_prompt_begins_with_the_blocks_that_are_known() {
    // (prompt of the first, prompt of the second, cached tokens of the second); blocks of four tokens.
    let cases = [
        (0..16, 0..16, 12), // the last token is always computed
        (0..16, 0..17, 16),
        (0..16, 0..10, 8),
        (0..3, 0..16, 0), // 3 of the prompt and 3 generated fill a block, of which the second knows nothing
        (0..16, 1..17, 0),
    ];
    for (first, second, cached_tokens) in cases {
        let mut engine = engine(GEOMETRY, CACHING);
        let second = request(2, 0).prompt(second);
        add(&mut engine, request(1, 0).prompt(first));
        drain(&mut engine);
        add(&mut engine, second.clone());
        let updates = drain(&mut engine);
        assert!(updates.iter().all(|update| update.cached_tokens == cached_tokens), "{updates:?}");
        assert_eq!(text(&updates, 2), alone(&second, 4));
        assert_eq!(engine.stats().prefix_hit_tokens, u64::from(cached_tokens));
    }
}

#[test]
fn generated_tokens_are_found_by_the_next_turn_of_a_conversation() {
    let mut engine = engine(GEOMETRY, CACHING);
    add(&mut engine, request(1, 5).max(8));
    let (generated, _) = text(&drain(&mut engine), 1);
    let conversation = request(1, 5).prompt.into_iter().chain(generated).chain([1, 2, 3]);
    add(&mut engine, request(2, 0).prompt(conversation));
    assert_eq!(drain(&mut engine)[0].cached_tokens, 12);
}

#[test]
fn blocks_are_shared_only_once_they_are_computed() {
    let mut engine = engine(GEOMETRY, CACHING);
    (1..=2).for_each(|id| add(&mut engine, request(id, 0).prompt(0..9)));
    step(&mut engine, 0.0);
    add(&mut engine, request(3, 0).prompt(0..9));
    let updates = drain(&mut engine);
    let cached =
        [1, 2, 3].map(|id| updates.iter().find(|update| update.request == RequestId(id)).unwrap().cached_tokens);
    assert_eq!(cached, [0, 0, 0], "the first step was in flight when the third was scheduled");
}

#[test]
fn without_the_prefix_cache_nothing_is_kept() {
    let mut engine = engine(GEOMETRY, CONFIG);
    for id in 1..=2 {
        add(&mut engine, request(id, 0).prompt(0..16));
        assert_eq!(drain(&mut engine)[0].cached_tokens, 0);
    }
    assert_eq!(engine.stats().prefix_query_tokens, 0);
    assert_eq!((engine.stats().kv.cached, engine.stats().kv.free), (0, GEOMETRY.blocks));
}

#[test]
fn the_longest_unused_prefix_gives_way_and_its_tail_before_its_head() {
    let mut engine = engine(Geometry { blocks: 8, ..GEOMETRY }, CACHING);
    let mut cached_of = |id, tokens: std::ops::Range<u32>| {
        add(&mut engine, request(id, 0).prompt(tokens).max(1));
        drain(&mut engine)[0].cached_tokens
    };
    assert_eq!(cached_of(1, 0..12), 0);
    assert_eq!(cached_of(2, 40..52), 0);
    assert_eq!(cached_of(3, 0..12), 8, "used again");
    assert_eq!(cached_of(4, 60..72), 0, "takes the two free blocks and the tail of 40..52");
    assert_eq!(cached_of(5, 0..12), 8);
    assert_eq!(cached_of(6, 40..51), 8, "its head is still there");
}

#[test]
fn a_stop_token_ends_the_text_and_is_part_of_it() {
    let (whole, _) = alone(&request(1, 5).max(10), 4);
    let stop = whole[2];
    let cut = whole.iter().position(|token| *token == stop).unwrap();
    let mut engine = engine(GEOMETRY, CONFIG);
    add(&mut engine, request(1, 5).max(10).stop(&[99, stop]));
    assert_eq!(text(&drain(&mut engine), 1), (whole[..=cut].to_vec(), Some(FinishReason::Stop)));
}

#[test]
fn stop_tokens_are_banned_before_min_tokens_and_only_then() {
    let mut engine = engine(GEOMETRY, CONFIG);
    let stop: Vec<u32> = (0..12).collect();
    add(&mut engine, request(1, 5).max(10).min(3).stop(&stop));
    let mut banned = Vec::new();
    let mut updates = Vec::new();
    while !engine.is_idle() {
        updates.extend(step(&mut engine, 0.0).updates);
        banned.push(last_row(&engine).sample.as_ref().unwrap().banned.len());
    }
    assert_eq!(banned[..4], [12, 12, 12, 0]);
    let (text, reason) = text(&updates, 1);
    assert_eq!((&text[..3], reason), (&[12, 12, 12][..], Some(FinishReason::Stop)));
    assert!(text[3..text.len() - 1].iter().all(|token| *token == 12));
}

#[test]
fn a_request_can_be_ended_from_outside_in_every_state() {
    let mut engine = engine(Geometry { max_step_rows: 2, ..GEOMETRY }, CONFIG);
    (1..=3).for_each(|id| add(&mut engine, request(id, 8).max(20)));
    step(&mut engine, 7.0);
    step(&mut engine, 8.0);
    let waiting = engine.finish(RequestId(3), FinishReason::Abort).unwrap();
    assert_eq!((waiting.finish, waiting.first_scheduled_seconds), (Some(FinishReason::Abort), None));
    let running = engine.finish(RequestId(1), FinishReason::Stop).unwrap();
    assert_eq!((running.finish, running.first_scheduled_seconds), (Some(FinishReason::Stop), Some(7.0)));
    assert_eq!(engine.finish(RequestId(1), FinishReason::Abort), None, "it has ended");
    assert_eq!(engine.finish(RequestId(9), FinishReason::Abort), None, "it never was");
    assert!(drain(&mut engine).iter().all(|update| update.request == RequestId(2)));
}

#[test]
fn a_preempted_request_can_be_ended() {
    let mut engine = engine(Geometry { blocks: 4, ..GEOMETRY }, CONFIG);
    (1..=2).for_each(|id| add(&mut engine, request(id, 4).max(12)));
    until_preempted(&mut engine);
    let update = engine.finish(RequestId(2), FinishReason::Abort).unwrap();
    assert_eq!((update.finish, update.tokens), (Some(FinishReason::Abort), vec![]));
    assert!(drain(&mut engine).iter().all(|update| update.request == RequestId(1)));
}

#[test]
fn blocks_of_an_ended_request_return_after_the_steps_that_name_them() {
    let mut engine = engine(GEOMETRY, CONFIG);
    add(&mut engine, request(1, 8).max(20));
    step(&mut engine, 0.0);
    step(&mut engine, 0.0);
    engine.finish(RequestId(1), FinishReason::Abort);
    let stats = engine.stats();
    assert_eq!((stats.running, stats.kv.held, stats.kv.leaked), (0, 3, 0), "a step is in flight");
    assert!(!engine.is_idle());
    assert_eq!(step(&mut engine, 0.0).updates, []);
    assert_eq!(engine.stats().kv.held, 0);
    assert!(engine.is_idle());
}

#[test]
fn a_failed_row_ends_its_request_alone() {
    let mut engine = engine(GEOMETRY, CONFIG);
    let other = request(2, 8);
    add(&mut engine, request(1, 8));
    add(&mut engine, other.clone());
    engine.executor().poison(RequestId(1));
    let updates = drain(&mut engine);
    assert_eq!(text(&updates, 1), (vec![], Some(FinishReason::Error)));
    assert_eq!(updates[0].failure, Some(SequenceFailure::Corrupted("poisoned".into())));
    assert_eq!(text(&updates, 2), alone(&other, 4));
}

#[test]
fn the_state_in_numbers() {
    let mut engine = engine(Geometry { max_step_rows: 2, ..GEOMETRY }, CONFIG);
    for id in 1..=4 {
        engine.add(request(id, 8).max(10), id as f64).unwrap();
    }
    step(&mut engine, 5.0);
    let updates = step(&mut engine, 6.0).updates;
    assert_eq!((updates[1].arrival_seconds, updates[1].first_scheduled_seconds), (2.0, Some(5.0)));
    let stats = engine.stats();
    assert_eq!((stats.running, stats.waiting, stats.queued_prompt_tokens), (2, 2, 16));
    assert_eq!((stats.oldest_waiting_arrival_seconds, stats.remaining_tokens), (Some(3.0), 18));
    assert_eq!((stats.kv.total, stats.kv.held, stats.kv.free), (64, 6, 58));
    assert_eq!(stats.kv.usage(), 6.0 / 64.0);
}

#[test]
#[should_panic(expected = "already live")]
fn a_live_id_cannot_be_added_again() {
    let mut engine = engine(GEOMETRY, CONFIG);
    (0..2).for_each(|_| add(&mut engine, request(1, 5)));
}

#[test]
fn an_id_can_be_used_again_while_the_old_ones_rows_are_in_flight() {
    let mut engine = engine(GEOMETRY, CONFIG);
    add(&mut engine, request(1, 8).max(20));
    step(&mut engine, 0.0);
    engine.finish(RequestId(1), FinishReason::Abort);
    let again = request(1, 0).prompt(50..55);
    add(&mut engine, again.clone());
    assert_eq!(text(&drain(&mut engine), 1), alone(&again, 4));
}

#[test]
fn a_fork_shares_full_blocks_copies_the_begun_one_and_computes_one_token() {
    // Blocks of four tokens: of ten, the first two are shared, and two tokens of the third are copied.
    let mut engine = engine(GEOMETRY, CONFIG);
    let leader = request(1, 10);
    add(&mut engine, leader.clone());
    add(&mut engine, Request { id: RequestId(2), ..leader.clone() }.fork(1));
    assert_eq!(next_plan(&mut engine), [(1, 0, 10)]);
    assert_eq!(next_plan(&mut engine), [(1, 10, 1), (2, 9, 1)]);
    let plan = engine.executor().last_plan();
    let [leader_row, fork_row] = &plan.rows[..] else { panic!("{plan:?}") };
    assert_eq!(fork_row.blocks[..2], leader_row.blocks[..2]);
    assert_eq!(plan.moves, [BlockMove::Copy { from: leader_row.blocks[2], to: fork_row.blocks[2] }]);
    let updates = drain(&mut engine);
    let (cached, own) = (updates.iter().find(|update| update.request.0 == 2).unwrap(), alone(&leader, 4));
    assert_eq!((cached.cached_tokens, text(&updates, 2)), (9, own));
}

#[test]
fn a_fork_at_the_border_of_a_block_copies_nothing() {
    for (prompt_tokens, copies) in [(9, 0), (8, 1), (10, 1), (1, 0)] {
        let mut engine = engine(GEOMETRY, CONFIG);
        let leader = request(1, prompt_tokens);
        add(&mut engine, leader.clone());
        add(&mut engine, Request { id: RequestId(2), ..leader.clone() }.fork(1));
        step(&mut engine, 0.0);
        step(&mut engine, 0.0);
        assert_eq!(engine.executor().last_plan().moves.len(), copies, "a prompt of {prompt_tokens}");
        assert_eq!(text(&drain(&mut engine), 2), alone(&leader, 4));
    }
}

#[test]
fn a_fork_of_another_prompt_or_of_nobody_is_a_request_of_its_own() {
    let mut engine = engine(GEOMETRY, CONFIG);
    let requests = [request(1, 10), request(2, 10).fork(1), request(3, 10).fork(77)];
    requests.iter().for_each(|request| add(&mut engine, request.clone()));
    let updates = drain(&mut engine);
    for request in &requests {
        assert_eq!(text(&updates, request.id.0), alone(request, 4));
    }
}

#[test]
fn a_prompt_is_scored_whole_within_the_steps_logits() {
    let mut engine = engine(GEOMETRY, CACHING);
    add(&mut engine, request(1, 20));
    drain(&mut engine);
    let scored = request(1, 20).max(0).scored(2);
    add(&mut engine, scored.clone());
    assert_eq!(next_plan(&mut engine), [(1, 0, 8)], "eight rows of logits, and nothing from the cache");
    let updates = drain(&mut engine);
    assert_eq!(text(&updates, 1), (vec![], Some(FinishReason::Length)));
    let [prompt, generated] = logprobs(&updates, 1);
    let scored_tokens: Vec<u32> = prompt.iter().map(|scores| scores.chosen.token).collect();
    assert_eq!((scored_tokens.as_slice(), generated.len()), (&scored.prompt[1..], 0));
    assert!(prompt.iter().all(|scores| scores.top.len() == 2));
}

#[test]
fn generated_tokens_are_scored_where_asked() {
    let mut engine = engine(GEOMETRY, CONFIG);
    add(&mut engine, Request { prompt_logprobs: None, ..request(1, 3).scored(1) });
    add(&mut engine, request(2, 3));
    let updates = drain(&mut engine);
    let [prompt, generated] = logprobs(&updates, 1);
    let tokens: Vec<u32> = generated.iter().map(|scores| scores.chosen.token).collect();
    assert_eq!((prompt.len(), tokens), (0, text(&updates, 1).0));
    assert_eq!(logprobs(&updates, 2), [vec![], vec![]]);
}
