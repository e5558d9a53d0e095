//! Names of exported metrics. `vllm:*` are vLLM's own, so existing dashboards and autoscalers work; the
//! exposition adds `_total` to counters. `windlass:*` is what those lack.

#![allow(missing_docs)] // each name says what it is

/// Labels of every engine metric.
pub const LABEL_MODEL: &str = "model_name";
/// vLLM numbers the engines of a server by it.
pub const LABEL_ENGINE: &str = "engine";
/// Its value here: a server has one engine.
pub const THIS_ENGINE: &str = "0";

pub const NUM_REQUESTS_RUNNING: &str = "vllm:num_requests_running";
pub const NUM_REQUESTS_WAITING: &str = "vllm:num_requests_waiting";
pub const KV_CACHE_USAGE: &str = "vllm:kv_cache_usage_perc";
pub const WAITING_BY_REASON: &str = "vllm:num_requests_waiting_by_reason";
pub const SLEEP_STATE: &str = "vllm:engine_sleep_state";
pub const LORA_INFO: &str = "vllm:lora_requests_info";
pub const CACHE_CONFIG_INFO: &str = "vllm:cache_config_info";
pub const PROMPT_TOKENS: &str = "vllm:prompt_tokens_total";
pub const PROMPT_TOKENS_CACHED: &str = "vllm:prompt_tokens_cached_total";
pub const PROMPT_TOKENS_BY_SOURCE: &str = "vllm:prompt_tokens_by_source_total";
pub const PROMPT_TOKENS_RECOMPUTED: &str = "vllm:prompt_tokens_recomputed_total";
pub const CORRUPTED_REQUESTS: &str = "vllm:corrupted_requests_total";
pub const VLLM_ADMISSION_REJECTIONS: &str = "vllm:admission_rejections_total";
pub const GENERATION_TOKENS: &str = "vllm:generation_tokens_total";
pub const SEQUENCES_RECOMPUTED: &str = "windlass:sequences_recomputed_total";
pub const NUM_PREEMPTIONS: &str = "vllm:num_preemptions_total";
pub const REQUEST_SUCCESS: &str = "vllm:request_success_total";
pub const PREFIX_CACHE_QUERIES: &str = "vllm:prefix_cache_queries_total";
pub const PREFIX_CACHE_HITS: &str = "vllm:prefix_cache_hits_total";
pub const EXTERNAL_PREFIX_CACHE_QUERIES: &str = "vllm:external_prefix_cache_queries_total";
pub const EXTERNAL_PREFIX_CACHE_HITS: &str = "vllm:external_prefix_cache_hits_total";
pub const SPEC_DECODE_DRAFTS: &str = "vllm:spec_decode_num_drafts_total";
pub const SPEC_DECODE_DRAFT_TOKENS: &str = "vllm:spec_decode_num_draft_tokens_total";
pub const SPEC_DECODE_ACCEPTED_TOKENS: &str = "vllm:spec_decode_num_accepted_tokens_total";
pub const SPEC_DECODE_ACCEPTED_TOKENS_PER_POS: &str = "vllm:spec_decode_num_accepted_tokens_per_pos_total";
pub const TIME_TO_FIRST_TOKEN: &str = "vllm:time_to_first_token_seconds";
pub const INTER_TOKEN_LATENCY: &str = "vllm:inter_token_latency_seconds";
pub const TIME_PER_OUTPUT_TOKEN: &str = "vllm:request_time_per_output_token_seconds";
pub const END_TO_END_LATENCY: &str = "vllm:e2e_request_latency_seconds";
pub const REQUEST_QUEUE_TIME: &str = "vllm:request_queue_time_seconds";
pub const REQUEST_PREFILL_TIME: &str = "vllm:request_prefill_time_seconds";
pub const REQUEST_DECODE_TIME: &str = "vllm:request_decode_time_seconds";
pub const REQUEST_INFERENCE_TIME: &str = "vllm:request_inference_time_seconds";
pub const REQUEST_PROMPT_TOKENS: &str = "vllm:request_prompt_tokens";
pub const REQUEST_GENERATION_TOKENS: &str = "vllm:request_generation_tokens";
pub const REQUEST_MAX_GENERATION_TOKENS: &str = "vllm:request_max_num_generation_tokens";
pub const REQUEST_PARAMS_N: &str = "vllm:request_params_n";
pub const REQUEST_PARAMS_MAX_TOKENS: &str = "vllm:request_params_max_tokens";
pub const REQUEST_PREFILL_COMPUTED: &str = "vllm:request_prefill_kv_computed_tokens";
pub const ITERATION_TOKENS: &str = "vllm:iteration_tokens_total";

// vLLM's older names, which dashboards still ask for.
pub const OLD_KV_CACHE_USAGE: &str = "vllm:gpu_cache_usage_perc";
pub const OLD_PREFIX_CACHE_QUERIES: &str = "vllm:gpu_prefix_cache_queries_total";
pub const OLD_PREFIX_CACHE_HITS: &str = "vllm:gpu_prefix_cache_hits_total";
pub const OLD_TIME_PER_OUTPUT_TOKEN: &str = "vllm:time_per_output_token_seconds";

pub const BUILD_INFO: &str = "windlass:build_info";
pub const OLDEST_QUEUED_AGE: &str = "windlass:oldest_queued_request_age_seconds";
pub const PREDICTED_TTFT: &str = "windlass:predicted_ttft_seconds";
pub const QUEUED_PROMPT_TOKENS: &str = "windlass:queued_prompt_tokens";
pub const UTILIZATION: &str = "windlass:utilization_ratio";
pub const BATCH_FILL: &str = "windlass:batch_fill_ratio";
pub const START_PHASE_SECONDS: &str = "windlass:start_phase_seconds";
pub const MEMORY_BYTES: &str = "windlass:memory_bytes";
pub const ADMISSION_REJECTIONS: &str = "windlass:admission_rejections_total";
pub const API_KEYS_UNREADABLE: &str = "windlass:api_keys_unreadable";
pub const KV_BLOCKS_SWAPPED: &str = "windlass:kv_blocks_swapped";
pub const KV_BLOCKS_LEAKED: &str = "windlass:kv_blocks_leaked";
pub const GRAPHS_CAPTURED: &str = "windlass:graphs_captured";
pub const GRAPHS_OF_ALL_STEPS: &str = "windlass:graphs_of_all_steps";

// Of each GPU, labelled with its number.
pub const GPU_UTILIZATION: &str = "windlass:gpu_utilization_ratio";
pub const GPU_MEMORY_USED: &str = "windlass:gpu_memory_used_bytes";
pub const GPU_MEMORY_TOTAL: &str = "windlass:gpu_memory_total_bytes";
pub const GPU_POWER: &str = "windlass:gpu_power_watts";
pub const GPU_TEMPERATURE: &str = "windlass:gpu_temperature_celsius";
pub const GPU_XID_ERRORS: &str = "windlass:gpu_xid_errors_total";
