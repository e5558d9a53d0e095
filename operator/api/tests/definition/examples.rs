//! The examples hold no field that the resource lacks, and nothing is lost in reading them.

use serde_json::Value;
use windlass_operator_api::InferenceService;

use crate::workspace;

fn examples() -> Vec<(String, Value)> {
    use serde::Deserialize;
    let folder = std::fs::read_dir(workspace().join("crds/examples")).expect("the folder");
    let files = folder.map(|entry| entry.expect("an entry").path());
    let mut found = Vec::new();
    for file in files.filter(|file| file.extension().is_some_and(|extension| extension == "yaml")) {
        let text = std::fs::read_to_string(&file).expect("text");
        for document in serde_yaml_ng::Deserializer::from_str(&text) {
            let value = Value::deserialize(document).expect("yaml");
            found.push((file.display().to_string(), value));
        }
    }
    found
}

/// Whether every value of `part` is in `whole`.
fn is_within(part: &Value, whole: &Value) -> bool {
    match (part, whole) {
        (Value::Object(part), Value::Object(whole)) => {
            part.iter().all(|(key, value)| whole.get(key).is_some_and(|found| is_within(value, found)))
        }
        (Value::Array(part), Value::Array(whole)) => {
            part.len() == whole.len() && part.iter().zip(whole).all(|(part, whole)| is_within(part, whole))
        }
        (part, whole) => part == whole,
    }
}

#[test]
fn every_example_is_read_whole() {
    let services: Vec<_> = examples().into_iter().filter(|(_, value)| value["kind"] == "InferenceService").collect();
    assert!(services.len() >= 6, "{}", services.len());
    for (file, value) in services {
        let service: InferenceService =
            serde_json::from_value(value.clone()).unwrap_or_else(|error| panic!("{file}: {error}"));
        let read = serde_json::to_value(&service).expect("json");
        assert!(is_within(&value, &read), "{file}: {value} {read}");
    }
}

#[test]
fn examples_for_the_autoscaler_leave_replicas_out() {
    for (file, value) in examples() {
        if value["spec"]["autoscaling"]["mode"] == "Builtin" {
            assert!(value["spec"].get("replicas").is_none(), "{file}");
        }
    }
}
