//! HorizontalPodAutoscalers: ours of mode HPA, and those of others that set the same replicas.

use std::sync::Arc;

use k8s_openapi::api::autoscaling::v2::{HorizontalPodAutoscaler, HorizontalPodAutoscalerCondition};
use windlass_operator_api::GROUP;

use crate::autoscale::policy::Scaling;
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

/// Autoscalers of others that set the same replicas as we do, in words: those of a workload, and those of the service
/// unless they are asked for.
pub fn foreign(service: &ValidatedService, observed: &Observed) -> Vec<String> {
    let is_asked_for = matches!(service.scaling, Scaling::External { .. });
    let others = observed.autoscalers.iter().filter(|found| !is_owned(&found.metadata, &service.uid));
    let is_foreign = |hpa: &&Arc<HorizontalPodAutoscaler>| match Aim::of(hpa, service) {
        Some(Aim::Workload) => true,
        Some(Aim::Service) => !is_asked_for,
        None => false,
    };
    let mut told: Vec<String> = others.filter(is_foreign).map(told).collect();
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

/// Whose replicas an autoscaler sets.
enum Aim {
    /// Those of the service.
    Service,
    /// Those of one of its workloads, which are ours to set.
    Workload,
}

impl Aim {
    fn of(hpa: &HorizontalPodAutoscaler, service: &ValidatedService) -> Option<Aim> {
        let target = &hpa.spec.as_ref()?.scale_target_ref;
        let group = target.api_version.as_deref()?.split_once('/').map(|(group, _)| group)?;
        let is_workload = || WorkloadKind::ALL.iter().any(|kind| kind.deployment(&service.name) == target.name);
        match (group, target.kind.as_str()) {
            (GROUP, "InferenceService") if target.name == service.name => Some(Aim::Service),
            ("apps", "Deployment") if is_workload() => Some(Aim::Workload),
            _ => None,
        }
    }
}
