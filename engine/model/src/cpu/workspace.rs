//! Buffers for the activations of a step on a CPU.

use crate::config::DecoderConfig;

/// The buffers, one row for each token, allocated once for the largest step. Their bytes are
/// `windlass_engine_contract::memory::workspace_bytes`.
#[derive(Debug)]
pub(super) struct Workspace {
    pub residual: Vec<f32>,
    pub normed: Vec<f32>,
    pub projected: Vec<f32>,
    pub query: Vec<f32>,
    pub key: Vec<f32>,
    pub value: Vec<f32>,
    pub attended: Vec<f32>,
    pub gate: Vec<f32>,
    pub up: Vec<f32>,
    pub gated: Vec<f32>,
    /// One row for each token that gets logits.
    pub logits: Vec<f32>,
}

impl Workspace {
    /// Allocates buffers for steps of `tokens` tokens, of which `logit_rows` get logits.
    pub fn new(config: &DecoderConfig, tokens: usize, logit_rows: usize) -> Workspace {
        let rows = |width: usize| vec![0.0; tokens * width];
        Workspace {
            residual: rows(config.hidden),
            normed: rows(config.hidden),
            projected: rows(config.hidden),
            query: rows(config.query_width()),
            key: rows(config.kv_width()),
            value: rows(config.kv_width()),
            attended: rows(config.query_width()),
            gate: rows(config.feed_forward),
            up: rows(config.feed_forward),
            gated: rows(config.feed_forward),
            logits: vec![0.0; logit_rows * config.vocabulary],
        }
    }
}
