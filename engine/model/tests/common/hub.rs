//! Small random checkpoints as the hub has them, and candle's models of them.

use std::fs;

use candle_core::{DType, Device, Tensor};
use candle_nn::VarBuilder;
use candle_transformers::models::llama;
use serde_json::{Value, json};
use windlass_checkpoint::Checkpoint;
use windlass_checkpoint::testing::SafetensorsBuilder;

use super::tiny::Random;

/// Positions that are compared: several blocks of 16.
pub const POSITIONS: usize = 75;
/// Tokens per step here, so that borders of chunks lie within blocks.
pub const CHUNK: usize = 25;
/// Tokens there are.
pub const VOCABULARY: u64 = 320;

/// candle's next logits, given a token and its position.
pub type Oracle = Box<dyn FnMut(&Tensor, usize) -> candle_core::Result<Tensor>>;

/// A family with what distinguishes its checkpoints.
pub struct Family {
    pub config: Value,
    pub biases: bool,
    pub head_norms: bool,
    pub oracle: fn(&Value, VarBuilder<'static>) -> Oracle,
}

/// Four layers of two query heads per key head, with `more` keys.
pub fn config(model_type: &str, more: Value) -> Value {
    let mut config = json!({
        "model_type": model_type, "vocab_size": VOCABULARY, "hidden_size": 128, "intermediate_size": 192,
        "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu", "tie_word_embeddings": true,
    });
    let more = more.as_object().unwrap().clone();
    config.as_object_mut().unwrap().extend(more);
    config
}

pub fn llama_oracle(config: &Value, weights: VarBuilder<'static>) -> Oracle {
    let config: llama::LlamaConfig = serde_json::from_value(config.clone()).unwrap();
    let config = config.into_config(false);
    let mut cache = llama::Cache::new(true, DType::F32, &config, &Device::Cpu).unwrap();
    let model = llama::Llama::load(weights, &config).unwrap();
    Box::new(move |token, position| model.forward(token, position, &mut cache))
}

impl Family {
    pub fn size(&self, key: &str) -> u64 {
        self.config[key].as_u64().unwrap()
    }

    /// Random weights, in f32.
    pub fn tensors(&self) -> Vec<(String, Vec<u64>, Vec<f32>)> {
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

    pub fn safetensors(&self) -> Vec<u8> {
        let add = |file: SafetensorsBuilder, (name, shape, values): (String, Vec<u64>, Vec<f32>)| {
            file.tensor_f32(&name, &shape, &values)
        };
        self.tensors().into_iter().fold(SafetensorsBuilder::new(), add).build()
    }

    pub fn open(&self, weights: &[u8]) -> Checkpoint {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("config.json"), self.config.to_string()).unwrap();
        fs::write(folder.path().join("model.safetensors"), weights).unwrap();
        Checkpoint::open(folder.path()).unwrap()
    }

    pub fn candle_logits(&self, weights: Vec<u8>) -> Vec<Vec<f32>> {
        let weights = VarBuilder::from_buffered_safetensors(weights, DType::F32, &Device::Cpu).unwrap();
        let mut oracle = (self.oracle)(&self.config, weights);
        let logits_at = |(position, &token): (usize, &u32)| {
            let input = Tensor::new(&[[token]], &Device::Cpu).unwrap();
            oracle(&input, position).unwrap().flatten_all().unwrap().to_vec1().unwrap()
        };
        tokens().iter().enumerate().map(logits_at).collect()
    }
}

pub fn tokens() -> Vec<u32> {
    let mut random = Random(7);
    (0..POSITIONS).map(|_| (random.bits() % VOCABULARY) as u32).collect()
}
