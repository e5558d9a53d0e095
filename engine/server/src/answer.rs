//! One answer as text: a request's tokens through detokenizer and stop strings, piece by piece.

use crate::driver::{Event, RequestStream};
use crate::generation::{Generation, Shows};
use crate::monitor::Monitor;
use crate::tenants::Lease;
use crate::text::detokenize::Detokenizer;
use crate::text::stop_strings::StopStrings;
use crate::text::tokenizer::Tokenizer;
use crate::text_log::Written;
use crate::traces::Answered;
use futures::Stream;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Instant;
use tracing::info;
use windlass_engine_api::generation::{FinishReason, StopReason};
use windlass_engine_api::usage::Usage;
use windlass_engine_core::plan::SequenceFailure;
use windlass_engine_core::request::{FinishReason as Ending, TokenId};
use windlass_engine_core::sampling::TokenLogprobs;
use windlass_engine_core::update::RequestUpdate;

/// The outcome of an answer that came to its end.
const COMPLETE: &str = "complete";
/// That of one which could not be given.
const INTERRUPTED: &str = "interrupted";

/// Text of one or more tokens.
#[derive(Clone, Debug, PartialEq)]
pub struct Piece {
    /// What is added; empty where a token completes no character or may belong to a stop string.
    pub text: String,
    /// The tokens that it took.
    pub tokens: Vec<TokenId>,
    /// Nothing came before it.
    pub first: bool,
    /// Set on the last piece.
    pub end: Option<End>,
    /// Counts so far.
    pub usage: Usage,
    /// What the model thought of the tokens behind the text, where it was asked.
    pub thoughts: Thoughts,
}

/// What the model thought of tokens.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Thoughts {
    /// Of the prompt's, in the first piece.
    pub prompt: Option<PromptThoughts>,
    /// Of the answer's.
    pub tokens: Vec<TokenLogprobs>,
    /// Where the first of them begins in the text, in characters.
    pub offset: u32,
}

/// What the model thought of a prompt.
#[derive(Clone, Debug, PartialEq)]
pub struct PromptThoughts {
    /// The first token, of which it thought nothing.
    pub first: TokenId,
    /// The others.
    pub rest: Vec<TokenLogprobs>,
}

/// What an answer has of its prompt.
#[derive(Clone, Debug)]
pub struct PromptShare {
    /// The first token.
    pub first: TokenId,
    /// Tokens that count for this answer: those of a prompt with several answers count once.
    pub tokens: u32,
    /// What is shown of it, before the answer.
    pub text: String,
}

/// How an answer ended.
#[derive(Clone, Debug, PartialEq)]
pub struct End {
    /// Why.
    pub reason: FinishReason,
    /// What of the client's ended it.
    pub stop: Option<StopReason>,
}

/// A complete answer.
#[derive(Clone, Debug, PartialEq)]
pub struct Whole {
    /// All of its text.
    pub text: String,
    /// How it ended.
    pub end: End,
    /// Token counts.
    pub usage: Usage,
    /// What the model thought of the tokens, where it was asked.
    pub thoughts: Thoughts,
}

/// Why an answer ended before it was complete, in words for its client.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Interrupted {
    /// The request leaves nothing to go on with, and would leave nothing again.
    #[error("the request leaves its answer nothing to go on with: {0}")]
    Unsatisfiable(String),
    /// What is asked for takes more time than an answer has, and would again.
    #[error("{0}")]
    TooSlow(String),
    /// This sequence failed, and would again.
    #[error("{0}")]
    Failed(String),
    /// It was given up: the same request may succeed elsewhere or later.
    #[error("{0}")]
    GivenUp(String),
}

impl From<SequenceFailure> for Interrupted {
    fn from(failure: SequenceFailure) -> Interrupted {
        match failure {
            SequenceFailure::Unsatisfiable(why) => Interrupted::Unsatisfiable(why),
            SequenceFailure::TooSlow(why) => Interrupted::TooSlow(why),
            SequenceFailure::Corrupted(why) | SequenceFailure::Uncomputable(why) | SequenceFailure::LostKv(why) => {
                Interrupted::Failed(why)
            }
        }
    }
}

/// The answers to one prompt, for what is counted of them together.
pub struct Siblings {
    monitor: Arc<Monitor>,
    longest_tokens: AtomicU32,
}

impl Siblings {
    /// None has been generated.
    pub fn new(monitor: Arc<Monitor>) -> Arc<Siblings> {
        Arc::new(Siblings { monitor, longest_tokens: AtomicU32::new(0) })
    }
}

impl Drop for Siblings {
    fn drop(&mut self) {
        self.monitor.answered(self.longest_tokens.load(Ordering::Relaxed));
    }
}

