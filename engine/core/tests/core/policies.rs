//! Order of service, size of steps, and isolation of tenants.

use crate::support::{CONFIG, GEOMETRY, TestEngine, VOCABULARY, With, alone, drain, engine, request, step, text};
use windlass_engine_core::engine::{Engine, EngineConfig, InterTokenLimit, Policy, QueueLimits};
use windlass_engine_core::executor::Geometry;
use windlass_engine_core::request::{RejectReason, Request, RequestId};
use windlass_engine_core::sim::{SimExecutor, StepTime, Unpaced};
use windlass_engine_core::update::RequestUpdate;

/// One sequence at a time, so that requests finish in the order of service.
const ONE: Geometry = Geometry { max_step_rows: 1, ..GEOMETRY };
/// Chunks large enough to be cut.
const WIDE: Geometry = Geometry { blocks: 2000, max_sequence_tokens: 4000, max_step_tokens: 1024, ..GEOMETRY };

fn with(policy: Policy) -> EngineConfig {
    EngineConfig { policy, ..CONFIG }
}

const PRIORITY: Policy = Policy::Priority { preemption_threshold: 2 };

fn add(engine: &mut TestEngine, request: Request) {
    engine.add(request, 0.0).expect("an admissible request");
}

fn order_of_ends(updates: &[RequestUpdate]) -> Vec<u64> {
    updates.iter().filter(|update| update.finish.is_some()).map(|update| update.request.0).collect()
}

#[test]
fn the_lowest_priority_goes_first_and_of_equals_the_first_to_come() {
    let mut engine = engine(ONE, with(PRIORITY));
    for (id, priority) in [(1, 5), (2, 0), (3, -4), (4, 0), (5, i32::MAX), (6, i32::MIN)] {
        add(&mut engine, request(id, 4).priority(priority));
    }
    assert_eq!(order_of_ends(&drain(&mut engine)), [6, 3, 2, 4, 1, 5]);
}

#[test]
fn first_come_first_served_has_no_priorities() {
    let mut engine = engine(ONE, CONFIG);
    (1..=3).for_each(|id| add(&mut engine, request(id, 4).priority(-(id as i32))));
    assert_eq!(order_of_ends(&drain(&mut engine)), [1, 2, 3]);
}

#[test]
fn a_running_sequence_is_preempted_for_one_more_urgent_by_more_than_the_threshold() {
    for (priority, order, preemptions) in [(-3, vec![2, 1], 1), (-2, vec![1, 2], 0)] {
        let mut engine = engine(ONE, with(PRIORITY));
        let first = request(1, 4).max(20);
        add(&mut engine, first.clone());
        let mut updates: Vec<_> = (0..5).flat_map(|_| step(&mut engine, 0.0).updates).collect();
        add(&mut engine, request(2, 4).priority(priority));
        updates.extend(step(&mut engine, 0.0).updates);
        assert_eq!(engine.stats().preemptions, preemptions, "{priority}, at once");
        updates.extend(drain(&mut engine));
        assert_eq!((order_of_ends(&updates), engine.stats().preemptions), (order, preemptions), "{priority}");
        assert_eq!(text(&updates, 1), alone(&first, 4));
    }
}

#[test]
fn a_sequence_that_waits_for_its_last_token_is_not_preempted() {
    let mut engine = engine(ONE, with(PRIORITY));
    add(&mut engine, request(1, 4).max(2));
    (0..2).for_each(|_| drop(step(&mut engine, 0.0)));
    add(&mut engine, request(2, 4).priority(-9));
    assert_eq!(order_of_ends(&drain(&mut engine)), [1, 2]);
    assert_eq!(engine.stats().preemptions, 0);
}

