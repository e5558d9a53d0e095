//! A Llama as the hub has it: random weights in bf16, and a tokenizer whose tokens are bytes.

use half::bf16;
use serde_json::json;
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::path::Path;
use windlass_checkpoint::testing::SafetensorsBuilder;

const HIDDEN: u64 = 256;
const WIDE: u64 = 512;
const LAYERS: u64 = 2;
/// The token behind the bytes.
const END: u64 = 256;

/// What distinguishes one from another.
pub struct Llama {
    /// At least 257.
    pub vocabulary: u64,
    /// How far weights are from those of the others, in parts of themselves.
    pub noise: f32,
}

impl Llama {
    /// Values of the embedding and the head.
    pub fn table_values(&self) -> u64 {
        2 * self.vocabulary * HIDDEN
    }

    /// Writes its files into a folder.
    pub fn write(&self, folder: &Path) {
        let config = json!({"model_type": "llama", "hidden_size": HIDDEN, "num_hidden_layers": LAYERS,
            "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": WIDE, "vocab_size": self.vocabulary,
            "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "tie_word_embeddings": false, "eos_token_id": END});
        fs::write(folder.join("config.json"), config.to_string()).unwrap();
        fs::write(folder.join("tokenizer.json"), tokenizer().to_string()).unwrap();
        let mut file = BufWriter::new(File::create(folder.join("model.safetensors")).unwrap());
        let (tensors, mut header, mut start) = (self.tensors(), SafetensorsBuilder::new(), 0);
        for (name, shape) in &tensors {
            let end = start + 2 * shape.iter().product::<u64>();
            let entry = json!({"dtype": "BF16", "shape": shape, "data_offsets": [start, end]});
            (header, start) = (header.entry(name, &entry.to_string()), end);
        }
        file.write_all(&header.build()).unwrap();
        for (seed, (_, shape)) in (1..).zip(&tensors) {
            for index in 0..shape.iter().product() {
                let value = bf16::from_f32(self.value(shape, seed, index));
                file.write_all(&value.to_le_bytes()).unwrap();
            }
        }
        file.flush().unwrap();
    }

    /// Names and shapes, the slowest dimension first.
    fn tensors(&self) -> Vec<(String, Vec<u64>)> {
        let mut tensors = Vec::new();
        let mut add = |name: &str, shape: &[u64]| tensors.push((format!("{name}.weight"), shape.to_vec()));
        add("model.embed_tokens", &[self.vocabulary, HIDDEN]);
        for layer in 0..LAYERS {
            let mut add = |part: &str, shape: &[u64]| add(&format!("model.layers.{layer}.{part}"), shape);
            add("input_layernorm", &[HIDDEN]);
            add("post_attention_layernorm", &[HIDDEN]);
            for (part, rows) in [("q", HIDDEN), ("k", HIDDEN / 2), ("v", HIDDEN / 2), ("o", HIDDEN)] {
                add(&format!("self_attn.{part}_proj"), &[rows, HIDDEN]);
            }
            for (part, shape) in [("gate", [WIDE, HIDDEN]), ("up", [WIDE, HIDDEN]), ("down", [HIDDEN, WIDE])] {
                add(&format!("mlp.{part}_proj"), &shape);
            }
        }
        add("model.norm", &[HIDDEN]);
        add("lm_head", &[self.vocabulary, HIDDEN]);
        tensors
    }

    /// Of a norm one; of a matrix what gives outputs about the size of inputs.
    fn value(&self, shape: &[u64], seed: u64, index: u64) -> f32 {
        let size = if shape.len() == 1 { 0.0 } else { (3.0 / shape[1] as f32).sqrt() };
        let near = 1.0 + self.noise * uniform(seed + 1000, index);
        near * if size == 0.0 { 1.0 } else { size * uniform(seed, index) }
    }
}

/// A value from -1 to 1 (the finalizer of SplitMix64).
fn uniform(seed: u64, index: u64) -> f32 {
    let mut bits = (seed << 40 ^ index).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    bits = (bits ^ bits >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    bits = (bits ^ bits >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    (bits >> 40) as f32 / (1 << 23) as f32 - 1.0
}

/// Bytes as GPT-2 spells them, without merges.
fn tokenizer() -> serde_json::Value {
    let is_printable = |byte: u32| matches!(byte, 33..=126 | 161..=172 | 174..=255);
    let mut others = 256..;
    let spelled = (0..256).map(|byte| if is_printable(byte) { byte } else { others.next().unwrap() });
    let spelled = spelled.map(|character| char::from_u32(character).unwrap().to_string());
    let vocabulary: BTreeMap<String, u64> = spelled.zip(0..).collect();
    let bytes = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true});
    json!({
        "version": "1.0", "truncation": null, "padding": null, "normalizer": null, "pre_tokenizer": bytes,
        "added_tokens": [{"id": END, "content": "</s>", "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": true}],
        "post_processor": null, "decoder": bytes,
        "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
            "vocab": vocabulary, "merges": []},
    })
}
