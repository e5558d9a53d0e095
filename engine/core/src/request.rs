//! A request as the scheduler knows it: tokens, limits and sampling parameters, already validated. No text, no HTTP.

use std::sync::Arc;

use crate::constraint::Constraint;
pub use crate::sampling::{Penalties, Sampling};

/// A token's index in the vocabulary.
pub type TokenId = u32;

/// Identifies a request for the life of the process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RequestId(pub u64);

/// The tenant of a request: a number that the caller assigns and never reuses. The fair policy shares the engine
/// among tenants.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Tenant(pub u32);

/// Scope of the prefix cache: requests of different scopes share no blocks. Numbers are the caller's, below 2^127.
/// Where clients choose the scope, it must be a number that others cannot guess.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CacheScope(pub u128);

impl CacheScope {
    /// The scope of all requests without a scope of their own.
    pub const SHARED: CacheScope = CacheScope(0);
}

/// A request to the engine.
#[derive(Clone, Debug)]
pub struct Request {
    /// Unique; chosen by the caller.
    pub id: RequestId,
    /// The tenant.
    pub tenant: Tenant,
    /// Scope in which its blocks are found and cached.
    pub cache_scope: CacheScope,
    /// Lower values are served first, under [`Policy::Priority`](crate::policy::Policy::Priority).
    pub priority: i32,
    /// Prompt tokens, at least one.
    pub prompt: Vec<TokenId>,
    /// Most tokens to generate. Prompt and this together fit the longest sequence. With 0 the prompt is only
    /// computed.
    pub max_tokens: u32,
    /// Neither an end-of-sequence nor a stop token is sampled before this many tokens were generated.
    pub min_tokens: u32,
    /// Sampling one of these finishes the request with [`FinishReason::Stop`]. Holds the model's end-of-sequence
    /// tokens, unless the client asked to ignore them.
    pub stop_tokens: Vec<TokenId>,
    /// Sampling parameters.
    pub sampling: Sampling,
    /// Constraint on the generated tokens.
    pub constraint: Option<Arc<dyn Constraint>>,
    /// Report the logprob of every generated token, and of this many most likely ones at its position.
    pub logprobs: Option<u32>,
    /// The same for every prompt token but the first. The whole prompt is then computed, whatever is cached.
    pub prompt_logprobs: Option<u32>,
    /// A live request with the same prompt and scope. Once its prompt is computed, its blocks are shared; the block
    /// that both would write is copied.
    pub fork_of: Option<RequestId>,
    /// The beam search that the request is part of.
    pub beams: Option<BeamSearch>,
}

/// A beam search, as vLLM defines it. It consists of `width` requests with the same prompt and parameters; each gets
/// one answer, and the leader the best one. All finish together, and no tokens are reported before. `sampling`,
/// `min_tokens`, `constraint` and `prompt_logprobs` are ignored.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BeamSearch {
    /// The request of the search that is added first.
    pub leader: RequestId,
    /// Number of beams, and of requests; at least one.
    pub width: u32,
    /// Answers are compared by their log probability over their length, prompt included, to this power.
    pub length_penalty: f64,
}

impl Request {
    /// A request for up to `max_tokens` most likely tokens after `prompt`, without options.
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

/// What a request demands of the engine: the input of time-to-first-token predictions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RequestDemand {
    /// The tenant.
    pub tenant: Tenant,
    /// Lower values are served first, under [`Policy::Priority`](crate::policy::Policy::Priority).
    pub priority: i32,
    /// Tokens to compute before the first one is generated, as far as they are known.
    pub prompt_tokens: u32,
    /// Most tokens to generate.
    pub max_tokens: u32,
}

impl RequestDemand {
    /// The smallest demand, of tenant 0.
    pub const MINIMAL: RequestDemand =
        RequestDemand { tenant: Tenant(0), priority: 0, prompt_tokens: 1, max_tokens: 1 };

    /// The demand of a request.
    pub fn of(request: &Request) -> RequestDemand {
        let prompt_tokens = match request.fork_of {
            Some(_) => 1,
            None => u32::try_from(request.prompt.len()).unwrap_or(u32::MAX),
        };
        let Request { tenant, priority, max_tokens, .. } = *request;
        RequestDemand { tenant, priority, prompt_tokens, max_tokens }
    }
}

/// Why a request finished. Each request has exactly one reason.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FinishReason {
    /// A stop token was sampled, or the server saw a stop string.
    Stop,
    /// `max_tokens` tokens were generated.
    Length,
    /// The client disconnected, or the server aborted the request.
    Abort,
    /// The sequence failed; the update's `failure` says why.
    Error,
}

impl FinishReason {
    /// The spelling in metric labels and in the API.
    pub fn name(self) -> &'static str {
        match self {
            FinishReason::Stop => "stop",
            FinishReason::Length => "length",
            FinishReason::Abort => "abort",
            FinishReason::Error => "error",
        }
    }
}

/// Why a request was rejected, with the numbers. `Display` is the text that the client gets.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum RejectReason {
    /// The prompt is empty.
    #[error("the prompt has no tokens")]
    EmptyPrompt,
    /// The prompt has a token outside the vocabulary: a client error.
    #[error("the prompt has token {token} and the model's tokens are below {vocabulary}")]
    UnknownToken {
        /// The token.
        token: TokenId,
        /// Ids are below this.
        vocabulary: u32,
    },
    /// Prompt and `max_tokens` exceed the longest sequence: a client error.
    #[error(
        "the prompt has {prompt_tokens} tokens and max_tokens is {max_tokens}, together more than the {limit_tokens} \
         tokens this model still_holds_window; shorten the prompt or lower max_tokens"
    )]
    TooLong {
        /// Tokens in the prompt.
        prompt_tokens: u32,
        /// `max_tokens` of the request.
        max_tokens: u32,
        /// Most tokens of a sequence.
        limit_tokens: u32,
    },
    /// The sequence needs more blocks than the pool has: a client error.
    #[error("the request needs {needed_blocks} KV blocks and the engine has {total_blocks}; lower max_tokens")]
    NeverFits {
        /// Blocks that it needs.
        needed_blocks: u32,
        /// Blocks in the pool.
        total_blocks: u32,
    },
    /// More requests arrived together than an idle engine admits: a client error.
    #[error("the request asks for {requests} answers and this server takes {limit} at once; ask for fewer")]
    TooMany {
        /// Requests that arrived together.
        requests: u32,
        /// Most that an idle engine admits.
        limit: u32,
    },
    /// Requests that arrived together have more prompt tokens than may ever wait: a client error.
    #[error(
        "the request's prompts have {prompt_tokens} tokens together and at most {limit_tokens} may wait; send fewer of \
         them at once"
    )]
    TooManyTokens {
        /// Prompt tokens of all of them.
        prompt_tokens: u64,
        /// Most that may wait.
        limit_tokens: u64,
    },
    /// The queue is full: the client may retry.
    #[error("{waiting} requests with {queued_tokens} prompt tokens are waiting; try again later")]
    QueueFull {
        /// Requests waiting.
        waiting: u32,
        /// Prompt tokens waiting.
        queued_tokens: u64,
    },
    /// The first token would take too long: the client may retry.
    #[error(
        "the first token would come after {predicted_milliseconds} ms, later than the {limit_milliseconds} ms that this \
         server promises; try again later"
    )]
    TooSlow {
        /// Predicted time to the first token, milliseconds.
        predicted_milliseconds: u64,
        /// Its limit, milliseconds.
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