/// As many are preempted as blocks are missing, and no more: the urgent request needs four blocks of its own, and one
/// for the next token of each running sequence. Cached blocks count as free ones; blocks shared with a running
/// sequence count as better than free, except that of the last token.
#[test]
fn as_many_are_preempted_as_an_urgent_request_needs_blocks() {
    for (blocks, idle_tokens, running_tokens, preemptions) in [
        (16, 0, 0, 0),
        (15, 0, 0, 1),
        (12, 0, 0, 1),
        (11, 0, 0, 2),
        (16, 8, 0, 0),
        (15, 8, 0, 1),
        (14, 0, 8, 0),
        (13, 0, 8, 1),
        (15, 0, 16, 0),
        (14, 0, 16, 1),
    ] {
        let config = EngineConfig { enable_prefix_cache: true, ..with(PRIORITY) };
        let mut engine = engine(Geometry { blocks, ..GEOMETRY }, config);
        let urgent = request(1, 16).priority(-9).max(1);
        let begun = |id: u64, tokens: usize, other: usize| {
            let others = request(id, other).prompt;
            request(id, 1).prompt(urgent.prompt[..tokens].iter().copied().chain(others))
        };
        if idle_tokens > 0 {
            add(&mut engine, begun(2, idle_tokens, 1).max(1));
            drain(&mut engine);
        }
        // Three blocks each, in the next steps; five if the first begins with the whole prompt of the urgent one.
        add(&mut engine, begun(3, running_tokens, 9usize.saturating_sub(running_tokens).max(1)));
        (4..6).for_each(|id| add(&mut engine, request(id, 9)));
        (0..2).for_each(|_| drop(step(&mut engine, 0.0)));
        add(&mut engine, urgent.clone());
        drain(&mut engine);
        assert_eq!(engine.stats().preemptions, preemptions, "{blocks} {idle_tokens} {running_tokens}");
    }
}

#[test]
fn blocks_are_taken_from_the_least_urgent() {
    // Three blocks each in the end, and five in all: one has to be preempted, and it is not the latest.
    let mut engine = engine(Geometry { blocks: 5, ..GEOMETRY }, with(PRIORITY));
    add(&mut engine, request(1, 4).max(8).priority(1));
    add(&mut engine, request(2, 4).max(8));
    add(&mut engine, request(3, 4).max(8));
    let updates = drain(&mut engine);
    assert!(engine.stats().preemptions > 0);
    assert_eq!(order_of_ends(&updates), [2, 3, 1]);
}

#[test]
fn debts_are_forgotten_once_nobody_waits_or_runs() {
    let mut engine = engine(Geometry { max_sequence_tokens: 6000, blocks: 1600, ..ONE }, with(Policy::Fair));
    add(&mut engine, request(1, 5000).max(1).tenant(1));
    drain(&mut engine);
    add(&mut engine, request(2, 4).tenant(1));
    add(&mut engine, request(3, 4).tenant(2));
    assert_eq!(order_of_ends(&drain(&mut engine)), [2, 3], "more than two quanta");
}

#[test]
fn tenants_take_turns_by_tokens_however_many_requests_one_has() {
    let mut engine = engine(Geometry { max_sequence_tokens: 2000, blocks: 600, ..ONE }, with(Policy::Fair));
    for id in 0..12 {
        add(&mut engine, request(id, 1000).max(1).tenant(1));
    }
    add(&mut engine, request(100, 1000).max(1).tenant(2));
    add(&mut engine, request(101, 1000).max(1).tenant(2));
    let order = order_of_ends(&drain(&mut engine));
    let last = order.iter().position(|id| *id == 101).unwrap();
    assert!(last < 8, "the second tenant waits for the first one's flood: {order:?}");
    assert_eq!(order.len(), 14);
}

/// An engine with the longest-prefix policy, with the prompt of request 1 in its cache.
fn longest_prefix_first() -> TestEngine {
    let config = EngineConfig { enable_prefix_cache: true, ..with(Policy::LongestPrefix) };
    let mut engine = engine(ONE, config);
    add(&mut engine, request(1, 40));
    drain(&mut engine);
    engine
}

fn drain_at(engine: &mut TestEngine, now: f64) -> Vec<RequestUpdate> {
    let mut updates = Vec::new();
    while !engine.is_idle() {
        updates.extend(step(engine, now).updates);
    }
    updates
}

#[test]
fn the_longest_prefix_in_the_cache_goes_first_but_not_for_ever() {
    let mut engine = longest_prefix_first();
    let later = Request { id: RequestId(3), ..request(1, 40) };
    add(&mut engine, request(2, 40));
    add(&mut engine, later.clone());
    assert_eq!(order_of_ends(&drain(&mut engine)), [3, 2]);
    engine.add(request(4, 40), 0.0).unwrap();
    engine.add(Request { id: RequestId(5), ..later }, 9.0).unwrap();
    assert_eq!(
        order_of_ends(&drain_at(&mut engine, 10.0)),
        [4, 5],
        "ten seconds are longer than anybody is passed over"
    );
}

