//! What the tests of this crate share: token ids of real text, comparisons of logits, and a driver of executors.

pub mod driver;
pub mod gguf;
pub mod hub;
pub mod oracle;
pub mod rows;
pub mod saved_logits;
pub mod tiny;
pub mod way;

/// Token ids of `data/harbour.txt` under SmolLM2's tokenizer, 1000 of them.
pub fn harbour_tokens() -> Vec<u32> {
    include_str!("../data/harbour.ids").split_whitespace().map(|id| id.parse().unwrap()).collect()
}
