//! Windowed layers beside full-attention layers: the blocks that each group holds, finds again and releases.

use crate::support::{CONFIG, GEOMETRY, TestEngine, With, drain, engine, request, step, text, updates_alone_reading};
use windlass_engine_core::engine::EngineConfig;
use windlass_engine_core::executor::{Geometry, KvGroups};
use windlass_engine_core::request::{BeamSearch, Request, RequestId};

const CACHING: EngineConfig = EngineConfig { enable_prefix_cache: true, ..CONFIG };
/// A full-attention group, and two with a window of eight tokens, which lie in three blocks of four at most.
const GROUPS: KvGroups = KvGroups { full: 1, windowed: 2, read_back_tokens: 8 };
const MIXED: Geometry = Geometry { groups: GROUPS, ..GEOMETRY };

/// Runs a request, checks that its answer is that of the request alone, and returns how many of its tokens were
/// cached.
fn serve(engine: &mut TestEngine, request: &Request) -> u32 {
    engine.add(request.clone(), 0.0).unwrap();
    let updates = drain(engine);
    let alone = updates_alone_reading(request, 4, GROUPS);
    assert_eq!(text(&updates, request.id.0), text(&alone, request.id.0));
    updates[0].cached_tokens
}

fn again(request: &Request, id: u64) -> Request {
    Request { id: RequestId(id), ..request.clone() }
}

#[test]
fn a_long_sequence_holds_all_of_one_group_and_the_windows_of_the_others() {
    let mut engine = engine(Geometry { max_step_tokens: 4, ..MIXED }, CONFIG);
    engine.add(request(1, 80).max(40), 0.0).unwrap();
    let (mut most, mut last) = (0, 0);
    while !engine.is_idle() {
        step(&mut engine, 0.0);
        let held = engine.stats().kv.held;
        (most, last) = (most.max(held), if held > 0 { held } else { last });
    }
    // 119 tokens are computed, in 30 blocks of a group. Three steps of four tokens may be in flight.
    assert!(last <= 30 + 2 * 4 && most <= 30 + 2 * (3 + 3), "{most} at most, {last} in the end");
}

#[test]
fn a_prompt_is_found_where_the_window_before_its_end_is() {
    // Ten blocks of one group, and room for few of the others, whose first blocks are overwritten.
    let mut engine = engine(Geometry { blocks: 18, max_step_tokens: 4, ..MIXED }, CACHING);
    let prompt = request(1, 40).max(1);
    assert_eq!(serve(&mut engine, &prompt), 0);
    assert_eq!(serve(&mut engine, &again(&prompt, 2)), 36, "all but the block of the last token");
    let goes_on = Request { prompt: [&prompt.prompt[..], &[1, 2, 3, 4, 5]].concat(), ..again(&prompt, 4) };
    assert_eq!(serve(&mut engine, &goes_on), 40);
    let begins_alike = Request { prompt: prompt.prompt[..12].to_vec(), ..again(&prompt, 3) };
    assert_eq!(serve(&mut engine, &begins_alike), 0, "the windows before its end are gone");
}

#[test]
fn a_prompt_comes_back_from_outside_with_the_windows_that_it_needs() {
    let small = Geometry { blocks: 20, swap_slots: 64, max_step_tokens: 4, ..MIXED };
    let mut engine = engine(small, CACHING);
    let [first, second] = [request(1, 40).max(1), request(2, 40).max(1)];
    assert_eq!([serve(&mut engine, &first), serve(&mut engine, &second)], [0, 0]);
    assert_eq!(serve(&mut engine, &again(&first, 3)), 36);
    let begins_alike = Request { prompt: first.prompt[..13].to_vec(), ..again(&first, 4) };
    assert_eq!(serve(&mut engine, &begins_alike), 12, "what was overwritten is outside");
}

/// Alone, with the fewest blocks for which it is admitted.
#[test]
fn a_sequence_gets_on_in_the_least_that_it_is_admitted_to() {
    for tokens in [20, 60, 100] {
        let blocks = GROUPS.sequence_blocks(tokens + 3, 4) as u32;
        let mut engine = engine(Geometry { blocks, ..MIXED }, CACHING);
        serve(&mut engine, &request(1, tokens as usize));
        serve(&mut engine, &again(&request(1, tokens as usize), 2));
        let longer = request(3, tokens as usize + 4).max(6);
        assert!(engine.add(longer, 0.0).is_err(), "{tokens} tokens in {blocks} blocks");
    }
}

/// Once its leader has released the window of the prompt, a request computes the prompt itself.
#[test]
fn who_comes_too_late_for_a_leaders_windows_shares_nothing() {
    // The window before the last token of 27 begins one block before that of the next one.
    for (prompt_tokens, generated, shared) in [(24, 1, 1), (24, 20, 0), (27, 1, 0)] {
        let mut engine = engine(MIXED, CONFIG);
        let leader = request(1, prompt_tokens).max(40);
        engine.add(leader.clone(), 0.0).unwrap();
        let mut tokens = 0;
        while tokens < generated {
            tokens += step(&mut engine, 0.0).updates.iter().map(|update| update.tokens.len()).sum::<usize>();
        }
        let late = Request { id: RequestId(2), ..leader }.fork(1).max(8);
        engine.add(late.clone(), 0.0).unwrap();
        let updates = drain(&mut engine);
        assert_eq!(text(&updates, 2), text(&updates_alone_reading(&late, 4, GROUPS), 2));
        let first_to_end = updates.iter().find(|update| update.finish.is_some()).map(|update| update.request);
        assert_eq!(first_to_end, Some(RequestId(2)), "it did not wait for its leader");
        // The last token of a shared prompt is recomputed.
        assert_eq!(engine.stats().recomputed_tokens, shared, "{prompt_tokens} {generated}");
    }
}

#[test]
fn beams_share_what_both_groups_hold() {
    let beams = Some(BeamSearch { leader: RequestId(1), width: 3, length_penalty: 1.0 });
    let search: Vec<Request> = (1..=3)
        .map(|id| Request { beams, logprobs: Some(0), prompt: request(1, 41).prompt, ..request(id, 1).max(30) })
        .collect();
    let found = |groups: KvGroups, blocks: u32, config: EngineConfig| {
        let mut engine = engine(Geometry { groups, blocks, ..GEOMETRY }, config);
        search.iter().for_each(|request| engine.add(request.clone(), 0.0).unwrap());
        let mut most_held = 0;
        let mut updates = Vec::new();
        while !engine.is_idle() {
            updates.extend(step(&mut engine, 0.0).updates);
            most_held = most_held.max(engine.stats().kv.held);
        }
        let texts: Vec<_> = (1..=3).map(|id| text(&updates, id)).collect();
        (texts, most_held)
    };
    let (expected, roomy) = found(GROUPS, 256, CONFIG);
    assert!(roomy < 3 * 3 * 18, "{roomy} blocks of three beams in three groups");
    for blocks in [30, 40, 60] {
        assert_eq!(found(GROUPS, blocks, CONFIG).0, expected, "{blocks} blocks");
        assert_eq!(found(GROUPS, blocks, CACHING).0, expected, "{blocks} blocks, cached");
    }
}
