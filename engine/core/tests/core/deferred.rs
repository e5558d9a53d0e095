//! Sequences whose token mask is late: they are deferred, and no others are delayed.

use std::sync::Arc;

use crate::support::{CONFIG, GEOMETRY, Reluctant, TestEngine, With, alone, drain, engine, logprobs, request, staged};
use crate::support::{step, text, updates_alone};
use windlass_engine_core::engine::EngineConfig;
use windlass_engine_core::executor::Geometry;
use windlass_engine_core::request::{Request, RequestId};

/// The same request under a constraint that allows every token, late.
fn late(request: &Request, late: u64) -> Request {
    Request { constraint: Some(Arc::new(Reluctant::new(late))), ..request.clone() }
}

fn add(engine: &mut TestEngine, request: Request) {
    engine.add(request, 0.0).unwrap();
}

#[test]
fn answers_are_the_same_however_late_their_constraint_is() {
    let caching = EngineConfig { enable_prefix_cache: true, ..CONFIG };
    let small = Geometry { max_step_tokens: 5, ..GEOMETRY };
    for mut engine in [engine(GEOMETRY, CONFIG), engine(small, caching), staged(GEOMETRY, CONFIG, 3)] {
        let requests = [request(1, 8).max(9), request(2, 13).max(9), request(3, 4).max(9)];
        for (request, times) in requests.iter().zip([0, 1, 4]) {
            add(&mut engine, late(request, times));
        }
        let updates = drain(&mut engine);
        for request in &requests {
            assert_eq!(text(&updates, request.id.0), alone(request, 4), "{:?}", request.id);
        }
    }
}

#[test]
fn what_was_told_of_a_prompt_is_told_once_and_whole() {
    let scored = request(1, 11).scored(2).max(5);
    let mut engine = engine(Geometry { max_step_tokens: 6, ..GEOMETRY }, CONFIG);
    add(&mut engine, late(&scored, 2));
    assert_eq!(logprobs(&drain(&mut engine), 1), logprobs(&updates_alone(&scored, 4), 1));
}

#[test]
fn a_deferred_sequence_delays_no_other() {
    let (mut engine, other) = (engine(GEOMETRY, CONFIG), request(2, 6).max(12));
    add(&mut engine, late(&request(1, 6).max(12), u64::MAX - 1));
    add(&mut engine, other.clone());
    let mut updates = Vec::new();
    // As many steps as it takes alone, and one more to fill the pipeline.
    for _ in 0..12 + 2 {
        updates.extend(step(&mut engine, 0.0).updates);
    }
    assert_eq!(text(&updates, 2), alone(&other, 4));
    assert_eq!((text(&updates, 1), engine.stats().running), ((vec![], None), 1));
    assert!(engine.finish(RequestId(1), windlass_engine_core::request::FinishReason::Abort).is_some());
    drain(&mut engine);
    assert_eq!(engine.stats().kv.held, 0);
}
