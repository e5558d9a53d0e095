//! Models of more than text: what they compute of text is what the same text model computes in a folder of its own, bit
//! for bit. Those are held against candle in `families`.

use crate::common::hub::{CHUNK, Family, VOCABULARY, config, llama_oracle, tokens};
use crate::common::oracle::our_logits;
use serde_json::{Value, json};
use windlass_checkpoint::Checkpoint;
use windlass_checkpoint::testing::SafetensorsBuilder;
use windlass_engine_model::{DecoderConfig, LoadOptions, build, survey};

/// Where a folder of more than text has the decoder and what reads images.
type Place = (fn(&str) -> String, &'static str);

const BESIDE: Place = (|name| format!("language_model.{name}"), "");
const WITHIN: Place = (
    |name| name.strip_prefix("model.").map_or(name.to_owned(), |rest| format!("model.language_model.{rest}")),
    "model.",
);

/// A text model with all its keys.
fn family(config: Value, head_norms: bool) -> Family {
    Family { config, biases: false, head_norms, oracle: llama_oracle }
}

/// Gemma 3's text with every key that is published as a default, and beside it what folders of the larger ones say.
fn gemma3() -> (Family, Value) {
    let own = json!({"hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 7, "sliding_window": 20,
        "vocab_size": VOCABULARY, "rope_scaling": {"factor": 8.0, "rope_type": "linear"}});
    let mut whole = config(
        "gemma3_text",
        json!({"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "rms_norm_eps": 1e-6,
            "max_position_embeddings": 131_072, "rope_theta": 1_000_000.0, "rope_local_base_freq": 10_000.0,
            "query_pre_attn_scalar": 256, "sliding_window_pattern": 6, "hidden_act": null,
            "hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": true}),
    );
    extend(&mut whole, &own);
    (family(whole, true), json!({"model_type": "gemma3", "text_config": own, "vision_config": {"hidden_size": 64}}))
}

/// Mistral's text, whose head is a matrix of its own.
fn mistral3() -> (Family, Value) {
    let own = json!({"model_type": "mistral", "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2,
        "head_dim": 64, "rope_theta": 1e9, "sliding_window": null, "vocab_size": VOCABULARY});
    let mut whole = config(
        "mistral",
        json!({"num_attention_heads": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-6,
            "max_position_embeddings": 131_072, "tie_word_embeddings": false}),
    );
    extend(&mut whole, &own);
    (family(whole, false), json!({"model_type": "mistral3", "text_config": own, "vision_config": {}}))
}

fn extend(config: &mut Value, more: &Value) {
    config.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
}

/// The folder of a wrapper around a text model, with a tensor of images and one between images and text.
fn wrapped(family: &Family, config: &Value, (name_of, images): Place) -> Checkpoint {
    let text = family.tensors().into_iter().fold(SafetensorsBuilder::new(), |file, (name, shape, values)| {
        file.tensor_f32(&name_of(&name), &shape, &values)
    });
    let images = ["vision_tower.vision_model.embeddings.patch_embedding.weight", "multi_modal_projector.norm.weight"]
        .iter()
        .fold(text, |file, name| file.tensor_f32(&format!("{images}{name}"), &[2, 3, 4, 4], &[0.5; 96]));
    open(config, &images.build())
}

fn open(config: &Value, weights: &[u8]) -> Checkpoint {
    family(config.clone(), false).open(weights)
}

#[test]
fn the_text_of_a_model_with_images_is_computed_as_if_it_were_alone() {
    for (family, config) in [gemma3(), mistral3()] {
        let alone = family.open(&family.safetensors());
        let expected = our_logits(&alone, &tokens(), CHUNK);
        for place in [BESIDE, WITHIN] {
            let checkpoint = wrapped(&family, &config, place);
            assert_eq!(our_logits(&checkpoint, &tokens(), CHUNK), expected, "{}", config["model_type"]);
            let [found, plain] = [&checkpoint, &alone].map(|folder| survey(folder, None).unwrap().shape);
            assert_eq!(found, plain, "nothing of images takes memory");
            assert!(DecoderConfig::read(&checkpoint).unwrap().is_of_more_than_text());
        }
        assert!(!DecoderConfig::read(&alone).unwrap().is_of_more_than_text());
    }
}

#[test]
fn what_is_neither_text_nor_images_is_refused_by_name() {
    let (family, config) = mistral3();
    let refusal = |change: &dyn Fn(&mut Value), name: fn(&str) -> String| {
        let mut config = config.clone();
        change(&mut config);
        build(&wrapped(&family, &config, (name, "")), &LoadOptions::default()).map(drop).unwrap_err().to_string()
    };
    let cases = [
        (
            refusal(&|config| config["text_config"] = json!(3), BESIDE.0),
            "config.json: text_config\" is 3; it must be an",
        ),
        (
            refusal(&|config| config["text_config"]["model_type"] = json!("ministral3"), BESIDE.0),
            "text_config.model_type\" is \"ministral3\": this text model in one of more than text is not supported",
        ),
        (
            refusal(&|config| config["text_config"]["num_hidden_layers"] = json!(1), BESIDE.0),
            "\"language_model.model.layers.1.input_layernorm.weight\" belongs to no supported decoder",
        ),
        (
            refusal(&|config| config["text_config"]["rope_scaling"] = json!({"rope_type": "helix"}), BESIDE.0),
            "config.json: text_config.rope_scaling.rope_type\" is \"helix\": this rotary scaling is not supported",
        ),
        (
            refusal(&|config| config["text_config"]["hidden_size"] = json!("wide"), BESIDE.0),
            "config.json: text_config.hidden_size\" is \"wide\"; it must be a positive integer",
        ),
        (refusal(&|_| (), str::to_owned), "tensor \"language_model.model.embed_tokens.weight\" is missing"),
    ];
    for (message, expected) in cases {
        assert!(message.contains(expected), "{message:?} should contain {expected:?}");
    }
    // A folder of text alone has no place for images.
    let plain = wrapped(&family, &family.config, (str::to_owned, ""));
    let refusal = build(&plain, &LoadOptions::default()).map(drop).unwrap_err().to_string();
    assert!(refusal.contains("\"multi_modal_projector.norm.weight\" belongs to no"), "{refusal}");
}
