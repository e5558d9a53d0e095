//! Configurations and headers that were tampered with: a refusal or a model, never a panic and never much memory.

use std::fs;

use crate::common::gguf::gguf;
use crate::common::hub::{Family, config, llama_oracle};
use crate::common::tiny::Random;
use serde_json::{Value, json};
use windlass_checkpoint::Checkpoint;
use windlass_engine_model::{KvBudget, LoadOptions, build};

fn families() -> Vec<Family> {
    let plain = |config| Family { config, biases: false, head_norms: false, oracle: llama_oracle };
    let experts = json!({"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 64, "norm_topk_prob": true, "mlp_only_layers": [], "decoder_sparse_step": 1});
    let gemma = json!({"hidden_act": null, "hidden_activation": "gelu_pytorch_tanh", "head_dim": 32,
        "query_pre_attn_scalar": 32, "final_logit_softcapping": 3.0, "attn_logit_softcapping": 5.0, "sliding_window": 20,
        "sliding_window_pattern": 3, "rope_local_base_freq": 1000.0});
    let (short, long) = (vec![1.0; 8], vec![2.0; 8]);
    let long = json!({"original_max_position_embeddings": 64, "partial_rotary_factor": 0.5, "rope_scaling":
        {"type": "longrope", "short_factor": short, "long_factor": long}});
    let llama3 = json!({"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 64}});
    let yarn = json!({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "beta_fast": 32.0,
        "beta_slow": 1.0, "attention_factor": 1.1, "mscale": 1.0, "mscale_all_dim": 0.5, "truncate": false});
    let by_pattern = json!({"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": true,
        "dynamic": {"-:lm_head": {}, "+:.*down": {"bits": 8, "group_size": 64, "sym": false}}});
    let group = |targets: Value, bits: u32| {
        let weights = json!({"num_bits": bits, "type": "int", "group_size": 32, "symmetric": true});
        json!({"targets": targets, "format": "pack-quantized", "weights": weights, "input_activations": {"num_bits": 8}})
    };
    let by_group = json!({"quant_method": "compressed-tensors", "format": "mixed-precision", "ignore": ["lm_head"],
        "config_groups": {"a": group(json!(["re:.*self_attn.*", "lm_head"]), 8), "b": group(json!(["Linear"]), 4)}});
    vec![
        plain(config("llama", llama3)),
        plain(config("smollm3", json!({"no_rope_layers": [1, 0, 1, 0]}))),
        Family { biases: true, ..plain(config("qwen2_moe", experts)) },
        plain(config("phi3", long)),
        Family { head_norms: true, ..plain(config("gemma3_text", gemma)) },
        plain(config("llama", json!({"rope_scaling": yarn, "quantization_config": by_pattern}))),
        plain(config("llama", json!({"quantization_config": by_group}))),
    ]
}

/// What an attacker or a careless tool might put in place of a value.
fn hostile() -> Vec<Value> {
    let numbers = [json!(0), json!(-1), json!(1), json!(3), json!(1e-300), json!(1e300), json!(0.5)];
    let large = [json!(u32::MAX), json!(u64::MAX), json!(1_u64 << 31), json!(65_536)];
    let others = [json!(null), json!(true), json!("text"), json!([]), json!([1e300, null]), json!({}), json!([[[]]])];
    numbers.into_iter().chain(large).chain(others).collect()
}

pub fn options() -> LoadOptions {
    LoadOptions {
        threads: 1,
        kv: KvBudget::Blocks(2),
        max_sequences: 1,
        max_step_tokens: 4,
        memory_limit_bytes: Some(64 << 20),
        ..LoadOptions::default()
    }
}

#[test]
fn any_value_of_any_key_of_a_configuration_is_survived() {
    for family in families() {
        let weights = family.safetensors();
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("model.safetensors"), &weights).unwrap();
        let mut served = 0;
        for path in paths(&family.config) {
            for value in hostile() {
                let mut config = family.config.clone();
                *config.pointer_mut(&path).unwrap() = value;
                fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
                let checkpoint = Checkpoint::open(folder.path()).unwrap();
                served += usize::from(build(&checkpoint, &options()).is_ok());
            }
        }
        assert!(served > 0, "some values change nothing, and then there is a model");
    }
}

/// Pointers to every value of an object, those within objects and lists too.
fn paths(value: &Value) -> Vec<String> {
    let within =
        |key: &str, value: &Value| paths(value).into_iter().map(|path| format!("/{key}{path}")).collect::<Vec<_>>();
    let inner: Vec<String> = match value {
        Value::Object(object) => object.iter().flat_map(|(key, value)| within(key, value)).collect(),
        Value::Array(list) => list.iter().enumerate().flat_map(|(i, value)| within(&i.to_string(), value)).collect(),
        _ => Vec::new(),
    };
    inner.into_iter().chain([String::new()]).collect()
}

#[test]
fn any_damage_to_a_safetensors_header_is_survived() {
    let family = &families()[2];
    let weights = family.safetensors();
    let header = 8 + u64::from_le_bytes(*weights.first_chunk().unwrap()) as usize;
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("config.json"), family.config.to_string()).unwrap();
    let mut random = Random(3);
    let mut refused = 0;
    for round in 0..600 {
        let mut damaged = weights.clone();
        for _ in 0..1 + round % 4 {
            let at = random.bits() as usize % header;
            damaged[at] = [b'9', b'0', b'-', b'"', b'[', b'}', 0, 255][random.bits() as usize % 8];
        }
        if round % 5 == 0 {
            damaged.truncate(random.bits() as usize % weights.len());
        }
        fs::write(folder.path().join("model.safetensors"), damaged).unwrap();
        let built = Checkpoint::open(folder.path()).map(|checkpoint| build(&checkpoint, &options()).is_ok());
        refused += usize::from(!matches!(built, Ok(true)));
    }
    assert!(refused > 300, "{refused} of 600 were refused");
}

#[test]
fn any_damage_to_a_gguf_header_is_survived() {
    for (family, architecture) in [(&families()[2], "qwen2moe"), (&families()[3], "phi3"), (&families()[4], "gemma3")] {
        let whole = gguf(family, architecture);
        let header = 6000.min(whole.len());
        let mut random = Random(5);
        for round in 0..400 {
            let mut damaged = whole.clone();
            for _ in 0..1 + round % 4 {
                let at = random.bits() as usize % header;
                damaged[at] = random.bits() as u8;
            }
            if let Ok(checkpoint) = Checkpoint::from_bytes(damaged) {
                let _ = build(&checkpoint, &options()).is_ok();
            }
        }
    }
}
