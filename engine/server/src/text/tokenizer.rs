//! The model's tokenizer: prompts to tokens, and what the special tokens are.

use super::detokenize::Detokenizer;
use super::guarded::guarded;
use super::vocabulary::{TokenType, Vocabulary};
use super::{bpe, byte_level, hub, spm, ugm, words, wpm};
use windlass_checkpoint::{HubError, HubFolder, Metadata, MetadataError};
use windlass_engine_core::request::TokenId;

/// Control tokens that end a turn or a text, by the spellings that model families use. A checkpoint names one of them
/// as its end of sequence; a chat model may emit another.
pub(super) const END_SPELLINGS: &[&str] = &[
    "<|im_end|>",
    "<|endoftext|>",
    "<|eot_id|>",
    "<|end_of_text|>",
    "<|eom_id|>",
    "<|end|>",
    "<|eot|>",
    "<end_of_turn>",
    "</s>",
    "<EOT>",
    "<|END_OF_TURN_TOKEN|>",
];

/// Most tokens in a vocabulary: four times the largest in use.
pub(super) const MAX_VOCABULARY: usize = 1 << 20;

/// Longest token: four times the longest in use.
const MAX_TOKEN_BYTES: usize = 1024;

/// Text to tokens and back.
pub struct Tokenizer {
    encoder: Encoder,
    vocabulary: Vocabulary,
    special: SpecialTokens,
}

/// Builds an encoder from a file's metadata, its spellings in order of id and their types.
type Build = fn(Metadata<'_>, &[&str], &[i32]) -> Result<tokenizers::Tokenizer, TokenizerError>;

enum Encoder {
    Crate(Box<tokenizers::Tokenizer>),
    Words,
}

/// Tokens with a function, as the checkpoint names them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SpecialTokens {
    /// Put before a plain prompt, where the model wants one.
    pub prefix: Option<TokenId>,
    /// Any of these ends an answer.
    pub ends: Vec<TokenId>,
    /// `bos_token` in chat templates.
    pub bos_text: String,
    /// `eos_token` in chat templates.
    pub eos_text: String,
}

/// The checkpoint's tokenizer cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum TokenizerError {
    /// A key is missing or of the wrong type.
    #[error(transparent)]
    Metadata(#[from] MetadataError),
    /// A kind that no decoder of this engine comes with.
    #[error(
        "tokenizer.ggml.model is {0:?}; this engine reads \"gpt2\" (byte-level BPE), \"llama\" (SentencePiece BPE), \"t5\" (unigram) and \"bert\" (WordPiece)"
    )]
    Model(String),
    /// The rule that cuts text into words is unknown, and guessing one would change prompts silently.
    #[error("tokenizer.ggml.pre is {found:?}; this engine knows {known}")]
    PreTokenizer {
        /// What the file says.
        found: String,
        /// What it could say.
        known: String,
    },
    /// A line of `tokenizer.ggml.merges` is no pair.
    #[error("tokenizer.ggml.merges has {0:?}, which is not two tokens with a space between")]
    Merge(String),
    /// A folder without one.
    #[error("the folder has no tokenizer.json")]
    NoTokenizerFile,
    /// A file of the folder cannot be read.
    #[error(transparent)]
    Hub(#[from] HubError),
    /// `tokenizer.json` spells its tokens in a way that cannot be turned into bytes.
    #[error("tokenizer.json has the decoder {0:?}; this engine reads ByteLevel, ByteFallback and Metaspace")]
    Decoder(String),
    /// Arrays or ids that contradict each other.
    #[error("{0}")]
    Inconsistent(String),
    /// The encoder refused what the file says.
    #[error("the tokenizer of this file is not usable: {0}")]
    Invalid(String),
}

impl TokenizerError {
    /// The file is sound and asks for what this engine does not have.
    pub fn is_unsupported(&self) -> bool {
        matches!(self, TokenizerError::Model(_) | TokenizerError::PreTokenizer { .. } | TokenizerError::Decoder(_))
    }
}

/// A prompt that could not be encoded.
#[derive(Debug, thiserror::Error)]
#[error("the prompt could not be tokenized: {0}")]
pub struct EncodeError(String);

