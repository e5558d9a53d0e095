//! Every model family as the hub has it, small and random, against candle-transformers' own model of that family.

use crate::common::gguf::gguf;
use crate::common::hub::{CHUNK, Family, Oracle, POSITIONS, config, llama_oracle, tokens};
use crate::common::oracle::{compare, our_logits, our_logits_with};
use candle_core::Tensor;
use candle_nn::VarBuilder;
use candle_transformers::models::{
    gemma, gemma2, gemma3, mistral, mixtral, phi3, qwen2, qwen2_moe, qwen3, qwen3_moe, smol::smollm3,
};
use half::bf16;
use serde_json::{Value, json};
use windlass_checkpoint::Checkpoint;
use windlass_checkpoint::testing::SafetensorsBuilder;
use windlass_engine_contract::memory::KvDataType;
use windlass_engine_model::{ActivationType, DecoderConfig, LoadOptions, Quantization, build};

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
        plain(
            config("mistral", json!({"head_dim": 64, "sliding_window": 20, "tie_word_embeddings": false})),
            windowed_mistral_oracle,
        ),
        plain(config("mixtral", mixtral_keys()), mixtral_oracle),
        Family { biases: true, ..plain(config("qwen2_moe", qwen2_moe_keys()), qwen2_moe_oracle) },
        Family { head_norms: true, ..plain(config("qwen3_moe", qwen3_moe_keys()), qwen3_moe_oracle) },
        plain(config("phi3", json!({"partial_rotary_factor": 0.5, "tie_word_embeddings": false})), phi3_oracle),
        plain(config("phi3", long_rope(512)), phi3_oracle),
        plain(config("phi3", long_rope(64)), phi3_oracle),
        plain(config("gemma", gemma_keys(json!({}))), gemma_oracle),
        plain(
            config("gemma2", gemma_keys(json!({"sliding_window": 512, "attn_logit_softcapping": 5.0}))),
            gemma2_oracle,
        ),
        Family { head_norms: true, ..plain(config("gemma3_text", gemma3_keys()), gemma3_oracle) },
    ]
}

/// Every expert is used: where a few are chosen, rounding may choose others.
fn mixtral_keys() -> Value {
    json!({"num_local_experts": 4, "num_experts_per_tok": 4, "sliding_window": 512, "use_flash_attn": false,
        "tie_word_embeddings": false})
}

fn qwen2_moe_keys() -> Value {
    json!({"num_experts": 6, "num_experts_per_tok": 6, "moe_intermediate_size": 96, "norm_topk_prob": false,
        "shared_expert_intermediate_size": 160, "decoder_sparse_step": 1, "sliding_window": 512, "max_window_layers": 4,
        "use_sliding_window": false, "tie_word_embeddings": false})
}

fn qwen3_moe_keys() -> Value {
    json!({"num_experts": 6, "num_experts_per_tok": 6, "moe_intermediate_size": 96, "norm_topk_prob": true,
        "decoder_sparse_step": 1, "mlp_only_layers": [], "head_dim": 64, "attention_bias": false,
        "max_window_layers": 4, "sliding_window": null, "use_sliding_window": false, "tie_word_embeddings": false})
}

/// Factors of LongRoPE, the longer ones for sequences beyond `original` tokens.
fn long_rope(original: u64) -> Value {
    let factors = |most: f32| (0..16).map(|pair| 1.0 + most * pair as f32 / 16.0).collect::<Vec<_>>();
    json!({"tie_word_embeddings": false, "original_max_position_embeddings": original, "rope_scaling":
        {"type": "longrope", "short_factor": factors(0.5), "long_factor": factors(6.0), "attention_factor": 1.0}})
}

fn gemma_keys(more: Value) -> Value {
    let mut keys = json!({"hidden_act": null, "hidden_activation": "gelu_pytorch_tanh", "head_dim": 48,
        "attention_bias": false, "query_pre_attn_scalar": 48, "final_logit_softcapping": 3.0});
    keys.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    keys
}

fn gemma3_keys() -> Value {
    gemma_keys(json!({"sliding_window": 20, "sliding_window_pattern": 3, "rope_local_base_freq": 1000.0,
        "rope_theta": 50000.0, "final_logit_softcapping": null}))
}

