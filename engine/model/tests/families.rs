//! Every model family as the hub has it, small and random, against candle-transformers' own model of that family.

#![allow(clippy::unwrap_used)] // in a test, a failed unwrap is the failure

mod common;

use candle_nn::VarBuilder;
use candle_transformers::models::{mistral, qwen2, qwen3, smol::smollm3};
use common::hub::{CHUNK, Family, Oracle, config, llama_oracle, tokens};
use common::oracle::{compare, our_logits, our_logits_with};
use half::bf16;
use serde_json::{Value, json};
use windlass_checkpoint::Checkpoint;
use windlass_checkpoint::testing::{GgufBuilder, SafetensorsBuilder};
use windlass_engine_model::{LoadOptions, Quantization, build};

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
        let ratio = packed as f64 / built.ledger().weights as f64;
        assert!((0.9..=1.05).contains(&ratio), "{packed} bytes packed, {} in the ledger", built.ledger().weights);
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
        (json!({"quantization_config": {"quant_method": "exl2"}}), "\"exl2\": a checkpoint quantized this way is not"),
        (
            json!({"quantization_config": {"quant_method": "gptq", "bits": 3}}),
            "bits\" is 3: a checkpoint quantized this way",
        ),
        (
            json!({"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 48}}),
            "group_size\" is 48: a group",
        ),
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

/// What a GGUF file calls a tensor of the hub's.
fn gguf_name(name: &str) -> String {
    let parts = [
        ("model.embed_tokens", "token_embd"),
        ("model.norm", "output_norm"),
        ("lm_head", "output"),
        ("model.layers", "blk"),
        ("input_layernorm", "attn_norm"),
        ("post_attention_layernorm", "ffn_norm"),
        ("self_attn.q_proj", "attn_q"),
        ("self_attn.k_proj", "attn_k"),
        ("self_attn.v_proj", "attn_v"),
        ("self_attn.o_proj", "attn_output"),
        ("self_attn.q_norm", "attn_q_norm"),
        ("self_attn.k_norm", "attn_k_norm"),
        ("mlp.gate_proj", "ffn_gate"),
        ("mlp.up_proj", "ffn_up"),
        ("mlp.down_proj", "ffn_down"),
    ];
    parts.iter().fold(name.to_owned(), |name, (hub, gguf)| name.replace(hub, gguf))
}

/// Rows of q or k in the order in which neighbours turn together.
fn interleaved(values: &[f32], rows: usize, head_dim: usize) -> Vec<f32> {
    let cols = values.len() / rows;
    let from = |row: usize| row / head_dim * head_dim + row % 2 * head_dim / 2 + row % head_dim / 2;
    (0..rows).flat_map(|row| values[from(row) * cols..][..cols].to_vec()).collect()
}

/// The family's checkpoint as the converter writes it.
fn gguf(family: &Family, architecture: &str, interleave: bool) -> Checkpoint {
    let head_dim =
        family.config["head_dim"].as_u64().unwrap_or(family.size("hidden_size") / family.size("num_attention_heads"));
    let key = |name: &str| format!("{architecture}.{name}");
    let mut file = GgufBuilder::new()
        .str("general.architecture", architecture)
        .f32(&key("rope.freq_base"), 10_000.0)
        .f32(&key("attention.layer_norm_rms_epsilon"), 1e-5)
        .u32(&key("attention.key_length"), head_dim as u32)
        .u32(&key("attention.value_length"), head_dim as u32);
    for (name, hub) in [
        ("block_count", "num_hidden_layers"),
        ("context_length", "max_position_embeddings"),
        ("embedding_length", "hidden_size"),
        ("feed_forward_length", "intermediate_size"),
        ("attention.head_count", "num_attention_heads"),
        ("attention.head_count_kv", "num_key_value_heads"),
    ] {
        file = file.u32(&key(name), family.size(hub) as u32);
    }
    for (name, shape, values) in family.tensors() {
        let turns = interleave && (name.ends_with("q_proj.weight") || name.ends_with("k_proj.weight"));
        let values = if turns { interleaved(&values, shape[0] as usize, head_dim as usize) } else { values };
        let dims: Vec<u64> = shape.iter().rev().copied().collect();
        file = file.tensor_f32(&gguf_name(&name), &dims, &values);
    }
    Checkpoint::from_bytes(file.build()).unwrap()
}

/// Equal weights give equal bits, whatever file they come in; the hub's are held against candle above.
#[test]
fn a_familys_gguf_files_compute_the_same() {
    let families = families();
    for (index, architecture, interleave) in
        [(0, "llama", true), (2, "llama", true), (3, "smollm3", true), (5, "qwen2", false), (6, "qwen3", false)]
    {
        let family = &families[index];
        let hub = our_logits(&family.open(&family.safetensors()), &tokens(), CHUNK);
        let found = our_logits(&gguf(family, architecture, interleave), &tokens(), CHUNK);
        let agreement = compare(&hub, &found);
        assert!(agreement.relative_error() <= 1e-3, "{architecture}: {agreement}");
    }
}
