//! Small random models in K-quants, against the log probabilities that llama.cpp computed of the same weights in F32
//! (`tests/peer/logits record`): of the files themselves it rounds the inputs to eight bits.

use std::path::Path;
use std::{env, fs};

use crate::common::oracle::our_logits_with;
use crate::common::saved_logits::{SavedLogits, centred};
use crate::common::tiny::Tiny;
use windlass_checkpoint::Checkpoint;
use windlass_engine_contract::memory::KvDataType;
use windlass_engine_model::{ActivationType, Agreement, LoadOptions};
use windlass_kernels::WeightType;

const KINDS: [WeightType; 6] =
    [WeightType::Q2K, WeightType::Q3K, WeightType::Q4K, WeightType::Q5K, WeightType::Q6K, WeightType::IQ4XS];
/// A way to round, and what it may lose.
#[derive(Debug)]
struct Way {
    activations: ActivationType,
    batch_invariant: bool,
    /// Tokens per step.
    chunk: usize,
    /// The largest mean KL in nats. Such models are touchy: of Q4_K's mean with eight bits, 1.1e-3, one position of the 60 makes
    /// nearly half.
    most_kl: f64,
    /// The largest relative error of logits around 0.
    most_error: f64,
}

/// In chunks that are no divisor of a block; and in whole windows, which are many tokens.
const WAYS: [Way; 3] = [
    Way { activations: ActivationType::Int16, batch_invariant: true, chunk: 7, most_kl: 1e-4, most_error: 0.01 },
    Way { activations: ActivationType::Int8, batch_invariant: true, chunk: 7, most_kl: 2e-3, most_error: 0.04 },
    Way { activations: ActivationType::Int8, batch_invariant: false, chunk: 32, most_kl: 5e-3, most_error: 0.06 },
];

/// With `WINDLASS_WRITE_MODELS=FOLDER` the models are written there, for llama.cpp to read, and nothing is compared.
#[test]
fn k_quants_have_the_logits_that_llama_cpp_gives_them() {
    let models = env::var_os("WINDLASS_WRITE_MODELS");
    for kind in KINDS {
        let file = model(kind);
        match &models {
            Some(folder) => fs::write(Path::new(folder).join(format!("{}.gguf", kind.name())), file).unwrap(),
            None => agrees(kind.name(), file),
        }
    }
}

fn agrees(kind: &str, file: Vec<u8>) {
    let recorded = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("tests/model/data/llama.cpp/{kind}.logits"));
    let recorded = fs::read(&recorded).unwrap_or_else(|error| panic!("{}: {error}", recorded.display()));
    let reference = SavedLogits::parse(&recorded).unwrap();
    assert!(!reference.windows.is_empty(), "{kind}");
    let checkpoint = Checkpoint::from_bytes(file).unwrap();
    for way in WAYS {
        let Way { activations, batch_invariant, chunk, most_kl, most_error } = way;
        // In bf16 keys and values are rounded more coarsely than all else: 6e-4.
        let options =
            LoadOptions { activations, batch_invariant, kv_data_type: KvDataType::F16, ..LoadOptions::default() };
        let mut agreement = Agreement::default();
        for window in &reference.windows {
            let found = our_logits_with(&checkpoint, &window.tokens, chunk, &options);
            window
                .rows
                .iter()
                .zip(&found[window.first..])
                .for_each(|(row, found)| agreement.add(&centred(row), &centred(found)));
        }
        println!("{kind} {way:?}: {agreement}");
        let is_near = agreement.mean_kl() <= most_kl && agreement.relative_error() <= most_error;
        assert!(is_near, "{kind} {way:?}: {agreement}");
    }
}

/// Two layers with a token for each byte: all that llama.cpp needs to read a text.
fn model(kind: WeightType) -> Vec<u8> {
    let tiny = Tiny::of(kind);
    let spelling = |token: u64| match u8::try_from(token) {
        Ok(byte) => spelled(byte).to_string(),
        Err(_) => format!("<unused{token}>"),
    };
    let tokens: Vec<String> = (0..tiny.vocabulary).map(spelling).collect();
    let tokenizer = tiny.build().str("tokenizer.ggml.model", "gpt2").str("tokenizer.ggml.pre", "gpt-2");
    tokenizer.str_array("tokenizer.ggml.tokens", &tokens).str_array::<&str>("tokenizer.ggml.merges", &[]).build()
}

/// As GPT-2 spells a byte: as itself if that can be printed, else as one of the characters from U+0100 on.
fn spelled(byte: u8) -> char {
    let is_printed = |byte: &u8| matches!(byte, 0x21..=0x7e | 0xa1..=0xac | 0xae..);
    let others = (0..byte).filter(|byte| !is_printed(byte)).count() as u32;
    if is_printed(&byte) { char::from(byte) } else { char::from_u32(0x100 + others).unwrap() }
}
