//! Random lives of small engines. Whatever is added, finished or failed, and whenever: invariants hold, every request
//! finishes once, and its text is the one that it gets alone.

use std::cell::RefCell;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::support::{CONFIG, DEFERRED, GEOMETRY, Oracle, Reluctant, TestEngine, WORDS, staged, updates_alone_reading};
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::test_runner::{Config, TestCaseError, TestRunner};
use windlass_engine_core::constraint::Constraint;
use windlass_engine_core::engine::{EngineConfig, InterTokenLimit, Policy};
use windlass_engine_core::executor::{Executor, Geometry, KvGroups};
use windlass_engine_core::plan::BlockMove;
use windlass_engine_core::request::{
    CacheScope, FinishReason, RejectReason, Request, RequestId, Sampling, Tenant, TokenId,
};
use windlass_engine_core::update::{DraftStats, RequestUpdate};

/// One event in the life of an engine.
#[derive(Clone, Debug)]
enum Event {
    Add(Wish),
    /// Finishes the nth live request from outside.
    Finish(usize, FinishReason),
    /// Makes the next row of the nth live request fail.
    Poison(usize),
    Step,
}

/// A request without its id.
#[derive(Clone, Debug)]
struct Wish {
    family: u32,
    prompt_tokens: u32,
    max_tokens: u32,
    min_tokens: u32,
    stop_tokens: Vec<TokenId>,
    seed: u64,
    /// Whether logprobs of the prompt, and of the answer, are requested.
    scored: (bool, bool),
    /// Whether it shares the prompt and the blocks of the previous request.
    fork: bool,
    tenant: u32,
    /// How often its token mask is late.
    late: Option<u64>,
}

impl Wish {
    /// Prompts of one family share a prefix.
    fn request(&self, id: RequestId, before: Option<&Request>) -> Request {
        let leader = before.filter(|_| self.fork);
        // Mostly of the same tenant: others share no blocks.
        let tenant = leader.filter(|_| self.seed > 0).map_or(Tenant(self.tenant), |leader| leader.tenant);
        let own = || (0..self.prompt_tokens).map(|i| (self.family * 17 + i * i) % 100).collect();
        let prompt = leader.map_or_else(own, |leader| leader.prompt.clone());
        let sampling = Sampling { temperature: (self.seed % 2) as f32, seed: self.seed, ..Sampling::GREEDY };
        Request {
            min_tokens: self.min_tokens,
            stop_tokens: self.stop_tokens.clone(),
            sampling,
            prompt_logprobs: self.scored.0.then_some(2),
            logprobs: self.scored.1.then_some(3),
            fork_of: leader.map(|leader| leader.id),
            tenant,
            cache_scope: CacheScope(tenant.0.into()),
            priority: self.tenant as i32,
            constraint: self.late.map(|late| Arc::new(Reluctant::new(late)) as Arc<dyn Constraint>),
            ..Request::greedy(id, prompt, self.max_tokens)
        }
    }
}

fn wishes() -> impl Strategy<Value = Wish> {
    let stop_tokens = prop_oneof![3 => Just(vec![]), 1 => vec(0..WORDS, 1..3)];
    let scored = (prop::bool::weighted(0.2), prop::bool::weighted(0.2));
    let fork = prop::bool::weighted(0.3);
    let late = prop::option::weighted(0.3, 1..4u64);
    (0..3u32, 1..40u32, 0..30u32, 0..6u32, stop_tokens, 0..4u64, scored, fork, 0..3u32, late).prop_map(
        |(family, prompt_tokens, max_tokens, min_tokens, stop_tokens, seed, scored, fork, tenant, late)| Wish {
            family,
            prompt_tokens,
            max_tokens,
            min_tokens,
            stop_tokens,
            seed,
            scored,
            fork,
            tenant,
            late,
        },
    )
}

