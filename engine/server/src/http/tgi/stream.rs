//! Events of this dialect: one for each token, the last with all of the text.

use super::error;
use super::generate::{finish_reason, split};
use crate::answer::Piece;
use crate::http::error::ApiError;
use crate::http::respond::{EventBuffer, Events};
use windlass_engine_api::tgi::{StreamDetails, StreamResponse};
use windlass_engine_api::usage::Usage;

/// Writes the events of one stream.
pub struct TgiEvents {
    seed: Option<i64>,
    text: String,
    tokens: u32,
}

impl TgiEvents {
    /// A stream whose text begins with `prefix`.
    pub fn new(prefix: String, seed: Option<i64>) -> TgiEvents {
        TgiEvents { seed, text: prefix, tokens: 0 }
    }
}

impl Events for TgiEvents {
    fn piece(&mut self, _: u32, piece: &Piece, _: Option<Usage>, out: &mut EventBuffer) {
        self.text.push_str(&piece.text);
        let reason = piece.end.as_ref().map(|end| finish_reason(end.reason, end.stop.as_ref()));
        let mut left = piece.tokens.len();
        for token in split(piece, reason) {
            (self.tokens, left) = (self.tokens + 1, left - 1);
            let last = reason.filter(|_| left == 0);
            out.event(&StreamResponse {
                index: self.tokens,
                token,
                generated_text: last.map(|_| self.text.clone()),
                details: last.map(|finish_reason| StreamDetails {
                    finish_reason,
                    generated_tokens: piece.usage.completion_tokens,
                    seed: self.seed,
                    input_length: piece.usage.prompt_tokens,
                }),
            });
        }
    }

    fn usage(&self, _: Usage, _: &mut EventBuffer) {}

    /// The last token's event is the end.
    fn done(&self, _: &mut EventBuffer) {}

    fn error(&self, error: ApiError, out: &mut EventBuffer) {
        out.event(&error::body(error));
    }
}
