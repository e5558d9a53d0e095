//! Fixtures, and an executor that checks the scheduler.

mod auditor;
mod clock;
mod oracle;
mod reluctant;

pub use auditor::Auditor;
pub use clock::TestClock;
pub use oracle::Oracle;
pub use reluctant::{DEFERRED, Reluctant};
use windlass_engine_core::engine::{Engine, EngineConfig, QueueLimits};
use windlass_engine_core::executor::{Geometry, KvGroups};
use windlass_engine_core::request::{CacheScope, FinishReason, Request, RequestId, Tenant, TokenId};
use windlass_engine_core::sampling::TokenLogprobs;
use windlass_engine_core::sim::{SimExecutor, SimVocabulary, StepTime, Unpaced};
use windlass_engine_core::update::{EngineOutputs, RequestUpdate};

/// Few words, so that stop tokens among them occur.
pub const WORDS: u32 = 13;
pub const VOCABULARY: SimVocabulary = SimVocabulary { word: |number| (number % WORDS as u64) as TokenId, stop: None };

pub const GEOMETRY: Geometry = Geometry {
    block_tokens: 4,
    blocks: 64,
    swap_slots: 0,
    max_sequence_tokens: 128,
    max_step_rows: 8,
    max_step_tokens: 32,
    max_step_logits: 8,
    vocabulary: 100,
    groups: KvGroups::ONE,
};

pub const CONFIG: EngineConfig = EngineConfig {
    queue: QueueLimits {
        max_waiting_requests: 1000,
        max_queued_prompt_tokens: 100_000,
        max_predicted_ttft_seconds: None,
    },
    ..EngineConfig::PLAIN
};

pub type TestEngine = Engine<Auditor>;

pub fn engine(geometry: Geometry, config: EngineConfig) -> TestEngine {
    Engine::new(auditor(geometry), config)
}

/// An engine on an executor with `stages` pipeline stages.
pub fn staged(geometry: Geometry, config: EngineConfig, stages: usize) -> TestEngine {
    Engine::new(Auditor::new(sim(geometry).with_stages(stages)), config)
}

fn auditor(geometry: Geometry) -> Auditor {
    Auditor::new(sim(geometry))
}

fn sim(geometry: Geometry) -> SimExecutor<Unpaced> {
    SimExecutor::new(geometry, StepTime::LARGE_GPU, VOCABULARY, Unpaced)
}

/// A greedy request for 4 tokens; its prompt differs from those of other ids.
pub fn request(id: u64, prompt_tokens: usize) -> Request {
    let prompt = (0..prompt_tokens as u64).map(|i| ((id * 31 + i * 7 + i * i) % 100) as TokenId).collect();
    Request::greedy(RequestId(id), prompt, 4)
}

/// Changes one field of a request.
pub trait With: Sized {
    fn max(self, tokens: u32) -> Self;
    fn min(self, tokens: u32) -> Self;
    fn stop(self, tokens: &[TokenId]) -> Self;
    fn prompt(self, tokens: impl IntoIterator<Item = TokenId>) -> Self;
    fn scored(self, top: u32) -> Self;
    fn fork(self, leader: u64) -> Self;
    fn priority(self, priority: i32) -> Self;
    fn tenant(self, tenant: u32) -> Self;
}

impl With for Request {
    fn max(self, max_tokens: u32) -> Self {
        Request { max_tokens, ..self }
    }

    fn min(self, min_tokens: u32) -> Self {
        Request { min_tokens, ..self }
    }

    fn stop(self, tokens: &[TokenId]) -> Self {
        Request { stop_tokens: tokens.to_vec(), ..self }
    }

    fn prompt(self, tokens: impl IntoIterator<Item = TokenId>) -> Self {
        Request { prompt: tokens.into_iter().collect(), ..self }
    }

    fn scored(self, top: u32) -> Self {
        Request { logprobs: Some(top), prompt_logprobs: Some(top), ..self }
    }

    fn fork(self, leader: u64) -> Self {
        Request { fork_of: Some(RequestId(leader)), ..self }
    }

    fn priority(self, priority: i32) -> Self {
        Request { priority, ..self }
    }

    fn tenant(self, tenant: u32) -> Self {
        Request { tenant: Tenant(tenant), cache_scope: CacheScope(tenant.into()), ..self }
    }
}

/// One engine step, with every invariant checked after it. Unless idle, it makes progress: it submits a step,
/// collects one, or finishes a request.
pub fn step(engine: &mut TestEngine, now: f64) -> EngineOutputs {
    let (idle, submitted) = (engine.is_idle(), engine.executor().submitted());
    let outputs = engine.step(now).expect("the simulator does not fail");
    engine.audit().expect("the engine is sound");
    let got_on = outputs.step.is_some() || !outputs.updates.is_empty() || engine.executor().submitted() > submitted;
    assert!(idle || got_on, "a turn for nothing: {:?}", engine.stats());
    outputs
}

/// Steps until idle; returns all updates in order.
pub fn drain(engine: &mut TestEngine) -> Vec<RequestUpdate> {
    let mut updates = Vec::new();
    while !engine.is_idle() {
        updates.extend(step(engine, 0.0).updates);
    }
    updates
}

/// Tokens and finish reason of one request.
pub fn text(updates: &[RequestUpdate], id: u64) -> (Vec<TokenId>, Option<FinishReason>) {
    let own = updates.iter().filter(|update| update.request == RequestId(id));
    let finish = own.clone().find_map(|update| update.finish);
    (own.flat_map(|update| update.tokens.clone()).collect(), finish)
}

/// Logprobs of one request: of the prompt, and of the generated tokens.
pub fn logprobs(updates: &[RequestUpdate], id: u64) -> [Vec<TokenLogprobs>; 2] {
    let own = updates.iter().filter(|update| update.request == RequestId(id));
    let prompt = own.clone().flat_map(|update| update.prompt_logprobs.clone()).collect();
    [prompt, own.flat_map(|update| update.logprobs.clone()).collect()]
}

/// Tokens and finish reason of a request alone in a large engine, in one chunk and without a prefix cache.
pub fn alone(request: &Request, block_tokens: u32) -> (Vec<TokenId>, Option<FinishReason>) {
    text(&updates_alone(request, block_tokens), request.id.0)
}

/// All updates of a request alone in such an engine.
pub fn updates_alone(request: &Request, block_tokens: u32) -> Vec<RequestUpdate> {
    updates_alone_reading(request, block_tokens, KvGroups::ONE)
}

/// The same with these groups of layers, none of which releases blocks.
pub fn updates_alone_reading(request: &Request, block_tokens: u32, groups: KvGroups) -> Vec<RequestUpdate> {
    let wide = Geometry { blocks: 128 * groups.count(), max_step_tokens: 128, max_step_logits: 128, ..GEOMETRY };
    let mut engine = Engine::new(auditor(Geometry { block_tokens, groups, ..wide }).hoarding(), CONFIG);
    engine.add(request.clone(), 0.0).expect("a request that fits");
    drain(&mut engine)
}
