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

    fn is(&self, names: &[&str]) -> bool {
        names.iter().any(|name| self.config["model_type"] == *name)
    }

    /// Values of a head.
    pub fn head_dim(&self) -> u64 {
        self.config["head_dim"].as_u64().unwrap_or(self.size("hidden_size") / self.size("num_attention_heads"))
    }

    /// Random weights, in f32.
    pub fn tensors(&self) -> Vec<(String, Vec<u64>, Vec<f32>)> {
        let mut tensors = Tensors { random: Random(0x57494e44), list: Vec::new() };
        let hidden = self.size("hidden_size");
        tensors.add("model.embed_tokens.weight", &[VOCABULARY, hidden]);
        for layer in 0..self.size("num_hidden_layers") {
            let mut add =
                |part: &str, shape: &[u64]| tensors.add(&format!("model.layers.{layer}.{part}.weight"), shape);
            add("input_layernorm", &[hidden]);
            add("post_attention_layernorm", &[hidden]);
            if self.is(&["gemma2", "gemma3_text"]) {
                add("pre_feedforward_layernorm", &[hidden]);
                add("post_feedforward_layernorm", &[hidden]);
            }
            self.add_attention(layer, &mut tensors);
            self.add_feed_forward(layer, &mut tensors);
        }
        tensors.add("model.norm.weight", &[hidden]);
        if self.config["tie_word_embeddings"] == false {
            tensors.add("lm_head.weight", &[VOCABULARY, hidden]);
        }
        tensors.list
    }

    fn add_attention(&self, layer: u64, tensors: &mut Tensors) {
        let (hidden, head_dim) = (self.size("hidden_size"), self.head_dim());
        let query = self.size("num_attention_heads") * head_dim;
        let kv = self.size("num_key_value_heads") * head_dim;
        let mut add = |part: &str, shape: &[u64]| tensors.add(&format!("model.layers.{layer}.self_attn.{part}"), shape);
        if self.is(&["phi3"]) {
            add("qkv_proj.weight", &[query + 2 * kv, hidden]);
        } else {
            for (name, rows) in [("q", query), ("k", kv), ("v", kv)] {
                add(&format!("{name}_proj.weight"), &[rows, hidden]);
                if self.biases {
                    add(&format!("{name}_proj.bias"), &[rows]);
                }
            }
        }
        for name in ["q_norm", "k_norm"].iter().filter(|_| self.head_norms) {
            add(&format!("{name}.weight"), &[head_dim]);
        }
        add("o_proj.weight", &[hidden, query]);
    }

    fn add_feed_forward(&self, layer: u64, tensors: &mut Tensors) {
        let hidden = self.size("hidden_size");
        let mut add = |part: &str, shape: &[u64]| tensors.add(&format!("model.layers.{layer}.{part}.weight"), shape);
        let mut gated = |prefix: &str, names: [&str; 3], wide: u64| {
            for (name, shape) in names.iter().zip([[wide, hidden], [wide, hidden], [hidden, wide]]) {
                add(&format!("{prefix}.{name}"), &shape);
            }
        };
        const NAMES: [&str; 3] = ["gate_proj", "up_proj", "down_proj"];
        if self.is(&["mixtral"]) {
            for expert in 0..self.size("num_local_experts") {
                let prefix = format!("block_sparse_moe.experts.{expert}");
                gated(&prefix, ["w1", "w3", "w2"], self.size("intermediate_size"));
            }
            add("block_sparse_moe.gate", &[self.size("num_local_experts"), hidden]);
        } else if let Some(experts) = self.config["num_experts"].as_u64() {
            for expert in 0..experts {
                gated(&format!("mlp.experts.{expert}"), NAMES, self.size("moe_intermediate_size"));
            }
            if let Some(wide) = self.config["shared_expert_intermediate_size"].as_u64() {
                gated("mlp.shared_expert", NAMES, wide);
                add("mlp.shared_expert_gate", &[1, hidden]);
            }
            add("mlp.gate", &[experts, hidden]);
        } else if self.is(&["phi3"]) {
            let wide = self.size("intermediate_size");
            add("mlp.gate_up_proj", &[2 * wide, hidden]);
            add("mlp.down_proj", &[hidden, wide]);
        } else {
            gated("mlp", NAMES, self.size("intermediate_size"));
        }
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

struct Tensors {
    random: Random,
    list: Vec<(String, Vec<u64>, Vec<f32>)>,
}

impl Tensors {
    fn add(&mut self, name: &str, shape: &[u64]) {
        let deviation = 1.0 / (shape[shape.len() - 1] as f32).sqrt();
        let value = |random: &mut Random| match shape.len() {
            1 if name.ends_with("bias") => random.normal() * 0.5,
            1 => 0.5 + random.uniform(),
            _ => random.normal() * deviation,
        };
        // As bf16 has them: what computes in bf16 begins with the same weights.
        let coarse = |value: f32| half::bf16::from_f32(value).to_f32();
        let values = (0..shape.iter().product()).map(|_| coarse(value(&mut self.random))).collect();
        self.list.push((name.to_owned(), shape.to_vec(), values));
    }
}

pub fn tokens() -> Vec<u32> {
    let mut random = Random(7);
    (0..POSITIONS).map(|_| (random.bits() % VOCABULARY) as u32).collect()
}
