//! Every field is described, every leaf bounded, and the schema structural.

use serde_json::{Value, json};

use crate::schema;

/// Calls `visit` with the path and schema of every field, entries of lists and maps included.
fn walk(path: &str, node: &Value, visit: &mut impl FnMut(&str, &Value)) {
    for (name, property) in node["properties"].as_object().into_iter().flatten() {
        let path = format!("{path}.{name}");
        visit(&path, property);
        walk(&path, property, visit);
    }
    for (key, suffix) in [("items", "[]"), ("additionalProperties", "{}")] {
        if let Some(entry) = node.get(key).filter(|entry| entry.is_object()) {
            let path = format!("{path}{suffix}");
            visit(&path, entry);
            walk(&path, entry, visit);
        }
    }
}

/// What a field lacks.
fn lacks(node: &Value) -> Option<&'static str> {
    let has = |key: &str| node.get(key).is_some();
    match node["type"].as_str() {
        Some("string") => {
            (!has("maxLength") && !has("enum") && node["format"] != json!("date-time")).then_some("maxLength")
        }
        Some("integer") => (!(has("minimum") && (has("maximum") || has("format")))).then_some("minimum and maximum"),
        Some("array") => (!has("maxItems")).then_some("maxItems"),
        Some("object") if has("additionalProperties") => (!has("maxProperties")).then_some("maxProperties"),
        Some("object") => (!has("properties")).then_some("properties"),
        Some("boolean") => None,
        Some(_) => Some("a type we know"),
        None => (!has("x-kubernetes-int-or-string")).then_some("type"),
    }
}

fn findings(schema: &Value) -> Vec<String> {
    let mut found = Vec::new();
    walk("", schema, &mut |path, node| {
        let is_entry = path.ends_with(']') || path.ends_with('}');
        if !is_entry && node["description"].as_str().unwrap_or_default().is_empty() {
            found.push(format!("{path}: description"));
        }
        found.extend(lacks(node).map(|what| format!("{path}: {what}")));
        if node.get("x-kubernetes-preserve-unknown-fields").is_some() {
            found.push(format!("{path}: keeps unknown fields"));
        }
        if ["anyOf", "oneOf", "allOf", "not"].iter().any(|key| node.get(key).is_some())
            && node.get("x-kubernetes-int-or-string").is_none()
        {
            found.push(format!("{path}: not structural"));
        }
    });
    found
}

#[test]
fn every_field_is_described_and_bounded() {
    let root = schema();
    for part in ["spec", "status"] {
        assert_eq!(findings(&json!({"properties": {part: root["properties"][part]}})), Vec::<String>::new());
    }
}

#[test]
fn a_field_without_description_or_bound_is_found() {
    for node in [
        json!({"type": "string", "description": "d"}),
        json!({"type": "string", "maxLength": 3}),
        json!({"type": "integer", "description": "d", "minimum": 0}),
        json!({"type": "array", "description": "d", "items": {"type": "boolean"}}),
        json!({"type": "object", "description": "d"}),
    ] {
        assert_eq!(findings(&json!({"properties": {"a": node}})).len(), 1, "{node}");
    }
}

#[test]
fn the_names_and_the_scale_subresource_are_as_documented() {
    let crd = windlass_operator_api::crd::definition();
    let names = crd.spec.names;
    assert_eq!(names.short_names, Some(vec!["infsvc".to_owned()]));
    assert_eq!(names.categories, Some(vec!["windlass".to_owned(), "all".to_owned()]));
    let version = &crd.spec.versions[0];
    let scale = version.subresources.clone().and_then(|subresources| subresources.scale).expect("a scale subresource");
    assert_eq!(scale.spec_replicas_path, ".spec.replicas");
    assert_eq!(scale.label_selector_path.as_deref(), Some(".status.selector"));
    // Without a value there, reading the scale subresource is an error.
    assert_eq!(schema()["properties"]["spec"]["properties"]["replicas"]["default"], json!(1));
}

#[test]
fn every_column_shows_a_field_that_exists() {
    let root = schema();
    for column in
        windlass_operator_api::crd::definition().spec.versions[0].additional_printer_columns.clone().expect("columns")
    {
        let path = column.json_path.split(['[', '.']).filter(|part| !part.is_empty());
        let mut node = &root;
        for part in path.take_while(|part| !part.starts_with('?')) {
            if part == "metadata" {
                break;
            }
            node = &node["properties"][part];
            assert!(node.is_object(), "{}: {part}", column.name);
        }
    }
}
