//! GPUs that are claimed instead of counted: the API server takes the pods, and its controllers make their claims. No driver
//! is here, so none is prepared.

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use std::time::Duration;
use windlass_tests::namespace::{skip, with_namespace};
use windlass_tests::service::{self, Service, pod_name};
use windlass_tests::wait::{self, Look};

const PATIENCE: Duration = Duration::from_secs(60);

#[test]
fn a_pod_gets_a_claim_made_from_the_template_and_says_why_it_waits() -> Result<()> {
    with_namespace("claims", |namespace| {
        let kubectl = namespace.cluster().kubectl();
        if kubectl.run(&["get", "--raw", "/apis/resource.k8s.io/v1"]).is_err() {
            return skip("this cluster does not serve resource.k8s.io/v1");
        }
        let requests = json!([{"name": "gpus", "exactly": {"deviceClassName": "gpu.nvidia.com", "count": 2}}]);
        namespace.apply(&[json!({
            "apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaimTemplate", "metadata": {"name": "two-gpus"},
            "spec": {"spec": {"devices": {"requests": requests}}},
        })])?;
        let mut spec = service::simulated(&[]);
        spec["accelerator"] = json!({"type": "NvidiaGPU", "nvidiaGPU": {"resourceClaimTemplateName": "two-gpus"}});
        spec["parallelism"] = json!({"tensor": 2});
        let service = Service::apply(namespace, "claiming", &spec)?;
        let claim = wait::until("a claim for the pod", PATIENCE, || {
            let claims: Vec<Value> = namespace.list(&["get", "resourceclaims"])?;
            Ok(claims.into_iter().next().map_or_else(|| Look::NotYet("none".into()), Look::Done))
        })?;
        let pod = service.pods()?.pop().context("no pod")?;
        let owner = &claim["metadata"]["ownerReferences"][0];
        ensure!(owner["kind"] == "Pod" && owner["name"] == pod_name(&pod), "{claim}");
        ensure!(claim["spec"]["devices"]["requests"][0]["exactly"]["count"] == 2, "{claim}");
        let waiting = service.wait_condition("Ready", "False", Some("Unschedulable"), PATIENCE)?;
        println!("{}", waiting.message);
        Ok(())
    })
}
