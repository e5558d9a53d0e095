//! The HorizontalPodAutoscaler of mode HPA: it sets `spec.replicas` of the service, by metrics of the service.

use k8s_openapi::api::autoscaling::v2::{
    CrossVersionObjectReference, HPAScalingPolicy, HPAScalingRules, HorizontalPodAutoscaler,
    HorizontalPodAutoscalerBehavior, HorizontalPodAutoscalerSpec, MetricIdentifier, MetricSpec, MetricTarget,
    ObjectMetricSource,
};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use std::time::Duration;
use windlass_operator_api::GROUP;

use super::metadata;
use crate::autoscale::policy::Policy;
use crate::custom_metrics::Metric;
use crate::validate::ValidatedService;

/// Replicas are added at this pace, seconds: the controller's own.
const UP_PERIOD_SECONDS: i32 = 15;
/// One replica drains in this time, seconds, before the next may go.
const DOWN_PERIOD_SECONDS: i32 = 60;

/// The autoscaler that holds `policy`; `by_utilization`: by utilization too.
pub fn build(service: &ValidatedService, policy: &Policy, by_utilization: bool) -> HorizontalPodAutoscaler {
    let latencies = policy.targets.iter().map(|target| {
        (Metric::Latency { metric: target.metric, percentile: target.percentile }, f64::from(target.milliseconds))
    });
    let busy = by_utilization.then_some((Metric::Utilization, policy.scale_up_at * 100.0));
    HorizontalPodAutoscaler {
        metadata: metadata(service, service.name.clone()),
        spec: Some(HorizontalPodAutoscalerSpec {
            scale_target_ref: reference(service),
            min_replicas: Some(policy.min),
            max_replicas: policy.max,
            metrics: Some(latencies.chain(busy).map(|(metric, value)| object(service, &metric, value)).collect()),
            behavior: Some(behavior(policy)),
        }),
        status: None,
    }
}

fn reference(service: &ValidatedService) -> CrossVersionObjectReference {
    CrossVersionObjectReference {
        api_version: Some(format!("{GROUP}/v1alpha1")),
        kind: "InferenceService".into(),
        name: service.name.clone(),
    }
}

fn object(service: &ValidatedService, metric: &Metric, value: f64) -> MetricSpec {
    MetricSpec {
        type_: "Object".into(),
        object: Some(ObjectMetricSource {
            described_object: reference(service),
            metric: MetricIdentifier { name: metric.name(), selector: None },
            target: MetricTarget {
                type_: "Value".into(),
                value: Some(Quantity(format!("{value:.0}"))),
                ..MetricTarget::default()
            },
        }),
        ..MetricSpec::default()
    }
}

fn behavior(policy: &Policy) -> HorizontalPodAutoscalerBehavior {
    let rules = |window: Duration, pods: i32, period: i32| HPAScalingRules {
        stabilization_window_seconds: i32::try_from(window.as_secs()).ok(),
        policies: Some(vec![HPAScalingPolicy { type_: "Pods".into(), value: pods, period_seconds: period }]),
        ..HPAScalingRules::default()
    };
    HorizontalPodAutoscalerBehavior {
        scale_up: Some(rules(policy.up_window, policy.max_step, UP_PERIOD_SECONDS)),
        scale_down: Some(rules(policy.down_window, 1, DOWN_PERIOD_SECONDS)),
    }
}
