//! What the program knows about itself: written by the engine's thread as it works, read by probes, `/metrics` and
//! `/stats` at any time. Everything shared is an atomic, so a reader never delays a step and a stuck step never delays
//! a reader.

mod busy;
mod encoded;
mod gpus;
mod metrics;
mod progress;
mod recent;
mod stats;
mod times;

use crate::clock::Clock;
use crate::driver::Depth;
use busy::BusyWindow;
pub use encoded::Encoded;
pub use gpus::GpuReading;
use metrics::Metrics;
pub use metrics::{QUEUE_FULL, TOO_SLOW};
use progress::Progress;
use recent::Recent;
pub use recent::SAMPLE_EVERY;
use std::future::pending;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
pub use times::RequestTimes;
use tokio::sync::watch;
use windlass_engine_api::native::ServerMetrics;
use windlass_engine_contract::memory::Ledger;
use windlass_engine_contract::stats::{EffectiveConfig, GpuStats, Phase, StartPhases, Stats};
use windlass_engine_core::executor::Prepared;
use windlass_engine_core::update::{EngineStats, RequestUpdate, StepStats};

/// The program's state as others may see it.
pub struct Monitor {
    clock: Clock,
    metrics: Metrics,
    busy: BusyWindow,
    progress: Progress,
    recent: Recent,
    /// Arrival of the oldest waiting request, microseconds; [`NONE`] without one.
    oldest_arrival_us: AtomicU64,
    built: OnceLock<Built>,
    /// What a GPU reported that computes no more.
    lost_gpu: watch::Sender<Option<String>>,
}

/// What was built at start.
#[derive(Clone, Debug)]
pub struct Built {
    /// The configuration, read back from what was built.
    pub effective: EffectiveConfig,
    /// Whether the executor is the simulator.
    pub simulated: bool,
    /// Memory by use, where the executor has any.
    pub ledger: Option<Ledger>,
    /// How long it took.
    pub start: StartPhases,
    /// What its answers depend on.
    pub fingerprint: String,
}

/// What only the moment of reading can tell.
struct Moment {
    uptime_seconds: f64,
    oldest_age_seconds: f64,
    utilization: Option<f64>,
    gpus: Option<GpuStats>,
}

const NONE: u64 = u64::MAX;

impl Monitor {
    /// Knows nothing yet.
    pub fn new(clock: Clock, model_name: &str) -> Result<Monitor, prometheus::Error> {
        Ok(Monitor {
            clock,
            metrics: Metrics::new(model_name)?,
            busy: BusyWindow::default(),
            progress: Progress::default(),
            recent: Recent::default(),
            oldest_arrival_us: AtomicU64::new(NONE),
            built: OnceLock::new(),
            lost_gpu: watch::Sender::new(None),
        })
    }

    /// What a GPU's management library says of it now, of the `elapsed` seconds since it was asked before.
    pub fn gpu(&self, gpu: usize, reading: &GpuReading, elapsed: f64) {
        self.metrics.gpus.record(gpu, reading, elapsed, self.clock.seconds());
    }

    /// A GPU reported a critical error, by NVIDIA's number.
    pub fn gpu_error(&self, gpu: usize, xid: u64) {
        self.metrics.gpus.failed(gpu, xid);
    }

    /// A GPU reported an error after which nothing that it computes can be relied on. The first one to do so counts.
    pub fn gpu_lost(&self, why: String) {
        self.lost_gpu.send_if_modified(|lost| {
            let is_first = lost.is_none();
            lost.get_or_insert(why);
            is_first
        });
    }

    /// What the process takes beside the model, where that has a ledger: known better once all of it is there.
    pub fn process_bytes(&self, bytes: u64) {
        if self.built.get().is_some_and(|built| built.ledger.is_some()) {
            self.metrics.process_bytes(bytes);
        }
    }

    /// What that one reported, if one did.
    pub fn lost_gpu(&self) -> Option<String> {
        self.lost_gpu.borrow().clone()
    }

    /// The same, once one does.
    pub async fn gpu_is_lost(&self) -> String {
        match self.lost_gpu.subscribe().wait_for(Option::is_some).await.map(|lost| lost.clone()) {
            Ok(Some(why)) => why,
            // The sender lives as long as this value.
            _ => pending().await,
        }
    }

    /// The engine stands and has generated a token.
    pub fn built(&self, built: Built) {
        self.metrics.built(&built);
        // Set once, at the end of the start.
        let _ = self.built.set(built);
    }

    /// Processes that share the model's layers; one until it was built.
    pub fn pipeline_stages(&self) -> u32 {
        self.built.get().map_or(1, |built| built.effective.pipeline_parallel)
    }

    /// Work came to an idle engine.
    pub fn woke(&self) {
        self.progress.made(self.clock.seconds());
    }

    /// The engine has nothing to do.
    pub fn idle(&self) {
        self.progress.idle();
    }

    /// How far the executor is with what it makes ahead.
    pub fn prepared(&self, prepared: &Prepared) {
        self.metrics.prepared(prepared);
    }

