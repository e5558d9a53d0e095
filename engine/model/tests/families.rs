//! Every model family as the hub has it, small and random, against candle-transformers' own model of that family.

#![allow(clippy::unwrap_used)] // in a test, a failed unwrap is the failure

mod common;

use std::fs;

use candle_core::{DType, Device, Tensor};
use candle_nn::VarBuilder;
use candle_transformers::models::{llama, mistral, qwen2, qwen3, smol::smollm3};
use common::oracle::{compare, our_logits, our_logits_with};
use common::tiny::Random;
use half::bf16;
use serde_json::{Value, json};
use windlass_checkpoint::Checkpoint;
use windlass_checkpoint::testing::SafetensorsBuilder;
use windlass_engine_model::{LoadOptions, Quantization, build};

const POSITIONS: usize = 75;
const CHUNK: usize = 25;
const VOCABULARY: u64 = 320;

/// candle's next logits, given a token and its position.
type Oracle = Box<dyn FnMut(&Tensor, usize) -> candle_core::Result<Tensor>>;

/// A family with what distinguishes its checkpoints.
struct Family {
    config: Value,
    biases: bool,
    head_norms: bool,
    oracle: fn(&Value, VarBuilder<'static>) -> Oracle,
}

/// Two layers of two query heads per key head, with `more` keys.
fn config(model_type: &str, more: Value) -> Value {
    let mut config = json!({
        "model_type": model_type, "vocab_size": VOCABULARY, "hidden_size": 128, "intermediate_size": 192,
        "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu", "tie_word_embeddings": true,
    });
    let more = more.as_object().unwrap().clone();
    config.as_object_mut().unwrap().extend(more);
    config
}

fn families() -> Vec<Family> {
    let llama3 = json!({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64});
    let qwen = json!({"sliding_window": 512, "max_window_layers": 4, "use_sliding_window": false});
    let qwen3_keys = json!({"head_dim": 64, "attention_bias": false, "max_window_layers": 4, "sliding_window": null,
        "use_sliding_window": false, "tie_word_embeddings": false});
    let plain = |config, oracle| Family { config, biases: false, head_norms: false, oracle };
    vec![
        plain(config("llama", json!({})), llama_oracle),
        plain(config("llama", json!({"rope_scaling": llama3, "rope_theta": 500_000.0})), llama_oracle),
        plain(
            config("mistral", json!({"head_dim": 64, "sliding_window": null, "tie_word_embeddings": false})),
            mistral_oracle,
        ),
        plain(config("smollm3", json!({"no_rope_layer_interval": 4})), smollm3_oracle),
        plain(config("smollm3", json!({"no_rope_layers": [1, 0, 1, 0]})), smollm3_oracle),
        Family { biases: true, ..plain(config("qwen2", qwen), qwen2_oracle) },
        Family { head_norms: true, ..plain(config("qwen3", qwen3_keys), qwen3_oracle) },
    ]
}

fn llama_oracle(config: &Value, weights: VarBuilder<'static>) -> Oracle {
    let config: llama::LlamaConfig = serde_json::from_value(config.clone()).unwrap();
    let config = config.into_config(false);
    let mut cache = llama::Cache::new(true, DType::F32, &config, &Device::Cpu).unwrap();
    let model = llama::Llama::load(weights, &config).unwrap();
    Box::new(move |token, position| model.forward(token, position, &mut cache))
}

fn mistral_oracle(config: &Value, weights: VarBuilder<'static>) -> Oracle {
    let mut config = config.clone();
    config["use_flash_attn"] = false.into();
    let mut model = mistral::Model::new(&serde_json::from_value(config).unwrap(), weights).unwrap();
    Box::new(move |token, position| model.forward(token, position))
}

fn smollm3_oracle(config: &Value, weights: VarBuilder<'static>) -> Oracle {
    let mut model = smollm3::ModelForCausalLM::new(&serde_json::from_value(config.clone()).unwrap(), weights).unwrap();
    Box::new(move |token, position| model.forward(token, position))
}

fn qwen2_oracle(config: &Value, weights: VarBuilder<'static>) -> Oracle {
    let mut model = qwen2::ModelForCausalLM::new(&serde_json::from_value(config.clone()).unwrap(), weights).unwrap();
    Box::new(move |token, position| model.forward(token, position))
}

fn qwen3_oracle(config: &Value, weights: VarBuilder<'static>) -> Oracle {
    let mut model = qwen3::ModelForCausalLM::new(&serde_json::from_value(config.clone()).unwrap(), weights).unwrap();
    Box::new(move |token, position| model.forward(token, position))
}

impl Family {
    fn size(&self, key: &str) -> u64 {
        self.config[key].as_u64().unwrap()
    }

