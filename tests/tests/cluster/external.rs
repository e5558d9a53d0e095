//! Replicas that are left to another autoscaler follow `/scale`, as `kubectl scale` and a HorizontalPodAutoscaler see it.

use anyhow::{Context, Result, ensure};
use k8s_openapi::api::autoscaling::v1::Scale;
use serde_json::json;
use std::time::Duration;
use windlass_tests::namespace::with_namespace;
use windlass_tests::service::{self, Service};

const PATIENCE: Duration = Duration::from_secs(90);

#[test]
fn replicas_follow_the_scale_subresource() -> Result<()> {
    with_namespace("external", |namespace| {
        let mut spec = service::simulated(&[]);
        spec["autoscaling"] = json!({"mode": "External"});
        let service = Service::apply(namespace, "led", &spec)?;
        service.wait_ready(1, PATIENCE)?;
        service.wait_condition("ScalingActive", "False", Some("External"), PATIENCE)?;
        service.scale(2)?;
        service.wait_ready(2, PATIENCE)?;
        let path = format!("/apis/windlass.dev/v1alpha1/namespaces/{}/inferenceservices/led/scale", namespace.name());
        let scale: Scale = serde_json::from_str(&namespace.cluster().kubectl().run(&["get", "--raw", &path])?)?;
        let status = scale.status.context("the scale has no status")?;
        ensure!(status.replicas == 2, "{status:?}");
        let selector = status.selector.context("a HorizontalPodAutoscaler needs a selector")?;
        let pods = namespace.run(&["get", "pods", "--selector", &selector, "-o", "name"])?;
        ensure!(pods.lines().count() == 2, "{selector} selects {pods}");
        Ok(())
    })
}
