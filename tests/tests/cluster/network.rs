//! Who reaches whom under the policies that the chart and the operator make, computed on a matrix of pods.

use anyhow::{Context, Result, ensure};
use k8s_openapi::api::networking::v1::NetworkPolicy;
use serde_json::json;
use std::time::Duration;
use windlass_engine_contract::{ADMIN_PORT, API_PORT};
use windlass_tests::namespace::{prepared_cluster, with_namespace};
use windlass_tests::network::{Endpoint, allows};
use windlass_tests::operator;
use windlass_tests::service::{self, Service};

const PATIENCE: Duration = Duration::from_secs(90);
const OPERATOR_METRICS: u16 = 8080;
const GUARDED_METRICS: u16 = 8443;
const API_SERVER: u16 = 6443;

#[test]
fn only_those_named_reach_engines_and_operator() -> Result<()> {
    with_namespace("network", |namespace| {
        let mut spec = service::simulated(&[]);
        let open = Service::apply(namespace, "open", &spec)?;
        spec["network"] = json!({"allowFrom": [{
            "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "gateway"}},
        }]});
        let fronted = Service::apply(namespace, "fronted", &spec)?;
        open.wait_ready(1, PATIENCE)?;
        fronted.wait_ready(1, PATIENCE)?;
        let mut policies: Vec<NetworkPolicy> = namespace.list(&["get", "networkpolicies"])?;
        let of_chart = ["get", "networkpolicies", "-n", operator::NAMESPACE];
        policies.extend(namespace.cluster().kubectl().list::<NetworkPolicy>(&of_chart)?);
        ensure!(policies.len() == 3, "{} policies", policies.len());

        let pod = |service: &Service<'_>| -> Result<Endpoint> {
            let pod = service.pods()?.into_iter().next().context("no pod")?;
            let labels = pod.metadata.labels.unwrap_or_default();
            Ok(Endpoint { namespace: namespace.name().to_owned(), labels })
        };
        let (open, fronted) = (pod(&open)?, pod(&fronted)?);
        let labels = operator::pods(namespace.cluster())?.remove(0).metadata.labels.unwrap_or_default();
        let operator = Endpoint { namespace: operator::NAMESPACE.to_owned(), labels };
        let neighbour = Endpoint::new(namespace.name(), &[("app", "client")]);
        let gateway = Endpoint::new("gateway", &[("app", "gateway")]);
        let impostor = Endpoint { namespace: "elsewhere".into(), labels: operator.labels.clone() };
        let prometheus = Endpoint::new("monitoring", &[("app", "prometheus")]);

        let matrix = [
            ("a neighbour, the API", &neighbour, &open, API_PORT, true),
            ("a gateway that is not named, the API", &gateway, &open, API_PORT, false),
            ("a neighbour, where only the gateway is named", &neighbour, &fronted, API_PORT, false),
            ("the gateway that is named", &gateway, &fronted, API_PORT, true),
            ("the gateway, the admin port", &gateway, &fronted, ADMIN_PORT, false),
            ("a neighbour, the admin port", &neighbour, &open, ADMIN_PORT, false),
            ("the operator, the admin port", &operator, &open, ADMIN_PORT, true),
            ("the operator, the API", &operator, &open, API_PORT, false),
            ("an impostor, the admin port", &impostor, &open, ADMIN_PORT, false),
            ("Prometheus where no namespace of it is named", &prometheus, &open, ADMIN_PORT, false),
            ("an engine, another engine", &open, &fronted, API_PORT, false),
            ("an engine, the operator", &open, &operator, OPERATOR_METRICS, false),
            ("an engine, the gateway", &fronted, &gateway, 443, false),
            (
                "Prometheus where no namespace of it is named, the operator",
                &prometheus,
                &operator,
                OPERATOR_METRICS,
                false,
            ),
            ("anybody, another port of the operator", &neighbour, &operator, 22, false),
            ("the operator, the API server", &operator, &Endpoint::new("kube-system", &[]), API_SERVER, true),
            ("the operator, a web server", &operator, &gateway, 80, false),
        ];
        for (who, from, to, port, expected) in matrix {
            ensure!(allows(&policies, from, to, port) == expected, "{who}: allowed is not {expected}");
        }
        Ok(())
    })
}

/// The chart's values, a port of the operator, and whether a pod of the namespace `monitoring` and one of `elsewhere` reach it.
const READERS: [(&str, u16, bool, bool); 6] = [
    ("monitoringNamespace=", OPERATOR_METRICS, false, false),
    ("monitoringNamespace=monitoring", OPERATOR_METRICS, true, false),
    ("monitoringNamespace=monitoring", 22, false, false),
    (
        "networkPolicy.metricsFrom[0].namespaceSelector.matchLabels.kubernetes\\.io/metadata\\.name=elsewhere",
        OPERATOR_METRICS,
        false,
        true,
    ),
    ("guardedMetrics.enabled=true", GUARDED_METRICS, true, true),
    ("networkPolicy.enabled=false", OPERATOR_METRICS, true, true),
];

#[test]
fn the_operators_metrics_are_open_to_those_named() -> Result<()> {
    let Some(cluster) = prepared_cluster()? else { return Ok(()) };
    for (values, port, monitoring, elsewhere) in READERS {
        let rendered =
            operator::template(&cluster, operator::RELEASE, "default", operator::NAMESPACE, &["--set", values])?;
        let objects = operator::objects(&rendered)?;
        let of_kind = |kind: &'static str| objects.iter().filter(move |object| object["kind"] == kind).cloned();
        let policies: Vec<NetworkPolicy> =
            of_kind("NetworkPolicy").map(serde_json::from_value).collect::<Result<_, _>>()?;
        let deployment = of_kind("Deployment").next().context("no Deployment")?;
        let labels = serde_json::from_value(deployment["spec"]["template"]["metadata"]["labels"].clone())?;
        let to = Endpoint { namespace: operator::NAMESPACE.to_owned(), labels };
        for (from, expected) in [("monitoring", monitoring), ("elsewhere", elsewhere)] {
            let reaches = allows(&policies, &Endpoint::new(from, &[]), &to, port);
            ensure!(reaches == expected, "{values}: {from} reaches port {port}: {reaches}");
        }
    }
    Ok(())
}
