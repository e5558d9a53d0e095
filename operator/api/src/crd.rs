//! Renders the CustomResourceDefinition: what `windlass-operator crd` prints and `crds/` holds.

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::{
    CustomResourceColumnDefinition, CustomResourceDefinition, JSONSchemaProps,
};
use kube_core::CustomResourceExt;
use serde_json::{Value, json};

use crate::{InferenceService, MAX_NAME_CHARS};

/// What `kubectl get` prints: name, type, path, whether only with `-o wide`, description.
const COLUMNS: [(&str, &str, &str, bool, &str); 11] = [
    ("Ready", "string", CONDITION_READY_STATUS, false, "Whether the replicas asked for serve as the spec asks."),
    ("Reason", "string", CONDITION_READY_REASON, false, "Why Ready is what it is."),
    ("Desired", "integer", ".status.desiredReplicas", false, "Replicas wanted now."),
    ("Serving", "integer", ".status.readyReplicas", false, "Replicas that serve."),
    ("Model", "string", ".status.servedName", false, "The name to put in a request's model field."),
    (
        "TTFT p95 ms",
        "integer",
        ".status.load.timeToFirstTokenP95Milliseconds",
        false,
        "Time to first token, 95th percentile, milliseconds; empty with fewer than 20 requests in the window.",
    ),
    ("URL", "string", ".status.url", false, "Base URL of the API inside the cluster."),
    ("Age", "date", ".metadata.creationTimestamp", false, "Time since creation."),
    ("Source", "string", ".spec.model.source", true, "Where the weights come from."),
    ("Decision", "string", ".status.autoscaling.decision", true, "The autoscaler's last decision."),
    ("Message", "string", CONDITION_READY_MESSAGE, true, "The cause in words."),
];
const CONDITION_READY_STATUS: &str = r#".status.conditions[?(@.type=="Ready")].status"#;
const CONDITION_READY_REASON: &str = r#".status.conditions[?(@.type=="Ready")].reason"#;
const CONDITION_READY_MESSAGE: &str = r#".status.conditions[?(@.type=="Ready")].message"#;

/// The definition, complete with columns and the rules on the resource's name.
pub fn definition() -> CustomResourceDefinition {
    let mut crd = InferenceService::crd();
    for version in &mut crd.spec.versions {
        version.additional_printer_columns = Some(COLUMNS.map(column).to_vec());
        if let Some(schema) = version.schema.as_mut().and_then(|schema| schema.open_api_v3_schema.as_mut()) {
            *schema = without_null(schema);
            schema.x_kubernetes_validations = serde_json::from_value(name_rules()).ok();
        }
    }
    crd
}

fn column((name, kind, path, wide, description): (&str, &str, &str, bool, &str)) -> CustomResourceColumnDefinition {
    CustomResourceColumnDefinition {
        name: name.into(),
        type_: kind.into(),
        json_path: path.into(),
        priority: wide.then_some(1),
        description: Some(description.into()),
        format: None,
    }
}

/// Children are named after the resource, a Service among them, whose names are the strictest.
fn name_rules() -> Value {
    json!([
        {
            "rule": format!("size(self.metadata.name) <= {MAX_NAME_CHARS}"),
            "message": format!("metadata.name: at most {MAX_NAME_CHARS} characters, so that names made from it fit"),
        },
        {
            "rule": "self.metadata.name.matches('^[a-z]([-a-z0-9]*[a-z0-9])?$')",
            "message": "metadata.name: lower-case letters, digits and -, beginning with a letter, as a Service's name must be",
        },
    ])
}

/// The schema without `nullable`: the API server then takes a null for an absent field, and so does the operator.
fn without_null(schema: &JSONSchemaProps) -> JSONSchemaProps {
    fn strip(value: &mut Value) {
        match value {
            Value::Object(entries) => {
                entries.remove("nullable");
                entries.values_mut().for_each(strip);
            }
            Value::Array(items) => items.iter_mut().for_each(strip),
            _ => {}
        }
    }
    // A schema always serializes, and what it serializes to is a schema.
    let mut value = serde_json::to_value(schema).unwrap_or_default();
    strip(&mut value);
    serde_json::from_value(value).unwrap_or_else(|_| schema.clone())
}

/// The definition as YAML, with a header that says where it comes from.
///
/// # Errors
/// When the definition cannot be serialized, which no input can cause.
pub fn yaml() -> Result<String, serde_yaml_ng::Error> {
    let body = serde_yaml_ng::to_string(&definition())?;
    Ok(format!("# Printed by `windlass-operator crd`. Do not edit: the types in operator/api are the source.\n{body}"))
}
