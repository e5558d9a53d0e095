//! At rest the operator writes nothing but its Lease.

use anyhow::{Result, ensure};
use serde_json::json;
use std::time::Duration;
use windlass_tests::audit::{Act, Mark};
use windlass_tests::namespace::{skip, with_namespace};
use windlass_tests::service::{self, Service};
use windlass_tests::wait;

const PATIENCE: Duration = Duration::from_secs(90);
/// Two looks at an idle engine. The campaign `scale` rests for longer.
const REST: Duration = Duration::from_secs(65);
/// Without a write for so long, what Ready set off is done.
const STILL: Duration = Duration::from_secs(10);

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
        wait::until_still("the operator has come to rest", PATIENCE, STILL, || Ok(writes(&beginning)?.len()))?;
        let rest = Mark::now(&log)?;
        std::thread::sleep(REST);
        let written = writes(&rest)?;
        ensure!(written.is_empty(), "{} writes in {} s at rest: {written:?}", written.len(), REST.as_secs());
        Ok(())
    })
}
