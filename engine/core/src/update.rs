//! What a turn of the engine gives back, and the engine's state in numbers. Times are the caller's, in seconds.

use crate::draft::MAX_DRAFT_TOKENS;
pub use crate::kv::{KvUsage, SwapStats};
use crate::plan::SequenceFailure;
use crate::request::{FinishReason, RequestId, TokenId};
use crate::sampling::TokenLogprobs;

/// Everything that one turn produced.
#[derive(Clone, Debug, Default)]
pub struct EngineOutputs {
    /// At most one entry per request.
    pub updates: Vec<RequestUpdate>,
    /// The step that was collected, if one was.
    pub step: Option<StepStats>,
    /// Why the last of the sequences that began again in this turn did, if any did.
    pub lost_kv: Option<String>,
}

/// News of one request.
#[derive(Clone, Debug, PartialEq)]
pub struct RequestUpdate {
    /// Whose.
    pub request: RequestId,
    /// Tokens generated since the last update, a stop token included.
    pub tokens: Vec<TokenId>,
    /// What the model thought of each of `tokens`; empty if nobody asked.
    pub logprobs: Vec<TokenLogprobs>,
    /// What the model thought of the prompt's tokens after those of earlier updates, its first token left out; empty
    /// if nobody asked.
    pub prompt_logprobs: Vec<TokenLogprobs>,
    /// Set in the last update of a request, and in no other.
    pub finish: Option<FinishReason>,
    /// What went wrong, with [`FinishReason::Error`].
    pub failure: Option<SequenceFailure>,
    /// Prompt tokens whose K and V were found in the prefix cache when it was first scheduled.
    pub cached_tokens: u32,
    /// `now` of [`add`](crate::engine::Engine::add).
    pub arrival_seconds: f64,
    /// `now` of the turn that first scheduled it; absent if that never happened.
    pub first_scheduled_seconds: Option<f64>,
}

/// One collected step.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct StepStats {
    /// Sequences in it.
    pub rows: u32,
    /// Prompt tokens computed, and generated tokens computed again after a preemption.
    pub prefill_tokens: u32,
    /// Generated tokens computed, one for each decoding sequence.
    pub decode_tokens: u32,
    /// Draft tokens computed beside them.
    pub draft_tokens: u32,
    /// Seconds the executor was busy with it; of several stages, the one that was longest.
    pub busy_seconds: f64,
}

impl StepStats {
    /// Tokens computed.
    pub fn tokens(&self) -> u32 {
        self.prefill_tokens + self.decode_tokens + self.draft_tokens
    }
}

/// The engine's state at one moment; counters are cumulative since its start.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct EngineStats {
    /// Sequences that hold blocks.
    pub running: u32,
    /// Requests that wait to be scheduled, preempted ones included.
    pub waiting: u32,
    /// When the oldest waiting request arrived.
    pub oldest_waiting_arrival_seconds: Option<f64>,
    /// Prompt tokens of waiting requests.
    pub queued_prompt_tokens: u64,
    /// Seconds after which a request that came now would get its first token; absent until steps were measured.
    pub predicted_ttft_seconds: Option<f64>,
    /// Upper bound of the tokens that running requests have still to generate.
    pub remaining_tokens: u64,
    /// Blocks by state.
    pub kv: KvUsage,
    /// Preemptions so far.
    pub preemptions: u64,
    /// Sequences so far whose blocks could not be brought back, and that were computed again.
    pub lost_sequences: u64,
    /// Prompt tokens looked up in the prefix cache so far.
    pub prefix_query_tokens: u64,
    /// Prompt tokens found there so far.
    pub prefix_hit_tokens: u64,
    /// Prompt tokens so far that were computed before and had to be once more: after a preemption, or the last of a
    /// prompt with several answers.
    pub recomputed_tokens: u64,
    /// What was looked up outside the pool so far, for sequences that return from a preemption, too.
    pub swap: SwapStats,
    /// Draft tokens so far.
    pub drafts: DraftStats,
}

/// What became of draft tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DraftStats {
    /// Rows with draft tokens.
    pub drafts: u64,
    /// Draft tokens in them.
    pub tokens: u64,
    /// Those that held.
    pub accepted: u64,
    /// Those that held, by how far behind the last known token they were.
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
