//! Every example in `crds/examples` is applied: those that a cluster of CPUs with the tests' model can serve come to be Ready,
//! of all others the workloads are made.

use anyhow::{Context, Result, ensure};
use k8s_openapi::api::apps::v1::Deployment;
use serde_json::Value;
use std::collections::BTreeSet;
use std::path::PathBuf;
use std::time::Duration;
use windlass_tests::namespace::{Namespace, with_namespace};
use windlass_tests::service::Service;
use windlass_tests::wait::{self, Look};
use windlass_tests::{operator, workspace};

/// A header that nobody can read is waited for a minute before pods are made without it.
const PATIENCE: Duration = Duration::from_secs(180);
/// Kinds that a cluster has only with other projects on it: `tests/campaigns/others.rs` holds these to their definitions.
const FOREIGN: [&str; 3] = ["ScaledObject", "Application", "LeaderWorkerSet"];
/// Those that serve here. The replicas of the others would not all find room on a node of two cores.
const SERVED: [(&str, Option<u32>); 5] =
    [("autoscaled", None), ("cpu-pvc", Some(1)), ("hpa", None), ("rollout", Some(1)), ("secured-with-api-keys", None)];

fn folder() -> PathBuf {
    workspace::root().join("crds/examples")
}

#[test]
fn examples_that_this_cluster_has_the_model_and_room_for_serve() -> Result<()> {
    with_namespace("examples", |namespace| {
        namespace.run(&[
            "create",
            "secret",
            "generic",
            "llm-keys",
            "--from-literal=alice=a",
            "--from-literal=bob=b",
        ])?;
        for (name, replicas) in SERVED {
            serves(namespace, &objects(name)?, replicas).with_context(|| name.to_owned())?;
        }
        Ok(())
    })
}

#[test]
fn the_overlay_serves_and_names_what_it_makes() -> Result<()> {
    with_namespace("kustomize", |namespace| {
        let overlay = folder().join("kustomize");
        let built = namespace.cluster().kubectl().run(&["kustomize", overlay.to_str().context("no text")?])?;
        let objects = operator::objects(&built)?;
        let find =
            |kind: &str| objects.iter().find(|object| object["kind"] == kind).with_context(|| format!("no {kind}"));
        let (service, secret) = (find("InferenceService")?, find("Secret")?);
        ensure!(service["metadata"]["name"] == "production-smollm2", "{service}");
        ensure!(
            service["spec"]["auth"]["apiKeysSecretRef"]["name"] == secret["metadata"]["name"],
            "{service}, {secret}"
        );
        // A patch whose target is not there changes nothing and is no error.
        ensure!(service["spec"]["autoscaling"]["mode"] == "Builtin", "{service}");
        serves(namespace, &objects, None)
    })
}

#[test]
fn of_all_other_examples_the_workloads_are_made() -> Result<()> {
    with_namespace("other-examples", |namespace| {
        let outcome = apply_others(namespace).and_then(|wanted| made(namespace, &wanted));
        // Of the cluster's, not the namespace's.
        let delete = ["delete", "persistentvolume", "node-models", "--wait=false", "--ignore-not-found"];
        namespace.cluster().kubectl().run(&delete)?;
        outcome
    })
}

/// Applies every example that is in one file and is not [`SERVED`]; returns the workloads that are to be made of them.
fn apply_others(namespace: &Namespace) -> Result<BTreeSet<String>> {
    let mut wanted = BTreeSet::new();
    for name in names()?.iter().filter(|name| SERVED.iter().all(|(served, _)| served != name)) {
        let objects = objects(name)?;
        if objects.is_empty() {
            continue;
        }
        apply(namespace, &objects).with_context(|| name.clone())?;
        for workload in services(&objects).flat_map(workloads) {
            ensure!(wanted.insert(workload.clone()), "another example has a {workload}, too, as {name}");
        }
    }
    Ok(wanted)
}

fn made(namespace: &Namespace, wanted: &BTreeSet<String>) -> Result<()> {
    wait::until("every workload is made", PATIENCE, || {
        let deployments: Vec<Deployment> = namespace.list(&["get", "deployments"])?;
        let made: BTreeSet<_> = deployments.into_iter().filter_map(|one| one.metadata.name).collect();
        let missing: Vec<_> = wanted.difference(&made).collect();
        Ok(Look::when(missing.is_empty(), (), format!("{missing:?} are missing")))
    })
}

/// Names of the examples that are one file.
fn names() -> Result<Vec<String>> {
    let entries = std::fs::read_dir(folder()).context("there are no examples")?;
    let files = entries.filter_map(|entry| Some(entry.ok()?.path())).filter(|path| path.is_file());
    let names: Vec<_> = files.filter_map(|path| Some(path.file_stem()?.to_str()?.to_owned())).collect();
    ensure!(names.len() > 8, "only {names:?}");
    Ok(names)
}

/// The objects of an example, those of other projects left out.
fn objects(name: &str) -> Result<Vec<Value>> {
    let text = std::fs::read_to_string(folder().join(format!("{name}.yaml")))?;
    let objects = operator::objects(&text)?.into_iter();
    Ok(objects.filter(|object| FOREIGN.iter().all(|kind| object["kind"] != *kind)).collect())
}

fn services(objects: &[Value]) -> impl Iterator<Item = &Value> {
    objects.iter().filter(|object| object["kind"] == "InferenceService")
}

/// Names of the workloads that a service is to have.
fn workloads(service: &Value) -> Vec<String> {
    let name = service["metadata"]["name"].as_str().unwrap_or_default();
    let spot = service["spec"]["spot"].is_object().then(|| format!("{name}-spot"));
    [name.to_owned()].into_iter().chain(spot).collect()
}

/// Applies objects and waits until their service is Ready with so many replicas, or as many as it asks for; then makes room
/// for the next.
fn serves(namespace: &Namespace, objects: &[Value], replicas: Option<u32>) -> Result<()> {
    apply(namespace, objects)?;
    let name = services(objects).next().and_then(|service| service["metadata"]["name"].as_str());
    let service = Service::named(namespace, name.context("no service")?);
    replicas.map_or(Ok(()), |replicas| service.scale(replicas))?;
    service.wait_condition("Ready", "True", Some("Serving"), PATIENCE)?;
    service.delete()?;
    wait::until("its pods are gone", PATIENCE, || {
        let left = service.pods()?.len();
        Ok(Look::when(left == 0, (), format!("{left} are left")))
    })
}

fn apply(namespace: &Namespace, objects: &[Value]) -> Result<()> {
    let apply = ["apply", "--validate=strict", "--namespace", namespace.name(), "-f", "-"];
    let list = serde_json::json!({"apiVersion": "v1", "kind": "List", "items": objects});
    namespace.cluster().kubectl().run_with_input(&apply, &list.to_string()).map(drop)
}
