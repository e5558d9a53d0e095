//! A ResourceQuota's refusal of a pod becomes a condition with the API server's own words.

use anyhow::{Result, ensure};
use serde_json::json;
use std::time::Duration;
use windlass_tests::namespace::with_namespace;
use windlass_tests::service::{self, Service};

#[test]
fn a_quota_refusal_becomes_a_condition_with_its_text() -> Result<()> {
    with_namespace("quota", |namespace| {
        namespace.apply(&[json!({
            "apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "small"},
            "spec": {"hard": {"requests.cpu": "60m"}},
        })])?;
        let mut spec = service::simulated(&[]);
        spec["replicas"] = json!(2);
        let service = Service::apply(namespace, "greedy", &spec)?;
        let condition = service.wait_words("exceeded quota: small", Duration::from_secs(60))?;
        ensure!(condition.message.contains("requests.cpu=50m"), "{condition:?}");
        ensure!(condition.type_ != "Ready" || condition.status == "False", "{condition:?}");
        Ok(())
    })
}
