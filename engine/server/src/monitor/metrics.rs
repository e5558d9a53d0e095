//! Prometheus handles under the names of the contract, each labelled with the model and the engine's number. The only
//! place that records.

use super::gpus::Gpus;
use super::{Built, Moment};
use crate::driver::Depth;
use prometheus::core::{AtomicU64, Collector, GenericCounter};
use prometheus::proto::MetricFamily;
use prometheus::{
    Encoder, Gauge, GaugeVec, Histogram, HistogramOpts, IntCounterVec, IntGauge, Opts, Registry, TextEncoder,
};
use std::sync::OnceLock;
use windlass_engine_contract::memory::PROCESS;
use windlass_engine_contract::metrics as names;
use windlass_engine_contract::stats::LATENCY_EDGES_MS;
use windlass_engine_core::executor::Prepared;
use windlass_engine_core::request::FinishReason;
use windlass_engine_core::update::{DraftStats, EngineStats, StepStats};

type Counter = GenericCounter<AtomicU64>;

/// Bucket edges of token counts, vLLM's progression of 1, 2, 5.
const TOKEN_EDGES: [f64; 17] = [
    1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0, 2000.0, 5000.0, 10_000.0, 20_000.0, 50_000.0,
    100_000.0, 200_000.0,
];

/// Every metric of the engine.
pub struct Metrics {
    registry: Registry,
    pub(super) running: IntGauge,
    pub(super) waiting: IntGauge,
    pub(super) kv_usage: Gauge,
    waiting_by_reason: GaugeVec,
    sleep_state: GaugeVec,
    build_info: GaugeVec,
    lora_info: GaugeVec,
    pub(super) queued_prompt_tokens: IntGauge,
    predicted_ttft: Gauge,
    pub(super) remaining_tokens: IntGauge,
    pub(super) cached_blocks: IntGauge,
    oldest_queued_age: Gauge,
    utilization: Gauge,
    pub(super) batch_fill: Gauge,
    blocks_leaked: IntGauge,
    blocks_swapped: IntGauge,
    graphs_captured: IntGauge,
    graphs_of_all_steps: IntGauge,
    pub(super) prompt_tokens: Counter,
    pub(super) generation_tokens: Counter,
    preemptions: Counter,
    lost_sequences: Counter,
    pub(super) prompt_tokens_cached: Counter,
    pub(super) prompt_tokens_by_source: IntCounterVec,
    prefix_queries: Counter,
    prefix_hits: Counter,
    external_queries: Counter,
    external_hits: Counter,
    recomputed: Counter,
    corrupted: Counter,
    drafts: Counter,
    draft_tokens: Counter,
    accepted_tokens: Counter,
    accepted_by_position: IntCounterVec,
    request_success: IntCounterVec,
    rejections: IntCounterVec,
    api_keys_unreadable: IntGauge,
    pub(super) time_to_first_token: Histogram,
    pub(super) inter_token: Histogram,
    pub(super) end_to_end: Histogram,
    pub(super) time_per_output_token: Histogram,
    pub(super) queue_time: Histogram,
    pub(super) prefill_time: Histogram,
    pub(super) decode_time: Histogram,
    pub(super) inference_time: Histogram,
    pub(super) request_prompt_tokens: Histogram,
    pub(super) request_generation_tokens: Histogram,
    pub(super) prefill_computed: Histogram,
    params_n: Histogram,
    params_max_tokens: Histogram,
    longest_answer: Histogram,
    iteration_tokens: Histogram,
    cache_config: GaugeVec,
    memory_bytes: GaugeVec,
    start_phase: GaugeVec,
    max_rows: OnceLock<u32>,
    pub(super) gpus: Gpus,
}

/// Names that are given beside the present one.
const OLDER_NAMES: &[(&str, &str)] = &[
    (names::OLD_KV_CACHE_USAGE, names::KV_CACHE_USAGE),
    (names::OLD_PREFIX_CACHE_QUERIES, names::PREFIX_CACHE_QUERIES),
    (names::OLD_PREFIX_CACHE_HITS, names::PREFIX_CACHE_HITS),
    (names::OLD_TIME_PER_OUTPUT_TOKEN, names::INTER_TOKEN_LATENCY),
    (names::VLLM_ADMISSION_REJECTIONS, names::ADMISSION_REJECTIONS),
];

/// The reason label of [`names::ADMISSION_REJECTIONS`] where more wait than may.
pub const QUEUE_FULL: &str = "queue_full";
/// Why a request was refused: its first token would come too late.
pub const TOO_SLOW: &str = "too_slow";

