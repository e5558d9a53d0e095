//! `/v1/metrics`: the server's last minute as JSON.

use serde::{Deserialize, Serialize};

/// The server in numbers. Rates and latencies are of the last `window_seconds`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ServerMetrics {
    /// What rates and latencies cover: a minute, less after the start.
    pub window_seconds: f64,
    /// Requests being generated.
    pub requests_running: u32,
    /// Requests that wait.
    pub requests_waiting: u32,
    /// Requests that ended, a second.
    pub requests_per_second: f64,
    /// Prompt tokens computed or found in the cache, a second.
    pub prompt_tokens_per_second: f64,
    /// Tokens generated, a second.
    pub generation_tokens_per_second: f64,
    /// Arrival to first token.
    pub time_to_first_token_ms: Option<Latency>,
    /// Between tokens.
    pub inter_token_ms: Option<Latency>,
    /// Arrival to last token.
    pub end_to_end_ms: Option<Latency>,
    /// Share of the last minute in which the engine computed, 0 to 1.
    pub utilization: Option<f64>,
    /// Sequences of the last step as a share of what a step may have, 0 to 1.
    pub batch_fill: f64,
    /// Share of KV blocks that live requests hold, 0 to 1.
    pub kv_cache_usage: f64,
}

/// Percentiles, milliseconds, interpolated between bucket edges. Absent where nothing was measured.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Latency {
    /// Half are shorter.
    pub p50: f64,
    /// 95 of 100 are shorter.
    pub p95: f64,
    /// 99 of 100 are shorter.
    pub p99: f64,
}