fn events() -> impl Strategy<Value = Vec<Event>> {
    let reason = prop_oneof![Just(FinishReason::Abort), Just(FinishReason::Stop)];
    let event = prop_oneof![
        4 => wishes().prop_map(Event::Add),
        1 => (0..20usize, reason).prop_map(|(nth, reason)| Event::Finish(nth, reason)),
        1 => (0..40usize).prop_map(Event::Poison),
        16 => Just(Event::Step),
    ];
    vec(event, 1..150)
}

fn geometries() -> impl Strategy<Value = Geometry> {
    let slots = prop_oneof![Just(0), 1..40u32];
    // The simulator reads the state of the token before, which depends on all tokens before it.
    let windowed = |full: u32, windowed: u32| {
        (2..30u32).prop_map(move |read_back_tokens| KvGroups { full, windowed, read_back_tokens })
    };
    let groups = prop_oneof![
        2 => Just(KvGroups::ONE),
        2 => windowed(0, 1),
        2 => windowed(1, 1),
        1 => windowed(1, 3),
        1 => windowed(2, 1),
    ];
    (1..6u32, 12..60u32, slots, 1..8u32, 1..40u32, groups).prop_map(
        |(block_tokens, blocks, swap_slots, max_step_rows, max_step_tokens, groups)| Geometry {
            block_tokens,
            blocks: blocks * (1 + groups.full + groups.windowed) / 2,
            swap_slots,
            max_step_rows,
            max_step_tokens,
            groups,
            ..GEOMETRY
        },
    )
}

fn configs() -> impl Strategy<Value = EngineConfig> {
    let policy = prop_oneof![
        2 => Just(Policy::Fcfs),
        2 => (0..2u32).prop_map(|preemption_threshold| Policy::Priority { preemption_threshold }),
        1 => Just(Policy::Fair),
        1 => Just(Policy::LongestPrefix),
    ];
    let gap = prop_oneof![
        Just(InterTokenLimit::Unlimited),
        Just(InterTokenLimit::Seconds(0.004)),
        Just(InterTokenLimit::StepMultiple(3.0))
    ];
    let ttl = prop_oneof![3 => Just(None), 1 => Just(Some(5.0))];
    (any::<bool>(), policy, gap, ttl).prop_map(|(enable_prefix_cache, policy, gap, ttl)| EngineConfig {
        enable_prefix_cache,
        policy,
        inter_token_limit: gap,
        prefix_cache_ttl_seconds: ttl,
        ..CONFIG
    })
}

/// The proposer, if any: how often it errs, whether it branches, and whether it is free.
fn oracles() -> impl Strategy<Value = Option<(u64, bool, bool)>> {
    prop::option::of((0..5u64, any::<bool>(), any::<bool>()))
}

fn oracle((errs_one_in, branches, free): (u64, bool, bool)) -> Oracle {
    Oracle { branches, free, ..Oracle::new(errs_one_in) }
}

/// What occurred in all lives together: a property that never saw a preemption would prove little.
#[derive(Debug, Default)]
struct Met {
    steps: u64,
    ended: HashMap<FinishReason, u64>,
    preemptions: u64,
    prefix_hits: u64,
    never_fits: u64,
    most_waiting: u32,
    copies: u64,
    returns: u64,
    drafts: u64,
    accepted: u64,
    /// Steps submitted to several stages while others were in flight.
    overlaps: u64,
}

/// An engine, and what its clients have received.
struct World {
    engine: TestEngine,
    geometry: Geometry,
    /// Requests by id, in order of arrival.
    requests: Vec<Request>,
    texts: HashMap<RequestId, Vec<TokenId>>,
    updates: Vec<RequestUpdate>,
    endings: HashMap<RequestId, FinishReason>,
    /// Finished from outside, or poisoned: their texts may stop anywhere.
    disturbed: HashSet<RequestId>,
    oracle: Option<Oracle>,
    met: Met,
}

impl World {
    fn new((geometry, stages): (Geometry, usize), config: EngineConfig, oracle: Option<Oracle>) -> World {
        let engine = staged(geometry, config, stages);
        let engine = match &oracle {
            Some(oracle) => engine.with_proposer(Box::new(oracle.clone()), 6),
            None => engine,
        };
        World {
            engine,
            oracle,
            geometry,
            requests: Vec::new(),
            texts: HashMap::new(),
            updates: Vec::new(),
            endings: HashMap::new(),
            disturbed: HashSet::new(),
            met: Met::default(),
        }
    }

