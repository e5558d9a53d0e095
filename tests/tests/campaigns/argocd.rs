//! Argo CD with self-healing and pruning leads services through their life: it sees no drift at rest, while they scale
//! and while they roll, its actions act and stay, and Degraded is what somebody has to mend.

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::time::Duration;
use windlass_tests::argocd::{self, ArgoCd};
use windlass_tests::chat::{self, Client};
use windlass_tests::load::Load;
use windlass_tests::namespace::{Namespace, skip, with_namespace};
use windlass_tests::service::{self, Service, pod_name};

const PATIENCE: Duration = Duration::from_secs(120);
const REST: Duration = Duration::from_secs(300);
const MOMENT: Duration = Duration::from_secs(20);

#[test]
fn argo_cd_leads_services_without_drift() -> Result<()> {
    with_namespace("gitops", |namespace| {
        if !argocd::is_installed() || !namespace.cluster().is_own() {
            return skip("Argo CD is not installed (tests/setup campaigns), or the cluster is not ours");
        }
        let argocd = ArgoCd::start(namespace.cluster())?;
        argocd.commit("two services", &[manual(json!({})), builtin()])?;
        argocd.follow(namespace.name())?;
        argocd.wait("Healthy", PATIENCE)?;
        let [by_hand, by_load] = ["by-hand", "by-load"].map(|name| Service::named(namespace, name));
        no_trace_on_children(namespace)?;

        let healths = argocd.stays_synced(REST, || Ok(true))?;
        ensure!(healths == ["Healthy"], "at rest: {healths:?}");
        println!("at rest: {} s without drift", REST.as_secs());

        let healths = scaled_by_load(&argocd, &by_load)?;
        ensure!(healths == ["Healthy"], "while scaling: {healths:?}");
        println!("out to two replicas and back in: no drift");

        acted_upon(&argocd, &by_hand)?;
        rolled(&argocd, &by_hand)?;
        rolled_back(&argocd, &by_hand)?;
        broken_and_mended(&argocd, namespace)
    })
}

fn resource(name: &str, spec: Value) -> Value {
    json!({
        "apiVersion": "windlass.dev/v1alpha1", "kind": "InferenceService",
        "metadata": {"name": name, "labels": {"team": "blue"}, "annotations": {"note": "kept here"}}, "spec": spec,
    })
}

fn manual(more: Value) -> Value {
    let mut spec = service::simulated(&[service::PATIENT_DRAIN]);
    for (name, value) in more.as_object().into_iter().flatten() {
        spec[name] = value.clone();
    }
    resource("by-hand", spec)
}

fn builtin() -> Value {
    let mut spec = service::simulated(&[
        "--sim-step-us=50000",
        "--sim-mean-answer-tokens=0",
        "--max-connection-age-seconds=5",
        service::PATIENT_DRAIN,
    ]);
    spec["engine"]["maxSequences"] = json!(4);
    spec["autoscaling"] = json!({
        "mode": "Builtin", "minReplicas": 1, "maxReplicas": 2,
        "targets": [{"metric": "TimeToFirstToken", "percentile": 95, "milliseconds": 500}],
        "behavior": {"scaleDown": {"stabilizationWindowSeconds": 10}},
    });
    resource("by-load", spec)
}

/// Neither labels nor annotations of a resource, Argo CD's own among them, are on what the operator makes of it.
fn no_trace_on_children(namespace: &Namespace) -> Result<()> {
    let kinds = "deployments,pods,services,networkpolicies,poddisruptionbudgets,serviceaccounts";
    let children: Vec<Value> = namespace.list(&["get", kinds, "--selector", "windlass.dev/inference-service"])?;
    ensure!(children.len() > 8, "only {} children", children.len());
    for child in children {
        let metadata = json!([child["metadata"]["labels"], child["metadata"]["annotations"]]).to_string();
        ensure!(!["argocd", "team", "note"].iter().any(|word| metadata.contains(word)), "{metadata}");
    }
    Ok(())
}

fn scaled_by_load(argocd: &ArgoCd<'_>, service: &Service<'_>) -> Result<Vec<String>> {
    let reach = service.reach()?;
    let load = Load::start(&Client::pooled(reach.url()), 8, |number| {
        chat::request("by-load", &format!("Request {number}"), 40)
    });
    let replicas = || Ok::<_, anyhow::Error>(service.read()?.status.context("no status")?.available_replicas);
    let mut healths = argocd.stays_synced(MOMENT, || Ok(replicas()? == 2))?;
    let report = load.stop();
    ensure!(report.failures.is_empty(), "{:?}", report.failures);
    healths.extend(argocd.stays_synced(MOMENT, || Ok(replicas()? == 1 && service.pods()?.len() == 1))?);
    healths.dedup();
    Ok(healths)
}

