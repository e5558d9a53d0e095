//! The model's header is read by a Job before a pod is made; what fits nowhere is not scheduled and says what would.

use anyhow::{Context, Result, ensure};
use k8s_openapi::api::batch::v1::Job;
use serde_json::json;
use std::time::Duration;
use windlass_tests::namespace::with_namespace;
use windlass_tests::service::{self, Service};
use windlass_tests::wait::{self, Look};

const PATIENCE: Duration = Duration::from_secs(90);

#[test]
fn a_model_is_read_before_it_is_scheduled_and_what_fits_nowhere_is_not() -> Result<()> {
    with_namespace("fit", |namespace| {
        let good = Service::apply(namespace, "good", &service::real())?;
        let mut spec = service::real();
        spec["resources"] = json!({"requests": {"cpu": "50m", "memory": "64Mi"}, "limits": {"memory": "96Mi"}});
        let large = Service::apply(namespace, "large", &spec)?;

        let fits = large.wait_condition("Fits", "False", Some("TooLarge"), PATIENCE)?;
        ensure!(fits.message.contains("resources.limits.memory of"), "no alternative is told: {fits:?}");
        large.wait_condition("Ready", "False", Some("TooLarge"), PATIENCE)?;
        ensure!(large.pods()?.is_empty(), "pods were made of what does not fit");

        good.wait_ready(1, PATIENCE)?;
        good.wait_condition("Fits", "True", Some("Fits"), PATIENCE)?;
        let model = good.read()?.status.and_then(|status| status.model).context("status tells no model")?;
        ensure!(model.weight_type == "q4_1" && model.weight_bytes > 50_000_000, "{model:?}");
        wait::until("the Jobs are gone", PATIENCE, || {
            let jobs: Vec<Job> = namespace.list(&["get", "jobs"])?;
            Ok(Look::when(jobs.is_empty(), (), format!("{} are left", jobs.len())))
        })?;

        large.patch(&json!({"spec": {"resources": {"limits": {"memory": "2Gi"}}}}))?;
        large.wait_ready(1, PATIENCE)
    })
}