#[test]
fn a_request_is_passed_over_for_two_seconds_after_it_came() {
    for (now, order) in [(102.0, [3, 2]), (102.5, [2, 3])] {
        let mut engine = longest_prefix_first();
        engine.add(request(2, 40), 100.0).unwrap();
        engine.add(Request { id: RequestId(3), ..request(1, 40) }, 100.0).unwrap();
        assert_eq!(order_of_ends(&drain_at(&mut engine, now)), order, "{now}");
    }
}

#[test]
fn of_equal_prefixes_the_earlier_request_goes_first() {
    let mut engine = longest_prefix_first();
    (2..4).for_each(|id| add(&mut engine, Request { id: RequestId(id), ..request(1, 40) }));
    (4..6).for_each(|id| add(&mut engine, request(id, 40)));
    assert_eq!(order_of_ends(&drain(&mut engine)), [2, 3, 4, 5]);
}

#[test]
fn prefill_is_cut_so_that_decodes_keep_their_target() {
    // A step takes 3.9 ms and 20 µs for each prompt token: 8 ms are some 200 tokens.
    let target = 0.008;
    let slowest = |gap| {
        let mut engine = engine(WIDE, EngineConfig { inter_token_limit: gap, ..CONFIG });
        add(&mut engine, request(1, 100).max(300));
        (0..20).for_each(|_| drop(step(&mut engine, 0.0)));
        add(&mut engine, request(2, 500).max(1));
        (0..20).for_each(|_| drop(step(&mut engine, 0.0)));
        // By now it has measured prefill.
        add(&mut engine, request(3, 3000).max(1));
        let steps: Vec<_> = (0..60).filter_map(|_| step(&mut engine, 0.0).step).collect();
        assert!(steps.iter().map(|step| step.prefill_tokens).sum::<u32>() >= 3000, "the prompt was computed");
        steps.iter().map(|step| step.busy_seconds).fold(0.0, f64::max)
    };
    assert!(slowest(InterTokenLimit::Unlimited) > 2.0 * target, "without a target chunks are large");
    let slowest = slowest(InterTokenLimit::Seconds(target));
    assert!((0.7 * target..1.15 * target).contains(&slowest), "{slowest}");
}

#[test]
fn a_target_that_cannot_be_held_still_lets_prompts_through() {
    let config = EngineConfig { inter_token_limit: InterTokenLimit::Seconds(1e-9), ..CONFIG };
    let mut engine = engine(WIDE, config);
    add(&mut engine, request(1, 100).max(300));
    (0..20).for_each(|_| drop(step(&mut engine, 0.0)));
    add(&mut engine, request(2, 200).max(1));
    assert_eq!(order_of_ends(&drain(&mut engine)), [2, 1]);
}

#[test]
fn a_request_whose_first_token_would_come_too_late_is_told_when() {
    let queue = QueueLimits { max_predicted_ttft_seconds: Some(0.05), ..CONFIG.queue };
    let mut engine = engine(WIDE, EngineConfig { queue, ..CONFIG });
    // It has to measure its speed first; a request is never rejected if it is alone.
    for id in 1..=3 {
        add(&mut engine, request(id, 3000).max(10));
        drain(&mut engine);
    }
    assert!(engine.stats().predicted_ttft_seconds.is_some());
    let refused = (10..30).find_map(|id| engine.add(request(id, 1000).max(10), 0.0).err());
    let Some(RejectReason::TooSlow { predicted_milliseconds, limit_milliseconds: 50 }) = refused else {
        panic!("{refused:?}")
    };
    assert!((50..150).contains(&predicted_milliseconds), "{predicted_milliseconds}");
    drain(&mut engine);
    add(&mut engine, request(99, 3000).max(10));
}

