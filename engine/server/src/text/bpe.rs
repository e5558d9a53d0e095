//! Byte-pair encoders from a checkpoint's metadata, as the `tokenizers` crate runs them.

use super::guarded::guarded;
use super::tokenizer::TokenizerError;
use super::vocabulary::TokenType;
use tokenizers::models::bpe::{BPE, Vocab};
use tokenizers::normalizers::NFC;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::digits::Digits;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::{AddedToken, PreTokenizerWrapper, SplitDelimiterBehavior, Tokenizer};
use tracing::warn;
use windlass_checkpoint::Metadata;

/// How text is cut into words before pairs are merged: one entry per value of `tokenizer.ggml.pre`.
struct PreTokenization {
    names: &'static [&'static str],
    cut: Cut,
    /// A word that is a token as a whole is not built by merging.
    ignore_merges: bool,
    normalize: bool,
    /// Prompts begin with the beginning-of-sequence token where the file does not say.
    begins: bool,
}

/// The rule of files that name none, as llama.cpp has it. Older files do not, whatever model they are of.
const DEFAULT: &str = "default";

/// The rule for cutting.
#[derive(Clone, Copy)]
enum Cut {
    /// GPT-2's expression, which the crate carries.
    Gpt2,
    /// Each digit alone, then GPT-2's expression.
    DigitsThenGpt2,
    /// Expressions, each cutting what the ones before left whole.
    Expressions(&'static [&'static str]),
}

/// OpenAI's cl100k expression, digits in threes.
const CL100K: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// The same with single digits.
const CL100K_SINGLE_DIGITS: &str =
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// The same with combining marks in words.
const CL100K_MARKS: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// OpenAI's o200k expression: words also begin at capitals.
const O200K: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// Mistral's: o200k with single digits and without English contractions.
const TEKKEN: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// DeepSeek-V3's last expression.
const DEEPSEEK_V3: &str = r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"##;

/// GPT-2's expression as llama.cpp has it behind others.
const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)";
/// Words of the first DeepSeek: letters of the scripts with cases, as its tokenizer lists them.
const DEEPSEEK_LLM: &str = r"\s?[A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-ώᾀ-ᾴᾶ-ᾼιῂ-ῄῆ-ῌῐ-ΐῖ-Ίῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤΩℨK-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃]+";

/// What most rules have in common.
const PLAIN: PreTokenization =
    PreTokenization { names: &[], cut: Cut::Gpt2, ignore_merges: false, normalize: false, begins: false };

