//! A request as the scheduler knows it: tokens, limits and sampling, already validated. No text, no HTTP.

use std::sync::Arc;

use crate::constraint::Constraint;
pub use crate::sampling::{Penalties, Sampling};

/// A token's index in the vocabulary.
pub type TokenId = u32;

/// Identifies one request for the life of the process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RequestId(pub u64);

/// On whose behalf a request is made: a number that the caller assigns and never reuses. Scheduling is fair between
/// tenants, and what one of them computed is no other's to find.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Tenant(pub u32);

/// Whose prompts may be found in the cache by whom: requests of different scopes share nothing. Numbers are the
/// caller's, below 2^127; ones that cannot be drafted keep scopes apart that clients choose.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CacheScope(pub u128);

impl CacheScope {
    /// The scope of everybody who has no other.
    pub const SHARED: CacheScope = CacheScope(0);
}

/// What is asked of the engine.
#[derive(Clone, Debug)]
pub struct Request {
    /// Unique; chosen by the caller.
    pub id: RequestId,
    /// Whose it is.
    pub tenant: Tenant,
    /// Where its prompt is looked for and kept.
    pub cache_scope: CacheScope,
    /// Lower ones go first, where the policy asks for it.
    pub priority: i32,
    /// Prompt tokens, at least one.
    pub prompt: Vec<TokenId>,
    /// Most tokens to generate; prompt and this together fit the model's length. With 0 the prompt is only computed.
    pub max_tokens: u32,
    /// Before this many tokens neither an end-of-sequence nor a stop token is sampled.
    pub min_tokens: u32,
    /// Sampling any of these ends the request with [`FinishReason::Stop`]. Holds the model's
    /// end-of-sequence tokens unless the client asked to ignore them.
    pub stop_tokens: Vec<TokenId>,
    /// How tokens are drawn.
    pub sampling: Sampling,
    /// What they must fit.
    pub constraint: Option<Arc<dyn Constraint>>,
    /// Report the log probability of every generated token, and of so many most likely ones at its place.
    pub logprobs: Option<u32>,
    /// The same for every prompt token but the first. Such a prompt is computed whole, whatever is cached.
    pub prompt_logprobs: Option<u32>,
    /// A live request with the same prompt and scope: once that is computed, its blocks are shared instead of
    /// computed again, and the one that both would write into is copied.
    pub fork_of: Option<RequestId>,
    /// The search whose answers it is one of.
    pub beams: Option<BeamSearch>,
}

/// A beam search, as vLLM defines it: as many answers as beams, to as many requests with one prompt and the same terms.
/// They end together, the best answer is the leader's, and nothing is told before. Sampling does not matter, nor do
/// `min_tokens`, `constraint` and `prompt_logprobs`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BeamSearch {
    /// The first of the requests to be added.
    pub leader: RequestId,
    /// Beams, and requests; at least one.
    pub width: u32,
    /// Answers are compared by the logarithm of their probability over their length, prompt included, to this power.
    pub length_penalty: f64,
}

impl Request {
    /// A request for up to `max_tokens` most likely tokens after `prompt`, and nothing else.
    pub fn greedy(id: RequestId, prompt: Vec<TokenId>, max_tokens: u32) -> Request {
        Request {
            id,
            tenant: Tenant::default(),
            cache_scope: CacheScope::SHARED,
            priority: 0,
            prompt,
            max_tokens,
            min_tokens: 0,
            stop_tokens: Vec::new(),
            sampling: Sampling::GREEDY,
            constraint: None,
            logprobs: None,
            prompt_logprobs: None,
            fork_of: None,
            beams: None,
        }
    }
}

/// What a request means to others that wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RequestDemand {
    /// Whose it is.
    pub tenant: Tenant,
    /// Lower ones go first, where the policy asks for it.
    pub priority: i32,
    /// Tokens to compute before the first one is generated, as far as they are known.
    pub prompt_tokens: u32,
    /// Most tokens to generate.
    pub max_tokens: u32,
}

impl RequestDemand {
    /// What is almost nothing, of nobody in particular.
    pub const MINIMAL: RequestDemand =
        RequestDemand { tenant: Tenant(0), priority: 0, prompt_tokens: 1, max_tokens: 1 };