/// An answer being generated. Dropping it ends the request.
pub struct Answer {
    stream: RequestStream,
    tokenizer: Arc<Tokenizer>,
    detokenizer: Detokenizer,
    stops: StopStrings,
    stop_token_ids: Vec<TokenId>,
    shows: Shows,
    /// Control tokens that are part of the text.
    marks: Arc<[TokenId]>,
    scores_prompt: bool,
    prompt: PromptShare,
    /// Characters of the tokens that the model was asked about so far.
    offset: u32,
    lease: Lease,
    siblings: Arc<Siblings>,
    usage: Usage,
    /// Counted and not yet in a piece.
    fresh: Vec<TokenId>,
    began: Instant,
    first_token_seconds: Option<f64>,
    /// How it ended, for the log.
    outcome: &'static str,
    /// Its text, where that is logged.
    written: Option<Written>,
    begun: bool,
    ended: bool,
}

impl Answer {
    /// The answer to an admitted request.
    pub fn new(
        stream: RequestStream,
        tokenizer: Arc<Tokenizer>,
        generation: &Generation,
        prompt: PromptShare,
        lease: Lease,
        siblings: Arc<Siblings>,
    ) -> Answer {
        Answer {
            stream,
            tokenizer,
            detokenizer: Detokenizer::default(),
            stops: StopStrings::new(&generation.stops),
            stop_token_ids: generation.stop_token_ids.clone(),
            shows: generation.shows,
            marks: generation.marks.clone(),
            scores_prompt: generation.scores_prompt(),
            offset: 0,
            usage: Usage::new(prompt.tokens, 0, 0),
            prompt,
            lease,
            siblings,
            fresh: Vec::new(),
            began: Instant::now(),
            first_token_seconds: None,
            outcome: "abandoned",
            written: None,
            begun: false,
            ended: false,
        }
    }

    /// The same, with its text kept for the log.
    pub fn written_into(mut self, written: Option<Written>) -> Answer {
        self.written = written;
        self
    }

    /// The next piece; `None` after the last.
    pub async fn next(&mut self) -> Option<Result<Piece, Interrupted>> {
        if self.ended {
            return None;
        }
        let piece = match self.stream.next().await {
            Some(Event::Update(update)) => self.take(update),
            Some(Event::GivenUp(why)) => Err(Interrupted::GivenUp(why)),
            _ => Err(self.broken_off()),
        };
        self.note(&piece);
        Some(piece)
    }

    /// Counts an end where its client is told of it: the engine may have gone on behind a stop string, and ended for another reason.
    fn note(&mut self, piece: &Result<Piece, Interrupted>) {
        let (outcome, ending) = match piece {
            Ok(Piece { end: None, .. }) => return,
            Ok(Piece { end: Some(End { reason: FinishReason::Length, .. }), .. }) => (COMPLETE, Ending::Length),
            Ok(_) => (COMPLETE, Ending::Stop),
            Err(Interrupted::GivenUp(_)) => (INTERRUPTED, Ending::Abort),
            Err(_) => (INTERRUPTED, Ending::Error),
        };
        (self.ended, self.outcome) = (true, outcome);
        self.siblings.monitor.finished(ending);
        if outcome == COMPLETE {
            self.siblings.monitor.completed(self.usage.completion_tokens);
        }
    }

    /// The whole text, once it is there.
    pub async fn whole(mut self) -> Result<Whole, Interrupted> {
        let (mut text, mut thoughts) = (String::new(), Thoughts::default());
        while let Some(piece) = self.next().await {
            let piece = piece?;
            text.push_str(&piece.text);
            thoughts.prompt = thoughts.prompt.or(piece.thoughts.prompt);
            thoughts.tokens.extend(piece.thoughts.tokens);
            if let Some(end) = piece.end {
                return Ok(Whole { text, end, usage: piece.usage, thoughts });
            }
        }
        Err(self.broken_off())
    }

    /// All pieces.
    pub fn into_pieces(self) -> impl Stream<Item = Result<Piece, Interrupted>> {
        futures::stream::unfold(self, |mut answer| async move { answer.next().await.map(|piece| (piece, answer)) })
    }

    fn broken_off(&self) -> Interrupted {
        let message = match self.stream.overrun() {
            true => "the client reads more slowly than the answer is generated, too far behind to go on",
            false => "the engine ended before this answer did",
        };
        Interrupted::GivenUp(message.to_owned())
    }

    fn take(&mut self, mut update: RequestUpdate) -> Result<Piece, Interrupted> {
        match (update.failure.take(), update.finish) {
            (Some(failure), _) => return Err(failure.into()),
            (None, Some(Ending::Abort)) => return Err(self.broken_off()),
            (None, _) => (),
        }
        let mut text = std::mem::take(&mut self.prompt.text);
        let stop_token = update.tokens.last().copied().filter(|_| update.finish == Some(Ending::Stop));
        let shown = update.tokens.len() - usize::from(stop_token.is_some() && !self.shows.stop);
        self.count(&update, 0);
        for (index, token) in update.tokens.iter().enumerate() {
            self.count(&update, 1);
            self.fresh.push(*token);
            let Some(stop) = self.show(*token, index < shown, &mut text) else { continue };
            self.stream.stop();
            let thoughts = self.thoughts(update, index + 1);
            return Ok(self.stopped(text, stop, thoughts));
        }
        let finish = update.finish;
        let thoughts = self.thoughts(update, shown);
        match finish {
            None => Ok(self.piece(text, None, thoughts)),
            Some(finish) => Ok(self.end(text, finish, stop_token, thoughts)),
        }
    }

