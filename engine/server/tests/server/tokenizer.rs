//! The tokenizer on a real vocabulary: the tokens that llama.cpp (xllamacpp 2026.10.11549) finds for the same texts
//! with the same file.

use std::time::Instant;
use windlass_checkpoint::GgufFile;
use windlass_checkpoint::testing::real_model;
use windlass_engine::text::detokenize::Detokenizer;
use windlass_engine::text::tokenizer::Tokenizer;

/// Texts with their tokens, special tokens read as such.
#[rustfmt::skip]
const EXPECTED: &[(&str, &[u32])] = &[
    ("Hello, world!", &[19556, 28, 905, 17]),
    ("The quick brown fox jumps over the lazy dog.", &[504, 2365, 6354, 16438, 27003, 690, 260, 23790, 2767, 30]),
    ("  leading and   inner spaces \n\n\ttabs\n", &[216, 2899, 284, 256, 6210, 5600, 38028, 197, 100, 7366, 198]),
    ("It's 1234567 o'clock, isn't it? 3.14", &[1589, 506, 216, 33, 34, 35, 36, 37, 38, 39, 263, 23, 17466, 28, 3247, 982, 357, 47, 216, 35, 30, 33, 36]),
    ("naïve café — “quotes” … 日本語 😀👩\u{200d}🚀", &[3546, 46494, 37366, 1841, 619, 385, 2346, 573, 5548, 17097, 241, 115, 40993, 179, 120, 248, 40303, 218, 10813, 235, 119, 321, 231, 10813, 244, 218]),
    ("def f(x):\n    return x**2  # comment\n", &[1604, 275, 24, 104, 727, 472, 1003, 1792, 828, 34, 216, 907, 5189, 198]),
    ("<|im_start|>user\nHi<|im_end|>\n", &[1, 4093, 198, 26843, 2, 198]),
    ("a<|endoftext|>b <|im_end", &[81, 0, 82, 2067, 108, 306, 79, 486]),
    ("ÄÖÜß ñ Ω √2 №5 ½ ٣٤", &[142, 222, 142, 240, 142, 246, 34878, 5549, 126, 5664, 119, 19995, 244, 34, 4636, 222, 240, 37, 216, 16738, 216, 164, 113, 164, 114]),
    ("\u{0}\u{1} control\r\n mix\u{a0}nbsp", &[190, 191, 1533, 2738, 3412, 15442, 94, 32093]),
    ("I'LL'd WE'VE y'all's", &[57, 23, 16421, 6737, 26587, 23, 18525, 329, 23, 449, 506]),
    ("xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx", &[31069, 31069, 31069, 31069, 31069, 31069, 31069, 31069, 31069, 31069]),
    ("https://example.com/a?b=c&d=%20", &[4687, 1742, 7434, 30, 824, 31, 81, 47, 82, 45, 83, 22, 84, 23446, 34, 32]),
];

fn tokenizer() -> Option<Tokenizer> {
    let file = GgufFile::open(&real_model()?).unwrap();
    let began = Instant::now();
    let tokenizer = Tokenizer::from_metadata(file.metadata()).unwrap();
    println!("{} tokens are ready after {:?}", tokenizer.vocabulary().len(), began.elapsed());
    Some(tokenizer)
}

fn decode(tokenizer: &Tokenizer, tokens: &[u32]) -> String {
    let (mut detokenizer, mut text) = (Detokenizer::default(), String::new());
    tokens.iter().for_each(|token| detokenizer.push(tokenizer.vocabulary().piece(*token), &mut text));
    detokenizer.finish(&mut text);
    text
}

#[test]
fn texts_have_the_tokens_of_the_reference() {
    let Some(tokenizer) = tokenizer() else { return };
    for (text, tokens) in EXPECTED {
        assert_eq!(tokenizer.encode(text).unwrap(), *tokens, "{text:?}");
    }
}

#[test]
fn tokens_become_the_text_again_without_control_tokens() {
    let Some(tokenizer) = tokenizer() else { return };
    for (text, tokens) in EXPECTED {
        let shown = ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]
            .iter()
            .fold((*text).to_owned(), |text, control| text.replace(control, ""));
        assert_eq!(decode(&tokenizer, tokens), shown);
    }
}

#[test]
fn special_tokens_are_those_of_the_file() {
    let Some(tokenizer) = tokenizer() else { return };
    let special = tokenizer.special();
    assert_eq!((special.prefix, special.ends.as_slice()), (None, &[0, 2][..]));
    assert_eq!((special.bos_text.as_str(), special.eos_text.as_str()), ("<|im_start|>", "<|im_end|>"));
}

#[test]
fn hostile_texts_are_tokenized_or_refused_and_never_crash() {
    let Some(tokenizer) = tokenizer() else { return };
    for unit in [" ", "\n", "a", "1", "é", "\u{300}", "<|", "<|im_end|>", "'s", "\u{0}"] {
        let began = Instant::now();
        let text = unit.repeat(200_000 / unit.len());
        if let Ok(tokens) = tokenizer.encode(&text) {
            assert!(!tokens.is_empty(), "{unit:?}");
        }
        println!("{unit:?} repeated to {} bytes: {:?}", text.len(), began.elapsed());
    }
}
