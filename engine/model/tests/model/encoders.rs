//! Encoders against what transformers' models said: a real one, and tiny ones whose weights a formula gives
//! (`tests/api/encoders.py` records both).

use serde_json::{Value, json};
use windlass_checkpoint::HubFolder;
use windlass_checkpoint::testing::{SafetensorsBuilder, sentence_encoder};
use windlass_engine_model::{Encoder, EncoderError, EncoderInput, Purpose};

fn recorded() -> Value {
    serde_json::from_str(include_str!("data/encoders.json")).unwrap()
}

fn rows(value: &Value) -> Vec<Vec<f32>> {
    serde_json::from_value(value.clone()).unwrap()
}

fn inputs(tokens: &Value, types: &Value) -> Vec<EncoderInput> {
    let tokens: Vec<Vec<u32>> = serde_json::from_value(tokens.clone()).unwrap();
    let types: Vec<Vec<u32>> = serde_json::from_value(types.clone()).unwrap_or_else(|_| vec![Vec::new(); tokens.len()]);
    tokens.into_iter().zip(types).map(|(tokens, types)| EncoderInput { tokens, types }).collect()
}

fn close(found: &[f32], expected: &[f32], tolerance: f32) -> bool {
    found.len() == expected.len() && found.iter().zip(expected).all(|(a, b)| (a - b).abs() <= tolerance)
}

#[test]
fn sentences_have_the_vectors_that_transformers_gives_them() {
    let Some(path) = sentence_encoder() else { return };
    let expected = &recorded()["sentences"];
    let encoder = Encoder::load(&HubFolder::open(&path).unwrap()).unwrap();
    assert_eq!(encoder.shape().purpose, Purpose::Vectors { dimensions: 384 });
    assert_eq!((encoder.shape().max_tokens, encoder.shape().vocabulary), (256, 30522));
    let texts = inputs(&expected["tokens"], &Value::Null);
    let together = encoder.run(&texts).unwrap();
    for (vector, first) in together.iter().zip(rows(&expected["first_numbers"])) {
        assert!(close(&vector[..16], &first, 2e-5), "{:?} {first:?}", &vector[..16]);
    }
    let cosine = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f32>();
    for (a, row) in together.iter().zip(rows(&expected["cosines"])) {
        let found: Vec<f32> = together.iter().map(|b| cosine(a, b)).collect();
        assert!(close(&found, &row, 2e-5), "{found:?} {row:?}");
    }
    // Padding says nothing.
    let alone = encoder.run(&texts[..1]).unwrap();
    assert!(close(&alone[0], &together[0], 1e-5));
}

/// The formula of `tests/api/encoders.py`.
fn weights(name: &str, elements: u64) -> Vec<f32> {
    let phase = name.bytes().map(u64::from).sum::<u64>() % 97;
    let shift = if name.contains("LayerNorm.weight") { 1.0 } else { 0.0 };
    let wave = |index: u64| 0.2 * (0.37 * (index + 1) as f64 + phase as f64).sin();
    (0..elements).map(|index| wave(index) as f32 + shift).collect()
}

/// A folder of a recorded tiny model that gives the first token's vector as it is.
fn tiny_folder(model: &Value, change: impl FnOnce(&mut Value)) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let mut config = model["config"].clone();
    config["architectures"] = json!([model["architecture"]]);
    config["id2label"] = json!({"0": "LABEL_0"});
    change(&mut config);
    let mut file = SafetensorsBuilder::new();
    for (name, shape) in model["names"].as_object().unwrap() {
        let shape: Vec<u64> = serde_json::from_value(shape.clone()).unwrap();
        file = file.tensor_f32(name, &shape, &weights(name, shape.iter().product()));
    }
    std::fs::create_dir(folder.path().join("1_Pooling")).unwrap();
    for (name, text) in [
        ("config.json", config.to_string()),
        ("modules.json", "[]".to_owned()),
        ("1_Pooling/config.json", json!({"pooling_mode_cls_token": true}).to_string()),
    ] {
        std::fs::write(folder.path().join(name), text).unwrap();
    }
    std::fs::write(folder.path().join("model.safetensors"), file.build()).unwrap();
    folder
}

#[test]
fn every_family_says_what_transformers_says() {
    for model in recorded()["tiny"].as_array().unwrap() {
        let folder = tiny_folder(model, |_| ());
        let folder = HubFolder::open(folder.path()).unwrap();
        assert!(Encoder::is_in(&folder));
        let encoder = Encoder::load(&folder).unwrap_or_else(|error| panic!("{}: {error}", model["architecture"]));
        let found = encoder.run(&inputs(&model["tokens"], &model["types"])).unwrap();
        for (found, expected) in found.iter().zip(rows(&model["values"])) {
            assert!(close(found, &expected, 2e-5), "{}: {found:?} {expected:?}", model["architecture"]);
        }
    }
}

#[test]
fn what_cannot_be_run_is_refused_with_the_reason() {
    let recorded = recorded();
    let (bert, scorer) = (&recorded["tiny"][0], &recorded["tiny"][1]);
    let load = |model: &Value, change: &dyn Fn(&mut Value)| {
        let folder = tiny_folder(model, |config| change(config));
        Encoder::load(&HubFolder::open(folder.path()).unwrap()).map(|_| ()).unwrap_err()
    };
    let labels = load(scorer, &|config| config["id2label"] = json!({"0": "a", "1": "b", "2": "c"}));
    assert!(matches!(labels, EncoderError::Classes(3)), "{labels}");
    let unknown = load(bert, &|config| config["architectures"] = json!(["ElectraModel"]));
    assert!(matches!(&unknown, EncoderError::Unsupported(name) if name == "ElectraModel"), "{unknown}");
    for (name, value) in
        [("hidden_size", 0), ("num_attention_heads", 3), ("vocab_size", 1_u64 << 40), ("hidden_size", 32)]
    {
        let error = load(bert, &|config| config[name] = json!(value));
        assert!(matches!(error, EncoderError::Config(_) | EncoderError::Tensors(_)), "{name}: {error}");
    }
}

#[test]
fn texts_that_are_too_long_or_of_other_tokens_are_no_panic() {
    let recorded = recorded();
    let folder = tiny_folder(&recorded["tiny"][0], |_| ());
    let encoder = Encoder::load(&HubFolder::open(folder.path()).unwrap()).unwrap();
    let text = |tokens: Vec<u32>| [EncoderInput { tokens, types: Vec::new() }];
    for tokens in [vec![1; 33], vec![40], vec![]] {
        assert!(matches!(encoder.run(&text(tokens)), Err(EncoderError::Compute(_))));
    }
    assert_eq!(encoder.run(&[]).unwrap(), Vec::<Vec<f32>>::new());
}