/// Registers metrics that all carry the model's name and the engine's number.
pub(super) struct Registrar<'a> {
    registry: &'a Registry,
    model_name: &'a str,
}

impl Registrar<'_> {
    pub(super) fn add<C: Collector + Clone + 'static>(
        &self,
        collector: Result<C, prometheus::Error>,
    ) -> prometheus::Result<C> {
        let collector = collector?;
        self.registry.register(Box::new(collector.clone()))?;
        Ok(collector)
    }

    pub(super) fn options(&self, name: &str, help: &str) -> Opts {
        let options = Opts::new(name, help).const_label(names::LABEL_MODEL, self.model_name);
        options.const_label(names::LABEL_ENGINE, names::THIS_ENGINE)
    }

    fn gauge(&self, name: &str, help: &str) -> prometheus::Result<Gauge> {
        self.add(Gauge::with_opts(self.options(name, help)))
    }

    fn int_gauge(&self, name: &str, help: &str) -> prometheus::Result<IntGauge> {
        self.add(IntGauge::with_opts(self.options(name, help)))
    }

    pub(super) fn gauges(&self, name: &str, help: &str, labels: &[&str]) -> prometheus::Result<GaugeVec> {
        self.add(GaugeVec::new(self.options(name, help), labels))
    }

    fn counter(&self, name: &str, help: &str) -> prometheus::Result<Counter> {
        self.add(Counter::with_opts(self.options(name, help)))
    }

    fn counters(&self, name: &str, help: &str, label: &str) -> prometheus::Result<IntCounterVec> {
        self.add(IntCounterVec::new(self.options(name, help), &[label]))
    }

    fn seconds(&self, name: &str, help: &str) -> prometheus::Result<Histogram> {
        let edges = LATENCY_EDGES_MS.iter().map(|&edge| f64::from(edge) / 1000.0).collect();
        self.histogram(name, help, edges)
    }

    fn tokens(&self, name: &str, help: &str) -> prometheus::Result<Histogram> {
        self.histogram(name, help, TOKEN_EDGES.to_vec())
    }

    fn histogram(&self, name: &str, help: &str, edges: Vec<f64>) -> prometheus::Result<Histogram> {
        let options = HistogramOpts { common_opts: self.options(name, help), buckets: edges };
        self.add(Histogram::with_opts(options))
    }
}

