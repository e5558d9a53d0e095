//! A request as the scheduler knows it: tokens, limits and sampling, already validated. No text, no HTTP.

use std::fmt;

/// A token's index in the vocabulary.
pub type TokenId = u32;

/// Identifies one request for the life of the process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RequestId(pub u64);

/// On whose behalf a request is made: a number that the caller assigns and never reuses. Scheduling is fair between
/// tenants, and what one of them computed is no other's to find.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Tenant(pub u32);

/// What is asked of the engine.
#[derive(Clone, Debug)]
pub struct Request {
    /// Unique; chosen by the caller.
    pub id: RequestId,
    /// Whose it is.
    pub tenant: Tenant,
    /// Prompt tokens, at least one.
    pub prompt: Vec<TokenId>,
    /// Most tokens to generate, at least one; prompt and this together fit the model's length.
    pub max_tokens: u32,
    /// Before this many tokens neither an end-of-sequence nor a stop token is sampled.
    pub min_tokens: u32,
    /// Sampling any of these ends the request with [`FinishReason::Stop`]. Holds the model's
    /// end-of-sequence tokens unless the client asked to ignore them.
    pub stop_tokens: Vec<TokenId>,
    /// How tokens are drawn.
    pub sampling: Sampling,
}

/// How a token is drawn from logits. Everything a row needs: the same values and position give the same token.
#[derive(Clone, Debug, PartialEq)]
pub struct Sampling {
    /// 0 takes the most likely token, the lowest id among equals.
    pub temperature: f32,
    /// Keep this many most likely tokens; 0 keeps all.
    pub top_k: u32,
    /// Keep the smallest set of tokens whose probabilities reach this sum, in (0, 1].
    pub top_p: f32,
    /// Drop tokens less likely than this share of the most likely one, in [0, 1].
    pub min_p: f32,
    /// Key of the counter-based generator: with the token's position it gives the draw.
    pub seed: u64,
}

impl Sampling {
    /// Always the most likely token.
    pub const GREEDY: Sampling = Sampling { temperature: 0.0, top_k: 0, top_p: 1.0, min_p: 0.0, seed: 0 };
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
#[derive(Clone, Debug, PartialEq)]
pub enum RejectReason {
    /// The prompt is empty.
    EmptyPrompt,
    /// `max_tokens` is 0.
    NothingToGenerate,
    /// The prompt has a token that the model does not know: a client error.
    UnknownToken {
        /// The token.
        token: TokenId,
        /// Ids are below this.
        vocabulary: u32,
    },
    /// Prompt and `max_tokens` exceed the longest sequence. Never admissible: a client error.
    TooLong {
        /// Tokens in the prompt.
        prompt_tokens: u32,
        /// Tokens asked for.
        max_tokens: u32,
        /// Longest sequence.
        limit_tokens: u32,
    },
    /// The sequence could never hold its blocks, even alone. Never admissible: a client error.
    NeverFits {
        /// Blocks it would need.
        needed_blocks: u32,
        /// Blocks there are.
        total_blocks: u32,
    },
    /// The queue is full: try again.
    QueueFull {
        /// Requests waiting.
        waiting: u32,
        /// Prompt tokens waiting.
        queued_tokens: u64,
    },
}

impl fmt::Display for RejectReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            RejectReason::EmptyPrompt => write!(f, "the prompt has no tokens"),
            RejectReason::NothingToGenerate => write!(f, "max_tokens is 0; it must be at least 1"),
            RejectReason::UnknownToken { token, vocabulary } => {
                write!(f, "the prompt has token {token} and the model's tokens are below {vocabulary}")
            }
            RejectReason::TooLong { prompt_tokens, max_tokens, limit_tokens } => write!(
                f,
                "the prompt has {prompt_tokens} tokens and max_tokens is {max_tokens}, together more than the \
                 {limit_tokens} tokens this model serves; shorten the prompt or lower max_tokens"
            ),
            RejectReason::NeverFits { needed_blocks, total_blocks } => write!(
                f,
                "the request needs {needed_blocks} KV blocks and the engine has {total_blocks}; lower max_tokens"
            ),
            RejectReason::QueueFull { waiting, queued_tokens } => {
                write!(f, "{waiting} requests with {queued_tokens} prompt tokens are waiting; try again later")
            }
        }
    }
}
