//! The field reference of the resource, as Markdown, from the same schema that the API server enforces.

use std::fmt::Write;

use serde_json::{Map, Value};

use crate::crd;

/// Fields of Kubernetes' own types: their reference is Kubernetes'.
const KUBERNETES: [(&str, &str); 5] = [
    ("affinity", "Affinity"),
    ("tolerations", "Toleration"),
    ("topologySpreadConstraints", "TopologySpreadConstraint"),
    ("allowFrom", "NetworkPolicyPeer"),
    ("conditions", "metav1 Condition"),
];

const HEADER: &str = "\
# InferenceService: fields

Written from the schema in `inferenceservices.windlass.dev.yaml`; a test keeps it fresh. Read the same on a cluster with
`kubectl explain infsvc.spec`. Complete resources are in `examples/`.

The kind's full name is `inferenceservices.windlass.dev`: other projects have an InferenceService too.
";

/// The reference.
pub fn markdown() -> String {
    let schema = serde_json::to_value(crd::definition()).unwrap_or_default();
    let root = &schema["spec"]["versions"][0]["schema"]["openAPIV3Schema"];
    let mut text = HEADER.to_owned();
    for (title, field) in [("Spec", "spec"), ("Status", "status")] {
        let _ = write!(text, "\n## {title}\n\n| Field | Type | Meaning |\n|---|---|---|\n");
        rows(&mut text, field, &root["properties"][field]);
    }
    text.push_str("\n## Rules across fields\n\n");
    rules(&mut text, root);
    text
}

/// One row per property, depth first, in the schema's order.
fn rows(text: &mut String, path: &str, schema: &Value) {
    let required = schema["required"].as_array().cloned().unwrap_or_default();
    for (name, property) in schema["properties"].as_object().into_iter().flatten() {
        let path = format!("{path}.{name}");
        let need = if required.iter().any(|one| one == name) { " **Required.**" } else { "" };
        let meaning = property["description"].as_str().unwrap_or_default().replace('\n', " ");
        let kubernetes = KUBERNETES.iter().find(|(field, _)| field == name).map(|(_, kind)| *kind);
        let _ = writeln!(text, "| `{path}` | {} | {meaning}{need} |", kind(property, kubernetes));
        if kubernetes.is_none() {
            rows(text, &path, property);
            rows(text, &format!("{path}[]"), &property["items"]);
        }
    }
}

/// The type with its bounds and default.
fn kind(property: &Value, kubernetes: Option<&str>) -> String {
    let base = match (kubernetes, property["type"].as_str()) {
        (Some(kind), Some("array")) => format!("list of {kind}"),
        (Some(kind), _) => kind.to_owned(),
        (None, Some("array")) => format!("list of {}", kind(&property["items"], None)),
        (None, Some("object")) if property.get("additionalProperties").is_some() => {
            format!("map to {}", kind(&property["additionalProperties"], None))
        }
        (None, Some("string")) if property.get("enum").is_some() => choices(&property["enum"]),
        (None, Some(kind)) => kind.to_owned(),
        (None, None) => "quantity".to_owned(),
    };
    let notes: Vec<String> = property.as_object().map(bounds).unwrap_or_default();
    if notes.is_empty() { base } else { format!("{base}; {}", notes.join("; ")) }
}

fn choices(values: &Value) -> String {
    let values = values.as_array().into_iter().flatten().filter_map(Value::as_str);
    values.map(|value| format!("`{value}`")).collect::<Vec<_>>().join(" or ")
}

fn bounds(property: &Map<String, Value>) -> Vec<String> {
    let number = |key: &str| property.get(key).and_then(Value::as_f64);
    let range = match (number("minimum"), number("maximum")) {
        (Some(min), Some(max)) => Some(format!("{min} to {max}")),
        (Some(min), None) => Some(format!("at least {min}")),
        _ => None,
    };
    let entries = number("maxItems").or(number("maxProperties")).map(|most| format!("at most {most}"));
    let default = property.get("default").map(|default| format!("default {default}"));
    [range, entries, default].into_iter().flatten().collect()
}

/// Every rule's message.
fn rules(text: &mut String, schema: &Value) {
    for rule in schema["x-kubernetes-validations"].as_array().into_iter().flatten() {
        let _ = writeln!(text, "- {}", rule["message"].as_str().unwrap_or_default());
    }
    for property in schema["properties"].as_object().into_iter().flat_map(Map::values) {
        rules(text, property);
    }
    if let Some(items) = schema.get("items") {
        rules(text, items);
    }
}
