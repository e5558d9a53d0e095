//! Replicas for spot run on demand while no spot node comes, one pod goes on asking, and they return when one does.

use anyhow::{Context, Result, ensure};
use k8s_openapi::api::core::v1::Pod;
use serde_json::json;
use std::time::Duration;
use windlass_tests::namespace::{Namespace, with_own_nodes};
use windlass_tests::service::{self, Service, is_ready};
use windlass_tests::wait::{self, Look};

const PATIENCE: Duration = Duration::from_secs(90);
/// A label of this test's own: other tests share the node.
const SPOT_NODE: &str = "spot.test.windlass.dev/node";

#[test]
fn replicas_fall_back_and_return_to_spot() -> Result<()> {
    with_own_nodes("spot", |namespace| {
        let mut spec = service::simulated(&[]);
        spec["replicas"] = json!(3);
        spec["spot"] = json!({
            "mode": "Prefer", "onDemandBase": 1, "fallbackAfterSeconds": 3, "nodeSelector": {SPOT_NODE: "yes"},
        });
        let service = Service::apply(namespace, "thrifty", &spec)?;
        wait::until("all replicas serve on demand and one pod asks for spot", PATIENCE, || {
            let (seen, status) = (Seen::of(&service)?, service.read()?.status.unwrap_or_default());
            let counted = (status.replicas, status.desired_replicas, status.spot_fallback_replicas);
            let holds = seen == Seen { on_demand: 3, spot: 0, asking: 1 } && counted == (3, 3, Some(2));
            Ok(Look::when(holds, (), format!("{seen:?}, replicas, desired, fallback: {counted:?}")))
        })?;
        service.wait_condition("Ready", "True", Some("Serving"), PATIENCE)?;
        label_nodes(namespace, &format!("{SPOT_NODE}=yes"))?;
        let returned = wait::until("two replicas serve on spot and one on demand", PATIENCE, || {
            let (seen, status) = (Seen::of(&service)?, service.read()?.status.unwrap_or_default());
            let counted = (status.replicas, status.desired_replicas, status.spot_fallback_replicas);
            ensure!(seen.on_demand + seen.spot >= 3, "a replica was lost on the way: {seen:?}");
            let holds = seen == Seen { on_demand: 1, spot: 2, asking: 0 } && counted == (3, 3, None);
            Ok(Look::when(holds, (), format!("{seen:?}, replicas, desired, fallback: {counted:?}")))
        });
        label_nodes(namespace, &format!("{SPOT_NODE}-"))?;
        returned?;
        let events = namespace.run(&["get", "events", "-o", "jsonpath={.items[*].reason}"])?;
        for reason in ["SpotFallback", "SpotReturned"] {
            ensure!(events.split(' ').any(|found| found == reason), "no event {reason} among {events}");
        }
        Ok(())
    })
}

/// Pods that do not leave.
#[derive(Debug, PartialEq, Eq)]
struct Seen {
    on_demand: usize,
    spot: usize,
    asking: usize,
}

impl Seen {
    fn of(service: &Service<'_>) -> Result<Seen> {
        let pods: Vec<Pod> = service.pods()?;
        let stays = |pod: &&Pod| pod.metadata.deletion_timestamp.is_none();
        let is = |pod: &Pod, workload: &str| {
            let labels = pod.metadata.labels.as_ref();
            labels.and_then(|labels| labels.get("windlass.dev/workload")).is_some_and(|found| found == workload)
        };
        let count = |workload: &str, ready: bool| {
            pods.iter().filter(stays).filter(|pod| is(pod, workload) && is_ready(pod) == ready).count()
        };
        Ok(Seen { on_demand: count("on-demand", true), spot: count("spot", true), asking: count("spot", false) })
    }
}

fn label_nodes(namespace: &Namespace, label: &str) -> Result<()> {
    let label = ["label", "node", "--all", "--overwrite", label];
    namespace.cluster().kubectl().run(&label).map(drop).context("cannot label the node")
}