    /// Random weights, in f32.
    fn tensors(&self) -> Vec<(String, Vec<u64>, Vec<f32>)> {
        let (hidden, feed_forward) = (self.size("hidden_size"), self.size("intermediate_size"));
        let heads = self.size("num_attention_heads");
        let head_dim = self.config["head_dim"].as_u64().unwrap_or(hidden / heads);
        let (query, kv) = (heads * head_dim, self.size("num_key_value_heads") * head_dim);
        let mut random = Random(0x57494e44);
        let mut tensors = Vec::new();
        let mut add = |name: String, shape: &[u64]| {
            let count: u64 = shape.iter().product();
            let deviation = 1.0 / (shape[shape.len() - 1] as f32).sqrt();
            let value = |random: &mut Random| match shape.len() {
                1 if name.ends_with("bias") => random.normal() * 0.5,
                1 => 0.5 + random.uniform(),
                _ => random.normal() * deviation,
            };
            let values = (0..count).map(|_| value(&mut random)).collect();
            tensors.push((name, shape.to_vec(), values));
        };
        add("model.embed_tokens.weight".into(), &[VOCABULARY, hidden]);
        for layer in 0..self.size("num_hidden_layers") {
            let mut part = |part: &str, shape: &[u64]| add(format!("model.layers.{layer}.{part}"), shape);
            part("input_layernorm.weight", &[hidden]);
            part("post_attention_layernorm.weight", &[hidden]);
            for (name, rows) in [("q", query), ("k", kv), ("v", kv)] {
                part(&format!("self_attn.{name}_proj.weight"), &[rows, hidden]);
                if self.biases {
                    part(&format!("self_attn.{name}_proj.bias"), &[rows]);
                }
            }
            for name in ["q_norm", "k_norm"].iter().filter(|_| self.head_norms) {
                part(&format!("self_attn.{name}.weight"), &[head_dim]);
            }
            part("self_attn.o_proj.weight", &[hidden, query]);
            part("mlp.gate_proj.weight", &[feed_forward, hidden]);
            part("mlp.up_proj.weight", &[feed_forward, hidden]);
            part("mlp.down_proj.weight", &[hidden, feed_forward]);
        }
        add("model.norm.weight".into(), &[hidden]);
        if self.config["tie_word_embeddings"] == false {
            add("lm_head.weight".into(), &[VOCABULARY, hidden]);
        }
        tensors
    }

    fn safetensors(&self) -> Vec<u8> {
        let add = |file: SafetensorsBuilder, (name, shape, values): (String, Vec<u64>, Vec<f32>)| {
            file.tensor_f32(&name, &shape, &values)
        };
        self.tensors().into_iter().fold(SafetensorsBuilder::new(), add).build()
    }

    fn open(&self, weights: &[u8]) -> Checkpoint {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("config.json"), self.config.to_string()).unwrap();
        fs::write(folder.path().join("model.safetensors"), weights).unwrap();
        Checkpoint::open(folder.path()).unwrap()
    }

    fn candle_logits(&self, weights: Vec<u8>) -> Vec<Vec<f32>> {
        let weights = VarBuilder::from_buffered_safetensors(weights, DType::F32, &Device::Cpu).unwrap();
        let mut oracle = (self.oracle)(&self.config, weights);
        let logits_at = |(position, &token): (usize, &u32)| {
            let input = Tensor::new(&[[token]], &Device::Cpu).unwrap();
            oracle(&input, position).unwrap().flatten_all().unwrap().to_vec1().unwrap()
        };
        tokens().iter().enumerate().map(logits_at).collect()
    }
}

fn tokens() -> Vec<u32> {
    let mut random = Random(7);
    (0..POSITIONS).map(|_| (random.bits() % VOCABULARY) as u32).collect()
}

/// The error left is that of bf16 in the KV cache.
#[test]
fn every_family_computes_what_candle_computes() {
    for family in families() {
        let weights = family.safetensors();
        let found = our_logits(&family.open(&weights), &tokens(), CHUNK);
        let agreement = compare(&family.candle_logits(weights), &found);
        println!("{} {agreement}", family.config);
        assert!(agreement.relative_error() <= 0.006 && agreement.top_1() >= 0.97, "{}: {agreement}", family.config);
    }
}

/// Turning a family's own feature off must show, or the test above would not see it.
#[test]
fn what_distinguishes_a_family_changes_its_logits() {
    let all = families();
    let smollm3 = &all[3];
    let weights = smollm3.safetensors();
    let turned = Family { config: config("llama", json!({})), ..plain_of(smollm3) };
    let tokens = tokens();
    let (still, turned) = (smollm3.open(&weights), turned.open(&weights));
    let agreement = compare(&our_logits(&still, &tokens, CHUNK), &our_logits(&turned, &tokens, CHUNK));
    assert!(agreement.relative_error() > 0.02, "{agreement}");
}