impl Metrics {
    /// Registers everything, at zero.
    pub fn new(model_name: &str) -> prometheus::Result<Metrics> {
        let registry = Registry::new();
        let add = Registrar { registry: &registry, model_name };
        let metrics = Metrics {
            running: add.int_gauge(names::NUM_REQUESTS_RUNNING, "Requests in the running batch")?,
            waiting: add.int_gauge(names::NUM_REQUESTS_WAITING, "Requests waiting to be scheduled")?,
            kv_usage: add.gauge(names::KV_CACHE_USAGE, "Share of KV blocks that live requests hold, 0 to 1")?,
            queued_prompt_tokens: add.int_gauge(names::QUEUED_PROMPT_TOKENS, "Prompt tokens of waiting requests")?,
            predicted_ttft: add.gauge(names::PREDICTED_TTFT, "Time to first token of a request that came now")?,
            oldest_queued_age: add.gauge(names::OLDEST_QUEUED_AGE, "Age of the oldest waiting request")?,
            utilization: add
                .gauge(names::UTILIZATION, "Share of the last 60 s in which the engine computed, or its GPUs did")?,
            batch_fill: add.gauge(names::BATCH_FILL, "Sequences of the last step as a share of --max-num-seqs")?,
            blocks_leaked: add.int_gauge(names::KV_BLOCKS_LEAKED, "KV blocks that nothing accounts for: always 0")?,
            blocks_swapped: add.int_gauge(names::KV_BLOCKS_SWAPPED, "Blocks of cached prompts in the swap space")?,
            graphs_captured: add.int_gauge(names::GRAPHS_CAPTURED, "CUDA graphs, as of the last time without work")?,
            graphs_of_all_steps: add.int_gauge(names::GRAPHS_OF_ALL_STEPS, "CUDA graphs that steps may need")?,
            prompt_tokens: add.counter(names::PROMPT_TOKENS, "Prompt tokens computed or found in the cache")?,
            generation_tokens: add.counter(names::GENERATION_TOKENS, "Tokens generated")?,
            preemptions: add.counter(names::NUM_PREEMPTIONS, "Sequences preempted")?,
            lost_sequences: add.counter(
                names::SEQUENCES_RECOMPUTED,
                "Sequences computed again as their blocks could not be read back",
            )?,
            prompt_tokens_cached: add.counter(names::PROMPT_TOKENS_CACHED, "Prompt tokens found in the cache")?,
            prompt_tokens_by_source: add.counters(
                names::PROMPT_TOKENS_BY_SOURCE,
                "Prompt tokens by source",
                "source",
            )?,
            prefix_queries: add.counter(names::PREFIX_CACHE_QUERIES, "Prompt tokens looked up in the prefix cache")?,
            prefix_hits: add.counter(names::PREFIX_CACHE_HITS, "Prompt tokens found in the prefix cache")?,
            external_queries: add
                .counter(names::EXTERNAL_PREFIX_CACHE_QUERIES, "Tokens looked up in the swap space")?,
            external_hits: add.counter(names::EXTERNAL_PREFIX_CACHE_HITS, "Tokens found in the swap space")?,
            recomputed: add.counter(names::PROMPT_TOKENS_RECOMPUTED, "Prompt tokens computed once more")?,
            corrupted: add
                .counter(names::CORRUPTED_REQUESTS, "Requests for which the model gave numbers that are none")?,
            drafts: add.counter(names::SPEC_DECODE_DRAFTS, "Rows with guesses of what comes next")?,
            draft_tokens: add.counter(names::SPEC_DECODE_DRAFT_TOKENS, "Guesses computed")?,
            accepted_tokens: add.counter(names::SPEC_DECODE_ACCEPTED_TOKENS, "Guesses that held")?,
            accepted_by_position: add.counters(
                names::SPEC_DECODE_ACCEPTED_TOKENS_PER_POS,
                "Guesses that held, by how many were before them",
                "position",
            )?,
            request_success: add.counters(names::REQUEST_SUCCESS, "Requests that ended", "finished_reason")?,
            rejections: add.counters(names::ADMISSION_REJECTIONS, "Requests refused before the queue", "reason")?,
            api_keys_unreadable: add.int_gauge(
                names::API_KEYS_UNREADABLE,
                "1 while keys or limits of tenants cannot be read as they are written",
            )?,
            time_to_first_token: add.seconds(names::TIME_TO_FIRST_TOKEN, "Arrival to first token")?,
            inter_token: add.seconds(names::INTER_TOKEN_LATENCY, "Between consecutive tokens of one request")?,
            end_to_end: add.seconds(names::END_TO_END_LATENCY, "Arrival to last token")?,
            time_per_output_token: add.seconds(names::TIME_PER_OUTPUT_TOKEN, "Mean time per token after the first")?,
            queue_time: add.seconds(names::REQUEST_QUEUE_TIME, "Arrival to first scheduling")?,
            prefill_time: add.seconds(names::REQUEST_PREFILL_TIME, "First scheduling to first token")?,
            decode_time: add.seconds(names::REQUEST_DECODE_TIME, "First token to last token")?,
            inference_time: add.seconds(names::REQUEST_INFERENCE_TIME, "First scheduling to last token")?,
            request_prompt_tokens: add.tokens(names::REQUEST_PROMPT_TOKENS, "Prompt tokens of a request")?,
            request_generation_tokens: add
                .tokens(names::REQUEST_GENERATION_TOKENS, "Tokens generated for a request")?,
            prefill_computed: add.tokens(names::REQUEST_PREFILL_COMPUTED, "Prompt tokens computed for a request")?,
            params_n: add.tokens(names::REQUEST_PARAMS_N, "Answers that a request asked for")?,
            params_max_tokens: add
                .tokens(names::REQUEST_PARAMS_MAX_TOKENS, "Longest answer that a request asked for")?,
            longest_answer: add.tokens(names::REQUEST_MAX_GENERATION_TOKENS, "Tokens of a request's longest answer")?,
            iteration_tokens: add.tokens(names::ITERATION_TOKENS, "Tokens computed in a step")?,
            cache_config: add.gauges(
                names::CACHE_CONFIG_INFO,
                "How the KV cache is laid out; always 1",
                &["block_size", "num_gpu_blocks", "cache_dtype"],
            )?,
            waiting_by_reason: add.gauges(
                names::WAITING_BY_REASON,
                "Waiting requests by what they wait for",
                &["reason"],
            )?,
            sleep_state: add.gauges(names::SLEEP_STATE, "1 for the state that the engine is in", &["sleep_state"])?,
            lora_info: add.gauges(
                names::LORA_INFO,
                "Adapters, of which there are none",
                &["max_lora", "running_lora_adapters", "waiting_lora_adapters"],
            )?,
            build_info: add.gauges(
                names::BUILD_INFO,
                "What serves; always 1",
                &["fingerprint", "version", "device"],
            )?,
            memory_bytes: add.gauges(names::MEMORY_BYTES, "Memory by use", &["kind"])?,
            start_phase: add.gauges(names::START_PHASE_SECONDS, "Seconds of each phase of the start", &["phase"])?,
            // In /stats only.
            remaining_tokens: IntGauge::new("remaining_tokens", "Tokens running requests may still generate")?,
            cached_blocks: IntGauge::new("cached_blocks", "Blocks that only the prefix cache keeps")?,
            max_rows: OnceLock::new(),
            gpus: Gpus::new(&add)?,
            registry,
        };
        metrics.rejections.with_label_values(&[QUEUE_FULL]);
        metrics.lora_info.with_label_values(&["0", "", ""]).set(0.0);
        metrics.rests(None);
        Ok(metrics)
    }

