//! What is made for other projects is accepted by their definitions: examples of KEDA, Argo CD and LeaderWorkerSet, monitors
//! and rules of the chart by the Prometheus operator.

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use std::path::PathBuf;
use windlass_tests::namespace::{Namespace, skip, with_namespace};
use windlass_tests::{argocd, go_module, operator, workspace};

/// Releases of Go modules that hold the definitions.
const KEDA: &str = "github.com/kedacore/keda/v2@v2.17.2";
const LEADER_WORKER_SET: &str = "sigs.k8s.io/lws@v0.9.0";
const PROMETHEUS: &str = "github.com/prometheus-operator/prometheus-operator@v0.85.0";

#[test]
fn what_is_made_for_other_projects_is_accepted_by_their_definitions() -> Result<()> {
    with_namespace("others", |namespace| {
        if !namespace.cluster().is_own() {
            return skip("definitions of other projects are installed on our own cluster alone");
        }
        let kubectl = namespace.cluster().kubectl();
        let definitions = definitions()?;
        definitions.iter().try_for_each(|file| kubectl.define(file))?;
        let outcome = examples(namespace).and_then(|()| monitors(namespace));
        let mut files = definitions.iter().filter_map(|file| file.to_str());
        files.try_for_each(|file| kubectl.run(&["delete", "--wait=false", "-f", file]).map(drop))?;
        outcome
    })
}

fn definitions() -> Result<Vec<PathBuf>> {
    let mut files = argocd::definitions()?;
    files.push(go_module::folder(KEDA)?.join("config/crd/bases/keda.sh_scaledobjects.yaml"));
    files.push(
        go_module::folder(LEADER_WORKER_SET)?.join("config/crd/bases/leaderworkerset.x-k8s.io_leaderworkersets.yaml"),
    );
    let prometheus = go_module::folder(PROMETHEUS)?.join("example/prometheus-operator-crd");
    let kinds = ["podmonitors", "servicemonitors", "prometheusrules"];
    files.extend(kinds.map(|kind| prometheus.join(format!("monitoring.coreos.com_{kind}.yaml"))));
    Ok(files)
}

fn examples(namespace: &Namespace) -> Result<()> {
    let kubectl = namespace.cluster().kubectl();
    kubectl.apply(&[json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "argocd"}})])?;
    let folder = workspace::root().join("crds/examples");
    let outcome =
        ["external-keda.yaml", "argocd-application.yaml", "leader-worker-set.yaml"].iter().try_for_each(|name| {
            let file = folder.join(name);
            let file = file.to_str().context("a path that is no text")?;
            let apply = ["apply", "--dry-run=server", "--validate=strict", "-f", file];
            if name.starts_with("argocd") { kubectl.run(&apply) } else { namespace.run(&apply) }.map(drop)
        });
    kubectl.run(&["delete", "namespace", "argocd", "--timeout=60s"])?;
    outcome
}

/// Both kinds of monitors, and the rules.
fn monitors(namespace: &Namespace) -> Result<()> {
    for more in [&[][..], &["--set", "guardedMetrics.enabled=true"]] {
        let values = [
            &[
                "--set",
                "podMonitor.enabled=true,monitoringNamespace=monitoring",
                "--set",
                "prometheusRule.enabled=true",
            ][..],
            more,
        ]
        .concat();
        let text =
            operator::template(namespace.cluster(), "windlass", operator::RELEASE, operator::NAMESPACE, &values)?;
        let objects = operator::objects(&text)?.into_iter();
        let theirs: Vec<Value> = objects.filter(|object| object["apiVersion"] == "monitoring.coreos.com/v1").collect();
        ensure!(theirs.len() == 3, "{} objects for the Prometheus operator", theirs.len());
        let list = json!({"apiVersion": "v1", "kind": "List", "items": theirs}).to_string();
        let apply = ["apply", "--dry-run=server", "--validate=strict", "-f", "-"];
        namespace.cluster().kubectl().run_with_input(&apply, &list)?;
    }
    Ok(())
}
