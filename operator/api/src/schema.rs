//! Schemas of Kubernetes' own types inside ours: shortened descriptions, and a bound on every leaf.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{Affinity, Toleration, TopologySpreadConstraint};
use k8s_openapi::api::networking::v1::NetworkPolicyPeer;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use schemars::transform::{Transform, transform_subschemas};
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde_json::{Map, Value, json};

/// Longest value of a label and of most names in Kubernetes' types, characters.
const MAX_STRING_CHARS: u64 = 317;
/// Most entries of a list or map in Kubernetes' types.
const MAX_ENTRIES: u64 = 32;

/// What a toleration may say, nothing included: Kubernetes refuses the pods of any other.
const TOLERATION_OPERATORS: [&str; 5] = ["", "Exists", "Equal", "Lt", "Gt"];
const TAINT_EFFECTS: [&str; 4] = ["", "NoSchedule", "PreferNoSchedule", "NoExecute"];

/// A Kubernetes quantity: `4`, `500m`, `32Gi`.
pub(crate) fn quantity(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "anyOf": [{"type": "integer"}, {"type": "string"}],
        "x-kubernetes-int-or-string": true,
        "minimum": 0,
        "maxLength": 32,
        "pattern": QUANTITY_PATTERN,
    })
}

/// One that is more than 0.
pub(crate) fn positive_quantity(generator: &mut SchemaGenerator) -> Schema {
    let mut amount = quantity(generator);
    amount.insert("minimum".into(), json!(1));
    amount.insert("pattern".into(), json!(POSITIVE_PATTERN));
    amount
}

const POSITIVE_PATTERN: &str = r"^\+?([0-9]*[1-9][0-9]*(\.[0-9]{1,9})?|[0-9]*\.[0-9]{0,8}[1-9][0-9]{0,8})(m|k|M|G|T|P|E|Ki|Mi|Gi|Ti|Pi|Ei|[eE][-+]?[0-9]{1,2})?$";
const QUANTITY_PATTERN: &str =
    r"^\+?([0-9]+|[0-9]+\.[0-9]{1,9}|\.[0-9]{1,9})(m|k|M|G|T|P|E|Ki|Mi|Gi|Ti|Pi|Ei|[eE][-+]?[0-9]{1,2})?$";

/// Resource name to quantity.
pub(crate) fn quantities(generator: &mut SchemaGenerator) -> Schema {
    let mut amount = quantity(generator);
    amount.insert("description".into(), json!("An amount: 4, 500m, 32Gi."));
    json_schema!({"type": "object", "maxProperties": 16, "additionalProperties": amount})
}

/// Label to value.
pub(crate) fn labels(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": "object",
        "maxProperties": MAX_ENTRIES,
        "additionalProperties": {"type": "string", "maxLength": 63, "description": "Value of the label."},
    })
}

/// A point in time.
pub(crate) fn time(_: &mut SchemaGenerator) -> Schema {
    json_schema!({"type": "string", "format": "date-time"})
}

/// A time that is only compared, so that whatever wrote it is kept as it is.
pub(crate) fn time_text(_: &mut SchemaGenerator) -> Schema {
    json_schema!({"type": "string", "format": "date-time", "maxLength": 64})
}

pub(crate) fn affinity(generator: &mut SchemaGenerator) -> Schema {
    embedded::<Affinity>(generator)
}

pub(crate) fn tolerations(generator: &mut SchemaGenerator) -> Schema {
    let mut list = list_of::<Toleration>(generator, "atomic");
    let values = [("operator", &TOLERATION_OPERATORS[..]), ("effect", &TAINT_EFFECTS[..])];
    for (field, values) in values {
        let path = format!("/items/properties/{field}");
        let property = list.pointer_mut(&path).and_then(Value::as_object_mut);
        property.into_iter().for_each(|property| drop(property.insert("enum".into(), json!(values))));
    }
    list
}

pub(crate) fn topology_spread_constraints(generator: &mut SchemaGenerator) -> Schema {
    list_of::<TopologySpreadConstraint>(generator, "atomic")
}

pub(crate) fn peers(generator: &mut SchemaGenerator) -> Schema {
    list_of::<NetworkPolicyPeer>(generator, "atomic")
}

pub(crate) fn conditions(generator: &mut SchemaGenerator) -> Schema {
    let mut item = embedded::<Condition>(generator);
    bound_condition(&mut item);
    json_schema!({
        "type": "array",
        "maxItems": 16,
        "x-kubernetes-list-type": "map",
        "x-kubernetes-list-map-keys": ["type"],
        "items": item,
    })
}

/// Bounds of metav1.Condition, which its own schema only tells in words.
fn bound_condition(item: &mut Schema) {
    let bounds = [
        ("message", json!({"maxLength": 32_768})),
        ("reason", json!({"minLength": 1, "maxLength": 1024})),
        ("status", json!({"enum": ["True", "False", "Unknown"]})),
        ("type", json!({"maxLength": 316})),
        ("observedGeneration", json!({"minimum": 0})),
    ];
    let properties = item.get_mut("properties").and_then(Value::as_object_mut);
    let by_name: BTreeMap<_, _> = bounds.into_iter().collect();
    for (name, property) in properties.into_iter().flatten() {
        if let (Some(Value::Object(bound)), Some(property)) = (by_name.get(name.as_str()), property.as_object_mut()) {
            property.extend(bound.clone());
        }
    }
}

fn list_of<T: JsonSchema>(generator: &mut SchemaGenerator, list_type: &str) -> Schema {
    let item = embedded::<T>(generator);
    json_schema!({"type": "array", "maxItems": MAX_ENTRIES, "x-kubernetes-list-type": list_type, "items": item})
}

/// The schema of one of Kubernetes' types, its descriptions cut to a sentence and its leaves bounded.
fn embedded<T: JsonSchema>(generator: &mut SchemaGenerator) -> Schema {
    let mut schema = T::json_schema(generator);
    Embedded.transform(&mut schema);
    schema
}

struct Embedded;

impl Transform for Embedded {
    fn transform(&mut self, schema: &mut Schema) {
        transform_subschemas(self, schema);
        let Some(object) = schema.as_object_mut() else { return };
        if let Some(Value::String(text)) = object.get_mut("description") {
            *text = first_sentence(text);
        }
        bound(object);
        describe_values(object);
    }
}

/// Adds the bound that a leaf of this type lacks.
fn bound(object: &mut Map<String, Value>) {
    let limits: &[(&str, Value)] = match object.get("type").and_then(Value::as_str) {
        Some("string") if !object.contains_key("enum") => &[("maxLength", json!(MAX_STRING_CHARS))],
        Some("array") => &[("maxItems", json!(MAX_ENTRIES))],
        Some("integer") => &[("minimum", json!(0)), ("maximum", json!(i32::MAX))],
        Some("object") if object.contains_key("additionalProperties") => &[("maxProperties", json!(MAX_ENTRIES))],
        _ => &[],
    };
    for (key, value) in limits {
        object.entry(*key).or_insert_with(|| value.clone());
    }
}

/// Values of a list or map are leaves too: Kubernetes' schemas describe only what holds them.
fn describe_values(object: &mut Map<String, Value>) {
    for (key, text) in [("items", "One entry."), ("additionalProperties", "One value.")] {
        if let Some(Value::Object(value)) = object.get_mut(key) {
            value.entry("description").or_insert_with(|| json!(text));
        }
    }
}

fn first_sentence(text: &str) -> String {
    let line = text.lines().next().unwrap_or_default();
    line.split_inclusive(". ").next().unwrap_or_default().trim_end().to_owned()
}
