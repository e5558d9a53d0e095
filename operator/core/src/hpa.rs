//! HorizontalPodAutoscalers: ours of mode HPA, and those of others that set the same replicas.

use std::sync::Arc;

use k8s_openapi::api::autoscaling::v2::{HorizontalPodAutoscaler, HorizontalPodAutoscalerCondition};

use crate::fleet::is_owned;
use crate::names::WorkloadKind;
use crate::observed::Observed;
use crate::validate::ValidatedService;

/// What the HorizontalPodAutoscaler's controller answers where nobody serves custom metrics.
const NO_METRICS_API: [&str; 2] = ["no custom metrics API", "no known available metric versions"];
/// How KEDA's ScaledObjects name the autoscalers they make.
const KEDA: &str = "keda-hpa-";

/// How the autoscaler of mode HPA stands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HpaFinding {
    /// It can decide.
    pub is_active: bool,
    /// A stable CamelCase word: its own, or ours.
    pub reason: String,
    /// In words.
    pub message: String,
}

/// What our autoscaler says of itself.
pub fn finding(service: &ValidatedService, observed: &Observed) -> HpaFinding {
    let say = |is_active, reason: &str, message: &str| HpaFinding {
        is_active,
        reason: reason.to_owned(),
        message: message.to_owned(),
    };
    let ours = observed.autoscalers.iter().find(|found| is_owned(&found.metadata, &service.uid));
    let Some(found) = ours.and_then(|hpa| condition(hpa, "ScalingActive")) else {
        return say(false, "AutoscalerStarting", "the HorizontalPodAutoscaler has not decided anything yet");
    };
    let message = found.message.as_deref().unwrap_or_default();
    if found.status == "True" {
        return say(true, "HPA", message);
    }
    if NO_METRICS_API.iter().any(|words| message.contains(words)) {
        let remedy = "nobody serves custom.metrics.k8s.io: enable the chart's customMetrics, or use mode Builtin";
        return say(false, "MetricsAPIMissing", &format!("{remedy} ({message})"));
    }
    say(false, found.reason.as_deref().unwrap_or("AutoscalerFailed"), message)
}

fn condition<'a>(hpa: &'a HorizontalPodAutoscaler, kind: &str) -> Option<&'a HorizontalPodAutoscalerCondition> {
    hpa.status.as_ref()?.conditions.as_ref()?.iter().find(|found| found.type_ == kind)
}

/// Autoscalers of others that set the replicas of this service or of its workloads, in words.
pub fn foreign(service: &ValidatedService, observed: &Observed) -> Vec<String> {
    let others = observed.autoscalers.iter().filter(|found| !is_owned(&found.metadata, &service.uid));
    let mut told: Vec<String> = others.filter(|hpa| targets(hpa, service)).map(told).collect();
    told.sort();
    told
}

fn told(hpa: &Arc<HorizontalPodAutoscaler>) -> String {
    let name = hpa.metadata.name.as_deref().unwrap_or_default();
    match name.strip_prefix(KEDA) {
        Some(object) => format!("ScaledObject {object}"),
        None => format!("HorizontalPodAutoscaler {name}"),
    }
}

/// Whether the autoscaler's target is the service or one of its workloads.
pub fn targets(hpa: &HorizontalPodAutoscaler, service: &ValidatedService) -> bool {
    let Some(target) = hpa.spec.as_ref().map(|spec| &spec.scale_target_ref) else { return false };
    match target.kind.as_str() {
        "InferenceService" => target.name == service.name,
        "Deployment" => WorkloadKind::ALL.iter().any(|kind| kind.deployment(&service.name) == target.name),
        _ => false,
    }
}
