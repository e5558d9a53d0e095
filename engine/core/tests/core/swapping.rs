//! Cached prompts that are swapped out and in.

use crate::support::{CONFIG, GEOMETRY, TestEngine, alone, drain, engine, request, text};
use windlass_engine_core::engine::EngineConfig;
use windlass_engine_core::executor::Geometry;
use windlass_engine_core::plan::BlockMove;
use windlass_engine_core::request::{FinishReason, Request, RequestId};
use windlass_engine_core::update::RequestUpdate;

const CACHING: EngineConfig = EngineConfig { enable_prefix_cache: true, ..CONFIG };
/// Room for one conversation of 28 tokens with its answer, and for two more in the swap space.
const SMALL: Geometry = Geometry { blocks: 9, swap_slots: 16, ..GEOMETRY };

/// Runs a request, checks that its answer is that of the request alone, and returns how many of its tokens were
/// cached.
fn serve(engine: &mut TestEngine, request: &Request) -> u32 {
    let updates = serve_all(engine, request);
    assert_eq!(text(&updates, request.id.0), alone(request, 4));
    updates[0].cached_tokens
}

fn serve_all(engine: &mut TestEngine, request: &Request) -> Vec<RequestUpdate> {
    engine.add(request.clone(), 0.0).unwrap();
    drain(engine)
}

fn again(request: &Request, id: u64) -> Request {
    Request { id: RequestId(id), ..request.clone() }
}

#[test]
fn a_prompt_whose_room_was_needed_comes_back_without_being_computed() {
    let mut engine = engine(SMALL, CACHING);
    let [first, second] = [request(1, 28), request(2, 28)];
    assert_eq!([serve(&mut engine, &first), serve(&mut engine, &second)], [0, 0]);
    assert!(engine.stats().kv.swapped >= 6, "{:?}", engine.stats().kv);
    engine.add(again(&first, 3), 0.0).unwrap();
    crate::support::step(&mut engine, 0.0);
    let back =
        engine.executor().last_plan().moves.iter().filter(|moved| matches!(moved, BlockMove::SwapIn { .. })).count();
    let updates = drain(&mut engine);
    assert_eq!((updates[0].cached_tokens, text(&updates, 3)), (24, alone(&again(&first, 3), 4)));
    assert!(back >= 5, "{back} blocks came back");
    assert_eq!(serve(&mut engine, &again(&second, 4)), 24);
    // Five blocks each time; of the four prompts, two blocks were still in the pool.
    let found = engine.stats().swap;
    assert_eq!((found.query_tokens, found.hit_tokens), (4 * 28 - 2 * 4, 2 * 5 * 4));
}

#[test]
fn without_slots_there_is_no_swap_space() {
    let mut engine = engine(Geometry { swap_slots: 0, ..SMALL }, CACHING);
    (0..3).for_each(|id| _ = serve(&mut engine, &again(&request(id % 2, 28), id)));
    assert_eq!(engine.stats().swap.query_tokens, 0);
}

#[test]
fn a_block_in_the_swap_space_already_is_not_swapped_out_again() {
    let mut engine = engine(SMALL, CACHING);
    let prompts = [request(1, 28), request(2, 28)];
    for round in 0..3 {
        for (index, prompt) in prompts.iter().enumerate() {
            serve(&mut engine, &again(prompt, 10 + round * 2 + index as u64));
        }
    }
    let before = engine.stats().kv.swapped;
    engine.add(again(&prompts[0], 50), 0.0).unwrap();
    crate::support::step(&mut engine, 0.0);
    let out =
        engine.executor().last_plan().moves.iter().filter(|moved| matches!(moved, BlockMove::SwapOut { .. })).count();
    assert_eq!((out, engine.stats().kv.swapped), (0, before));
    drain(&mut engine);
}

#[test]
fn a_full_swap_space_evicts_the_longest_unused_and_never_what_is_swapped_in() {
    for swap_slots in 1..9 {
        let mut engine = engine(Geometry { swap_slots, ..SMALL }, CACHING);
        for id in 0..12 {
            let cached = serve(&mut engine, &again(&request(id % 3, 28), 100 + id));
            assert!(cached <= 24, "{cached}");
            assert!(engine.stats().kv.swapped <= swap_slots);
        }
    }
}

#[test]
fn what_a_failed_sequence_had_is_not_found_again() {
    let mut engine = engine(SMALL, CACHING);
    let prompt = request(1, 28);
    serve(&mut engine, &prompt);
    serve(&mut engine, &request(2, 28));
    let failing = again(&prompt, 3);
    engine.executor().poison(failing.id);
    assert_eq!(text(&serve_all(&mut engine, &failing), 3).1, Some(FinishReason::Error));
    assert_eq!(serve(&mut engine, &again(&prompt, 4)), 0, "it is computed, not found");
    assert_eq!(serve(&mut engine, &again(&prompt, 5)), 24);
}

#[test]
fn slots_expire_with_their_prompts() {
    let config = EngineConfig { prefix_cache_ttl_seconds: Some(10.0), ..CACHING };
    let mut engine = engine(SMALL, config);
    (1..3).for_each(|id| _ = serve(&mut engine, &request(id, 28)));
    for (id, now, expired) in [(3, 9.0, false), (4, 25.0, true)] {
        engine.add(request(id, 4), now).unwrap();
        while !engine.is_idle() {
            crate::support::step(&mut engine, now);
        }
        assert_eq!(engine.stats().kv.swapped == 0, expired, "{now}");
    }
}

#[test]
fn what_cannot_be_brought_back_is_computed_again_and_counted() {
    let mut engine = engine(SMALL, CACHING);
    let prompts = [request(1, 28), request(2, 28)];
    prompts.iter().for_each(|prompt| _ = serve(&mut engine, prompt));
    for id in 3..9 {
        let prompt = again(&prompts[id as usize % 2], id);
        engine.executor().lose(prompt.id);
        engine.add(prompt.clone(), 0.0).unwrap();
        let (mut updates, mut why) = (Vec::new(), None);
        while !engine.is_idle() {
            let outputs = crate::support::step(&mut engine, 0.0);
            why = why.or(outputs.lost_kv);
            updates.extend(outputs.updates);
        }
        assert_eq!(text(&updates, id), alone(&prompt, 4));
        assert_eq!((engine.stats().lost_sequences, why.as_deref()), (id - 2, Some("the disk is full")));
    }
}

#[test]
fn a_recomputed_sequence_continues_its_answer_before_those_that_wait() {
    let mut engine = engine(Geometry { max_step_rows: 2, max_step_logits: 2, ..SMALL }, CACHING);
    let requests = [1, 2, 3].map(|id| Request { max_tokens: 8, ..request(id, 8) });
    requests.iter().for_each(|request| engine.add(request.clone(), 0.0).unwrap());
    let mut updates = Vec::new();
    for _ in 0..4 {
        updates.extend(crate::support::step(&mut engine, 0.0).updates);
    }
    engine.executor().lose(RequestId(1));
    updates.extend(drain(&mut engine));
    for request in &requests {
        assert_eq!(text(&updates, request.id.0), alone(request, 4), "{:?}", request.id);
    }
    let ended: Vec<u64> =
        updates.iter().filter(|update| update.finish.is_some()).map(|update| update.request.0).collect();
    assert_eq!((ended, engine.stats().lost_sequences), (vec![2, 1, 3], 1));
}
