//! Mode HPA, and autoscalers of others.

use std::sync::Arc;

use k8s_openapi::api::autoscaling::v2::HorizontalPodAutoscaler;
use serde_json::{Value, json};

use crate::plan::{Kind, Step};
use crate::testing::cluster::Cluster;
use crate::testing::{ServiceBuilder, service};

fn hpa(extra: Value) -> ServiceBuilder {
    let target = json!({"metric": "InterToken", "percentile": 99, "milliseconds": 80});
    let mut autoscaling = json!({"mode": "HPA", "minReplicas": 2, "maxReplicas": 6, "targets": [target]});
    for (field, value) in extra.as_object().expect("fields") {
        autoscaling[field] = value.clone();
    }
    service().with("autoscaling", autoscaling)
}

fn made(cluster: &Cluster) -> Value {
    serde_json::to_value(cluster.observed.autoscalers[0].as_ref()).expect("json")
}

fn foreign(kind: &str, target: &str, name: &str) -> Arc<HorizontalPodAutoscaler> {
    let group = if kind == "Deployment" { "apps/v1" } else { "windlass.dev/v1alpha1" };
    foreign_of(group, kind, target, name)
}

fn foreign_of(version: &str, kind: &str, target: &str, name: &str) -> Arc<HorizontalPodAutoscaler> {
    let target = json!({"apiVersion": version, "kind": kind, "name": target});
    let object = json!({"metadata": {"name": name}, "spec": {"maxReplicas": 9, "scaleTargetRef": target}});
    Arc::new(serde_json::from_value(object).expect("an autoscaler"))
}

#[test]
fn targets_become_metrics_of_the_service_and_the_scale_of_the_service_is_the_target() {
    let behavior = json!({"scaleUp": {"maxStep": 3}, "scaleDown": {"stabilizationWindowSeconds": 120}});
    let mut cluster =
        Cluster::new(hpa(json!({"gpuUtilization": {"scaleUpPercent": 70}, "behavior": behavior})).build());
    cluster.reconcile();
    let spec = made(&cluster)["spec"].clone();
    let target = json!({"apiVersion": "windlass.dev/v1alpha1", "kind": "InferenceService", "name": "llama"});
    assert_eq!(spec["scaleTargetRef"], target);
    assert_eq!((&spec["minReplicas"], &spec["maxReplicas"]), (&json!(2), &json!(6)));
    let object = |metric: &str, value: &str| {
        let target_value = json!({"type": "Value", "value": value});
        let object = json!({"describedObject": target, "metric": {"name": metric}, "target": target_value});
        json!({"type": "Object", "object": object})
    };
    let expected =
        [object("windlass_inter_token_p99_milliseconds", "80"), object("windlass_utilization_percent", "70")];
    assert_eq!(spec["metrics"], json!(expected));
    assert_eq!(spec["behavior"]["scaleUp"]["policies"][0]["value"], 3);
    assert_eq!(spec["behavior"]["scaleDown"]["stabilizationWindowSeconds"], 120);
    assert_eq!(spec["behavior"]["scaleDown"]["policies"][0]["value"], 1, "one victim at a time");
    assert_eq!(cluster.reconcile().steps, vec![]);
}

#[test]
fn replicas_follow_the_spec_and_the_autoscaler_goes_with_the_mode() {
    let mut cluster = Cluster::serving(hpa(json!({})).with("replicas", json!(4)).build());
    assert_eq!((cluster.replicas("llama"), cluster.observed.autoscalers.len()), (Some(4), 1));
    cluster.edit(service().with("replicas", json!(4)).build());
    let plan = cluster.reconcile();
    let is_it = |step: &Step| matches!(step, Step::Delete { kind: Kind::HorizontalPodAutoscaler, .. });
    assert!(plan.steps.iter().any(is_it), "{:?}", plan.steps);
}

