//! The engine: a scheduler and an executor. One step is in flight while the next is scheduled, or one for each
//! pipeline stage.
//!
//! One thread owns the engine and calls [`Engine::step`] until the engine is idle. Only the executor's `collect`
//! blocks. Time enters as `now`, in seconds since any fixed moment.

use crate::draft::Proposer;
use crate::executor::{Executor, ExecutorError, Prepared};
pub use crate::policy::Policy;
use crate::request::{FinishReason, RejectReason, Request, RequestDemand, RequestId};
pub use crate::scheduler::QueueLimits;
use crate::scheduler::Scheduler;
use crate::update::{EngineOutputs, EngineStats, RequestUpdate};

/// Settings of the engine, beside its executor's geometry.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct EngineConfig {
    /// Limits of the waiting queue.
    pub queue: QueueLimits,
    /// Keep the blocks of finished requests, for prompts that share a prefix with them.
    pub enable_prefix_cache: bool,
    /// Secret key of the prefix hashes. Draw it at random for each process, so that no client can aim for collisions.
    pub prefix_cache_key: u128,
    /// Seconds after which the prefix cache drops a block that nobody used; `None` keeps it until the pool needs the
    /// room.
    pub prefix_cache_ttl_seconds: Option<f64>,
    /// Order of service.
    pub policy: Policy,
    /// How much prefill may delay the tokens of decoding sequences.
    pub inter_token_limit: InterTokenLimit,
}

/// Limit on the time between two tokens of a decoding sequence. Prefill chunks in the same step are cut to keep it,
/// but never below one block a step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum InterTokenLimit {
    /// No limit: a chunk may fill the step.
    Unlimited,
    /// This multiple of the duration of a step without prefill. Until that is measured, chunks are small.
    StepMultiple(f64),
    /// Seconds.
    Seconds(f64),
}

impl EngineConfig {
    /// First come, first served, with an unlimited queue and no prefix cache.
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

/// Takes requests and returns updates.
#[derive(Debug)]
pub struct Engine<E> {
    scheduler: Scheduler,
    executor: E,
}

impl<E: Executor> Engine<E> {
    /// Builds an idle engine.
    ///
    /// # Panics
    /// If the executor's geometry has no blocks, or allows no tokens or rows in a step.
    pub fn new(executor: E, config: EngineConfig) -> Engine<E> {
        let scheduler = Scheduler::new(executor.geometry(), config).with_stages(executor.stages());
        Engine { scheduler, executor }
    }

    /// Sets the proposer, which may draft up to `max_tokens` tokens of a sequence in a step, where that pays.
    pub fn with_proposer(mut self, proposer: Box<dyn Proposer>, max_tokens: u32) -> Engine<E> {
        self.scheduler.set_proposer(proposer, max_tokens);
        self
    }

    /// Queues a request. `now` must never decrease from one call to the next.
    ///
    /// # Panics
    /// If a request with this id is live.
    pub fn add(&mut self, request: Request, now: f64) -> Result<(), RejectReason> {
        self.scheduler.add(request, now)
    }

    /// Seconds after which a request that [`add`](Engine::add) has just refused is likely to be admitted, as for HTTP's
    /// `Retry-After`. Each answer is remembered: later ones reckon with the clients that were told to come back before.
    pub fn retry_after_seconds(&mut self, demand: RequestDemand, now: f64) -> u32 {
        self.scheduler.retry_after_seconds(demand, now)
    }

    /// Finishes a live request from outside: [`FinishReason::Abort`], or [`FinishReason::Stop`] for a stop string.
    ///
    /// Returns its final update; no later step mentions the request. `None` if no such request is live: it has
    /// finished already.
    pub fn finish(&mut self, id: RequestId, reason: FinishReason) -> Option<RequestUpdate> {
        self.scheduler.finish(id, reason)
    }

    /// Submits the next step if there is anything to compute. Collects the oldest step in flight if the executor
    /// takes no more steps, or if nothing could be submitted.
    ///
    /// An error means that the executor is lost, and every live request with it.
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

    /// Whether no request is live and no step in flight: a step would do nothing.
    pub fn is_idle(&self) -> bool {
        self.scheduler.is_idle()
    }

    /// Builds one piece of what later steps would otherwise wait for ([`Executor::prepare`]).
    ///
    /// # Panics
    /// If the engine is not idle.
    pub fn prepare(&mut self) -> Result<Prepared, ExecutorError> {
        assert!(self.is_idle(), "steps come first");
        self.executor.prepare()
    }

    /// Statistics at this moment.
    pub fn stats(&self) -> EngineStats {
        self.scheduler.stats()
    }

    /// Checks every invariant that must hold between two calls, in time proportional to the size of the pool. For
    /// tests, and for an idle engine. The error says which invariant is broken.
    pub fn audit(&self) -> Result<(), String> {
        self.scheduler.audit()
    }

    /// The executor.
    pub fn executor(&self) -> &E {
        &self.executor
    }

    /// Gives up the engine and returns its executor. The contents of all blocks are forgotten; no request may be
    /// live.
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