fn acted_upon(argocd: &ArgoCd<'_>, service: &Service<'_>) -> Result<()> {
    argocd.act(service, "scale", &[("replicas", "2")])?;
    argocd.stays_synced(MOMENT, || Ok(service.wait_ready(2, PATIENCE).is_ok()))?;
    ensure!(service.read()?.spec.replicas == 2, "the number of replicas was taken back");
    argocd.act(service, "pause", &[])?;
    argocd.stays_synced(MOMENT, || Ok(true))?;
    let offered = argocd.actions(service)?;
    for (action, disabled) in [("pause", true), ("restart", true), ("resume", false), ("scale", false)] {
        ensure!(offered.get(action) == Some(&disabled), "{action}: {offered:?}");
    }
    argocd.act(service, "resume", &[])?;
    let before = names(service)?;
    argocd.act(service, "restart", &[])?;
    let healths = argocd
        .stays_synced(MOMENT, || Ok(service.wait_ready(2, PATIENCE).is_ok() && names(service)?.is_disjoint(&before)))?;
    ensure!(!healths.iter().any(|health| health == "Degraded"), "while restarting: {healths:?}");
    argocd.wait("Healthy", PATIENCE)?;
    let wrong = argocd.act(service, "scale", &[("replicas", "many")]);
    ensure!(wrong.is_err_and(|error| format!("{error:#}").contains("whole number")), "`many` replicas were taken");
    println!("scale, pause, resume, restart: they act and stay");
    Ok(())
}

fn rolled(argocd: &ArgoCd<'_>, service: &Service<'_>) -> Result<()> {
    let before = names(service)?;
    argocd.commit("another engine setting", &[manual(json!({"drainTimeoutSeconds": 61})), builtin()])?;
    argocd.wait("Progressing", PATIENCE)?;
    let healths = argocd.stays_synced(MOMENT, || Ok(argocd.verdict()?.health == "Healthy"))?;
    ensure!(healths == ["Progressing", "Healthy"], "while rolling: {healths:?}");
    ensure!(names(service)?.is_disjoint(&before), "nothing has rolled");
    ensure!(service.read()?.spec.replicas == 2, "the rollout has taken back the number of replicas");
    println!("a rollout from Git: Progressing, then Healthy, no drift");
    Ok(())
}

/// To the revision before, and on to that of the spec again.
fn rolled_back(argocd: &ArgoCd<'_>, service: &Service<'_>) -> Result<()> {
    let newest = revision(service)?;
    acted_and_rolled(argocd, service, "rollback")?;
    let pinned = service.read()?.spec.rollout.and_then(|rollout| rollout.pinned_revision);
    ensure!(
        pinned.is_some() && pinned == revision(service)? && pinned != newest,
        "{pinned:?} is pinned, of {newest:?}"
    );
    acted_and_rolled(argocd, service, "unpin")?;
    ensure!(revision(service)? == newest, "unpinned, it does not serve {newest:?}");
    ensure!(argocd.actions(service)?.get("unpin") == Some(&true), "nothing is pinned, and can be unpinned");
    println!("rollback, unpin: they act and stay");
    Ok(())
}

/// Other pods serve after it, and nothing drifts meanwhile.
fn acted_and_rolled(argocd: &ArgoCd<'_>, service: &Service<'_>, action: &str) -> Result<()> {
    let before = names(service)?;
    argocd.act(service, action, &[])?;
    argocd
        .stays_synced(MOMENT, || Ok(service.wait_ready(2, PATIENCE).is_ok() && names(service)?.is_disjoint(&before)))
        .context(action.to_owned())?;
    argocd.wait("Healthy", PATIENCE).map(drop)
}

fn revision(service: &Service<'_>) -> Result<Option<String>> {
    Ok(service.read()?.status.context("no status")?.revision)
}

fn broken_and_mended(argocd: &ArgoCd<'_>, namespace: &Namespace) -> Result<()> {
    let mut refused = manual(json!({}));
    refused["metadata"]["name"] = json!("refused");
    refused["spec"]["engine"]["extraArgs"] = json!(["--executor=sim", "--no-such-flag"]);
    let mut crowded = manual(json!({}));
    crowded["metadata"]["name"] = json!("crowded");
    crowded["spec"]["resources"] = json!({"requests": {"cpu": "900"}});
    let rolled = manual(json!({"drainTimeoutSeconds": 61}));
    argocd.commit("one that finds no node", &[rolled.clone(), builtin(), crowded])?;
    argocd.wait("Progressing", PATIENCE)?;
    argocd.commit("one that is refused", &[rolled.clone(), builtin(), refused])?;
    let verdict = argocd.wait("Degraded", PATIENCE)?;
    let unhealthy: Vec<_> = verdict.resources.iter().filter(|(_, health)| health != "Healthy").collect();
    ensure!(unhealthy.len() == 1 && unhealthy[0].0 == "refused", "{verdict:?}");
    argocd.commit("back", &[rolled, builtin()])?;
    argocd.wait("Healthy", PATIENCE)?;
    let left = namespace.run(&["get", "inferenceservices.windlass.dev", "-o", "name"])?;
    ensure!(left.lines().count() == 2, "pruning has left {left}");
    println!("no node is Progressing, a refused flag is Degraded, and what leaves Git is pruned");
    Ok(())
}

fn names(service: &Service<'_>) -> Result<BTreeSet<String>> {
    Ok(service.pods()?.iter().map(|pod| pod_name(pod).to_owned()).collect())
}
