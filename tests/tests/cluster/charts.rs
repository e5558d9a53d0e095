//! The charts render what an API server accepts without a word, and the CRD chart carries the CRD of `crds/`.

use anyhow::{Context, Result, ensure};
use serde_yaml_ng::Value;
use std::fs;
use windlass_tests::namespace::{prepared_cluster, with_namespace};
use windlass_tests::{command, operator, workspace};

/// The API server's limit for what `kubectl apply` notes on an object, and so for an object that is applied, is
/// 256 KiB; room is left for growth.
const CRD_BYTES: usize = 200_000;

/// Values that between them reach every template but those that need other projects' kinds.
const VALUES: [&[&str]; 5] = [
    &[],
    &[
        "--set",
        "watchNamespaces={blue,green}",
        "--set",
        "serviceAccount.create=false",
        "--set",
        "serviceAccount.name=mine",
    ],
    &[
        "--set",
        "guardedMetrics.enabled=true",
        "--set",
        "guardedMetrics.readers[0].namespace=a,guardedMetrics.readers[0].name=b",
    ],
    &["--set", DIGESTS],
    &["--set", "replicas=1", "--set", "networkPolicy.enabled=false", "--set", "grafanaDashboard.enabled=true"],
];

/// Images by digest.
const DIGESTS: &str = "image.digest=sha256:0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef,\
    engine.image.digest=sha256:0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef";

#[test]
fn what_the_chart_renders_is_accepted_without_a_word() -> Result<()> {
    with_namespace("charts", |namespace| {
        let kubectl = namespace.cluster().kubectl();
        let namespaces = ["blue", "green"]
            .map(|name| serde_json::json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}));
        kubectl.apply(&namespaces)?;
        for values in VALUES {
            let rendered =
                operator::template(namespace.cluster(), operator::RELEASE, RENDERED, namespace.name(), values)?;
            let mut apply = kubectl.command();
            apply.args(["apply", "--dry-run=server", "--validate=strict", "-f", "-", "--output=name"]);
            let applied = command::output_and_error_with_input(&mut apply, &rendered)?;
            ensure!(applied.error.is_empty(), "{values:?}: {}", applied.error);
            ensure!(applied.output.lines().count() > 3, "{values:?}: rendered too little: {}", applied.output);
        }
        kubectl.run(&["delete", "namespace", "blue", "green", "--wait=false"]).map(drop)
    })
}

/// What is refused, and how the refusal names it.
const REFUSED: [(&str, &str); 12] = [
    ("namespaces={blue}", "'namespaces' not allowed"),
    ("watchNamespaces={Blue}", "'/watchNamespaces/0'"),
    ("replicas=0", "'/replicas'"),
    ("replicas=many", "'/replicas'"),
    ("image.digest=latest", "'/image/digest'"),
    ("log.format=xml", "'/log/format'"),
    ("scrape.activeSeconds=0", "'/scrape/activeSeconds'"),
    ("podMonitor.interval=soon", "'/podMonitor/interval'"),
    ("prometheusRule.runbookUrl=README.md", "'/prometheusRule/runbookUrl'"),
    ("prometheusRule.objectives.errorRatio=2", "'/prometheusRule/objectives/errorRatio'"),
    ("podMonitor.enabled=true", "monitoringNamespace: name"),
    ("customMetrics.enabled=true,customMetrics.existingSecret=mine", "customMetrics.caBundle is needed"),
];

#[test]
fn wrong_values_are_refused_by_name() -> Result<()> {
    let Some(cluster) = prepared_cluster()? else { return Ok(()) };
    for (value, name) in REFUSED {
        let rendered = operator::template(&cluster, operator::RELEASE, RENDERED, "default", &["--set", value]);
        let error = rendered.err().with_context(|| format!("{value} is taken"))?;
        ensure!(format!("{error:#}").contains(name), "{value}: {error:#}");
    }
    Ok(())
}