fn plain_of(family: &Family) -> Family {
    Family { config: family.config.clone(), biases: false, head_norms: false, oracle: family.oracle }
}

#[test]
fn bf16_and_f16_load_as_they_are() {
    let family = &families()[0];
    let tensors = family.tensors();
    let rounded = |(name, shape, values): &(String, Vec<u64>, Vec<f32>), file: SafetensorsBuilder| {
        let data: Vec<u8> = values.iter().flat_map(|value| bf16::from_f32(*value).to_le_bytes()).collect();
        file.tensor(name, "BF16", shape, &data)
    };
    let weights = tensors.iter().fold(SafetensorsBuilder::new(), |file, tensor| rounded(tensor, file)).build();
    let checkpoint = family.open(&weights);
    let agreement = compare(&family.candle_logits(weights), &our_logits(&checkpoint, &tokens(), CHUNK));
    assert!(agreement.relative_error() <= 0.006, "{agreement}");
    let built = build(&checkpoint, &LoadOptions::default()).unwrap();
    assert_eq!(built.weight_type, "bf16");
}

#[test]
fn floats_are_quantized_as_they_are_loaded() {
    let family = &families()[0];
    let checkpoint = family.open(&family.safetensors());
    let exact = our_logits(&checkpoint, &tokens(), CHUNK);
    for (quantization, kind, bound) in [(Quantization::Int8, "q8_0", 0.05), (Quantization::Int4, "q4_1", 0.45)] {
        let options = LoadOptions { quantization: Some(quantization), ..LoadOptions::default() };
        let agreement = compare(&exact, &our_logits_with(&checkpoint, &tokens(), CHUNK, &options));
        println!("{} {agreement}", quantization.name());
        assert!(agreement.relative_error() <= bound, "{}: {agreement}", quantization.name());
        let built = build(&checkpoint, &options).unwrap();
        assert_eq!(built.weight_type, kind);
        let packed: u64 = built.decoder.weights().matrices().map(|matrix| matrix.bytes() as u64).sum();
        let ratio = packed as f64 / built.ledger.weights as f64;
        assert!((0.9..=1.05).contains(&ratio), "{packed} bytes packed, {} in the ledger", built.ledger.weights);
    }
}

#[test]
fn configurations_that_cannot_be_served_are_refused_by_name() {
    let family = &families()[0];
    let weights = family.safetensors();
    let refusal = |more: Value| {
        let family = Family { config: config("llama", more), ..plain_of(family) };
        build(&family.open(&weights), &LoadOptions::default()).map(drop).unwrap_err().to_string()
    };
    let cases = [
        (
            json!({"model_type": "mamba"}),
            "the architecture \"mamba\" is not supported; supported are llama, mistral, qwen2",
        ),
        (json!({"model_type": 3}), "\"config.json: model_type\" is 3; it must be a name"),
        (json!({"hidden_size": null}), "\"config.json: hidden_size\" is missing; it must be a positive integer"),
        (json!({"hidden_size": 4294967296u64}), "\"config.json: hidden_size\" is 4294967296"),
        (json!({"num_key_value_heads": 3}), "num_key_value_heads\" is 3; it must be a divisor of the 4 heads"),
        (json!({"num_attention_heads": 6, "num_key_value_heads": 6}), "a divisor of the width 128"),
        (json!({"rms_norm_eps": 2.0}), "rms_norm_eps\" is 2.0; it must be below 1"),
        (json!({"max_position_embeddings": 33554432}), "max_position_embeddings\" is 33554432; it must be at most"),
        (json!({"attention_bias": true}), "a bias of the attention's output is not supported"),
        (json!({"hidden_act": "gelu"}), "this activation is not supported"),
        (json!({"sliding_window": 64}), "sliding_window\" is 64: a window is not supported"),
        (json!({"quantization_config": {"quant_method": "awq"}}), "\"awq\": a checkpoint quantized this way is not"),
        (json!({"rope_scaling": {"rope_type": "yarn"}}), "\"yarn\": this rotary scaling is not supported"),
        (json!({"rope_scaling": {"type": "linear"}}), "factor\" is missing; it must be a positive number"),
        (json!({"partial_rotary_factor": 0.01}), "it must be an even share of the 32 values"),
        (
            json!({"intermediate_size": 96}),
            "\"model.layers.0.mlp.gate_proj.weight\" has the dimensions [128, 192]; it should have [128, 96]",
        ),
        (json!({"num_hidden_layers": 5}), "\"model.layers.4.input_layernorm.weight\" is missing"),
        (
            json!({"num_hidden_layers": 3}),
            "tensor \"model.layers.3.input_layernorm.weight\" belongs to no supported decoder",
        ),
    ];
    for (more, expected) in cases {
        let message = refusal(more);
        assert!(message.contains(expected), "{message:?} should contain {expected:?}");
    }
}
