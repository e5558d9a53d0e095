//! Whether an object in the cluster is already as it is wanted.
//!
//! Servers add defaults and write quantities in their canonical form, so equality will not do: everything wanted must
//! be there with the same meaning, whatever else is there beside it. Lists must have equal length.

use serde::Serialize;
use serde_json::Value;

use crate::quantity;

/// Whether applying `wanted` would leave `observed` as it is.
pub fn covers(observed: &impl Serialize, wanted: &impl Serialize) -> bool {
    // Kubernetes' types always serialize.
    let observed = serde_json::to_value(observed).unwrap_or_default();
    let wanted = serde_json::to_value(wanted).unwrap_or_default();
    owners_cover(&observed, &wanted) && has(Some(&observed), &without_owners(wanted))
}

/// Others may own a child too; ours must be among the owners.
fn owners_cover(observed: &Value, wanted: &Value) -> bool {
    let owners = |object: &Value| object["metadata"]["ownerReferences"].as_array().cloned().unwrap_or_default();
    owners(wanted).iter().all(|owner| owners(observed).iter().any(|existing| has(Some(existing), owner)))
}

fn without_owners(mut object: Value) -> Value {
    if let Some(metadata) = object.get_mut("metadata").and_then(Value::as_object_mut) {
        metadata.remove("ownerReferences");
    }
    object
}

fn has(observed: Option<&Value>, wanted: &Value) -> bool {
    match (observed, wanted) {
        (None, wanted) => is_empty(wanted),
        (Some(Value::Object(observed)), Value::Object(wanted)) => {
            wanted.iter().all(|(key, value)| has(observed.get(key), value))
        }
        (Some(Value::Array(observed)), Value::Array(wanted)) => {
            observed.len() == wanted.len()
                && observed.iter().zip(wanted).all(|(observed, wanted)| has(Some(observed), wanted))
        }
        (Some(Value::String(observed)), Value::String(wanted)) => observed == wanted || same_amount(observed, wanted),
        (Some(observed), wanted) => observed == wanted,
    }
}

/// Servers drop empty lists and maps.
fn is_empty(wanted: &Value) -> bool {
    match wanted {
        Value::Null => true,
        Value::Object(entries) => entries.is_empty(),
        Value::Array(items) => items.is_empty(),
        _ => false,
    }
}

fn same_amount(left: &str, right: &str) -> bool {
    quantity::milli(left).is_some_and(|amount| quantity::milli(right) == Some(amount))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn defaults_and_canonical_quantities_are_no_difference() {
        let observed = json!({"spec": {"a": 1, "cpu": "500m", "added": true, "list": [{"x": 1, "y": 2}]}});
        let wanted = json!({"spec": {
            "a": 1, "cpu": "0.5", "list": [{"x": 1}], "noItems": [], "noEntries": {}, "nothing": null,
        }});
        assert!(covers(&observed, &wanted));
    }

    #[test]
    fn a_changed_value_a_lost_key_and_a_list_of_other_length_are_differences() {
        let observed = json!({"spec": {"a": 1, "list": [1, 2]}});
        for wanted in [
            json!({"spec": {"a": 2}}),
            json!({"spec": {"b": 1}}),
            json!({"spec": {"b": {"c": 1}}}),
            json!({"spec": {"list": [1]}}),
            json!({"spec": {"list": [2, 1]}}),
        ] {
            assert!(!covers(&observed, &wanted), "{wanted}");
        }
    }

    #[test]
    fn a_second_owner_is_no_difference_and_a_lost_one_is() {
        let wanted = json!({"metadata": {"ownerReferences": [{"uid": "1"}]}});
        let both = json!({"metadata": {"ownerReferences": [{"uid": "2"}, {"uid": "1", "name": "n"}]}});
        assert!(covers(&both, &wanted));
        assert!(!covers(&json!({"metadata": {}}), &wanted));
    }
}