    /// What stays the same from now on.
    pub(super) fn built(&self, built: &Built) {
        let effective = &built.effective;
        // Set once, at the end of the start.
        let _ = self.max_rows.set(effective.max_sequences.max(1));
        let layout = [effective.block_tokens.to_string(), effective.kv_blocks.to_string()];
        let labels = [layout[0].as_str(), layout[1].as_str(), effective.kv_cache_data_type.as_str()];
        self.cache_config.with_label_values(&labels).set(1.0);
        let version = env!("CARGO_PKG_VERSION");
        self.build_info.with_label_values(&[built.fingerprint.as_str(), version, effective.device.as_str()]).set(1.0);
        if let Some(ledger) = built.ledger {
            let uses = ledger.uses();
            uses.iter().for_each(|(kind, bytes)| self.memory_bytes.with_label_values(&[kind]).set(*bytes as f64));
        }
        let phases = [
            ("download", built.start.download_seconds),
            ("load", built.start.load_seconds),
            ("warm", built.start.warm_seconds),
        ];
        phases.iter().for_each(|(phase, seconds)| self.start_phase.with_label_values(&[phase]).set(*seconds));
    }

    /// What the process takes beside the model, as it is known now.
    pub(super) fn process_bytes(&self, bytes: u64) {
        self.memory_bytes.with_label_values(&[PROCESS]).set(bytes as f64);
    }

    /// How far an executor is with what it makes ahead.
    pub(super) fn prepared(&self, prepared: &Prepared) {
        self.graphs_captured.set(prepared.done.into());
        self.graphs_of_all_steps.set(prepared.all.into());
    }

    pub(super) fn step(&self, step: &StepStats) {
        self.iteration_tokens.observe(f64::from(step.tokens()));
        self.batch_fill.set(f64::from(step.rows) / f64::from(self.max_rows.get().copied().unwrap_or(1)));
    }

    pub(super) fn finished(&self, reason: FinishReason) {
        self.request_success.with_label_values(&[reason.name()]).inc();
    }

    /// The model gave a request numbers that are none.
    pub(super) fn corrupted(&self) {
        self.corrupted.inc();
    }

    pub(super) fn rejected(&self, reason: &str) {
        self.rejections.with_label_values(&[reason]).inc();
    }

    /// Whether keys could be read.
    pub(super) fn api_keys(&self, unreadable: bool) {
        self.api_keys_unreadable.set(unreadable.into());
    }

    /// What a request asks for.
    pub(super) fn asked(&self, answers: u32, max_tokens: Option<u32>) {
        self.params_n.observe(answers.into());
        if let Some(most) = max_tokens {
            self.params_max_tokens.observe(most.into());
        }
    }

    /// How long a request's longest answer was.
    pub(super) fn answered(&self, longest_tokens: u32) {
        self.longest_answer.observe(longest_tokens.into());
    }

    /// How deep the engine sleeps, if it does.
    pub(super) fn rests(&self, depth: Option<Depth>) {
        let state = match depth {
            None => "awake",
            Some(Depth::KeepsWeights) => "weights_offloaded",
            Some(Depth::DropsWeights) => "discard_all",
        };
        for known in ["awake", "weights_offloaded", "discard_all"] {
            self.sleep_state.with_label_values(&[known]).set(f64::from(u8::from(known == state)));
        }
    }

