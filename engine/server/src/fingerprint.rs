//! The word for what answers depend on: the contract says what goes into it, here it is read and digested.

use crate::dialogue::DialogueConfig;
use crate::text::vocabulary::Vocabulary;
use crc_fast::CrcAlgorithm;
use sha2::{Digest, Sha256};
use windlass_checkpoint::{Checkpoint, Data, Tensor};
use windlass_engine_contract::fingerprint::Fingerprint;

/// Of a tensor's bytes that are read at a time, and given back then.
const STRIP_BYTES: usize = 4 << 20;

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
    digest(&tensors, |bytes| checkpoint.release(bytes))
}

/// Tensors in this order. Every byte counts, by a checksum that is read as fast as memory is: beside loading it takes
/// no time of its own.
pub fn tensors_digest(tensors: &[Tensor<'_>]) -> String {
    digest(tensors, |_| ())
}

/// `done` is told of bytes once they were read. They are read as they lie in their files, which may still be on their way.
fn digest(tensors: &[Tensor<'_>], done: impl Fn(&[u8])) -> String {
    let mut order: Vec<usize> = (0..tensors.len()).collect();
    order.sort_by_key(|&tensor| tensors[tensor].bytes.address());
    let mut sums = vec![0; tensors.len()];
    for tensor in order {
        sums[tensor] = checksum(tensors[tensor].bytes, &done);
    }
    let mut digest = Sha256::new();
    for (Tensor { name, kind, dims, .. }, data) in tensors.iter().zip(sums) {
        digest.update(format!("{name} {} {dims:?} {data:016x}\n", kind.name()));
    }
    hex(digest)
}

/// CRC-64/NVME of a tensor's bytes.
fn checksum(data: Data<'_>, done: &impl Fn(&[u8])) -> u64 {
    let mut sum = crc_fast::Digest::new(CrcAlgorithm::Crc64Nvme);
    for start in (0..data.len()).step_by(STRIP_BYTES) {
        let bytes = data.slice(start..data.len().min(start + STRIP_BYTES)).get();
        sum.update(bytes);
        done(bytes);
    }
    sum.finalize()
}

/// What flags say of how answers are read.
pub fn dialogue(config: &DialogueConfig) -> [String; 2] {
    [format!("tool-call-parser={:?}", config.calls), format!("reasoning-parser={:?}", config.thoughts)]
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
    use windlass_checkpoint::testing::GgufBuilder;

    #[test]
    fn a_byte_anywhere_in_the_weights_changes_their_digest() {
        let digest = |at: usize| {
            let mut values = vec![1.0; 16 << 10];
            values[at] = 2.0;
            let file = GgufBuilder::new().tensor_f32("a", &[16 << 10], &values);
            weights(&Checkpoint::from_bytes(file.build()).unwrap())
        };
        let digests: std::collections::BTreeSet<String> = [0, 5000, 8 << 10, (16 << 10) - 1].map(digest).into();
        assert_eq!(digests.len(), 4);
        assert_eq!(digest(5000), digest(5000));
    }

    /// The word of a model stays what it was, however much is read at a time.
    #[test]
    fn strips_have_the_checksum_of_all_bytes_and_are_given_back() {
        let values: Vec<f32> = (0..3 << 20).map(|n| n as f32).collect();
        let file = GgufBuilder::new().tensor_f32("a", &[values.len() as u64], &values);
        let checkpoint = Checkpoint::from_bytes(file.build()).unwrap();
        let (data, given_back) = (checkpoint.tensor("a").unwrap().bytes, std::cell::RefCell::new(Vec::new()));
        let sum = checksum(data, &|bytes| given_back.borrow_mut().push(bytes.len()));
        assert_eq!(sum, crc_fast::checksum(CrcAlgorithm::Crc64Nvme, &data));
        assert_eq!(given_back.into_inner(), [STRIP_BYTES; 3]);
    }

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
