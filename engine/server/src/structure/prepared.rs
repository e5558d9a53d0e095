//! What `llguidance` knows of a vocabulary, and how it compiles with it.

use super::Grammar;
use crate::text::tokenizer::Tokenizer;
use llguidance::api::{GrammarInit, ParserLimits, TopLevelGrammar};
use llguidance::toktrie::{ApproximateTokEnv, InferenceCapabilities, TokRxInfo, TokTrie};
use llguidance::{Logger, Matcher, ParserFactory};
use std::sync::Arc;
use windlass_engine_core::request::TokenId;

/// Longest message of `llguidance` that a client is shown.
const MAX_MESSAGE_CHARS: usize = 300;

pub(super) struct Prepared {
    factory: ParserFactory,
    ends: Vec<TokenId>,
    vocabulary: u32,
}

impl Prepared {
    pub(super) fn new(tokenizer: &Tokenizer) -> Result<Prepared, String> {
        let ends = tokenizer.special().ends.clone();
        let end = *ends.first().ok_or("this model has no token that ends a text")?;
        let (vocabulary, count) = (tokenizer.vocabulary(), tokenizer.vocabulary().len());
        let word = |token| match vocabulary.piece(token) {
            [] => [&[TokTrie::SPECIAL_TOKEN_MARKER], vocabulary.spelling(token)].concat(),
            piece => piece.to_vec(),
        };
        let words: Vec<Vec<u8>> = (0..count).map(word).collect();
        let trie = TokTrie::from(&TokRxInfo::new(count, end), &words);
        let factory = ParserFactory::new_simple(&(Arc::new(ApproximateTokEnv::new(trie)) as _)).map_err(message)?;
        Ok(Prepared { factory, ends, vocabulary: count })
    }

    /// Compiles a grammar and asks it for its first tokens, which prepares it further.
    pub(super) fn compile(&self, grammar: TopLevelGrammar) -> Result<Grammar, String> {
        let limits = ParserLimits { verbose_errors: false, ..ParserLimits::default() };
        let (init, logger) = (GrammarInit::Serialized(grammar), Logger::new(0, 0));
        let parser = self.factory.create_parser_from_init_ext(init, logger, InferenceCapabilities::default(), limits);
        let mut matcher = Matcher::new(parser);
        if let Some(error) = matcher.get_error() {
            return Err(shortened(&error));
        }
        matcher.compute_mask_or_eos().map_err(message)?;
        Ok(Grammar::new(matcher, self.ends.clone(), self.vocabulary))
    }
}

fn message(error: impl std::fmt::Display) -> String {
    shortened(&error.to_string())
}

fn shortened(message: &str) -> String {
    message.chars().take(MAX_MESSAGE_CHARS).collect()
}