#[test]
fn predictions_come_true() {
    let mut engine = engine(WIDE, CONFIG);
    for id in 1..=3 {
        add(&mut engine, request(id, 3000).max(10));
        drain(&mut engine);
    }
    (10..14).for_each(|id| add(&mut engine, request(id, 2000).max(5)));
    let predicted = engine.stats().predicted_ttft_seconds.unwrap();
    add(&mut engine, request(20, 1).max(5));
    let mut busy = 0.0;
    loop {
        let outputs = step(&mut engine, 0.0);
        busy += outputs.step.map_or(0.0, |step| step.busy_seconds);
        if outputs.updates.iter().any(|update| update.request.0 == 20) {
            break;
        }
    }
    assert!((0.75..1.35).contains(&(predicted / busy)), "{predicted} s were predicted, {busy} s it took");
}

#[test]
fn tenants_find_nothing_of_each_other_in_the_cache() {
    let mut engine = engine(GEOMETRY, EngineConfig { enable_prefix_cache: true, ..CONFIG });
    let cached = |engine: &mut TestEngine, id, tenant| {
        add(engine, Request { id: RequestId(id), ..request(1, 40).tenant(tenant) });
        drain(engine)[0].cached_tokens
    };
    assert_eq!(cached(&mut engine, 1, 1), 0);
    assert_eq!(cached(&mut engine, 2, 2), 0);
    assert_eq!(cached(&mut engine, 3, 1), 36);
    assert_eq!(cached(&mut engine, 4, 2), 36);
}

#[test]
fn what_nobody_used_for_its_time_is_forgotten() {
    let config = EngineConfig { enable_prefix_cache: true, prefix_cache_ttl_seconds: Some(60.0), ..CONFIG };
    let mut engine = engine(GEOMETRY, config);
    let mut cached = |now: f64| {
        engine.add(Request { id: RequestId(now as u64), ..request(1, 40) }, now).unwrap();
        let mut updates = Vec::new();
        while !engine.is_idle() {
            updates.extend(step(&mut engine, now).updates);
        }
        updates[0].cached_tokens
    };
    assert_eq!((cached(0.0), cached(50.0), cached(100.0)), (0, 36, 36), "each use counts anew");
    assert_eq!(cached(161.0), 0);
}

/// Sorted seconds between the tokens of decoding sequences while long prompts come and go, and the duration of a step
/// without prefill.
fn gaps(step_time: StepTime, gap: InterTokenLimit) -> (Vec<f64>, f64) {
    let geometry = Geometry { max_step_tokens: 2048, max_step_rows: 8, max_step_logits: 8, ..WIDE };
    let sim = SimExecutor::new(geometry, step_time, VOCABULARY, Unpaced);
    let mut engine = Engine::new(sim, EngineConfig { inter_token_limit: gap, ..CONFIG });
    (1..5).for_each(|id| engine.add(request(id, 60).max(900), 0.0).expect("an admissible request"));
    let (mut gaps, mut alone) = (Vec::new(), f64::INFINITY);
    for step in 0..800 {
        if step % 100 == 60 {
            engine.add(request(100 + step, 1500).max(2), 0.0).expect("an admissible request");
        }
        let Some(stats) = engine.step(0.0).expect("the simulator does not fail").step else { continue };
        if stats.decode_tokens == 4 {
            gaps.push(stats.busy_seconds);
            alone = if stats.prefill_tokens == 0 { alone.min(stats.busy_seconds) } else { alone };
        }
    }
    gaps.sort_by(f64::total_cmp);
    (gaps, alone)
}

#[test]
fn by_default_long_prompts_leave_others_gaps_of_a_few_steps() {
    for step_time in [StepTime::SMALL_CPU, StepTime::LARGE_GPU] {
        let share = |(gaps, alone): (Vec<f64>, f64)| [99, 100].map(|of| gaps[(gaps.len() - 1) * of / 100] / alone);
        let ([cut, longest], [_, whole]) = (
            share(gaps(step_time, InterTokenLimit::StepMultiple(3.0))),
            share(gaps(step_time, InterTokenLimit::Unlimited)),
        );
        println!(
            "p99 of gaps over a step without prompts: {cut:.2}, at most {longest:.2}; with whole steps at most {whole:.1}"
        );
        assert!(cut <= 4.0, "{cut}");
        assert!(whole > 2.0 * cut, "{whole}");
    }
}
