//! At rest the operator writes nothing but its Lease.

use anyhow::{Context, Result, ensure};
use serde_json::json;
use std::time::Duration;
use windlass_tests::audit::{Act, Mark};
use windlass_tests::namespace::{skip, with_namespace};
use windlass_tests::service::{self, Service};
use windlass_tests::wait::{self, Look};

const PATIENCE: Duration = Duration::from_secs(90);
const REST: Duration = Duration::from_secs(120);

#[test]
fn at_rest_the_operator_writes_nothing() -> Result<()> {
    with_namespace("rest", |namespace| {
        let Some(log) = namespace.cluster().audit_log() else {
            return skip("the API server's audit log cannot be read on this cluster");
        };
        let beginning = Mark::now(&log)?;
        let mut spec = service::simulated(&[]);
        let manual = Service::apply(namespace, "manual", &spec)?;
        spec["autoscaling"] = json!({
            "mode": "Builtin", "minReplicas": 1, "maxReplicas": 2,
            "targets": [{"metric": "TimeToFirstToken", "percentile": 95, "milliseconds": 500}],
        });
        let builtin = Service::apply(namespace, "builtin", &spec)?;
        manual.wait_ready(1, PATIENCE)?;
        builtin.wait_ready(1, PATIENCE)?;
        let writes = |since: &Mark| -> Result<Vec<Act>> {
            let acts = since.acts()?.into_iter();
            Ok(acts.filter(|act| act.writes() && act.namespace == namespace.name()).collect())
        };
        // The look itself can see: the operator did write to get here.
        ensure!(!writes(&beginning)?.is_empty(), "the audit log shows no write of the operator");
        settle(&writes, &log)?;
        let rest = Mark::now(&log)?;
        std::thread::sleep(REST);
        let written = writes(&rest)?;
        ensure!(written.is_empty(), "{} writes in {} s at rest: {written:?}", written.len(), REST.as_secs());
        Ok(())
    })
}

/// Waits until a moment has passed without writes: what Ready set off is then done.
fn settle(writes: &impl Fn(&Mark) -> Result<Vec<Act>>, log: &std::path::Path) -> Result<()> {
    wait::until("the operator has come to rest", PATIENCE, || {
        let mark = Mark::now(log)?;
        std::thread::sleep(Duration::from_secs(10));
        let written = writes(&mark).context("cannot read the audit log")?;
        Ok(Look::when(written.is_empty(), (), format!("{written:?}")))
    })
}
