//! The API server is away for a minute and no engine can be read: requests are answered, nothing changes, and the
//! operator says that it is blind.

use anyhow::{Result, ensure};
use serde_json::json;
use std::collections::BTreeSet;
use std::process::Command;
use std::time::Duration;
use windlass_tests::chat::{self, Client};
use windlass_tests::command;
use windlass_tests::fault::{Fault, Proxy};
use windlass_tests::host::Stage;
use windlass_tests::load::Load;
use windlass_tests::namespace::{skip, with_namespace};
use windlass_tests::service::{self, Service, pod_name};
use windlass_tests::wait::{self, Look};

const PATIENCE: Duration = Duration::from_secs(120);
const AWAY: Duration = Duration::from_secs(60);

#[test]
fn without_api_server_and_metrics_the_data_plane_goes_on() -> Result<()> {
    with_namespace("blind", |namespace| {
        if !namespace.cluster().is_own() {
            return skip("the operator is no process of this machine there");
        }
        let stage = Stage::clear(namespace.cluster())?;
        let api = stage.operators_api()?;
        let proxy = Proxy::start(api.address())?;
        let kubeconfig = stage.plain_kubeconfig(proxy.address())?;
        let mut operator = stage.operator(&kubeconfig, &["--namespace", namespace.name()])?;
        operator.wait_ready()?;
        // Idle enough to shrink to one, were that known.
        let mut spec = service::simulated(&["--sim-mean-answer-tokens=0", service::PATIENT_DRAIN]);
        spec["autoscaling"] = json!({
            "mode": "Builtin", "minReplicas": 2, "maxReplicas": 4,
            "targets": [{"metric": "TimeToFirstToken", "percentile": 95, "milliseconds": 500}],
            "behavior": {"scaleDown": {"stabilizationWindowSeconds": 5}},
        });
        let service = Service::apply(namespace, "blind", &spec)?;
        service.wait_ready(2, PATIENCE)?;
        service.wait_condition("ScalingActive", "True", None, PATIENCE)?;
        let before = names(&service)?;
        let reach = service.reach()?;
        let load =
            Load::start(&Client::pooled(reach.url()), 2, |n| chat::request("blind", &format!("Request {n}"), 20));

        let silence = Silence::begin()?;
        let blind = || service.wait_condition("ScalingActive", "False", Some("StaleMetrics"), PATIENCE);
        blind()?;
        service.patch(&json!({"spec": {"autoscaling": {"minReplicas": 1}}}))?;
        blind()?;
        ensure!(names(&service)? == before, "blind, it has scaled");
        proxy.set(Fault::Away);
        let answered = load.completed();
        std::thread::sleep(AWAY);
        let meanwhile = load.completed() - answered;
        ensure!(names(&service)? == before, "somebody has scaled");
        proxy.set(Fault::None);
        drop(silence);
        service.wait_condition("ScalingActive", "True", None, PATIENCE)?;
        wait::until("it sees again and scales in", PATIENCE, || {
            let now = names(&service)?;
            Ok(Look::when(now.len() == 1 && before.is_superset(&now), (), format!("{now:?}")))
        })?;
        let report = load.stop();
        ensure!(report.failures.is_empty(), "{:?}", report.failures);
        ensure!(meanwhile > 100, "{meanwhile} answered while nobody looked");
        println!("{meanwhile} requests answered in {} s without API server and metrics, none failed", AWAY.as_secs());
        Ok(())
    })
}

fn names(service: &Service<'_>) -> Result<BTreeSet<String>> {
    Ok(service.pods()?.iter().map(|pod| pod_name(pod).to_owned()).collect())
}

/// Nobody on this machine reaches the admin port of pods, as long as it lives.
struct Silence;

/// A rule for routes: TCP to the admin port of the test cluster's pods.
const RULE: [&str; 7] = ["ipproto", "tcp", "dport", "8001", "to", "10.244.0.0/24", "prohibit"];

impl Silence {
    fn begin() -> Result<Silence> {
        command::output(Command::new("ip").args(["rule", "add"]).args(RULE)).map(|_| Silence)
    }
}

impl Drop for Silence {
    fn drop(&mut self) {
        if let Err(error) = command::output(Command::new("ip").args(["rule", "delete"]).args(RULE)) {
            eprintln!("a rule for routes stays: {error:#}");
        }
    }
}