    /// The engine's state; counters grow by what they grew since `before`.
    pub(super) fn publish(&self, stats: &EngineStats, before: &EngineStats) {
        self.running.set(stats.running.into());
        self.waiting.set(stats.waiting.into());
        // Nothing waits for anything but room.
        self.waiting_by_reason.with_label_values(&["capacity"]).set(stats.waiting.into());
        self.waiting_by_reason.with_label_values(&["deferred"]).set(0.0);
        self.kv_usage.set(stats.kv.usage());
        self.queued_prompt_tokens.set(stats.queued_prompt_tokens as i64);
        self.predicted_ttft.set(stats.predicted_ttft_seconds.unwrap_or_default());
        self.remaining_tokens.set(stats.remaining_tokens as i64);
        self.cached_blocks.set(stats.kv.cached.into());
        self.blocks_leaked.set(stats.kv.leaked.into());
        self.blocks_swapped.set(stats.kv.swapped.into());
        self.preemptions.inc_by(stats.preemptions - before.preemptions);
        self.lost_sequences.inc_by(stats.lost_sequences - before.lost_sequences);
        self.prefix_queries.inc_by(stats.prefix_query_tokens - before.prefix_query_tokens);
        self.prefix_hits.inc_by(stats.prefix_hit_tokens - before.prefix_hit_tokens);
        self.external_queries.inc_by(stats.tier.query_tokens - before.tier.query_tokens);
        self.external_hits.inc_by(stats.tier.hit_tokens - before.tier.hit_tokens);
        self.recomputed.inc_by(stats.recomputed_tokens - before.recomputed_tokens);
        self.publish_drafts(&stats.drafts, &before.drafts);
        if stats.running == 0 {
            self.batch_fill.set(0.0);
        }
    }

    /// An encoder's texts.
    pub(super) fn encoding(&self, running: u64, waiting: u64, tokens: u64) {
        self.running.set(running as i64);
        self.waiting.set(waiting as i64);
        self.queued_prompt_tokens.set(tokens as i64);
    }

    /// Requests that ended since start.
    pub(super) fn ended(&self) -> u64 {
        let reasons = [FinishReason::Stop, FinishReason::Length, FinishReason::Abort, FinishReason::Error];
        reasons.iter().map(|reason| self.request_success.with_label_values(&[reason.name()]).get()).sum()
    }

    /// Requests refused since start for want of room, which more replicas would help.
    pub(super) fn refused(&self) -> u64 {
        [QUEUE_FULL, TOO_SLOW].iter().map(|reason| self.rejections.with_label_values(&[reason]).get()).sum()
    }

    /// The text exposition, with what only the moment of reading can tell.
    pub(super) fn exposition(&self, moment: &Moment) -> prometheus::Result<String> {
        self.oldest_queued_age.set(moment.oldest_age_seconds);
        self.utilization.set(moment.utilization.unwrap_or(0.0));
        let mut text = Vec::new();
        TextEncoder::new().encode(&with_older_names(self.registry.gather()), &mut text)?;
        String::from_utf8(text).map_err(|error| prometheus::Error::Msg(error.to_string()))
    }
}

/// The same figures again under the names that they had, or have in vLLM.
fn with_older_names(mut families: Vec<MetricFamily>) -> Vec<MetricFamily> {
    let named = |(older, name): &(&str, &str)| {
        let mut family = families.iter().find(|family| family.name() == *name)?.clone();
        family.set_name((*older).to_owned());
        Some(family)
    };
    let older: Vec<MetricFamily> = OLDER_NAMES.iter().filter_map(named).collect();
    families.extend(older);
    families
}

impl Metrics {
    /// Positions appear with their first guess that held.
    fn publish_drafts(&self, drafts: &DraftStats, before: &DraftStats) {
        self.drafts.inc_by(drafts.drafts - before.drafts);
        self.draft_tokens.inc_by(drafts.tokens - before.tokens);
        self.accepted_tokens.inc_by(drafts.accepted - before.accepted);
        let grown = drafts.accepted_by_position.iter().zip(before.accepted_by_position).map(|(now, then)| now - then);
        for (position, grown) in grown.enumerate().filter(|(_, grown)| *grown > 0) {
            self.accepted_by_position.with_label_values(&[&position.to_string()]).inc_by(grown);
        }
    }
}