#[test]
fn what_the_autoscaler_says_of_itself_is_told_and_a_missing_metrics_api_by_name() {
    let condition = |status: &str, reason: &str, message: &str| json!([{"type": "ScalingActive", "status": status, "reason": reason, "message": message}]);
    let missing =
        "unable to fetch metrics from custom metrics API: no custom metrics API (custom.metrics.k8s.io) registered";
    for (conditions, expected) in [
        (json!([]), ("False", "AutoscalerStarting")),
        (condition("True", "ValidMetricFound", "it scales"), ("True", "HPA")),
        (condition("False", "FailedGetObjectMetric", "no value"), ("False", "FailedGetObjectMetric")),
        (condition("False", "FailedGetObjectMetric", missing), ("False", "MetricsAPIMissing")),
    ] {
        let mut cluster = Cluster::serving(hpa(json!({})).build());
        let mut object = made(&cluster);
        object["status"] = json!({"conditions": conditions, "desiredReplicas": 1});
        cluster.observed.autoscalers = vec![Arc::new(serde_json::from_value(object).expect("an autoscaler"))];
        cluster.reconcile();
        let (status, reason) = cluster.condition("ScalingActive");
        assert_eq!((status.as_str(), reason.as_str()), expected);
    }
}

#[test]
fn an_autoscaler_of_somebody_else_is_said_where_it_does_harm() {
    for (kind, target, name, told) in [
        ("InferenceService", "llama", "theirs", "HorizontalPodAutoscaler theirs"),
        ("InferenceService", "llama", "keda-hpa-queue", "ScaledObject queue"),
        ("Deployment", "llama", "theirs", "HorizontalPodAutoscaler theirs"),
        ("Deployment", "llama-spot", "theirs", "HorizontalPodAutoscaler theirs"),
    ] {
        let mut cluster = Cluster::serving(service().builtin(1, 4, 500).build());
        cluster.observed.autoscalers.push(foreign(kind, target, name));
        cluster.reconcile();
        assert_eq!(cluster.condition("ScalingActive").1, "ForeignAutoscaler", "{kind} {target}");
        assert!(cluster.message("ScalingActive").contains(told), "{}", cluster.message("ScalingActive"));
        cluster.pass(5);
        cluster.reconcile();
        let said = cluster.events.iter().filter(|event| event.reason == "ForeignAutoscaler").count();
        assert_eq!(said, 1, "{told}");
        cluster.observed.autoscalers.clear();
        cluster.reconcile();
        assert_ne!(cluster.condition("ScalingActive").1, "ForeignAutoscaler");
    }
}

#[test]
fn autoscalers_of_other_targets_are_nobodys_business() {
    for other in [
        foreign("Deployment", "other", "theirs"),
        foreign("InferenceService", "other", "theirs"),
        foreign_of("serving.kserve.io/v1beta1", "InferenceService", "llama", "theirs"),
        foreign_of("apps.example/v1", "Deployment", "llama", "theirs"),
    ] {
        let mut cluster = Cluster::serving(service().builtin(1, 4, 500).build());
        cluster.observed.autoscalers.push(other);
        cluster.reconcile();
        assert_ne!(cluster.condition("ScalingActive").1, "ForeignAutoscaler");
    }
}

#[test]
fn in_every_mode_a_workload_s_replicas_are_ours_and_in_mode_external_alone_the_service_s_are_not() {
    for (mode, kind, told) in [
        ("Manual", "Deployment", "ForeignAutoscaler"),
        ("Manual", "InferenceService", "ForeignAutoscaler"),
        ("External", "Deployment", "ForeignAutoscaler"),
        ("External", "InferenceService", "External"),
    ] {
        let mut cluster = Cluster::serving(service().with("autoscaling", json!({"mode": mode})).build());
        cluster.observed.autoscalers.push(foreign(kind, "llama", "theirs"));
        cluster.reconcile();
        assert_eq!(cluster.condition("ScalingActive").1, told, "{mode} {kind}");
    }
}

#[test]
fn the_remedy_for_a_foreign_autoscaler_is_what_the_mode_leaves_to_do() {
    for (mode, remedy) in [("External", "let its target be the InferenceService"), ("Manual", "use mode External")] {
        let mut cluster = Cluster::new(service().with("autoscaling", json!({"mode": mode})).build());
        cluster.observed.autoscalers.push(foreign("Deployment", "llama", "theirs"));
        cluster.reconcile();
        assert!(cluster.message("ScalingActive").contains(remedy), "{}", cluster.message("ScalingActive"));
    }
}