const PRE_TOKENIZATIONS: &[PreTokenization] = &[
    PreTokenization {
        names: &["smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"],
        cut: Cut::DigitsThenGpt2,
        ..PLAIN
    },
    PreTokenization { names: &["gpt-2", "phi-2", "jina-es", "jina-de", "exaone4"], ..PLAIN },
    PreTokenization { names: &["mpt", "olmo"], normalize: true, ..PLAIN },
    PreTokenization {
        names: &[DEFAULT],
        cut: Cut::Expressions(&[r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]"]),
        ..PLAIN
    },
    PreTokenization {
        names: &["falcon"],
        cut: Cut::Expressions(&[r"[\p{P}\$\+<=>\^~\|`]+", GPT2, "[0-9][0-9][0-9]"]),
        ..PLAIN
    },
    PreTokenization {
        names: &["llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "midm-2.0", "lfm2"],
        cut: Cut::Expressions(&[CL100K]),
        ignore_merges: true,
        begins: true,
        ..PLAIN
    },
    PreTokenization { names: &["dbrx", "smaug-bpe", "chatglm-bpe"], cut: Cut::Expressions(&[CL100K]), ..PLAIN },
    PreTokenization { names: &["glm4"], cut: Cut::Expressions(&[CL100K]), ignore_merges: true, ..PLAIN },
    PreTokenization {
        names: &["qwen2", "deepseek-r1-qwen", "megrez"],
        cut: Cut::Expressions(&[CL100K_SINGLE_DIGITS]),
        normalize: true,
        ..PLAIN
    },
    PreTokenization { names: &["qwen35"], cut: Cut::Expressions(&[CL100K_MARKS]), ..PLAIN },
    PreTokenization { names: &["gpt-4o", "llama4"], cut: Cut::Expressions(&[O200K]), ..PLAIN },
    PreTokenization {
        names: &["tekken"],
        cut: Cut::Expressions(&[TEKKEN]),
        ignore_merges: true,
        begins: true,
        ..PLAIN
    },
    PreTokenization {
        names: &["deepseek-llm"],
        cut: Cut::Expressions(&[
            r"[\r\n]",
            DEEPSEEK_LLM,
            r"\s?[!-/:-~！-／：-～‘-‟　-。]+",
            r"\s+$",
            "[一-龥ࠀ-一가-퟿]+",
            r"\p{N}+",
        ]),
        ..PLAIN
    },
    PreTokenization {
        names: &["deepseek-coder"],
        cut: Cut::Expressions(&[r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}"]),
        ..PLAIN
    },
    PreTokenization {
        names: &["deepseek-v3"],
        cut: Cut::Expressions(&[r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", DEEPSEEK_V3]),
        ..PLAIN
    },
];

/// Whether prompts begin with the beginning-of-sequence token where the file does not say.
pub fn begins(metadata: Metadata<'_>) -> Result<bool, TokenizerError> {
    Ok(pre_tokenization(metadata)?.begins)
}

/// Builds the encoder for `spellings`, the vocabulary in order of id, with its `types`.
pub fn build(metadata: Metadata<'_>, spellings: &[&str], types: &[i32]) -> Result<Tokenizer, TokenizerError> {
    let rule = pre_tokenization(metadata)?;
    if rule.names == [DEFAULT] {
        warn!("tokenizer.ggml.pre does not say how text is cut into words: answers may be worse than the model's");
    }
    let vocabulary: Vocab = spellings.iter().zip(0u32..).map(|(text, id)| ((*text).to_owned(), id)).collect();
    let model = BPE::builder().vocab_and_merges(vocabulary, merges(metadata)?).ignore_merges(rule.ignore_merges);
    let model = guarded(|| model.build()).map_err(TokenizerError::Invalid)?;
    let mut tokenizer = Tokenizer::new(model);
    tokenizer.with_normalizer(rule.normalize.then_some(NFC)).map_err(invalid)?;
    tokenizer.with_pre_tokenizer(Some(rule.cut.pre_tokenizer()?));
    tokenizer.add_tokens(added(spellings, types)).map_err(invalid)?;
    Ok(tokenizer)
}

fn pre_tokenization(metadata: Metadata<'_>) -> Result<&'static PreTokenization, TokenizerError> {
    let name = metadata.str("tokenizer.ggml.pre")?.filter(|name| !name.is_empty()).unwrap_or(DEFAULT);
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
            Cut::Expressions(expressions) => {
                let mut steps =
                    expressions.iter().map(|expression| split(expression)).collect::<Result<Vec<_>, _>>()?;
                steps.push(bytes(false).into());
                Sequence::new(steps).into()
            }
        })
    }
}

fn split(expression: &str) -> Result<PreTokenizerWrapper, TokenizerError> {
    let pattern = SplitPattern::Regex(expression.to_owned());
    Ok(Split::new(pattern, SplitDelimiterBehavior::Isolated, false).map_err(invalid)?.into())
}

/// Tokens found in text before anything else: control tokens and the user's.
pub fn added(spellings: &[&str], types: &[i32]) -> Vec<AddedToken> {
    let typed = spellings.iter().zip(types);
    let wanted = typed.filter(|(_, kind)| matches!(**kind, TokenType::CONTROL | TokenType::USER_DEFINED));
    wanted.map(|(text, kind)| AddedToken::from(*text, *kind == TokenType::CONTROL).normalized(false)).collect()
}

pub fn invalid(error: tokenizers::Error) -> TokenizerError {
    TokenizerError::Invalid(error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokenizers::{OffsetReferential, OffsetType, PreTokenizedString, PreTokenizer};
    use windlass_checkpoint::GgufFile;
    use windlass_checkpoint::testing::GgufBuilder;

    /// The words that `name` cuts a text into.
    fn words<'t>(name: Option<&str>, text: &'t str) -> Vec<&'t str> {
        let file = GgufBuilder::new().str("general.architecture", "llama");
        let file = name.into_iter().fold(file, |file, name| file.str("tokenizer.ggml.pre", name));
        let file = GgufFile::from_bytes(file.build()).unwrap();
        let mut cut = PreTokenizedString::from(text);
        let rule = pre_tokenization(file.metadata()).unwrap();
        rule.cut.pre_tokenizer().unwrap().pre_tokenize(&mut cut).unwrap();
        let splits = cut.get_splits(OffsetReferential::Original, OffsetType::Byte);
        splits.into_iter().map(|(_, (start, end), _)| &text[start..end]).collect()
    }

    /// Recorded of Python's regex module, which went through llama.cpp's expressions as that does: each cuts all that the
    /// ones before left.
    #[test]
    fn texts_are_cut_as_recorded() {
        const TEXTS: [&str; 3] =
            ["I'll pay $1,234,567.8 (12345 `no` x^2)…", "a  b\n\n c\t", "Größe Ωμέγα Привет ªº ǀǃ 你好，世界！ 3½x  "];
        let number = "1|,|234|,|567|.|8";
        let default = [
            format!("I|'|ll| pay| |$|{number}| |(|123|45| `|no|`| x|^|2|)…"),
            "a| | b|\n\n| c|\t".to_owned(),
            "Größe| Ωμέγα| Привет| ªº| ǀǃ| 你好|，|世界|！| |3½|x|  ".to_owned(),
        ];
        let falcon = [
            format!("I|'|ll| pay| |$|{number}| |(|123|45| |`|no|`| x|^|2|)…"),
            default[1].clone(),
            "Größe| Ωμέγα| Привет| ªº| ǀǃ| 你好|，|世界|！| 3½|x|  ".to_owned(),
        ];
        // The class of punctuation goes from colon to tilde: letters of ASCII are in it.
        let deepseek = [
            format!("I|'|ll| pay| $|{number}| (|12345| `|no|`| x|^|2|)|…"),
            "a| | b|\n|\n| c|\t".to_owned(),
            "Gr|öß|e| Ωμέγα| Привет| ªº ǀǃ |你好|，|世界|！| |3½|x|  ".to_owned(),
        ];
        for (name, expected) in [
            (Some("default"), &default),
            (Some(""), &default),
            (None, &default),
            (Some("falcon"), &falcon),
            (Some("deepseek-llm"), &deepseek),
        ] {
            for (text, expected) in TEXTS.iter().zip(expected) {
                assert_eq!(words(name, text).join("|"), *expected, "{name:?}");
            }
        }
    }

    /// Of one longer than any token is, the tokenizers library makes a panic.
    #[test]
    fn merges_whose_whole_is_no_token_are_refused() {
        let file = GgufBuilder::new().str("general.architecture", "llama").str("tokenizer.ggml.pre", "gpt-2");
        let file = GgufFile::from_bytes(file.str_array("tokenizer.ggml.merges", &["a b"]).build()).unwrap();
        for (longest, why) in [("b", "the tokenizers library panicked"), ("long", "out of vocabulary")] {
            let tokens = ["a", "b", longest];
            let refusal = build(file.metadata(), &tokens, &[1; 3]).map(drop).unwrap_err().to_string();
            assert!(refusal.contains(why), "{refusal}");
        }
    }
}
