//! Rotary scaling by YaRN: what transformers computes of it (`tests/api/yarn.py` records that), a decoder of which candle is
//! told the frequencies, and files that are refused.

use crate::common::gguf::gguf_builder;
use crate::common::hub::{CHUNK, Family, Oracle, POSITIONS, config, tokens};
use crate::common::oracle::{compare, our_logits_with};
use candle_nn::VarBuilder;
use candle_transformers::models::phi3;
use serde_json::{Value, json};
use windlass_checkpoint::Checkpoint;
use windlass_checkpoint::testing::{GgufBuilder, SafetensorsBuilder};
use windlass_engine_contract::memory::KvDataType;
use windlass_engine_model::{DecoderConfig, LoadOptions, RopeConfig};

fn family(model_type: &str, more: Value) -> Family {
    Family { config: config(model_type, more), biases: false, head_norms: false, oracle: phi3_oracle }
}

fn read(checkpoint: &Checkpoint) -> Result<DecoderConfig, String> {
    DecoderConfig::read(checkpoint).map_err(|error| error.to_string())
}

fn read_hub(more: Value) -> Result<DecoderConfig, String> {
    let family = family("llama", more);
    read(&family.open(&family.safetensors()))
}

fn frequencies(rope: &RopeConfig) -> Vec<f64> {
    let factors = rope.factors_for(POSITIONS).unwrap();
    let frequency = |pair: usize| f64::from(rope.theta).powf(-2.0 * pair as f64 / rope.dims as f64);
    factors.iter().enumerate().map(|(pair, factor)| frequency(pair) / f64::from(*factor)).collect()
}

#[test]
fn frequencies_and_magnitudes_are_those_of_transformers() {
    let recorded: Value = serde_json::from_str(include_str!("data/yarn.json")).unwrap();
    for case in recorded["cases"].as_array().unwrap() {
        let expected: Vec<f64> = serde_json::from_value(case["inv_freq"].clone()).unwrap();
        let (parameters, tokens) = (&case["parameters"], &case["max_position_embeddings"]);
        let named = |key: &str| {
            let mut parameters = parameters.clone();
            parameters[key] = "yarn".into();
            parameters
        };
        let base = json!({"head_dim": 2 * expected.len(), "max_position_embeddings": tokens});
        let with = |key: &str, value: Value| {
            let mut config = base.clone();
            config[key] = value;
            config["rope_theta"] = parameters["rope_theta"].clone();
            config
        };
        // As newer files have it, as older ones, and as the oldest.
        let files = [
            with("rope_parameters", named("rope_type")),
            with("rope_scaling", named("rope_type")),
            with("rope_scaling", named("type")),
        ];
        for file in files {
            let rope = read_hub(file).unwrap().rope;
            let found = frequencies(&rope);
            let near = |(found, expected): (&f64, &f64)| (found / expected - 1.0).abs() < 1e-5;
            assert!(found.len() == expected.len() && found.iter().zip(&expected).all(near), "{case}: {found:?}");
            assert!((f64::from(rope.magnitude) - case["magnitude"].as_f64().unwrap()).abs() < 1e-6, "{case}");
        }
    }
}

