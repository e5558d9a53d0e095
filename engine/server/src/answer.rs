//! One answer as text: a request's tokens through detokenizer and stop strings, piece by piece.

use crate::driver::{Event, RequestStream};
use crate::generation::Generation;
use crate::tenants::Lease;
use crate::text::detokenize::Detokenizer;
use crate::text::stop_strings::StopStrings;
use crate::text::tokenizer::Tokenizer;
use futures::Stream;
use std::sync::Arc;
use std::time::Instant;
use tracing::info;
use windlass_engine_api::generation::{FinishReason, StopReason};
use windlass_engine_api::usage::Usage;
use windlass_engine_core::request::{FinishReason as Ending, TokenId};
use windlass_engine_core::update::RequestUpdate;

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
}

/// The engine gave the answer up.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct Interrupted {
    /// Why, for the client.
    pub message: String,
    /// The same request may succeed elsewhere or later.
    pub retry: bool,
}

/// An answer being generated. Dropping it ends the request.
pub struct Answer {
    stream: RequestStream,
    tokenizer: Arc<Tokenizer>,
    detokenizer: Detokenizer,
    stops: StopStrings,
    stop_token_ids: Vec<TokenId>,
    prompt_tokens: u32,
    lease: Lease,
    usage: Usage,
    /// Counted and not yet in a piece.
    fresh: Vec<TokenId>,
    began: Instant,
    /// How it ended, for the log.
    outcome: &'static str,
    begun: bool,
    ended: bool,
}

impl Answer {
    /// The answer to an admitted request.
    pub fn new(
        stream: RequestStream,
        tokenizer: Arc<Tokenizer>,
        generation: &Generation,
        prompt_tokens: u32,
        lease: Lease,
    ) -> Answer {
        Answer {
            stream,
            tokenizer,
            detokenizer: Detokenizer::default(),
            stops: StopStrings::new(&generation.stops),
            stop_token_ids: generation.stop_token_ids.clone(),
            prompt_tokens,
            lease,
            usage: Usage::new(prompt_tokens, 0, 0),
            fresh: Vec::new(),
            began: Instant::now(),
            outcome: "abandoned",
            begun: false,
            ended: false,
        }
    }

    /// The next piece; `None` after the last.
    pub async fn next(&mut self) -> Option<Result<Piece, Interrupted>> {
        if self.ended {
            return None;
        }
        let piece = match self.stream.next().await {
            Some(Event::Update(update)) => self.take(update),
            _ => Err(self.broken_off()),
        };
        self.ended = !matches!(piece, Ok(Piece { end: None, .. }));
        self.outcome = match &piece {
            Ok(Piece { end: None, .. }) => self.outcome,
            Ok(Piece { end: Some(_), .. }) => "complete",
            Err(_) => "interrupted",
        };
        Some(piece)
    }

    /// The whole text, once it is there.
    pub async fn whole(mut self) -> Result<Whole, Interrupted> {
        let mut text = String::new();
        while let Some(piece) = self.next().await {
            let piece = piece?;
            text.push_str(&piece.text);
            if let Some(end) = piece.end {
                return Ok(Whole { text, end, usage: piece.usage });
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
        Interrupted { message: message.to_owned(), retry: true }
    }

    fn take(&mut self, update: RequestUpdate) -> Result<Piece, Interrupted> {
        if let Some(finish @ (Ending::Error | Ending::Abort)) = update.finish {
            let message = update.error.unwrap_or_else(|| "the request was aborted".to_owned());
            // An error is of this sequence alone and would come again; an abort is the server's.
            return Err(Interrupted { message, retry: finish == Ending::Abort });
        }
        let mut text = String::new();
        let stop_token = update.tokens.last().copied().filter(|_| update.finish == Some(Ending::Stop));
        let shown = update.tokens.len() - usize::from(stop_token.is_some());
        for (index, token) in update.tokens.iter().enumerate() {
            self.count(*token, &update);
            let Some(stop) = self.show(*token, index < shown, &mut text) else { continue };
            self.stream.stop();
            return Ok(self.piece(text, Some(End { reason: FinishReason::Stop, stop: Some(StopReason::Text(stop)) })));
        }
        match update.finish {
            None => Ok(self.piece(text, None)),
            Some(finish) => Ok(self.end(text, finish, stop_token)),
        }
    }

    fn count(&mut self, token: TokenId, update: &RequestUpdate) {
        self.fresh.push(token);
        self.lease.spend(1);
        self.usage = Usage::new(self.prompt_tokens, self.usage.completion_tokens + 1, update.cached_tokens);
    }

    /// Adds a token's text; the stop string that it completes, if any.
    fn show(&mut self, token: TokenId, visible: bool, text: &mut String) -> Option<String> {
        if !visible {
            return None;
        }
        let mut decoded = String::new();
        self.detokenizer.push(self.tokenizer.vocabulary().piece(token), &mut decoded);
        self.stops.push(&decoded, text).map(str::to_owned)
    }

    /// The last piece, with what was held back.
    fn end(&mut self, mut text: String, finish: Ending, stop_token: Option<TokenId>) -> Piece {
        let mut rest = String::new();
        self.detokenizer.finish(&mut rest);
        if let Some(stop) = self.stops.push(&rest, &mut text).map(str::to_owned) {
            return self.piece(text, Some(End { reason: FinishReason::Stop, stop: Some(StopReason::Text(stop)) }));
        }
        self.stops.finish(&mut text);
        let reason = if finish == Ending::Length { FinishReason::Length } else { FinishReason::Stop };
        let named = stop_token.filter(|token| self.stop_token_ids.contains(token));
        self.piece(text, Some(End { reason, stop: named.map(StopReason::Token) }))
    }

    fn piece(&mut self, text: String, end: Option<End>) -> Piece {
        let first = !std::mem::replace(&mut self.begun, true);
        Piece { text, tokens: std::mem::take(&mut self.fresh), first, end, usage: self.usage }
    }
}

/// One line for each answer, with no word of it.
impl Drop for Answer {
    fn drop(&mut self) {
        info!(
            request = self.lease.request(),
            tenant = self.lease.tenant_name(),
            prompt_tokens = self.usage.prompt_tokens,
            cached_tokens = self.usage.prompt_tokens_details.cached_tokens,
            completion_tokens = self.usage.completion_tokens,
            seconds = self.began.elapsed().as_secs_f64(),
            outcome = self.outcome,
            "answer"
        );
    }
}