    /// A turn begins.
    pub fn turn_began(&self, now: f64) {
        self.busy.begin(now);
    }

    /// The turn that began at `began` is over.
    pub fn turn_ended(&self, began: f64, now: f64) {
        self.busy.end(began, now);
    }

    /// A step was collected.
    pub fn step(&self, step: &StepStats, now: f64) {
        self.progress.made(now);
        self.metrics.step(step);
    }

    /// A request has news.
    pub fn update(&self, times: &mut RequestTimes, update: &RequestUpdate, now: f64) {
        times.observe(update, now, &self.metrics);
    }

    /// A request was refused before it could wait; `reason` is a word of the metrics.
    pub fn rejected(&self, reason: &str) {
        self.metrics.rejected(reason);
    }

    /// Whether something is wrong with the files of API keys.
    pub fn api_keys(&self, unreadable: bool) {
        self.metrics.api_keys(unreadable);
    }

    /// The engine's state now, and when it was published last: its counters begin again when it wakes, ours go on.
    pub fn publish(&self, stats: &EngineStats, before: &EngineStats) {
        self.metrics.publish(stats, before);
        let oldest = stats.oldest_waiting_arrival_seconds.map_or(NONE, microseconds);
        self.oldest_arrival_us.store(oldest, Ordering::Relaxed);
    }

    /// What an encoder does now: texts in the running batch, texts waiting, and all their tokens.
    pub fn encoding(&self, running: u64, waiting: u64, tokens: u64) {
        self.metrics.encoding(running, waiting, tokens);
    }

    /// A text was computed, in a batch of this share of its largest size.
    pub fn encoded(&self, text: &Encoded, batch_fill: f64) {
        self.progress.made(text.ended);
        text.observe(&self.metrics);
        self.metrics.batch_fill.set(batch_fill);
    }

    /// How deep it sleeps, if it does.
    pub fn rests(&self, depth: Option<Depth>) {
        self.metrics.rests(depth);
    }

    /// What a request asks for.
    pub fn asked(&self, answers: u32, max_tokens: Option<u32>) {
        self.metrics.asked(answers, max_tokens);
    }

    /// So many tokens of an answer count for its client.
    pub fn generated(&self, tokens: u32) {
        self.metrics.generation_tokens.inc_by(tokens.into());
    }

    /// An answer came to its end with so many tokens.
    pub fn completed(&self, tokens: u32) {
        self.metrics.request_generation_tokens.observe(tokens.into());
    }

    /// How long the longest of a request's answers was.
    pub fn answered(&self, longest_tokens: u32) {
        self.metrics.answered(longest_tokens);
    }

    /// Requests that run or wait.
    pub fn load(&self) -> i64 {
        self.metrics.running.get() + self.metrics.waiting.get()
    }

    /// Seconds with work and without a finished step.
    pub fn stalled_seconds(&self) -> f64 {
        self.progress.stalled_seconds(self.clock.seconds())
    }

    /// What is stuck, if work is there and no step was finished for longer than `limit_seconds`.
    pub fn stuck(&self, limit_seconds: f64) -> Option<String> {
        let stalled = Some(self.stalled_seconds()).filter(|stalled| *stalled > limit_seconds)?;
        let (running, waiting) = (self.metrics.running.get(), self.metrics.waiting.get());
        let what = match self.busy.running_seconds(self.clock.seconds()) {
            Some(seconds) => format!("the executor has been in one step for {seconds:.0} s"),
            None => "the engine's thread is in no step".to_owned(),
        };
        let load = format!("{running} requests run and {waiting} wait");
        Some(format!("work is queued and no step has finished for {stalled:.0} s: {what}; {load}"))
    }

    /// `/metrics`.
    pub fn exposition(&self) -> Result<String, prometheus::Error> {
        self.metrics.exposition(&self.moment())
    }

    /// `/stats`.
    pub fn stats(&self, phase: Phase, unseen: u32) -> Stats {
        stats::read(&self.metrics, self.built.get(), &self.moment(), phase, unseen)
    }

    /// `/v1/metrics`: the last minute.
    pub fn recent(&self, phase: Phase, unseen: u32) -> ServerMetrics {
        self.recent.until(&self.stats(phase, unseen), self.metrics.batch_fill.get())
    }

    /// Keeps a reading for [`Monitor::recent`]; called every [`SAMPLE_EVERY`].
    pub fn sample(&self) {
        self.recent.record(self.stats(Phase::Ready, 0));
    }

    fn moment(&self) -> Moment {
        let now = self.clock.seconds();
        let oldest_age_seconds = match self.oldest_arrival_us.load(Ordering::Relaxed) {
            NONE => 0.0,
            arrival => (now - seconds(arrival)).max(0.0),
        };
        let utilization = self.metrics.gpus.utilization(now).or_else(|| self.busy.share(now));
        Moment { uptime_seconds: now, oldest_age_seconds, utilization, gpus: self.metrics.gpus.stats() }
    }
}

fn microseconds(seconds: f64) -> u64 {
    (seconds * 1e6) as u64
}

fn seconds(microseconds: u64) -> f64 {
    microseconds as f64 * 1e-6
}