    fn happen(&mut self, event: &Event) {
        match event {
            Event::Add(wish) => self.add(wish),
            Event::Finish(nth, reason) => self.finish(*nth, *reason),
            Event::Poison(nth) => self.poison(*nth),
            Event::Step => self.step(),
        }
        self.engine.audit().unwrap();
        let stats = self.engine.stats();
        assert_eq!(stats.kv.leaked, 0);
        assert!(stats.running <= self.geometry.max_step_rows);
        assert_eq!(stats.running as usize + stats.waiting as usize, self.live_requests().count());
        self.met.most_waiting = self.met.most_waiting.max(stats.waiting);
    }

    fn add(&mut self, wish: &Wish) {
        let request = wish.request(RequestId(self.requests.len() as u64), self.requests.last());
        match self.engine.add(request.clone(), self.met.steps as f64) {
            Ok(()) => {
                if let Some(oracle) = &self.oracle {
                    let answer = crate::support::text(&self.alone(&request), request.id.0).0;
                    oracle.tell(request.id, [&request.prompt[..], &answer].concat());
                }
                self.requests.push(request);
            }
            Err(RejectReason::NeverFits { .. }) => self.met.never_fits += 1,
            Err(reason) => panic!("{reason}"),
        }
    }

    fn finish(&mut self, nth: usize, reason: FinishReason) {
        let Some(id) = self.live(nth) else { return };
        self.disturbed.insert(id);
        let update = self.engine.finish(id, reason).expect("a live request");
        assert_eq!(update.finish, Some(reason));
        self.see(update);
        assert_eq!(self.engine.finish(id, reason), None, "{id:?} ended twice");
    }

    fn poison(&mut self, nth: usize) {
        let Some(id) = self.live(nth) else { return };
        self.disturbed.insert(id);
        self.engine.executor().poison(id);
    }

    fn step(&mut self) {
        self.met.steps += 1;
        let (submitted, stages) = (self.engine.executor().submitted(), self.engine.executor().stages());
        let in_flight = self.engine.executor().in_flight();
        let outputs = crate::support::step(&mut self.engine, self.met.steps as f64);
        if self.engine.executor().submitted() > submitted {
            self.met.overlaps += u64::from(stages > 1 && in_flight > 0);
            let plan = self.engine.executor().last_plan();
            self.met.copies += plan.moves.iter().filter(|moved| matches!(moved, BlockMove::Copy { .. })).count() as u64;
            self.met.returns +=
                plan.moves.iter().filter(|moved| matches!(moved, BlockMove::SwapIn { .. })).count() as u64;
        }
        outputs.updates.into_iter().for_each(|update| self.see(update));
    }

    fn see(&mut self, update: RequestUpdate) {
        let id = update.request;
        assert!(!self.endings.contains_key(&id), "{id:?} goes on after its end");
        assert_eq!(update.failure.is_some(), update.finish == Some(FinishReason::Error));
        self.texts.entry(id).or_default().extend(&update.tokens);
        self.updates.push(update.clone());
        if let Some(reason) = update.finish {
            self.endings.insert(id, reason);
            *self.met.ended.entry(reason).or_default() += 1;
        }
    }

    /// Steps until idle. Each step makes progress, but so would an engine that discards its work for ever, hence the
    /// bound.
    fn come_to_rest(&mut self) {
        let tokens: usize = self.requests.iter().map(|request| request.prompt.len() + 30).sum();
        for _ in 0..100 + 10 * tokens {
            if self.engine.is_idle() {
                return;
            }
            self.happen(&Event::Step);
        }
        panic!("no rest: {:?}", self.engine.stats());
    }

    /// Updates of a request that has a large engine to itself.
    fn alone(&self, request: &Request) -> Vec<RequestUpdate> {
        updates_alone_reading(request, self.geometry.block_tokens, self.geometry.groups)
    }

