//! A replica to spare is reached by no request, and takes them long before a new one could.

use anyhow::{Context, Result, ensure};
use k8s_openapi::api::discovery::v1::EndpointSlice;
use serde_json::json;
use std::collections::BTreeSet;
use std::time::{Duration, Instant};
use windlass_tests::chat::{self, Client};
use windlass_tests::load::Load;
use windlass_tests::namespace::{Namespace, with_namespace};
use windlass_tests::service::{self, Service};
use windlass_tests::wait::{self, Look};

const PATIENCE: Duration = Duration::from_secs(120);
/// What a new replica needs to load.
const LOAD_SECONDS: u64 = 30;

#[test]
fn a_spare_takes_requests_before_a_new_replica_could() -> Result<()> {
    with_namespace("standby", |namespace| {
        let load = format!("--sim-load-seconds={LOAD_SECONDS}");
        let mut spec = service::simulated(&["--sim-step-us=50000", "--sim-mean-answer-tokens=0", &load]);
        spec["engine"]["maxSequences"] = json!(2);
        spec["autoscaling"] = json!({
            "mode": "Builtin", "minReplicas": 1, "maxReplicas": 2, "standbyReplicas": 1,
            "targets": [{"metric": "TimeToFirstToken", "percentile": 95, "milliseconds": 500}],
        });
        let service = Service::apply(namespace, "spared", &spec)?;
        wait::until("one replica serves and one is spared", PATIENCE, || {
            let status = service.read()?.status.unwrap_or_default();
            let (ready, spared) = (status.ready_replicas, status.standby_replicas);
            Ok(Look::when((ready, spared) == (1, Some(1)), (), format!("{ready} serve, {spared:?} are spared")))
        })?;
        wait::until("requests reach one of two pods", PATIENCE, || {
            let reached = reached(namespace)?;
            Ok(Look::when(reached.len() == 1, (), format!("{reached:?}")))
        })?;
        let before: BTreeSet<_> = service.pods()?.into_iter().filter_map(|pod| pod.status?.pod_ip).collect();
        ensure!(before.len() == 2, "{before:?}");

        let reach = service.reach()?;
        let asked = |number| chat::request("spared", &format!("Request {number}"), 40);
        let load = Load::start(&Client::unpooled(reach.url()), 6, asked);
        let more = wait::until("more replicas are asked for", PATIENCE, || {
            let desired = service.read()?.status.unwrap_or_default().desired_replicas;
            Ok(Look::when(desired == 2, Instant::now(), format!("{desired}")))
        })?;
        wait::until("requests reach the spare too", PATIENCE, || {
            let reached = reached(namespace)?;
            Ok(Look::when(reached == before, (), format!("{reached:?} of {before:?}")))
        })?;
        let took = more.elapsed();
        let report = load.stop();
        ensure!(report.failures.is_empty(), "{:?}", report.failures);
        ensure!(took < Duration::from_secs(LOAD_SECONDS / 2), "{took:?}, and a new replica loads for {LOAD_SECONDS} s");
        println!("the spare was reached {:.1} s after more was asked for", took.as_secs_f64());
        Ok(())
    })
}

/// Addresses that the Service leads to.
fn reached(namespace: &Namespace) -> Result<BTreeSet<String>> {
    let slices: Vec<EndpointSlice> =
        namespace.list(&["get", "endpointslices", "--selector=kubernetes.io/service-name=spared"])?;
    let endpoints = slices.into_iter().flat_map(|slice| slice.endpoints);
    let ready = endpoints.filter(|endpoint| endpoint.conditions.as_ref().and_then(|found| found.ready) == Some(true));
    ready.map(|endpoint| endpoint.addresses.into_iter().next().context("an endpoint without an address")).collect()
}