/// Computes each token anew with all before it: candle's own cache would let it see them all.
fn windowed_mistral_oracle(config: &Value, weights: VarBuilder<'static>) -> Oracle {
    let mut config = config.clone();
    config["use_flash_attn"] = false.into();
    // candle lets a query see one key more than the model's authors do.
    config["sliding_window"] = (config["sliding_window"].as_u64().unwrap() - 1).into();
    let mut model = mistral::Model::new(&serde_json::from_value(config).unwrap(), weights).unwrap();
    let mut all: Option<Tensor> = None;
    Box::new(move |token, _| {
        let tokens = match &all {
            None => token.clone(),
            Some(before) => Tensor::cat(&[before, token], 1)?,
        };
        model.clear_kv_cache();
        let logits = model.forward(&tokens, 0);
        all = Some(tokens);
        logits
    })
}

fn mixtral_oracle(config: &Value, weights: VarBuilder<'static>) -> Oracle {
    let mut model = mixtral::Model::new(&serde_json::from_value(config.clone()).unwrap(), weights).unwrap();
    Box::new(move |token, position| model.forward(token, position))
}

fn qwen2_moe_oracle(config: &Value, weights: VarBuilder<'static>) -> Oracle {
    let mut model = qwen2_moe::Model::new(&serde_json::from_value(config.clone()).unwrap(), weights).unwrap();
    Box::new(move |token, position| model.forward(token, position))
}

fn qwen3_moe_oracle(config: &Value, weights: VarBuilder<'static>) -> Oracle {
    let mut model =
        qwen3_moe::ModelForCausalLM::new(&serde_json::from_value(config.clone()).unwrap(), weights).unwrap();
    Box::new(move |token, position| model.forward(token, position))
}

/// candle multiplies frequencies with the factors, where Phi-3's authors divide, and takes the long ones only where the
/// position itself is far; here the whole sequence has one kind.
fn phi3_oracle(config: &Value, weights: VarBuilder<'static>) -> Oracle {
    let mut config = config.clone();
    if config["rope_scaling"].is_object() {
        let long = config["original_max_position_embeddings"].as_u64().unwrap() < POSITIONS as u64;
        let factors = &config["rope_scaling"][if long { "long_factor" } else { "short_factor" }];
        let inverse: Vec<f64> =
            factors.as_array().unwrap().iter().map(|factor| 1.0 / factor.as_f64().unwrap()).collect();
        config["rope_scaling"] = json!({"type": "longrope", "short_factor": inverse, "long_factor": inverse});
    }
    let mut model = phi3::Model::new(&serde_json::from_value(config).unwrap(), weights).unwrap();
    Box::new(move |token, position| model.forward(token, position))
}

fn gemma_oracle(config: &Value, weights: VarBuilder<'static>) -> Oracle {
    let mut model = gemma::Model::new(false, &serde_json::from_value(config.clone()).unwrap(), weights).unwrap();
    // candle's first Gemma knows no cap, as its authors' does not.
    let cap = config["final_logit_softcapping"].as_f64().unwrap();
    Box::new(move |token, position| (model.forward(token, position)? / cap)?.tanh()? * cap)
}

fn gemma2_oracle(config: &Value, weights: VarBuilder<'static>) -> Oracle {
    let mut model = gemma2::Model::new(false, &serde_json::from_value(config.clone()).unwrap(), weights).unwrap();
    Box::new(move |token, position| model.forward(token, position))
}