    /// What this request means.
    pub fn of(request: &Request) -> RequestDemand {
        let prompt_tokens = match request.fork_of {
            Some(_) => 1,
            None => u32::try_from(request.prompt.len()).unwrap_or(u32::MAX),
        };
        let Request { tenant, priority, max_tokens, .. } = *request;
        RequestDemand { tenant, priority, prompt_tokens, max_tokens }
    }
}

/// Why a request ended. Exactly one per request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FinishReason {
    /// A stop token was sampled, or the server saw a stop string.
    Stop,
    /// `max_tokens` were generated.
    Length,
    /// The client went away or the server gave it up.
    Abort,
    /// This sequence alone failed; the text says how.
    Error,
}

impl FinishReason {
    /// As the metrics label and the API spell it.
    pub fn name(self) -> &'static str {
        match self {
            FinishReason::Stop => "stop",
            FinishReason::Length => "length",
            FinishReason::Abort => "abort",
            FinishReason::Error => "error",
        }
    }
}

/// Why a request was not admitted, with its numbers. `Display` is what the client reads.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum RejectReason {
    /// The prompt is empty.
    #[error("the prompt has no tokens")]
    EmptyPrompt,
    /// The prompt has a token that the model does not know: a client error.
    #[error("the prompt has token {token} and the model's tokens are below {vocabulary}")]
    UnknownToken {
        /// The token.
        token: TokenId,
        /// Ids are below this.
        vocabulary: u32,
    },
    /// Prompt and `max_tokens` exceed the longest sequence. Never admissible: a client error.
    #[error(
        "the prompt has {prompt_tokens} tokens and max_tokens is {max_tokens}, together more than the {limit_tokens} \
         tokens this model still_holds_window; shorten the prompt or lower max_tokens"
    )]
    TooLong {
        /// Tokens in the prompt.
        prompt_tokens: u32,
        /// Tokens asked for.
        max_tokens: u32,
        /// Longest sequence.
        limit_tokens: u32,
    },
    /// The sequence could never hold its blocks, even alone. Never admissible: a client error.
    #[error("the request needs {needed_blocks} KV blocks and the engine has {total_blocks}; lower max_tokens")]
    NeverFits {
        /// Blocks it would need.
        needed_blocks: u32,
        /// Blocks there are.
        total_blocks: u32,
    },
    /// More requests come together than may ever wait: a client error.
    #[error("the request asks for {requests} answers and this server takes {limit} at once; ask for fewer")]
    TooMany {
        /// Requests that came.
        requests: u32,
        /// Most that an idle engine takes.
        limit: u32,
    },
    /// Requests that come together have more prompt tokens than may ever wait: a client error.
    #[error(
        "the request's prompts have {prompt_tokens} tokens together and at most {limit_tokens} may wait; send fewer of \
         them at once"
    )]
    TooManyTokens {
        /// Prompt tokens of all.
        prompt_tokens: u64,
        /// Most that may wait.
        limit_tokens: u64,
    },
    /// The queue is full: try again.
    #[error("{waiting} requests with {queued_tokens} prompt tokens are waiting; try again later")]
    QueueFull {
        /// Requests waiting.
        waiting: u32,
        /// Prompt tokens waiting.
        queued_tokens: u64,
    },
    /// The first token would come too late: try again.
    #[error(
        "the first token would come after {predicted_milliseconds} ms, later than the {limit_milliseconds} ms that this \
         server promises; try again later"
    )]
    TooSlow {
        /// When it would come, milliseconds from now.
        predicted_milliseconds: u64,
        /// The latest that is allowed, milliseconds.
        limit_milliseconds: u64,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reasons_are_spelled_as_clients_know_them() {
        let reasons = [FinishReason::Stop, FinishReason::Length, FinishReason::Abort, FinishReason::Error];
        assert_eq!(reasons.map(FinishReason::name), ["stop", "length", "abort", "error"]);
        let too_long = RejectReason::TooLong { prompt_tokens: 9, max_tokens: 8, limit_tokens: 16 }.to_string();
        assert_eq!(
            too_long,
            "the prompt has 9 tokens and max_tokens is 8, together more than the 16 tokens this model still_holds_window; shorten \
             the prompt or lower max_tokens"
        );
    }
}
