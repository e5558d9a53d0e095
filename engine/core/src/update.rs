//! Outputs of one engine step, and statistics of the engine. Times are in seconds on the caller's clock.

use crate::draft::MAX_DRAFT_TOKENS;
pub use crate::kv::{KvUsage, SwapStats};
use crate::plan::SequenceFailure;
use crate::request::{FinishReason, RequestId, TokenId};
use crate::sampling::TokenLogprobs;

/// Everything that one call of [`Engine::step`](crate::engine::Engine::step) produced.
#[derive(Clone, Debug, Default)]
pub struct EngineOutputs {
    /// At most one for each request.
    pub updates: Vec<RequestUpdate>,
    /// The step that was collected, if any.
    pub step: Option<StepStats>,
    /// Why a sequence lost its KV blocks, if one did since the last step: the most recent error.
    pub lost_kv: Option<String>,
}

/// Progress of one request.
#[derive(Clone, Debug, PartialEq)]
pub struct RequestUpdate {
    /// The request.
    pub request: RequestId,
    /// Tokens generated since the last update, including a stop token.
    pub tokens: Vec<TokenId>,
    /// Logprobs of `tokens`; empty unless requested.
    pub logprobs: Vec<TokenLogprobs>,
    /// Logprobs of the prompt tokens after those of earlier updates, except the first token of the prompt; empty
    /// unless requested.
    pub prompt_logprobs: Vec<TokenLogprobs>,
    /// Set in the final update of a request, and in no other.
    pub finish: Option<FinishReason>,
    /// The error, with [`FinishReason::Error`].
    pub failure: Option<SequenceFailure>,
    /// Prompt tokens that were in the prefix cache when the request was first scheduled.
    pub cached_tokens: u32,
    /// `now` of the [`add`](crate::engine::Engine::add) that queued it.
    pub arrival_seconds: f64,
    /// `now` of the step that first scheduled it; `None` if none did.
    pub first_scheduled_seconds: Option<f64>,
}

/// Statistics of one collected step.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct StepStats {
    /// Sequences in the step.
    pub rows: u32,
    /// Tokens computed by prefill: prompt tokens, and generated tokens that are recomputed after a preemption.
    pub prefill_tokens: u32,
    /// Tokens computed by decode, one for each decoding sequence.
    pub decode_tokens: u32,
    /// Draft tokens verified beside them.
    pub draft_tokens: u32,
    /// Seconds that the executor was busy with the step. With several pipeline stages, those of the slowest stage.
    pub busy_seconds: f64,
}

impl StepStats {
    /// All tokens computed.
    pub fn tokens(&self) -> u32 {
        self.prefill_tokens + self.decode_tokens + self.draft_tokens
    }
}

/// State of the engine at one moment. Counters are cumulative since the start of the engine.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct EngineStats {
    /// Sequences in the running batch.
    pub running: u32,
    /// Requests in the waiting queue, including preempted ones.
    pub waiting: u32,
    /// Arrival of the oldest waiting request.
    pub oldest_waiting_arrival_seconds: Option<f64>,
    /// Prompt tokens of waiting requests.
    pub queued_prompt_tokens: u64,
    /// Predicted seconds to the first token of a request that arrived now; `None` until enough steps were measured.
    pub predicted_ttft_seconds: Option<f64>,
    /// Upper bound of the tokens that the running requests still have to generate.
    pub remaining_tokens: u64,
    /// Blocks by state.
    pub kv: KvUsage,
    /// Preemptions.
    pub preemptions: u64,
    /// Sequences whose blocks could not be swapped in and that were recomputed.
    pub lost_sequences: u64,
    /// Prompt tokens looked up in the prefix cache.
    pub prefix_query_tokens: u64,
    /// Prompt tokens found there.
    pub prefix_hit_tokens: u64,
    /// Prompt tokens that were computed more than once: after a preemption, or the last token of a prompt that
    /// several sequences share.
    pub recomputed_tokens: u64,
    /// Lookups in the swap space, including those of sequences that return from a preemption.
    pub swap: SwapStats,
    /// Speculative decoding.
    pub drafts: DraftStats,
}

/// Statistics of speculative decoding.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DraftStats {
    /// Rows that had draft tokens.
    pub drafts: u64,
    /// Draft tokens in those rows.
    pub tokens: u64,
    /// Draft tokens accepted.
    pub accepted: u64,
    /// Draft tokens accepted, by position after the last known token.
    pub accepted_by_position: [u64; MAX_DRAFT_TOKENS],
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_has_the_tokens_of_prompts_answers_and_drafts() {
        let step = StepStats { prefill_tokens: 1, decode_tokens: 2, draft_tokens: 4, ..StepStats::default() };
        assert_eq!(step.tokens(), 7);
    }
}