    fn count(&mut self, update: &RequestUpdate, tokens: u32) {
        if tokens > 0 && self.first_token_seconds.is_none() {
            self.first_token_seconds = Some(self.began.elapsed().as_secs_f64());
        }
        self.lease.spend(tokens);
        self.siblings.monitor.generated(tokens);
        let cached_tokens = update.cached_tokens.min(self.prompt.tokens);
        self.usage = Usage::new(self.prompt.tokens, self.usage.completion_tokens + tokens, cached_tokens);
    }

    /// What an update tells of its first `shown` tokens, and of the prompt.
    fn thoughts(&mut self, update: RequestUpdate, shown: usize) -> Thoughts {
        let wanted = self.scores_prompt && !self.begun;
        let prompt = wanted.then_some(PromptThoughts { first: self.prompt.first, rest: update.prompt_logprobs });
        if let Some(prompt) = prompt.as_ref().filter(|_| self.shows.prompt) {
            let rest = prompt.rest.iter().map(|scores| scores.chosen.token);
            self.offset += std::iter::once(prompt.first).chain(rest).map(|token| self.characters(token)).sum::<u32>();
        }
        let (offset, mut tokens) = (self.offset, update.logprobs);
        tokens.truncate(shown);
        self.offset += tokens.iter().map(|scores| self.characters(scores.chosen.token)).sum::<u32>();
        Thoughts { prompt, tokens, offset }
    }

    fn characters(&self, token: TokenId) -> u32 {
        self.tokenizer.vocabulary().text(token).chars().count() as u32
    }

    /// Adds a token's text; the stop string that it completes, if any.
    fn show(&mut self, token: TokenId, visible: bool, text: &mut String) -> Option<String> {
        if !visible {
            return None;
        }
        let (vocabulary, mut decoded) = (self.tokenizer.vocabulary(), String::new());
        let spelled = self.shows.special_tokens || self.marks.contains(&token);
        let piece = if spelled { vocabulary.spelling(token) } else { vocabulary.piece(token) };
        self.detokenizer.push(piece, &mut decoded);
        self.stops.push(&decoded, text).map(str::to_owned)
    }

    /// The last piece, with what was held back.
    fn end(&mut self, mut text: String, finish: Ending, stop_token: Option<TokenId>, thoughts: Thoughts) -> Piece {
        let mut rest = String::new();
        self.detokenizer.finish(&mut rest);
        if let Some(stop) = self.stops.push(&rest, &mut text).map(str::to_owned) {
            return self.stopped(text, stop, thoughts);
        }
        self.stops.finish(&mut text);
        let reason = if finish == Ending::Length { FinishReason::Length } else { FinishReason::Stop };
        let named = stop_token.filter(|token| self.stop_token_ids.contains(token));
        self.piece(text, Some(End { reason, stop: named.map(StopReason::Token) }), thoughts)
    }

    /// The last piece, at a stop string.
    fn stopped(&mut self, mut text: String, stop: String, thoughts: Thoughts) -> Piece {
        if self.shows.stop {
            text.push_str(&stop);
        }
        self.piece(text, Some(End { reason: FinishReason::Stop, stop: Some(StopReason::Text(stop)) }), thoughts)
    }

    fn piece(&mut self, text: String, end: Option<End>, thoughts: Thoughts) -> Piece {
        let first = !std::mem::replace(&mut self.begun, true);
        let tokens = std::mem::take(&mut self.fresh);
        if let Some(written) = &mut self.written {
            written.push(&text);
        }
        Piece { text, tokens, first, end, usage: self.usage, thoughts }
    }
}

/// One line for each answer, with no word of it unless the flags ask for it.
impl Drop for Answer {
    fn drop(&mut self) {
        if !self.ended {
            self.siblings.monitor.finished(Ending::Abort);
        }
        let seconds = self.began.elapsed().as_secs_f64();
        self.lease.answered(Answered {
            prompt_tokens: self.usage.prompt_tokens,
            completion_tokens: self.usage.completion_tokens,
            cached_tokens: self.usage.prompt_tokens_details.cached_tokens,
            first_token_seconds: self.first_token_seconds,
            seconds,
            failed: self.outcome != COMPLETE,
        });
        self.siblings.longest_tokens.fetch_max(self.usage.completion_tokens, Ordering::Relaxed);
        info!(
            request = self.lease.request(),
            tenant = self.lease.tenant_name(),
            prompt_tokens = self.usage.prompt_tokens,
            cached_tokens = self.usage.prompt_tokens_details.cached_tokens,
            completion_tokens = self.usage.completion_tokens,
            seconds,
            outcome = self.outcome,
            text = self.written.as_ref().map(Written::text),
            "answer"
        );
    }
}
