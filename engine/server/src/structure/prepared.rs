//! What `llguidance` knows of a vocabulary, and how it compiles with it.

use super::Grammar;
use super::form::Source;
use super::lanes::Lanes;
use crate::machine::own_time;
use crate::text::tokenizer::Tokenizer;
use llguidance::api::{GrammarInit, ParserLimits};
use llguidance::toktrie::{ApproximateTokEnv, InferenceCapabilities, TokRxInfo, TokTrie};
use llguidance::{Logger, Matcher, ParserFactory};
use std::sync::Arc;
use std::time::Duration;
use windlass_engine_core::constraint::TokenSet;
use windlass_engine_core::request::TokenId;

/// Longest message of `llguidance` that a client is shown.
const MAX_MESSAGE_CHARS: usize = 300;

/// Places in a grammar that one mask may look at: nine times what arithmetic takes, JSON hardly any, and some 15 ms.
const MOST_ITEMS: usize = 10_000;
/// States that a form's lexer may have, of a kilobyte or two.
const MOST_STATES: usize = 20_000;
/// Masks by which a form's pace is judged, and the most that they may take together.
const FIRST_MASKS: usize = 8;
const MOST_FOR_FIRST_MASKS: Duration = Duration::from_millis(40);
/// Which of the tokens that are allowed is taken there: common ones and rare ones.
const STRIDE: usize = 7919;

/// What `llguidance` may spend on a form.
pub(super) fn limits() -> ParserLimits {
    ParserLimits {
        verbose_errors: false,
        step_max_items: MOST_ITEMS,
        max_lexer_states: MOST_STATES,
        ..ParserLimits::default()
    }
}

/// Trees of tokens that `llguidance` keeps: one of all, and three for each of the kinds of text that it tells apart and
/// for the rest, but for the two innermost of one.
const TREES: usize = 15;
/// What it keeps of a node of a tree, and of a token in each.
const NODE_BYTES: usize = 8;
const TOKEN_BYTES: usize = 12;

pub(super) struct Prepared {
    factory: ParserFactory,
    ends: Vec<TokenId>,
    vocabulary: u32,
    lanes: Arc<Lanes>,
    /// Memory of its own.
    pub(super) bytes: u64,
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
        let text: usize = words.iter().map(Vec::len).sum();
        let tree_bytes = NODE_BYTES * trie.root().subtree_size() + TOKEN_BYTES * words.len() + text;
        let bytes = (TREES * tree_bytes) as u64;
        let factory = ParserFactory::new_simple(&(Arc::new(ApproximateTokEnv::new(trie)) as _)).map_err(message)?;
        Ok(Prepared { factory, ends, vocabulary: count, lanes: Arc::default(), bytes })
    }

    /// Compiles a grammar and asks it for its first masks, which prepares it further.
    pub(super) fn compile(&self, source: &Source) -> Result<Grammar, String> {
        let (init, logger) = (GrammarInit::Serialized(source.grammar()?), Logger::new(0, 0));
        let parser = self.factory.create_parser_from_init_ext(init, logger, InferenceCapabilities::default(), limits());
        let mut matcher = Matcher::new(parser).into_cancellable();
        if let Some(error) = matcher.get_error() {
            return Err(shortened(&error));
        }
        // Kept for those that begin here.
        matcher.compute_mask_or_eos().map_err(message)?;
        self.check_pace(&matcher)?;
        Ok(Grammar::new(matcher, self.ends.clone(), self.vocabulary, self.lanes.clone()))
    }

    /// Refuses a grammar whose first masks are slow also the second time, when all of it that can be is prepared.
    fn check_pace(&self, beginning: &Matcher) -> Result<(), String> {
        self.first_masks(beginning.clone());
        let began = own_time();
        self.first_masks(beginning.clone());
        let took = own_time().saturating_sub(began);
        if took <= MOST_FOR_FIRST_MASKS {
            return Ok(());
        }
        let took = took.as_millis();
        Err(format!("finding what it allows at the first {FIRST_MASKS} tokens takes {took} ms; make it less ambiguous"))
    }

    /// Goes through a text that the grammar allows, as far as the vocabulary has words for it.
    fn first_masks(&self, mut matcher: Matcher) {
        for number in 0..FIRST_MASKS {
            let Ok(mask) = matcher.compute_mask_or_eos() else { return };
            let mask = TokenSet::from_words(mask.as_slice().to_vec());
            let goes_on = |token: &TokenId| *token < self.vocabulary && !self.ends.contains(token);
            let words: Vec<TokenId> = mask.iter().filter(goes_on).collect();
            if words.is_empty() || matcher.consume_token(words[(number * STRIDE) % words.len()]).is_err() {
                return;
            }
        }
    }
}

fn message(error: impl std::fmt::Display) -> String {
    shortened(&error.to_string())
}

fn shortened(message: &str) -> String {
    message.chars().take(MAX_MESSAGE_CHARS).collect()
}
