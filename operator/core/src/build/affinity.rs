//! Requirements on nodes: those of the accelerator and of spot, joined with the user's own.
//!
//! Node selector terms are alternatives (OR) of conjunctions (AND). To require one more thing is to join it to every
//! alternative the user gave; to require one of several is the product of both lists.

use k8s_openapi::api::core::v1::{
    Affinity, Node, NodeAffinity, NodeSelector, NodeSelectorRequirement, NodeSelectorTerm, PreferredSchedulingTerm,
};
use windlass_operator_api::spot::SpotMode;

use crate::names::WorkloadKind;
use crate::validate::{Device, SpotPolicy, ValidatedService};

/// Labels of GPU feature discovery: product name, memory in MiB.
pub(crate) const GPU_PRODUCT: &str = "nvidia.com/gpu.product";
pub(crate) const GPU_MEMORY: &str = "nvidia.com/gpu.memory";
/// Label of nodes whose GPUs are joined by NVLink: their domain and clique.
const GPU_CLIQUE: &str = "nvidia.com/gpu.clique";

/// Labels by which providers mark spot nodes, each with its value: Karpenter, EKS, GKE, AKS.
pub(crate) const SPOT_LABELS: [(&str, &str); 4] = [
    ("karpenter.sh/capacity-type", "spot"),
    ("eks.amazonaws.com/capacityType", "SPOT"),
    ("cloud.google.com/gke-spot", "true"),
    ("kubernetes.azure.com/scalesetpriority", "spot"),
];

/// The strongest preference that can be told.
const PREFERENCE_WEIGHT: i32 = 100;

/// Conjunctions of which one must hold.
type Alternatives = Vec<Vec<NodeSelectorRequirement>>;

/// The affinity of pods of one workload; `None` where nothing is asked.
pub fn build(service: &ValidatedService, workload: WorkloadKind) -> Option<Affinity> {
    let mut affinity = service.scheduling.affinity.clone().unwrap_or_default();
    require(&mut affinity, vec![gpu(&service.device)]);
    if service.device.tensor() > 1 {
        // Every layer ends with an exchange between GPUs.
        prefer(&mut affinity, vec![vec![exists(GPU_CLIQUE)]]);
    }
    place(&mut affinity, &service.spot, workload);
    (affinity != Affinity::default()).then_some(affinity)
}

fn place(affinity: &mut Affinity, spot: &SpotPolicy, workload: WorkloadKind) {
    match (spot.mode, workload) {
        (None, _) => {}
        (Some(_), WorkloadKind::OnDemand) => require(affinity, off_spot(spot)),
        (Some(SpotMode::Require), WorkloadKind::Spot) => require(affinity, on_spot(spot)),
        (Some(_), WorkloadKind::Spot) if spot.fallback_after.is_some() => require(affinity, on_spot(spot)),
        (Some(SpotMode::Never | SpotMode::Prefer), WorkloadKind::Spot) => prefer(affinity, on_spot(spot)),
    }
}

fn gpu(device: &Device) -> Vec<NodeSelectorRequirement> {
    let Device::NvidiaGpu { products, min_memory_mebibytes, .. } = device else { return Vec::new() };
    let product = (!products.is_empty()).then(|| requirement(GPU_PRODUCT, "In", products.clone()));
    // Gt is the only comparison there is, so "at least" is "greater than one less".
    let memory = min_memory_mebibytes.map(|least| requirement(GPU_MEMORY, "Gt", vec![(least - 1).to_string()]));
    product.into_iter().chain(memory).collect()
}

/// A spot node has all labels the user names, or one of the well-known ones.
fn on_spot(spot: &SpotPolicy) -> Alternatives {
    let is = |key: &str, value: &str| requirement(key, "In", vec![value.to_owned()]);
    if spot.node_selector.is_empty() {
        return SPOT_LABELS.map(|(key, value)| vec![is(key, value)]).to_vec();
    }
    vec![spot.node_selector.iter().map(|(key, value)| is(key, value)).collect()]
}

/// The opposite: a node lacks one of the labels the user names, or has none of the well-known ones.
fn off_spot(spot: &SpotPolicy) -> Alternatives {
    let is_not = |key: &str, value: &str| requirement(key, "NotIn", vec![value.to_owned()]);
    if spot.node_selector.is_empty() {
        return vec![SPOT_LABELS.map(|(key, value)| is_not(key, value)).to_vec()];
    }
    spot.node_selector.iter().map(|(key, value)| vec![is_not(key, value)]).collect()
}

/// Whether `node` is one that [`on_spot`] asks for.
pub(crate) fn is_spot(spot: &SpotPolicy, node: &Node) -> bool {
    let has = |key: &str, value: &str| {
        let labels = node.metadata.labels.as_ref();
        labels.and_then(|labels| labels.get(key)).is_some_and(|found| found == value)
    };
    match spot.node_selector.is_empty() {
        true => SPOT_LABELS.iter().any(|(key, value)| has(key, value)),
        false => spot.node_selector.iter().all(|(key, value)| has(key, value)),
    }
}

fn requirement(key: &str, operator: &str, values: Vec<String>) -> NodeSelectorRequirement {
    NodeSelectorRequirement { key: key.to_owned(), operator: operator.to_owned(), values: Some(values) }
}

fn exists(key: &str) -> NodeSelectorRequirement {
    NodeSelectorRequirement { key: key.to_owned(), operator: "Exists".to_owned(), values: None }
}

/// Adds "one of `alternatives` holds" to what nodes must fulfil.
fn require(affinity: &mut Affinity, alternatives: Alternatives) {
    if alternatives.iter().all(Vec::is_empty) {
        return;
    }
    let node = affinity.node_affinity.get_or_insert_default();
    let given = node.required_during_scheduling_ignored_during_execution.take();
    let terms = given.map(|selector| selector.node_selector_terms).unwrap_or_default();
    let terms = if terms.is_empty() { vec![NodeSelectorTerm::default()] } else { terms };
    let joined = terms.iter().flat_map(|term| alternatives.iter().map(move |extra| join(term, extra)));
    node.required_during_scheduling_ignored_during_execution =
        Some(NodeSelector { node_selector_terms: joined.collect() });
}

/// Adds each of `alternatives` to what nodes should fulfil.
fn prefer(affinity: &mut Affinity, alternatives: Alternatives) {
    let node: &mut NodeAffinity = affinity.node_affinity.get_or_insert_default();
    let preferences = node.preferred_during_scheduling_ignored_during_execution.get_or_insert_default();
    preferences.extend(alternatives.iter().map(|extra| PreferredSchedulingTerm {
        preference: join(&NodeSelectorTerm::default(), extra),
        weight: PREFERENCE_WEIGHT,
    }));
}

fn join(term: &NodeSelectorTerm, extra: &[NodeSelectorRequirement]) -> NodeSelectorTerm {
    let mut joined = term.clone();
    joined.match_expressions.get_or_insert_default().extend_from_slice(extra);
    joined
}