impl Tokenizer {
    /// Reads the tokenizer of a checkpoint.
    pub fn from_metadata(metadata: Metadata<'_>) -> Result<Tokenizer, TokenizerError> {
        let tokenizer = match metadata.require("tokenizer.ggml.model", Metadata::str)? {
            "gpt2" => Tokenizer::byte_level(metadata),
            "llama" => Tokenizer::by_spaces(metadata, spm::build),
            "t5" => Tokenizer::by_spaces(metadata, ugm::build),
            "bert" => Tokenizer::by_spaces(metadata, wpm::build),
            other => Err(TokenizerError::Model(other.to_owned())),
        };
        tokenizer?.with_plausible_tokens()
    }

    /// Reads the tokenizer of a hub folder.
    pub fn from_folder(folder: &HubFolder) -> Result<Tokenizer, TokenizerError> {
        let hub::HubText { encoder, vocabulary, special } = hub::read(folder)?;
        Tokenizer { encoder: Encoder::Crate(Box::new(encoder)), vocabulary, special }.with_plausible_tokens()
    }

    /// Refuses tokens of a length that none has: buffers are sized by the longest.
    fn with_plausible_tokens(self) -> Result<Tokenizer, TokenizerError> {
        let length = |token: &TokenId| self.vocabulary.spelling(*token).len();
        match (0..self.vocabulary.len()).find(|token| length(token) > MAX_TOKEN_BYTES) {
            Some(token) => {
                let said =
                    format!("token {token} has {} bytes; it must have {MAX_TOKEN_BYTES} at most", length(&token));
                Err(TokenizerError::Inconsistent(said))
            }
            None => Ok(self),
        }
    }

    /// The simulator's own language.
    pub fn words() -> Tokenizer {
        let special = SpecialTokens { ends: vec![words::END], ..SpecialTokens::default() };
        Tokenizer { encoder: Encoder::Words, vocabulary: words::vocabulary(), special }
    }

    fn byte_level(metadata: Metadata<'_>) -> Result<Tokenizer, TokenizerError> {
        let spellings: Vec<&str> = metadata.require("tokenizer.ggml.tokens", Metadata::str_array)?.collect();
        let types = token_types(metadata, spellings.len())?;
        let encoder = bpe::build(metadata, &spellings, &types)?;
        let special = special_tokens(metadata, &spellings, &types, bpe::begins(metadata)?)?;
        Ok(Tokenizer { encoder: Encoder::Crate(Box::new(encoder)), vocabulary: pieces(&spellings, &types), special })
    }

    /// A tokenizer whose pieces spell the beginning of a word.
    fn by_spaces(metadata: Metadata<'_>, build: Build) -> Result<Tokenizer, TokenizerError> {
        let spellings: Vec<&str> = metadata.require("tokenizer.ggml.tokens", Metadata::str_array)?.collect();
        let types = token_types(metadata, spellings.len())?;
        let encoder = build(metadata, &spellings, &types)?;
        let special = special_tokens(metadata, &spellings, &types, true)?;
        let vocabulary = spm::pieces(&spellings, &types);
        Ok(Tokenizer { encoder: Encoder::Crate(Box::new(encoder)), vocabulary, special })
    }

    /// Tokens of a plain prompt: with the prefix token where the model wants one.
    pub fn encode_prompt(&self, text: &str) -> Result<Vec<TokenId>, EncodeError> {
        let mut tokens = self.encode(text)?;
        if let Some(prefix) = self.special.prefix.filter(|prefix| tokens.first() != Some(prefix)) {
            tokens.insert(0, prefix);
        }
        Ok(tokens)
    }

    /// Tokens of a text that already holds its special tokens, as a rendered chat does.
    pub fn encode(&self, text: &str) -> Result<Vec<TokenId>, EncodeError> {
        match &self.encoder {
            Encoder::Words => Ok(words::encode(text, &self.vocabulary)),
            Encoder::Crate(encoder) => {
                let encoding = guarded(|| encoder.encode_fast(text, false)).map_err(EncodeError)?;
                Ok(encoding.get_ids().to_vec())
            }
        }
    }

    /// The text of tokens together, without special ones.
    pub fn decode(&self, tokens: &[TokenId]) -> String {
        let (mut detokenizer, mut text) = (Detokenizer::default(), String::new());
        tokens.iter().for_each(|token| detokenizer.push(self.vocabulary.piece(*token), &mut text));
        detokenizer.finish(&mut text);
        text
    }

    /// Bytes of every token.
    pub fn vocabulary(&self) -> &Vocabulary {
        &self.vocabulary
    }

