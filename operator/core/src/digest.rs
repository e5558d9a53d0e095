//! Fingerprints of specs and templates: the same content gives the same text, whatever the order of its keys.

use serde::Serialize;
use serde_json::{Map, Value};
use sha2::{Digest, Sha256};

/// Hexadecimal digits of a fingerprint: enough that no two of a service's templates ever meet.
const DIGITS: usize = 16;

/// The fingerprint of a value's JSON with sorted keys.
pub fn fingerprint(value: &impl Serialize) -> String {
    // Kubernetes' types and ours always serialize.
    let canonical = sorted(serde_json::to_value(value).unwrap_or_default());
    let hash = Sha256::digest(canonical.to_string());
    hash.iter().flat_map(|byte| [byte >> 4, byte & 15]).filter_map(hex).take(DIGITS).collect()
}

fn hex(nibble: u8) -> Option<char> {
    char::from_digit(nibble.into(), 16)
}

fn sorted(value: Value) -> Value {
    match value {
        Value::Object(entries) => {
            let mut entries: Vec<_> = entries.into_iter().map(|(key, value)| (key, sorted(value))).collect();
            entries.sort_by(|left, right| left.0.cmp(&right.0));
            Value::Object(Map::from_iter(entries))
        }
        Value::Array(items) => Value::Array(items.into_iter().map(sorted).collect()),
        leaf => leaf,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn order_of_keys_does_not_matter_and_values_do() {
        let one = json!({"a": 1, "b": [{"c": 1, "d": 2}]});
        let other = json!({"b": [{"d": 2, "c": 1}], "a": 1});
        assert_eq!(fingerprint(&one), fingerprint(&other));
        assert_ne!(fingerprint(&one), fingerprint(&json!({"a": 2})));
        assert_eq!(fingerprint(&one).len(), DIGITS);
    }

    /// Those in the cluster were made by other versions of the operator: with others, every workload would roll.
    #[test]
    fn a_fingerprint_is_the_beginning_of_the_sha256_and_stays_so() {
        assert_eq!(fingerprint(&json!({})), "44136fa355b3678a");
        assert_eq!(fingerprint(&json!({"b": 2, "a": 1})), "43258cff783fe703");
    }
}
