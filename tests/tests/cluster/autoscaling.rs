//! Load from one pooled client scales the service out, the new pod gets its share, and without load it scales in.

use anyhow::{Result, ensure};
use serde_json::json;
use std::collections::BTreeSet;
use std::time::Duration;
use windlass_tests::chat::{self, Client};
use windlass_tests::load::Load;
use windlass_tests::namespace::{skip, with_namespace};
use windlass_tests::service::{self, Service, pod_name};
use windlass_tests::wait::{self, Look};

const PATIENCE: Duration = Duration::from_secs(180);

#[test]
fn load_scales_out_the_new_pod_serves_and_idleness_scales_in() -> Result<()> {
    with_namespace("autoscaling", |namespace| {
        // Four sequences of twenty tokens a second each: eight clients leave four waiting, two replicas hold them all.
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
        let service = Service::apply(namespace, "scaled", &spec)?;
        service.wait_ready(1, PATIENCE)?;
        let first: BTreeSet<_> = service.pods()?.iter().map(|pod| pod_name(pod).to_owned()).collect();
        let reach = service.reach()?;
        if !reach.is_balanced() {
            return skip("the Service's address is not reached from here, and a port forward leads to one pod only");
        }
        let load = Load::start(&Client::pooled(reach.url()), 8, |number| {
            chat::request("scaled", &format!("Request {number}"), 40)
        });
        service.wait_ready(2, PATIENCE)?;
        wait::until("the new pod has answered requests", PATIENCE, || {
            let pods = service.pods()?;
            let new = pods.iter().find(|pod| !first.contains(pod_name(pod)));
            let finished = new.map(|pod| service.stats(pod)).transpose()?.map_or(0, |stats| stats.finished);
            Ok(Look::when(finished >= 5, (), format!("{finished} requests")))
        })?;
        let report = load.stop();
        ensure!(report.failures.is_empty(), "{} failed: {:?}", report.failures.len(), report.failures);
        let explained = service.read()?.status.and_then(|status| status.autoscaling);
        ensure!(explained.as_ref().is_some_and(|autoscaling| !autoscaling.message.is_empty()), "{explained:?}");

        service.wait_ready(1, PATIENCE)?;
        let replicas = service.read()?.spec.replicas;
        ensure!(replicas == 1, "the autoscaler wrote spec.replicas: {replicas}");
        println!("{} requests answered while scaling, none failed", report.completed);
        Ok(())
    })
}