    /// Tokens with a function.
    pub fn special(&self) -> &SpecialTokens {
        &self.special
    }
}

/// The type of each token; a file without types has normal ones only.
fn token_types(metadata: Metadata<'_>, tokens: usize) -> Result<Vec<i32>, TokenizerError> {
    if tokens == 0 || tokens > MAX_VOCABULARY {
        let message = format!("tokenizer.ggml.tokens has {tokens} entries; it must have 1 to {MAX_VOCABULARY}");
        return Err(TokenizerError::Inconsistent(message));
    }
    let Some(types) = metadata.i32_array("tokenizer.ggml.token_type")? else { return Ok(vec![1; tokens]) };
    let types: Vec<i32> = types.collect();
    if types.len() == tokens {
        return Ok(types);
    }
    let message = format!("tokenizer.ggml.token_type has {} entries and tokenizer.ggml.tokens {tokens}", types.len());
    Err(TokenizerError::Inconsistent(message))
}

fn pieces(spellings: &[&str], types: &[i32]) -> Vocabulary {
    let mut vocabulary = Vocabulary::default();
    for (spelling, kind) in spellings.iter().zip(types) {
        if *kind == TokenType::CONTROL {
            vocabulary.push_control(spelling);
            continue;
        }
        vocabulary.push(|bytes| match *kind {
            TokenType::USER_DEFINED => bytes.extend_from_slice(spelling.as_bytes()),
            _ => byte_level::append_bytes(spelling, bytes),
        });
    }
    vocabulary
}

/// `begins`: whether prompts begin with the beginning-of-sequence token where the file does not say.
fn special_tokens(
    metadata: Metadata<'_>,
    spellings: &[&str],
    types: &[i32],
    begins: bool,
) -> Result<SpecialTokens, TokenizerError> {
    let id = |name: &str| -> Result<Option<TokenId>, TokenizerError> {
        let key = format!("tokenizer.ggml.{name}_token_id");
        match metadata.u32(&key)? {
            Some(id) if id as usize >= spellings.len() => {
                let message = format!("{key} is {id} and the vocabulary has {} tokens", spellings.len());
                Err(TokenizerError::Inconsistent(message))
            }
            id => Ok(id),
        }
    };
    let text = |id: Option<TokenId>| id.map(|id| spellings[id as usize].to_owned()).unwrap_or_default();
    let (bos, eos) = (id("bos")?, id("eos")?);
    let mut ends: Vec<TokenId> = [eos, id("eot")?, id("eom")?].into_iter().flatten().collect();
    let typed = spellings.iter().zip(types).zip(0..);
    let spelled = typed.filter(|((text, kind), _)| **kind == TokenType::CONTROL && END_SPELLINGS.contains(text));
    ends.extend(spelled.map(|(_, id): (_, TokenId)| id));
    ends.sort_unstable();
    ends.dedup();
    let add_bos = metadata.bool("tokenizer.ggml.add_bos_token")?.unwrap_or(begins);
    Ok(SpecialTokens { prefix: bos.filter(|_| add_bos), ends, bos_text: text(bos), eos_text: text(eos) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use windlass_checkpoint::GgufFile;
    use windlass_checkpoint::testing::GgufBuilder;

    #[test]
    fn tokens_longer_than_any_are_refused() {
        for (kind, length, problem) in [(1, 1024, None), (1, 1025, Some("1025")), (3, 3000, Some("3000"))] {
            let tokens = ["a".to_owned(), "b".repeat(length)];
            let file =
                GgufBuilder::new().str("tokenizer.ggml.model", "gpt2").str_array("tokenizer.ggml.tokens", &tokens);
            let file = file.i32_array("tokenizer.ggml.token_type", &[1, kind]);
            let file = file.str_array::<&str>("tokenizer.ggml.merges", &[]).str("tokenizer.ggml.pre", "gpt-2");
            let file = GgufFile::from_bytes(file.build()).unwrap();
            let refused = Tokenizer::from_metadata(file.metadata()).err().map(|error| error.to_string());
            let expected = problem.map(|bytes| format!("token 1 has {bytes} bytes; it must have 1024 at most"));
            assert!(refused.is_some() == expected.is_some(), "{refused:?}");
            assert!(refused.unwrap_or_default().contains(&expected.unwrap_or_default()), "{kind} {length}");
        }
    }
}
