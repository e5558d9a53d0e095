//! Byte-pair encoders from a checkpoint's metadata, as the `tokenizers` crate runs them.

use super::tokenizer::TokenizerError;
use tokenizers::models::bpe::{BPE, Vocab};
use tokenizers::normalizers::NFC;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::digits::Digits;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::{AddedToken, PreTokenizerWrapper, SplitDelimiterBehavior, Tokenizer};
use windlass_checkpoint::Metadata;

/// `tokenizer.ggml.token_type`: tokens with a function instead of text.
pub const CONTROL: i32 = 3;
/// `tokenizer.ggml.token_type`: text that is always one token.
pub const USER_DEFINED: i32 = 4;

/// How text is cut into words before pairs are merged: one entry per value of `tokenizer.ggml.pre`.
struct PreTokenization {
    names: &'static [&'static str],
    cut: Cut,
    /// A word that is a token as a whole is not built by merging.
    ignore_merges: bool,
    normalize: bool,
}

/// The rule for cutting.
#[derive(Clone, Copy)]
enum Cut {
    /// GPT-2's expression, which the crate carries.
    Gpt2,
    /// Each digit alone, then GPT-2's expression.
    DigitsThenGpt2,
    /// An expression of its own.
    Expression(&'static str),
}

/// OpenAI's cl100k expression, digits in threes.
const CL100K: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// The same with single digits.
const CL100K_SINGLE_DIGITS: &str =
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

const PRE_TOKENIZATIONS: &[PreTokenization] = &[
    PreTokenization {
        names: &["smollm", "starcoder", "refact", "command-r", "codeshell"],
        cut: Cut::DigitsThenGpt2,
        ignore_merges: false,
        normalize: false,
    },
    PreTokenization {
        names: &["gpt-2", "phi-2", "olmo", "jina-es", "jina-de"],
        cut: Cut::Gpt2,
        ignore_merges: false,
        normalize: false,
    },
    PreTokenization {
        names: &["llama-bpe", "llama3", "llama-v3"],
        cut: Cut::Expression(CL100K),
        ignore_merges: true,
        normalize: false,
    },
    PreTokenization {
        names: &["dbrx", "smaug-bpe"],
        cut: Cut::Expression(CL100K),
        ignore_merges: false,
        normalize: false,
    },
    PreTokenization {
        names: &["qwen2", "deepseek-r1-qwen"],
        cut: Cut::Expression(CL100K_SINGLE_DIGITS),
        ignore_merges: false,
        normalize: true,
    },
];

/// Builds the encoder for `spellings`, the vocabulary in order of id, with its `types`.
pub fn build(metadata: Metadata<'_>, spellings: &[&str], types: &[i32]) -> Result<Tokenizer, TokenizerError> {
    let rule = pre_tokenization(metadata)?;
    let vocabulary: Vocab = spellings.iter().zip(0u32..).map(|(text, id)| ((*text).to_owned(), id)).collect();
    let model = BPE::builder()
        .vocab_and_merges(vocabulary, merges(metadata)?)
        .ignore_merges(rule.ignore_merges)
        .build()
        .map_err(invalid)?;
    let mut tokenizer = Tokenizer::new(model);
    tokenizer.with_normalizer(rule.normalize.then_some(NFC)).map_err(invalid)?;
    tokenizer.with_pre_tokenizer(Some(rule.cut.pre_tokenizer()?));
    tokenizer.add_tokens(added(spellings, types)).map_err(invalid)?;
    Ok(tokenizer)
}

fn pre_tokenization(metadata: Metadata<'_>) -> Result<&'static PreTokenization, TokenizerError> {
    let name = metadata.require("tokenizer.ggml.pre", Metadata::str)?;
    PRE_TOKENIZATIONS
        .iter()
        .find(|rule| rule.names.contains(&name))
        .ok_or_else(|| TokenizerError::PreTokenizer { found: name.to_owned(), known: known() })
}

fn known() -> String {
    PRE_TOKENIZATIONS.iter().flat_map(|rule| rule.names).copied().collect::<Vec<_>>().join(", ")
}

/// Pairs in order of rank. A token may itself begin with a space only if it was added, and those are never merged.
fn merges(metadata: Metadata<'_>) -> Result<Vec<(String, String)>, TokenizerError> {
    let lines = metadata.require("tokenizer.ggml.merges", Metadata::str_array)?;
    let pair = |line: &str| {
        let (left, right) = line.split_once(' ').ok_or_else(|| TokenizerError::Merge(line.to_owned()))?;
        Ok((left.to_owned(), right.to_owned()))
    };
    lines.map(pair).collect()
}

impl Cut {
    fn pre_tokenizer(self) -> Result<PreTokenizerWrapper, TokenizerError> {
        let bytes = |use_regex| ByteLevel::new(false, true, use_regex);
        Ok(match self {
            Cut::Gpt2 => bytes(true).into(),
            Cut::DigitsThenGpt2 => Sequence::new(vec![Digits::new(true).into(), bytes(true).into()]).into(),
            Cut::Expression(expression) => {
                let pattern = SplitPattern::Regex(expression.to_owned());
                let split = Split::new(pattern, SplitDelimiterBehavior::Isolated, false).map_err(invalid)?;
                Sequence::new(vec![split.into(), bytes(false).into()]).into()
            }
        })
    }
}

/// Tokens found in text before anything else: control tokens and the user's.
fn added(spellings: &[&str], types: &[i32]) -> Vec<AddedToken> {
    let typed = spellings.iter().zip(types);
    let wanted = typed.filter(|(_, kind)| matches!(**kind, CONTROL | USER_DEFINED));
    wanted.map(|(text, kind)| AddedToken::from(*text, *kind == CONTROL).normalized(false)).collect()
}

fn invalid(error: tokenizers::Error) -> TokenizerError {
    TokenizerError::Invalid(error.to_string())
}
