//! Number formats are those of the engine's flags.

use serde::de::DeserializeOwned;
use serde_json::{Value, from_value};
use windlass_operator_api::engine::{KvCacheDataType, Quantization};

use crate::schema;

/// Every value that the field offers.
fn offered<T: DeserializeOwned>(field: &str) -> Vec<T> {
    let values = schema()["properties"]["spec"]["properties"]["engine"]["properties"][field]["enum"].clone();
    let values: Vec<Value> = from_value(values).expect("a list");
    values.into_iter().filter(|value| !value.is_null()).map(|value| from_value(value).expect("a format")).collect()
}

#[test]
fn every_format_but_auto_has_a_flag_of_its_own() {
    let weights: Vec<Quantization> = offered("quantization");
    for format in &weights {
        assert_eq!(format.flag().and_then(Quantization::of_flag), Some(*format).filter(|&it| it != Quantization::Auto));
    }
    let mut keys: Vec<_> = offered::<KvCacheDataType>("kvCacheDataType").iter().map(|format| format.flag()).collect();
    assert_eq!(keys.remove(0), None, "Auto");
    assert!(weights.len() > 10 && keys.len() > 4 && keys.iter().all(Option::is_some), "{weights:?}, {keys:?}");
}