    fn check_texts(&self) {
        for request in &self.requests {
            let alone = self.alone(request);
            let (whole, reason) = crate::support::text(&alone, request.id.0);
            let heard = crate::support::logprobs(&self.updates, request.id.0);
            for (whole, heard) in crate::support::logprobs(&alone, request.id.0).iter().zip(&heard) {
                let same = whole.len() == heard.len() || self.disturbed.contains(&request.id);
                assert!(whole.starts_with(heard) && same, "{request:?} scores {whole:?} alone and {heard:?} here");
            }
            let text = self.texts.get(&request.id).map_or(&[][..], Vec::as_slice);
            assert!(whole.starts_with(text), "{request:?} gives {whole:?} alone and {text:?} here");
            let undisturbed = text.len() == whole.len() && self.endings.get(&request.id) == reason.as_ref();
            assert!(undisturbed || self.disturbed.contains(&request.id), "{request:?} gives {text:?}, not {whole:?}");
        }
    }

    fn live_requests(&self) -> impl Iterator<Item = RequestId> {
        self.requests.iter().map(|request| request.id).filter(|id| !self.endings.contains_key(id))
    }

    fn live(&self, nth: usize) -> Option<RequestId> {
        self.live_requests().nth(nth)
    }
}

fn live_through(executor: (Geometry, usize), config: EngineConfig, oracle: Option<Oracle>, events: &[Event]) -> Met {
    let mut world = World::new(executor, config, oracle);
    events.iter().for_each(|event| world.happen(event));
    world.come_to_rest();
    world.check_texts();
    let stats = world.engine.stats();
    assert_eq!((stats.kv.held, stats.queued_prompt_tokens, stats.remaining_tokens), (0, 0, 0));
    assert!(world.oracle.is_none_or(|oracle| oracle.remembered() == 0));
    let DraftStats { tokens: drafts, accepted, .. } = stats.drafts;
    Met { preemptions: stats.preemptions, prefix_hits: stats.prefix_hit_tokens, drafts, accepted, ..world.met }
}

#[test]
fn whatever_happens_the_engine_is_sound_and_texts_are_those_of_requests_alone() {
    let met = RefCell::new(Met::default());
    let mut runner =
        TestRunner::new(Config { cases: 640, failure_persistence: None, max_shrink_iters: 500, ..Config::default() });
    let executors = (geometries(), prop_oneof![2 => Just(1), 1 => 2..4usize]);
    let outcome = runner.run(&(executors, configs(), oracles(), events()), |(executor, config, oracle, events)| {
        met.borrow_mut().add(live_through(executor, config, oracle.map(self::oracle), &events));
        Ok::<(), TestCaseError>(())
    });
    outcome.unwrap_or_else(|failure| panic!("{failure}"));
    let met = met.into_inner();
    println!("{met:?}");
    assert!(met.steps > 10_000 && met.preemptions > 100 && met.prefix_hits > 1000, "{met:?}");
    assert!(met.never_fits > 10 && met.most_waiting > 10 && met.ended.values().all(|count| *count > 100), "{met:?}");
    assert!(met.ended.len() == 4 && met.copies > 100 && met.returns > 200, "{met:?}");
    assert!(met.overlaps > 1000, "{met:?}");
    assert!(DEFERRED.load(Ordering::Relaxed) > 1000);
    assert!(met.accepted > 1000 && met.drafts > met.accepted + 1000, "{met:?}");
}

impl Met {
    fn add(&mut self, other: Met) {
        self.steps += other.steps;
        self.preemptions += other.preemptions;
        self.prefix_hits += other.prefix_hits;
        self.never_fits += other.never_fits;
        self.copies += other.copies;
        self.returns += other.returns;
        self.drafts += other.drafts;
        self.accepted += other.accepted;
        self.overlaps += other.overlaps;
        self.most_waiting = self.most_waiting.max(other.most_waiting);
        for (reason, count) in other.ended {
            *self.ended.entry(reason).or_default() += count;
        }
    }
}
