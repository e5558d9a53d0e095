//! What is wrong with requests and limits.

use windlass_operator_api::InferenceServiceSpec;
use windlass_operator_api::accelerator::Resources;

use super::Refusal;
use crate::quantity;

/// GPUs, which are derived.
pub fn gpus_in_resources(spec: &InferenceServiceSpec) -> impl Iterator<Item = Refusal> {
    let resources = spec.resources.clone().unwrap_or_default();
    let named = [("spec.resources.requests", resources.requests), ("spec.resources.limits", resources.limits)];
    named.into_iter().flat_map(|(field, amounts)| {
        let gpus = amounts.into_keys().filter(|name| name.starts_with("nvidia.com/"));
        gpus.map(move |resource| Refusal::GpuInResources { field, resource })
    })
}

/// What Kubernetes would refuse in pods.
pub fn requests_beyond_limits(spec: &InferenceServiceSpec) -> impl Iterator<Item = Refusal> {
    let Resources { requests, limits } = spec.resources.clone().unwrap_or_default();
    requests.into_iter().filter_map(move |(resource, request)| {
        let limit = limits.get(&resource)?;
        let is_beyond = quantity::milli(&request.0)? > quantity::milli(&limit.0)?;
        is_beyond.then(|| Refusal::BeyondLimit { resource, request: request.0, limit: limit.0.clone() })
    })
}