/// Values, what is rendered of them, and what is not.
const RENDERED_OF: [(&str, &[&str], &[&str]); 3] = [
    ("watchNamespaces={blue,green}", &["--namespace=blue\n", "--namespace=green\n"], &["kind: ClusterRole"]),
    (
        "podMonitor.enabled=true,monitoringNamespace=prom,watchNamespaces={blue}",
        &["--monitoring-namespace=prom\n", "matchNames:\n    - blue\n"],
        &["any: true"],
    ),
    (
        "prometheusRule.enabled=true,prometheusRule.runbookUrl=https://runbooks.example.com/w",
        &["runbook_url: https://runbooks.example.com/w#windlassspotlost\n"],
        &["RUNBOOK_URL", "https://windlass.dev/charts"],
    ),
];

#[test]
fn values_are_where_they_act() -> Result<()> {
    let Some(cluster) = prepared_cluster()? else { return Ok(()) };
    for (values, present, absent) in RENDERED_OF {
        let rendered = operator::template(&cluster, operator::RELEASE, RENDERED, "default", &["--set", values])?;
        let missing: Vec<_> = present.iter().filter(|part| !rendered.contains(**part)).collect();
        let left: Vec<_> = absent.iter().filter(|part| rendered.contains(**part)).collect();
        ensure!(missing.is_empty() && left.is_empty(), "{values}: without {missing:?}, with {left:?}");
    }
    Ok(())
}

#[test]
fn a_rendering_with_certificates_that_are_given_is_always_the_same() -> Result<()> {
    let Some(cluster) = prepared_cluster()? else { return Ok(()) };
    let given = "guardedMetrics.enabled=true,guardedMetrics.existingSecret=mine,customMetrics.enabled=true,\
                 customMetrics.existingSecret=ours,customMetrics.caBundle=Q0E=";
    let render = || operator::template(&cluster, operator::RELEASE, RENDERED, "default", &["--set", given]);
    let rendered = render()?;
    ensure!(rendered == render()?, "two renderings differ");
    ensure!(
        ["secretName: mine", "secretName: ours", "caBundle: Q0E="].iter().all(|part| rendered.contains(part)),
        "{rendered}"
    );
    ensure!(operator::objects(&rendered)?.iter().all(|object| object["kind"] != "Secret"), "a Secret is made");
    Ok(())
}

#[test]
fn the_crd_chart_carries_the_committed_crd() -> Result<()> {
    let Some(cluster) = prepared_cluster()? else { return Ok(()) };
    let rendered = operator::template(&cluster, "windlass-crds", RENDERED, "default", &[])?;
    ensure!(rendered.len() < CRD_BYTES, "{} bytes", rendered.len());
    let rendered: Value = serde_yaml_ng::from_str(&rendered)?;
    let committed: Value = serde_yaml_ng::from_str(&fs::read_to_string(workspace::root().join("crds").join(CRD))?)?;
    ensure!(rendered["metadata"]["name"] == committed["metadata"]["name"], "another name");
    ensure!(rendered["spec"] == committed["spec"], "the chart's CRD is not the one in crds/{CRD}");
    Ok(())
}

#[test]
fn the_crd_is_structural() -> Result<()> {
    let Some(cluster) = prepared_cluster()? else { return Ok(()) };
    let crd: serde_json::Value = cluster.kubectl().get(&["get", "crd", "inferenceservices.windlass.dev"])?;
    let conditions = crd["status"]["conditions"].as_array().context("the CRD has no conditions")?;
    let bad =
        conditions.iter().find(|condition| condition["type"] == "NonStructuralSchema" && condition["status"] == "True");
    ensure!(bad.is_none(), "{bad:?}");
    Ok(())
}

/// A release that is not installed: `kubectl apply` would warn about what helm has installed.
const RENDERED: &str = "rendered";
const CRD: &str = "inferenceservices.windlass.dev.yaml";