/// Numbers that change what 16 pairs do within the positions that are compared: some pairs keep their frequency, some are
/// stretched in part, some in full.
fn yarn() -> Value {
    json!({"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64, "beta_fast": 8.0, "beta_slow": 0.5})
}

fn phi3(more: Value) -> Family {
    let mut keys = json!({"tie_word_embeddings": false, "rope_scaling": yarn()});
    keys.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    family("phi3", keys)
}

/// candle's model knows no YaRN; what it takes for LongRoPE's factors multiplies each frequency, and is computed here by the
/// paper's formula: the share of turns in the original context decides, which its authors count in places.
fn phi3_oracle(config: &Value, weights: VarBuilder<'static>) -> Oracle {
    let mut config = config.clone();
    let (place, dims) =
        (|turns: f64| 32.0 * (64.0 / (turns * std::f64::consts::TAU)).ln() / (2.0 * 10_000_f64.ln()), 32.0);
    let (first, last) = (place(8.0).floor().max(0.0), f64::min(place(0.5).ceil(), dims - 1.0));
    let stretched = |pair: f64| ((pair - first) / (last - first)).clamp(0.0, 1.0);
    let shares: Vec<f64> = (0..16).map(|pair| 1.0 - stretched(pair.into()) * (1.0 - 1.0 / 8.0)).collect();
    config["rope_scaling"] = json!({"type": "longrope", "short_factor": shares, "long_factor": shares});
    config["original_max_position_embeddings"] = json!(512);
    let mut model = phi3::Model::new(&serde_json::from_value(config).unwrap(), weights).unwrap();
    Box::new(move |token, position| model.forward(token, position))
}

/// The weights of candle's model, whose queries are as much longer as the scores are: both what turns them and what turns the
/// keys has the magnitude.
fn lengthened(family: &Family, magnitude: f32) -> Vec<u8> {
    let queries = (family.size("num_attention_heads") * family.head_dim() * family.size("hidden_size")) as usize;
    let add = |file: SafetensorsBuilder, (name, shape, mut values): (String, Vec<u64>, Vec<f32>)| {
        if name.ends_with("qkv_proj.weight") {
            values[..queries].iter_mut().for_each(|value| *value *= magnitude * magnitude);
        }
        file.tensor_f32(&name, &shape, &values)
    };
    family.tensors().into_iter().fold(SafetensorsBuilder::new(), add).build()
}

fn fine() -> LoadOptions {
    LoadOptions { kv_data_type: KvDataType::F16, ..LoadOptions::default() }
}

#[test]
fn a_decoder_computes_what_candle_computes_of_its_frequencies() {
    let formula = 0.1 * 8_f32.ln() + 1.0;
    for (attention_factor, magnitude) in [(Value::Null, formula), (json!(1.0), 1.0)] {
        let mut family = phi3(json!({}));
        family.config["rope_scaling"]["attention_factor"] = attention_factor;
        let found = our_logits_with(&family.open(&family.safetensors()), &tokens(), CHUNK, &fine());
        let agreement = compare(&family.candle_logits(lengthened(&family, magnitude)), &found);
        println!("{magnitude}: {agreement}");
        assert!(agreement.relative_error() <= 2e-3, "{agreement}");
        let unscaled = phi3(json!({"rope_scaling": null}));
        let unscaled = our_logits_with(&unscaled.open(&unscaled.safetensors()), &tokens(), CHUNK, &fine());
        assert!(compare(&unscaled, &found).relative_error() > 0.02, "scaling must show");
    }
}

/// The keys of a GGUF file that say the same.
fn gguf_yarn(file: GgufBuilder, architecture: &str) -> GgufBuilder {
    let key = |name: &str| format!("{architecture}.rope.scaling.{name}");
    file.str(&key("type"), "yarn")
        .f32(&key("factor"), 8.0)
        .u32(&key("original_context_length"), 64)
        .f32(&key("yarn_beta_fast"), 8.0)
        .f32(&key("yarn_beta_slow"), 0.5)
}

#[test]
fn gguf_files_say_the_same_by_keys_of_their_own() {
    let family = phi3(json!({}));
    let build = |file: GgufBuilder| Checkpoint::from_bytes(gguf_yarn(file, "phi3").build()).unwrap();
    let (hub, file) = (family.open(&family.safetensors()), build(gguf_builder(&family, "phi3")));
    assert_eq!(read(&hub).unwrap().rope, read(&file).unwrap().rope);
    let [hub, file] = [hub, file].map(|checkpoint| our_logits_with(&checkpoint, &tokens(), CHUNK, &fine()));
    let agreement = compare(&hub, &file);
    assert!(agreement.relative_error() <= 1e-3, "{agreement}");
    let scaled = build(gguf_builder(&family, "phi3").f32("phi3.rope.scaling.attn_factor", 0.5));
    assert_eq!(read(&scaled).unwrap().rope.magnitude, 0.5 * (1.0 + 0.1 * 8_f32.ln()));
}

/// Cards of Qwen2.5 tell their readers to add YaRN, and leave the context as it is.
#[test]
fn the_context_is_as_long_as_the_file_says_or_as_it_was_extended() {
    let tokens = |positions: u64, scaling: Value| {
        read_hub(json!({"max_position_embeddings": positions, "rope_scaling": scaling}))
            .map(|config| config.context_tokens)
    };
    let scaled = |factor: f32| json!({"type": "yarn", "factor": factor, "original_max_position_embeddings": 512});
    assert_eq!(tokens(512, scaled(4.0)), Ok(2048));
    assert_eq!(tokens(4096, scaled(4.0)), Ok(4096));
    assert_eq!(tokens(512, json!({"type": "yarn", "factor": 2.5})), Ok(1280));
    // By its own context, if the file names no factor.
    assert_eq!(tokens(4096, json!({"type": "yarn", "original_max_position_embeddings": 512})), Ok(4096));
    let file = gguf_yarn(gguf_builder(&phi3(json!({"max_position_embeddings": 100})), "phi3"), "phi3");
    assert_eq!(read(&Checkpoint::from_bytes(file.build()).unwrap()).unwrap().context_tokens, 512);
}

#[test]
fn numbers_of_folders_that_cannot_be_are_refused_by_name() {
    let cases = [
        ("factor", json!(0.5), "rope_scaling.factor\" is 0.5; it must be a number from 1 to 16777216"),
        ("factor", json!("8"), "rope_scaling.factor\" is \"8\"; it must be a number from 1"),
        ("factor", json!(1e30), "rope_scaling.factor\" is 1e+30; it must be a number from 1"),
        ("original_max_position_embeddings", json!(0), "\" is 0; it must be a positive integer"),
        ("original_max_position_embeddings", json!(1u64 << 25), "\" is 33554432; it must be at most 16777216"),
        ("beta_fast", json!(-1), "rope_scaling.beta_fast\" is -1; it must be a positive number"),
        ("beta_slow", json!(8), "rope_scaling.beta_slow\" is 8; it must be below beta_fast, 8"),
        ("attention_factor", json!(0), "attention_factor\" is 0; it must be a number from 0.001 to 1000"),
        ("mscale", json!(-1), "rope_scaling.mscale\" is -1; it must be a number from 0 to 1000"),
        ("mscale_all_dim", json!("all"), "rope_scaling.mscale_all_dim\" is \"all\"; it must be a number"),
        ("truncate", json!(1), "rope_scaling.truncate\" is 1; it must be true or false"),
    ];
    for (key, value, expected) in cases {
        let mut scaling = yarn();
        scaling[key] = value;
        let message = read_hub(json!({"rope_scaling": scaling})).unwrap_err();
        assert!(message.contains(expected), "{message:?} should contain {expected:?}");
    }
    let message = read_hub(json!({"rope_scaling": yarn(), "rope_theta": 1.0})).unwrap_err();
    assert!(message.contains("rope_theta\" is 1.0; it must be above 1"), "{message}");
}

#[test]
fn numbers_of_gguf_files_that_cannot_be_are_refused_by_name() {
    let refusal = |change: &dyn Fn(GgufBuilder) -> GgufBuilder| {
        let file = gguf_yarn(gguf_builder(&phi3(json!({})), "phi3"), "phi3");
        read(&Checkpoint::from_bytes(change(file).build()).unwrap()).unwrap_err()
    };
    let float = |name: &'static str, number: f32| {
        let key = format!("phi3.rope.scaling.{name}");
        refusal(&|file| file.without(&key).f32(&key, number))
    };
    let original = "phi3.rope.scaling.original_context_length";
    let cases = [
        (float("factor", f32::NAN), "rope.scaling.factor\" is NaN; it must be from 1 to 16777216"),
        (float("yarn_beta_fast", 0.0), "yarn_beta_fast\" is 0; it must be finite and positive"),
        (float("yarn_beta_slow", 9.0), "yarn_beta_slow\" is 9; it must be below yarn_beta_fast, 8"),
        (float("attn_factor", f32::INFINITY), "attn_factor\" is inf; it must be from 0.001 to 1000"),
        (float("yarn_attn_factor", 1.0), "yarn_attn_factor\" is 1: this number of YaRN's is not supported"),
        (float("yarn_ext_factor", 0.5), "yarn_ext_factor\" is 0.5: this number of YaRN's is not supported"),
        (float("yarn_log_multiplier", 0.1), "yarn_log_multiplier\" is 0.1: this number of YaRN's is not supported"),
        (refusal(&|file| file.without("phi3.rope.scaling.factor")), "rope.scaling.factor\" is missing"),
        (refusal(&|file| file.without(original).u32(original, 1 << 25)), "is 33554432; it must be at most 16777216"),
        (
            refusal(&|file| file.without("phi3.rope.freq_base").f32("phi3.rope.freq_base", 1.0)),
            "rope.freq_base\" is 1; it must be above 1",
        ),
    ];
    for (message, expected) in cases {
        assert!(message.contains(expected), "{message:?} should contain {expected:?}");
    }
}
