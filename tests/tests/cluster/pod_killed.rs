//! A pod that is killed is replaced.

use anyhow::{Context, Result, ensure};
use std::time::Duration;
use windlass_tests::chat::{self, Client};
use windlass_tests::namespace::with_namespace;
use windlass_tests::service::{self, Service, pod_name};
use windlass_tests::wait::{self, Look};

const PATIENCE: Duration = Duration::from_secs(60);

#[test]
fn a_killed_pod_is_replaced_and_the_service_answers_again() -> Result<()> {
    with_namespace("killed", |namespace| {
        let service = Service::apply(namespace, "mortal", &service::simulated(&[]))?;
        service.wait_ready(1, PATIENCE)?;
        let killed = service.pods()?.first().map(|pod| pod_name(pod).to_owned()).context("no pod")?;
        namespace.run(&["delete", "pod", &killed, "--grace-period=0", "--force"])?;
        wait::until("another pod exists", PATIENCE, || {
            let pods = service.pods()?;
            let names: Vec<_> = pods.iter().map(pod_name).collect();
            Ok(Look::when(!names.is_empty() && !names.contains(&killed.as_str()), (), format!("{names:?}")))
        })?;
        service.wait_ready(1, PATIENCE)?;
        let answer =
            Client::pooled(service.reach()?.url()).stream(&chat::request("mortal", "Still there?", 8), |_| {})?;
        ensure!(!answer.text.is_empty(), "{answer:?}");
        Ok(())
    })
}
