//! What services become, to the letter: whatever changes here of a template rolls the pods of everybody at the next
//! upgrade. `WINDLASS_UPDATE=1` writes it anew.

use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use serde_json::json;
use windlass_operator_api::InferenceService;

use crate::plan::{Object, Step};
use crate::testing::cluster::Cluster;
use crate::testing::{UID, service};

/// The service of an example, as the API server would have it.
pub fn example(name: &str) -> InferenceService {
    let file = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join(format!("../../crds/examples/{name}.yaml"));
    let text = std::fs::read_to_string(&file).expect("an example");
    let documents = serde_yaml_ng::Deserializer::from_str(&text).map(serde_yaml_ng::Value::deserialize);
    let found =
        documents.map(|document| document.expect("YAML")).find(|document| document["kind"] == "InferenceService");
    let mut service: InferenceService = serde_yaml_ng::from_value(found.expect("a service")).expect("a service");
    service.metadata.namespace = Some("demo".to_owned());
    service.metadata.uid = Some(UID.to_owned());
    service.metadata.generation = Some(1);
    service
}

fn yaml(object: &Object) -> String {
    fn text(object: &impl Serialize) -> String {
        serde_yaml_ng::to_string(object).expect("YAML")
    }
    match object {
        Object::ServiceAccount(object) => text(object),
        Object::Service(object) => text(object),
        Object::NetworkPolicy(object) => text(object),
        Object::PodDisruptionBudget(object) => text(object),
        Object::ConfigMap(object) => text(object),
        Object::Job(object) => text(object),
        Object::ControllerRevision(object) => text(object),
        Object::HorizontalPodAutoscaler(object) => text(object),
        Object::StatefulSet(object) => text(object),
        Object::Deployment(object) => text(object),
    }
}

/// Everything that is made for a service at first, and what reads its header.
fn made(service: InferenceService) -> String {
    let mut cluster = Cluster::new(service);
    cluster.defaults.image_pull_policy = Some("Always".to_owned());
    cluster.defaults.inspect_timeout = Some(Duration::from_secs(60));
    let mut steps = cluster.reconcile().steps;
    cluster.defaults.inspect_timeout = None;
    steps.extend(cluster.reconcile().steps);
    let objects = steps.iter().filter_map(|step| match step {
        Step::Apply(object) => Some(yaml(object)),
        _ => None,
    });
    objects.collect::<Vec<_>>().join("---\n")
}

/// What no example asks for.
fn placed() -> InferenceService {
    let scheduling = json!({
        "nodeSelector": {"disk": "fast"},
        "tolerations": [{"key": "models", "operator": "Exists"}],
        "priorityClassName": "high",
        "runtimeClassName": "sandboxed",
    });
    service().https().with("scheduling", scheduling).with("imagePullSecrets", json!([{"name": "registry"}])).build()
}

#[test]
fn services_become_what_is_written() {
    let names =
        ["cpu-https", "cpu-pipeline", "hpa", "nvidia-gpu-claims", "nvidia-gpu-tp", "secured-with-api-keys", "spot-mix"];
    let examples = names.map(|name| (name, example(name)));
    for (name, service) in examples.into_iter().chain([("placed", placed())]) {
        let file = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join(format!("src/tests/written/{name}.yaml"));
        let wanted = made(service);
        if std::env::var_os("WINDLASS_UPDATE").is_some() {
            std::fs::write(&file, &wanted).expect("written");
        }
        let found = std::fs::read_to_string(&file).unwrap_or_default();
        assert!(found == wanted, "{name} becomes something else: run this test with WINDLASS_UPDATE=1 and look at it");
    }
}