fn gemma3_oracle(config: &Value, weights: VarBuilder<'static>) -> Oracle {
    let mut model = gemma3::Model::new(false, &serde_json::from_value(config.clone()).unwrap(), weights).unwrap();
    Box::new(move |token, position| model.forward(token, position))
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

/// Keys and values as finely as the cache can hold them.
fn fine() -> LoadOptions {
    LoadOptions { kv_data_type: KvDataType::F16, ..LoadOptions::default() }
}

/// The error left is that of f16 in the KV cache.
#[test]
fn every_family_computes_what_candle_computes() {
    for family in families() {
        let weights = family.safetensors();
        let found = our_logits_with(&family.open(&weights), &tokens(), CHUNK, &fine());
        let agreement = compare(&family.candle_logits(weights), &found);
        println!("{} {agreement}", family.config);
        let (error, top_1) = (agreement.relative_error(), agreement.top_1());
        assert!(error <= 2e-3 && top_1 >= 0.98, "{}: {agreement}", family.config);
    }
}

/// LongRoPE lengthens queries and keys alike by what its authors' formula says of a context of 512 that was 64: scores
/// grow by 1 + ln 8 / ln 64. candle lengthens neither; its queries are made longer by that instead.
#[test]
fn longer_contexts_lengthen_queries_and_keys() {
    let mut config = config("phi3", long_rope(64));
    config["rope_scaling"].as_object_mut().unwrap().remove("attention_factor");
    let family = Family { config, oracle: phi3_oracle, ..plain_of(&families()[0]) };
    let queries = (family.size("num_attention_heads") * family.head_dim() * family.size("hidden_size")) as usize;
    let lengthened = family.tensors().into_iter().fold(SafetensorsBuilder::new(), |file, (name, shape, mut values)| {
        if name.ends_with("qkv_proj.weight") {
            values[..queries].iter_mut().for_each(|value| *value *= 1.5);
        }
        file.tensor_f32(&name, &shape, &values)
    });
    let found = our_logits_with(&family.open(&family.safetensors()), &tokens(), CHUNK, &fine());
    let agreement = compare(&family.candle_logits(lengthened.build()), &found);
    assert!(agreement.relative_error() <= 2e-3, "{agreement}");
}

/// Fewer experts than there are. A token whose experts are all but tied may go to another one than in candle; in a
/// decoder of one layer that changes what this token gives, and no other.
#[test]
fn tokens_go_to_the_experts_that_candle_chooses() {
    let with = |mut family: Family, more: Value| {
        family.config.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        family
    };
    for family in families() {
        let Some(count) = [&family.config["num_local_experts"], &family.config["num_experts"]][..]
            .iter()
            .find_map(|count| count.as_u64())
        else {
            continue;
        };
        for used in 1..count {
            let family = with(plain_of(&family), json!({"num_hidden_layers": 1, "num_experts_per_tok": used}));
            let weights = family.safetensors();
            let found = our_logits_with(&family.open(&weights), &tokens(), CHUNK, &fine());
            let candle = family.candle_logits(weights);
            let near = |position: &usize| {
                let one = *position..position + 1;
                compare(&candle[one.clone()], &found[one]).relative_error() < 5e-3
            };
            let agreeing = (0..candle.len()).filter(near).count();
            println!("{} {used} of {count} experts: {agreeing} of {}", family.config["model_type"], candle.len());
            assert!(agreeing + 1 >= candle.len(), "{}: {agreeing} of {}", family.config, candle.len());
        }
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
    Family { config: family.config.clone(), ..*family }
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
    let reference = family.candle_logits(weights);
    // Activations that are rounded to bf16, too, and finer ones.
    for (activations, bound) in [(ActivationType::Int8, 0.012), (ActivationType::Int16, 0.006)] {
        let options = LoadOptions { activations, ..LoadOptions::default() };
        let agreement = compare(&reference, &our_logits_with(&checkpoint, &tokens(), CHUNK, &options));
        assert!(agreement.relative_error() <= bound, "{activations:?}: {agreement}");
    }
    let built = build(&checkpoint, &LoadOptions::default()).unwrap();
    assert_eq!(built.weight_type, "bf16");
}

#[test]
fn floats_are_quantized_as_they_are_loaded() {
    let family = &Family { config: config("llama", json!({"intermediate_size": 256})), ..plain_of(&families()[0]) };
    let checkpoint = family.open(&family.safetensors());
    let exact = our_logits(&checkpoint, &tokens(), CHUNK);
    let cases = [
        ("int8", "q8_0", 0.05),
        ("fp8", "fp8_g64", 0.2),
        ("int4", "q4_1", 0.45),
        ("int4-g64", "int4_g64", 0.5),
        ("int4-g128", "int4_g128", 0.6),
        ("int4-sym", "q4_0", 0.6),
        ("int4-g64-sym", "int4_g64_sym", 0.6),
        ("int4-g128-sym", "int4_g128_sym", 0.7),
    ];
    for (name, kind, bound) in cases {
        let quantization = Quantization::named(name).unwrap();
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
            "the architecture \"mamba\" is not supported; supported are gemma, gemma2, gemma3, gemma3_text, llama",
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
        (json!({"sliding_window": -1}), "sliding_window\" is -1; it must be a positive integer"),
        (
            json!({"sliding_window": 9, "layer_types": ["full_attention"]}),
            "layer_types\" is [\"full_attention\"]; it must be",
        ),
        (
            json!({"num_local_experts": 2, "num_experts_per_tok": 3}),
            "num_experts_per_tok\" is 3; it must be at most the 2",
        ),
        (json!({"quantization_config": {"quant_method": "exl2"}}), "\"exl2\": a checkpoint quantized this way is not"),
        (
            json!({"quantization_config": {"quant_method": "auto-round", "data_type": "int", "packing_format": "auto_round:llm"}}),
            "packing_format\" is \"auto_round:llm\": this layout is not",
        ),
        (
            json!({"quantization_config": {"quant_method": "auto-round", "data_type": "int", "packing_format": "auto_round:llm"}}),
            "packing_format\" is \"auto_round:llm\": this layout is not supported",
        ),
        (
            json!({"quantization_config": {"quant_method": "gptq", "bits": 5}}),
            "bits\" is 5: a checkpoint quantized this way",
        ),
        (
            json!({"quantization_config": {"quant_method": "gptq", "bits": 4, "dynamic": ["+:.*"]}}),
            "dynamic\" is [\"+:.*\"]: what is no object of patterns is not",
        ),
        (
            json!({"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 48}}),
            "group_size\" is 48: a group",
        ),
        (json!({"head_dim": 65_538}), "head_dim\" is 65538; it must be at most 65536"),
        (json!({"num_hidden_layers": 65_537}), "num_hidden_layers\" is 65537; it must be at most 65536"),
        (json!({"rope_scaling": {"rope_type": "dynamic"}}), "\"dynamic\": this rotary scaling is not supported"),
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

/// Equal weights give nearly equal logits, whatever file they come in; the hub's are held against candle above.
#[test]
fn a_familys_gguf_files_compute_the_same() {
    let families = families();
    for (index, architecture) in [
        (0, "llama"),
        (2, "llama"),
        (3, "smollm3"),
        (5, "qwen2"),
        (6, "qwen3"),
        (7, "llama"),
        (8, "llama"),
        (9, "qwen2moe"),
        (10, "qwen3moe"),
        (11, "phi3"),
        (12, "phi3"),
        (13, "phi3"),
        (14, "gemma"),
        (15, "gemma2"),
        (16, "gemma3"),
    ] {
        let family = &families[index];
        let hub = our_logits(&family.open(&family.safetensors()), &tokens(), CHUNK);
        let found = our_logits(&Checkpoint::from_bytes(gguf(family, architecture)).unwrap(), &tokens(), CHUNK);
        let agreement = compare(&hub, &found);
        assert!(agreement.relative_error() <= 1e-3, "{architecture}: {agreement}");
    }
}

/// Which layers have windows, as each family's files say it.
#[test]
fn windows_are_where_the_family_has_them() {
    let windows = |model_type: &str, more: Value| {
        let family = Family { config: config(model_type, more), ..plain_of(&families()[0]) };
        let config = DecoderConfig::read(&family.open(&family.safetensors())).unwrap();
        let windows: Vec<usize> = (0..4).map(|layer| config.window(layer).unwrap_or(0)).collect();
        (windows, config.shape(0).windowed.map(|windowed| (windowed.layers, windowed.tokens)))
    };
    assert_eq!(windows("mistral", json!({"sliding_window": 9})), (vec![9; 4], Some((4, 9))));
    assert_eq!(windows("mistral", json!({"sliding_window": 512})), (vec![0; 4], None));
    assert_eq!(windows("gemma2", gemma_keys(json!({"sliding_window": 9}))), (vec![9, 0, 9, 0], Some((2, 9))));
    assert_eq!(windows("gemma3_text", gemma_keys(json!({"sliding_window": 9}))), (vec![9; 4], Some((4, 9))));
    let types = ["full_attention", "sliding_attention", "full_attention", "full_attention"];
    let listed = json!({"sliding_window": 9, "layer_types": types});
    assert_eq!(windows("gemma2", gemma_keys(listed)), (vec![0, 9, 0, 0], Some((1, 9))));
    let upper = json!({"sliding_window": 9, "use_sliding_window": true, "max_window_layers": 3});
    assert_eq!(windows("qwen2", upper), (vec![0, 0, 0, 9], Some((1, 9))));
    assert_eq!(windows("qwen2", json!({"sliding_window": 9, "use_sliding_window": false})), (vec![0; 4], None));
}
