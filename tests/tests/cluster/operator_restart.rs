//! The operator, killed in the middle of a change and again in the middle of the next, brings both to their end.

use anyhow::{Result, ensure};
use serde_json::json;
use std::time::Duration;
use windlass_tests::namespace::{Namespace, with_namespace};
use windlass_tests::operator;
use windlass_tests::service::{self, Service};
use windlass_tests::wait::{self, Look};

const PATIENCE: Duration = Duration::from_secs(120);

#[test]
fn an_operator_killed_mid_change_converges() -> Result<()> {
    with_namespace("restart", |namespace| {
        let mut spec = service::simulated(&[]);
        spec["replicas"] = json!(2);
        let service = Service::apply(namespace, "steady", &spec)?;
        kill_operator(namespace)?;
        service.wait_ready(2, PATIENCE)?;

        service.patch(&json!({"spec": {"engine": {"maxSequences": 16}}}))?;
        wait::until("the rollout has begun", PATIENCE, || {
            let pods = service.pods()?.len();
            Ok(Look::when(pods > 2, (), format!("{pods} pods")))
        })?;
        kill_operator(namespace)?;
        service.scale(1)?;
        service.wait_ready(1, PATIENCE)?;
        for pod in service.pods()? {
            let effective = service.stats(&pod)?.effective;
            ensure!(effective.as_ref().is_some_and(|config| config.max_sequences == 16), "{effective:?}");
        }
        Ok(())
    })
}

fn kill_operator(namespace: &Namespace) -> Result<()> {
    operator::pods(namespace.cluster())?.iter().try_for_each(|pod| namespace.cluster().kill(pod))
}
