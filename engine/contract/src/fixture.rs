//! Examples that the tests of several crates hold their arithmetic and their readers against.

use crate::shape::ModelShape;
use crate::stats::{EffectiveConfig, Histogram, Phase, StartPhases, Stats};

/// Llama-3.1-8B in bf16, as published: 128 KiB of bf16 KV cache a token, 15.0 GiB of weights.
pub fn llama_8b() -> ModelShape {
    ModelShape {
        architecture: "llama".into(),
        layers: 32,
        hidden: 4096,
        feed_forward: 14_336,
        heads: 32,
        kv_heads: 8,
        head_dim: 128,
        vocabulary: 128_256,
        context_tokens: 131_072,
        weight_bytes: 16_060_522_496,
        windowed: None,
    }
}

/// What an idle engine on CPU says, a thousand seconds after its start.
pub fn idle() -> Stats {
    Stats {
        uptime_seconds: 1000.0,
        phase: Phase::Ready,
        simulated: false,
        running: 0,
        waiting: 0,
        oldest_queue_age_seconds: 0.0,
        queued_tokens: 0,
        remaining_tokens: 0,
        kv_usage: 0.0,
        cached_blocks: 0,
        utilization: Some(0.0),
        finished: 0,
        rejected: 0,
        prompt_tokens: 0,
        generation_tokens: 0,
        time_to_first_token: Histogram::default(),
        inter_token: Histogram::default(),
        end_to_end: Histogram::default(),
        effective: Some(effective()),
        start: Some(StartPhases { download_seconds: 0.0, load_seconds: 0.25, warm_seconds: 0.5 }),
        fingerprint: Some("fp_0123456789abcdef".into()),
        gpus: None,
    }
}

/// What that engine built.
pub fn effective() -> EffectiveConfig {
    EffectiveConfig {
        device: "cpu".into(),
        tensor_parallel: 1,
        pipeline_parallel: 1,
        quantization: "q4_1".into(),
        kv_cache_data_type: "bf16".into(),
        max_model_tokens: 4096,
        max_sequences: 64,
        kv_blocks: 1000,
        block_tokens: 16,
        served_names: vec!["llama".into()],
        kernels: "avx2".into(),
    }
}
