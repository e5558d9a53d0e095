//! The scheduler and an executor, one step ahead of the results, or one for each further stage.
//!
//! One thread owns it and calls [`Engine::step`] as long as it is not idle. Waiting happens only inside an
//! executor's `collect`. Time enters as `now`, in seconds since any fixed moment.

use crate::draft::Proposer;
use crate::executor::{Executor, ExecutorError, Prepared};
pub use crate::policy::Policy;
use crate::request::{FinishReason, RejectReason, Request, RequestDemand, RequestId};
pub use crate::scheduler::QueueLimits;
use crate::scheduler::Scheduler;
use crate::update::{EngineOutputs, EngineStats, RequestUpdate};

/// What the engine is told beyond its executor's geometry.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct EngineConfig {
    /// How much may wait.
    pub queue: QueueLimits,
    /// Keep the blocks of ended requests for prompts that begin alike.
    pub enable_prefix_cache: bool,
    /// Key of the digests by which prefixes are found: one that nobody can draft token, of its own for each process.
    pub prefix_cache_key: u128,
    /// How long the prefix cache keeps what nobody uses; absent for as long as there is room.
    pub prefix_cache_ttl_seconds: Option<f64>,
    /// Who goes first.
    pub policy: Policy,
    /// How long prompts may make the tokens of others wait.
    pub inter_token_limit: InterTokenLimit,
}

/// The time between two tokens of a sequence that prompts computed beside it should not exceed: they are cut to it, down to one
/// block a step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum InterTokenLimit {
    /// As long as a step may be.
    Unlimited,
    /// So many times as long as without prompts. Until that is known, chunks are small.
    StepMultiple(f64),
    /// So many seconds.
    Seconds(f64),
}

impl EngineConfig {
    /// First come, first served, without a bound on what waits, and nothing kept of what has ended.
    pub const PLAIN: EngineConfig = EngineConfig {
        queue: QueueLimits {
            max_waiting_requests: u32::MAX,
            max_queued_prompt_tokens: u64::MAX,
            max_predicted_ttft_seconds: None,
        },
        enable_prefix_cache: false,
        prefix_cache_key: 0,
        prefix_cache_ttl_seconds: None,
        policy: Policy::Fcfs,
        inter_token_limit: InterTokenLimit::Unlimited,
    };
}

/// Requests in, updates out.
#[derive(Debug)]
pub struct Engine<E> {
    scheduler: Scheduler,
    executor: E,
}

impl<E: Executor> Engine<E> {
    /// An idle engine.
    ///
    /// # Panics
    /// If the executor's geometry has no blocks or allows no tokens or rows in a step.
    pub fn new(executor: E, config: EngineConfig) -> Engine<E> {
        let scheduler = Scheduler::new(executor.geometry(), config).with_stages(executor.stages());
        Engine { scheduler, executor }
    }

    /// Lets `proposer` draft token up to `most` tokens of a sequence in a step, where that pays.
    pub fn with_proposer(mut self, proposer: Box<dyn Proposer>, max_tokens: u32) -> Engine<E> {
        self.scheduler.set_proposer(proposer, max_tokens);
        self
    }

    /// Queues a request. `now` never goes back from one call to the next.
    ///
    /// # Panics
    /// If a request with this id is live.
    pub fn add(&mut self, request: Request, now: f64) -> Result<(), RejectReason> {
        self.scheduler.add(request, now)
    }

    /// Seconds after which a request that [`add`](Engine::add) just refused for now is likely to be admitted. Who is told so
    /// counts for the next ones.
    pub fn retry_after_seconds(&mut self, demand: RequestDemand, now: f64) -> u32 {
        self.scheduler.retry_after_seconds(demand, now)
    }

    /// Ends a live request from outside: [`FinishReason::Abort`], or [`FinishReason::Stop`] for a stop string.
    ///
    /// Gives its last update; no later turn mentions it. `None` if no such request is live: it has ended already.
    pub fn finish(&mut self, id: RequestId, reason: FinishReason) -> Option<RequestUpdate> {
        self.scheduler.finish(id, reason)
    }

    /// Submits the next step if there is anything to compute, and collects the oldest one if the executor has enough
    /// or nothing could be submitted.
    ///
    /// An error means that the executor is lost, and with it every live request.
    pub fn step(&mut self, now: f64) -> Result<EngineOutputs, ExecutorError> {
        let submitted = self.submit_next(now)?;
        let mut outputs = match submitted && self.scheduler.may_submit() {
            true => EngineOutputs::default(),
            false => self.collect_oldest()?,
        };
        outputs.updates.extend(self.scheduler.take_final_updates());
        outputs.lost_kv = self.scheduler.take_lost();
        Ok(outputs)
    }

    /// Nothing is live and nothing in flight: a turn would do nothing.
    pub fn is_idle(&self) -> bool {
        self.scheduler.is_idle()
    }

    /// Makes one piece of what later steps would wait for, as [`Executor::prepare`].
    ///
    /// # Panics
    /// If the engine is not idle.
    pub fn prepare(&mut self) -> Result<Prepared, ExecutorError> {
        assert!(self.is_idle(), "steps come first");
        self.executor.prepare()
    }

    /// The state at this moment.
    pub fn stats(&self) -> EngineStats {
        self.scheduler.stats()
    }

    /// Checks every invariant that must hold between two calls, in time proportional to the pool: for tests, and for
    /// an engine with nothing better to do. The error says what is broken.
    pub fn audit(&self) -> Result<(), String> {
        self.scheduler.audit()
    }

    /// The executor.
    pub fn executor(&self) -> &E {
        &self.executor
    }

    /// The executor, without the engine: every block's content is forgotten. There must be nothing live.
    pub fn into_executor(self) -> E {
        self.executor
    }

    fn submit_next(&mut self, now: f64) -> Result<bool, ExecutorError> {
        let Some(step) = self.scheduler.schedule(now) else { return Ok(false) };
        let ticket = self.executor.submit(step.plan)?;
        self.scheduler.submitted(ticket, step.rows, &step.copy_sources, step.stats);
        Ok(true)
    }

    fn collect_oldest(&mut self) -> Result<EngineOutputs, ExecutorError> {
        let Some(ticket) = self.scheduler.oldest_in_flight() else { return Ok(EngineOutputs::default()) };
        let output = self.executor.collect(ticket)?;
        let (updates, stats) = self.scheduler.complete(output)?;
        Ok(EngineOutputs { updates, step: Some(stats), lost_kv: None })
    }
}
