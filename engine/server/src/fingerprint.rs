//! The word for what answers depend on: the contract says what goes into it, here it is read and digested.

use crate::text::vocabulary::Vocabulary;
use sha2::{Digest, Sha256};
use windlass_checkpoint::{Checkpoint, Tensor};
use windlass_engine_contract::fingerprint::Fingerprint;

/// Bytes at either end of a tensor's data that are read.
const EDGE_BYTES: usize = 4 << 10;

/// The word for these parts; `flags` are those that change answers.
pub fn word(weights: String, tokenizer: String, mut flags: Vec<String>, device: &str) -> String {
    flags.sort();
    let version = env!("CARGO_PKG_VERSION").to_owned();
    let parts = Fingerprint { weights, tokenizer, flags, version, device: device.to_owned() };
    Fingerprint::word(&hex(Sha256::new_with_prefix(parts.text())))
}

/// A checkpoint's tensors.
pub fn weights(checkpoint: &Checkpoint) -> String {
    let mut tensors: Vec<Tensor<'_>> = checkpoint.tensors().collect();
    tensors.sort_by_key(|tensor| tensor.name);
    tensors_digest(&tensors)
}

/// Tensors in this order.
pub fn tensors_digest(tensors: &[Tensor<'_>]) -> String {
    let mut digest = Sha256::new();
    for tensor in tensors {
        let edge = tensor.bytes.len().min(EDGE_BYTES);
        digest.update(format!("{} {} {:?}\n", tensor.name, tensor.kind.name(), tensor.dims));
        digest.update(&tensor.bytes[..edge]);
        digest.update(&tensor.bytes[tensor.bytes.len() - edge..]);
    }
    hex(digest)
}

/// A vocabulary in its order, and a chat template.
pub fn tokenizer(vocabulary: &Vocabulary, template: Option<&str>) -> String {
    let mut digest = Sha256::new();
    for token in 0..vocabulary.len() {
        let spelling = vocabulary.spelling(token);
        digest.update((spelling.len() as u64).to_le_bytes());
        digest.update(spelling);
    }
    digest.update(template.unwrap_or_default());
    hex(digest)
}

/// Some text, as the part of a fingerprint.
pub fn text(text: &str) -> String {
    hex(Sha256::new_with_prefix(text))
}

fn hex(digest: Sha256) -> String {
    digest.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::text::tokenizer::Tokenizer;

    #[test]
    fn every_part_changes_the_word() {
        let word = |weights: &str, flags: &[&str], device: &str| {
            word(weights.to_owned(), "t".to_owned(), flags.iter().map(|&flag| flag.to_owned()).collect(), device)
        };
        let one = word("w", &["a=1", "b=2"], "cpu");
        assert_eq!(one, word("w", &["b=2", "a=1"], "cpu"));
        assert!(one.starts_with("fp_") && one.len() == 19, "{one}");
        for other in [word("v", &["a=1", "b=2"], "cpu"), word("w", &["a=1"], "cpu"), word("w", &["a=1", "b=2"], "sim")]
        {
            assert_ne!(one, other);
        }
        let words = Tokenizer::words();
        assert_ne!(tokenizer(words.vocabulary(), None), tokenizer(words.vocabulary(), Some("template")));
    }
}
