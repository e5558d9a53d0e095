//! An edit rolls the pods, and no request fails meanwhile.

use anyhow::{Result, ensure};
use serde_json::json;
use std::collections::BTreeSet;
use std::time::Duration;
use windlass_tests::chat::{self, Client};
use windlass_tests::load::Load;
use windlass_tests::namespace::{skip, with_namespace};
use windlass_tests::service::{self, Service, pod_name};

const PATIENCE: Duration = Duration::from_secs(120);

#[test]
fn an_edit_rolls_the_pods_and_no_request_fails() -> Result<()> {
    with_namespace("rollout", |namespace| {
        let mut spec = service::simulated(&["--max-connection-age-seconds=5", service::PATIENT_DRAIN]);
        spec["replicas"] = json!(2);
        let service = Service::apply(namespace, "rolled", &spec)?;
        service.wait_ready(2, PATIENCE)?;
        let before = names(&service)?;
        let reach = service.reach()?;
        if !reach.is_balanced() {
            return skip("the Service's address is not reached from here, and a port forward ends with its pod");
        }
        let load = Load::start(&Client::pooled(reach.url()), 6, |number| {
            chat::request("rolled", &format!("Request {number}"), 40)
        });
        service.patch(&json!({"spec": {"engine": {"maxSequences": 32}}}))?;
        service.wait_ready(2, PATIENCE)?;
        let report = load.stop();
        let after = names(&service)?;
        ensure!(before.is_disjoint(&after), "not all pods are new: {before:?}, then {after:?}");
        for pod in service.pods()? {
            let effective = service.stats(&pod)?.effective;
            ensure!(effective.as_ref().is_some_and(|config| config.max_sequences == 32), "{effective:?}");
        }
        ensure!(report.failures.is_empty(), "{} failed: {:?}", report.failures.len(), report.failures);
        ensure!(report.completed > 20, "only {} requests were answered", report.completed);
        println!("{} requests answered during the rollout, none failed", report.completed);
        Ok(())
    })
}

fn names(service: &Service<'_>) -> Result<BTreeSet<String>> {
    Ok(service.pods()?.iter().map(|pod| pod_name(pod).to_owned()).collect())
}
