//! What nodes offer one replica: GPUs by product, memory and number in a node, or a processor's memory.
//!
//! Read from the labels of NVIDIA's GPU feature discovery and from what the device plugin makes allocatable. A GPU split
//! by MIG with strategy `single` is labelled as its slices are; with strategy `mixed` its slices are other resources, and
//! it offers no GPU here. Affinity to nodes is not weighed: a node too many is a smaller error than one too few.

use std::collections::BTreeMap;
use std::sync::Arc;

use k8s_openapi::api::core::v1::{Node, Taint, Toleration};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

use crate::build::affinity::{GPU_MEMORY, GPU_PRODUCT};
use crate::build::pod::{GPU_RESOURCE, SPOT_TAINTS};
use crate::quantity;
use crate::validate::{Device, ValidatedService};

/// Devices by the name that feature discovery gives them begins with, and their memory in MiB as `nvidia-smi` tells it.
/// For nodes without a memory label, and for products of which there is no node yet.
const HARDWARE: [(&str, u64); 8] = [
    ("NVIDIA-GeForce-RTX-4090", 24_564),
    ("NVIDIA-A100-SXM4-40GB", 40_960),
    ("NVIDIA-A100-PCIE-40GB", 40_960),
    ("NVIDIA-L40S", 46_068),
    ("NVIDIA-A100", 81_920),
    ("NVIDIA-H100-NVL", 95_830),
    ("NVIDIA-H100", 81_559),
    ("NVIDIA-H200", 143_771),
];
/// Taints that come and go with a node's health: what it offers stays.
const HEALTH_TAINTS: &str = "node.kubernetes.io/";
const MEBIBYTE: u64 = 1 << 20;

/// GPUs of one kind.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GpuKind {
    /// Product, as nodes are labelled.
    pub product: String,
    /// Memory of one, bytes.
    pub memory: u64,
    /// Most of them in one node; of a product without a node, as many as anybody builds.
    pub in_a_node: u32,
    /// Nodes that have them; 0 for a product that is asked for and known, but not there.
    pub nodes: u32,
}

impl GpuKind {
    /// Slices of one GPU do not compute one model together.
    pub fn is_slice(&self) -> bool {
        self.product.contains("-MIG-")
    }

    /// Known kinds, the smallest first.
    pub fn known() -> impl Iterator<Item = GpuKind> {
        HARDWARE.into_iter().map(|(product, mebibytes)| GpuKind::absent(product, mebibytes))
    }

    fn absent(product: &str, mebibytes: u64) -> GpuKind {
        GpuKind { product: product.to_owned(), memory: mebibytes * MEBIBYTE, in_a_node: 8, nodes: 0 }
    }
}

/// What nodes that a replica may run on offer it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Inventory {
    /// GPUs, the kind with the least memory first.
    pub gpus: Vec<GpuKind>,
    /// Allocatable memory of the largest node, bytes; `None` without any node.
    pub memory: Option<u64>,
}

impl Inventory {
    /// Of the nodes that `service` may run on.
    pub fn of(service: &ValidatedService, nodes: &[Arc<Node>]) -> Inventory {
        let usable: Vec<&Node> = nodes.iter().map(Arc::as_ref).filter(|node| is_usable(service, node)).collect();
        let memory = usable.iter().filter_map(|node| allocatable(node, "memory")).max();
        Inventory { gpus: gpus(service, &usable), memory }
    }
}

fn gpus(service: &ValidatedService, nodes: &[&Node]) -> Vec<GpuKind> {
    // What a driver offers to claims is in ResourceSlices, which are not read.
    let Device::NvidiaGpu { products, min_memory_mebibytes, claim_template: None, .. } = &service.device else {
        return Vec::new();
    };
    let mut kinds: BTreeMap<(String, u64), GpuKind> = BTreeMap::new();
    let mut add = |kind: GpuKind| {
        let known =
            kinds.entry((kind.product.clone(), kind.memory)).or_insert_with(|| GpuKind { nodes: 0, ..kind.clone() });
        known.in_a_node = known.in_a_node.max(kind.in_a_node);
        known.nodes += kind.nodes;
    };
    nodes.iter().filter_map(|node| gpu_of(node)).for_each(&mut add);
    // A node for it may be added once a pod asks for one.
    let wished = products.iter().filter_map(|product| Some(GpuKind::absent(product, memory_of(product)?)));
    wished.for_each(&mut add);
    let least = min_memory_mebibytes.unwrap_or(0) * MEBIBYTE;
    let is_asked = |kind: &GpuKind| products.is_empty() || products.contains(&kind.product);
    let mut kinds: Vec<_> = kinds.into_values().filter(|kind| is_asked(kind) && kind.memory >= least).collect();
    // What is there makes what is only known superfluous.
    if kinds.iter().any(|kind| kind.nodes > 0) {
        kinds.retain(|kind| kind.nodes > 0);
    }
    kinds.sort_by(|left, right| (left.memory, &left.product).cmp(&(right.memory, &right.product)));
    kinds
}

fn gpu_of(node: &Node) -> Option<GpuKind> {
    let in_a_node = u32::try_from(allocatable(node, GPU_RESOURCE)?).ok().filter(|count| *count > 0)?;
    let label = |key: &str| node.metadata.labels.as_ref()?.get(key).cloned();
    let product = label(GPU_PRODUCT).unwrap_or_else(|| "a GPU without a product label".to_owned());
    let labelled = label(GPU_MEMORY).and_then(|text| text.parse().ok());
    Some(GpuKind { memory: labelled.or_else(|| memory_of(&product))? * MEBIBYTE, product, in_a_node, nodes: 1 })
}

fn memory_of(product: &str) -> Option<u64> {
    HARDWARE.into_iter().find(|(known, _)| product.starts_with(known)).map(|(_, mebibytes)| mebibytes)
}

fn allocatable(node: &Node, resource: &str) -> Option<u64> {
    let amounts = node.status.as_ref()?.allocatable.as_ref()?;
    let Quantity(text) = amounts.get(resource)?;
    quantity::milli(text).map(|thousandths| (thousandths / 1000.0) as u64)
}

/// Whether the service's selector and tolerations, and those that are added for it, let a pod onto the node.
fn is_usable(service: &ValidatedService, node: &Node) -> bool {
    let labels = node.metadata.labels.clone().unwrap_or_default();
    let is_selected = service.scheduling.node_selector.iter().all(|(key, value)| labels.get(key) == Some(value));
    let taints = node.spec.as_ref().and_then(|spec| spec.taints.as_ref());
    is_selected && taints.into_iter().flatten().all(|taint| is_tolerated(service, taint))
}

fn is_tolerated(service: &ValidatedService, taint: &Taint) -> bool {
    let is_own = taint.key == GPU_RESOURCE && matches!(service.device, Device::NvidiaGpu { .. });
    let is_spot = service.spot.has_workload() && SPOT_TAINTS.iter().any(|(key, _)| taint.key == *key);
    let given = || service.scheduling.tolerations.iter().chain(&service.spot.tolerations);
    taint.effect == "PreferNoSchedule"
        || taint.key.starts_with(HEALTH_TAINTS)
        || is_own
        || is_spot
        || given().any(|toleration| tolerates(toleration, taint))
}

fn tolerates(toleration: &Toleration, taint: &Taint) -> bool {
    let same = |own: &Option<String>, other: &str| own.as_deref().is_none_or(|own| own.is_empty() || own == other);
    let exists = toleration.operator.as_deref() == Some("Exists");
    same(&toleration.effect, &taint.effect)
        && same(&toleration.key, &taint.key)
        && (exists || toleration.value.as_deref().unwrap_or("") == taint.value.as_deref().unwrap_or(""))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{gpu_node, service};
    use crate::validate::validate;
    use serde_json::{Value, json};

    fn inventory(accelerator: Value, nodes: &[Arc<Node>]) -> Inventory {
        Inventory::of(&validate(&service().with("accelerator", accelerator).build()).expect("valid"), nodes)
    }

    fn any() -> Value {
        json!({"type": "NvidiaGPU"})
    }

    #[test]
    fn nodes_of_a_kind_are_counted_together_and_the_smallest_comes_first() {
        let nodes = [
            gpu_node("NVIDIA-H200", 143_771, 8),
            gpu_node("NVIDIA-L40S", 46_068, 2),
            gpu_node("NVIDIA-L40S", 46_068, 4),
        ];
        let found = inventory(any(), &nodes).gpus;
        let told: Vec<_> = found.iter().map(|kind| (kind.product.as_str(), kind.in_a_node, kind.nodes)).collect();
        assert_eq!(told, [("NVIDIA-L40S", 4, 2), ("NVIDIA-H200", 8, 1)]);
        assert_eq!(found[0].memory, 46_068 << 20);
    }

    #[test]
    fn products_and_least_memory_choose() {
        let nodes = [gpu_node("NVIDIA-H200", 143_771, 8), gpu_node("NVIDIA-L40S", 46_068, 2)];
        let chosen = |wish: Value| {
            let found = inventory(json!({"type": "NvidiaGPU", "nvidiaGPU": wish}), &nodes).gpus;
            found.into_iter().map(|kind| (kind.product, kind.nodes)).collect::<Vec<_>>()
        };
        assert_eq!(chosen(json!({"products": ["NVIDIA-L40S"]})), [("NVIDIA-L40S".to_owned(), 1)]);
        assert_eq!(chosen(json!({"minMemory": "80Gi"})), [("NVIDIA-H200".to_owned(), 1)]);
        assert_eq!(chosen(json!({"products": ["NVIDIA-H100-80GB-HBM3"]})), [("NVIDIA-H100-80GB-HBM3".to_owned(), 0)]);
        assert_eq!(chosen(json!({"products": ["TPU"]})), [], "of an unknown product without a node nothing is known");
    }

    #[test]
    fn a_node_without_a_memory_label_is_known_by_its_product_and_slices_by_their_name() {
        let mut bare = Node::clone(&gpu_node("NVIDIA-A100-SXM4-40GB", 1, 4));
        bare.metadata.labels.get_or_insert_default().remove(GPU_MEMORY);
        let found = inventory(any(), &[Arc::new(bare), gpu_node("NVIDIA-A100-SXM4-40GB-MIG-1g.5gb", 4864, 7)]).gpus;
        assert_eq!((found[0].is_slice(), found[0].memory), (true, 4864 << 20));
        assert_eq!((found[1].is_slice(), found[1].memory), (false, 40_960 << 20));
    }

    #[test]
    fn a_foreign_taint_keeps_a_node_out_and_a_sick_node_still_counts() {
        let tainted = |key: &str| {
            let mut node = Node::clone(&gpu_node("NVIDIA-L40S", 46_068, 1));
            let taint = Taint { key: key.into(), effect: "NoSchedule".into(), ..Taint::default() };
            node.spec.get_or_insert_default().taints = Some(vec![taint]);
            [Arc::new(node)]
        };
        assert_eq!(inventory(any(), &tainted("nvidia.com/gpu")).gpus.len(), 1);
        assert_eq!(inventory(any(), &tainted("node.kubernetes.io/not-ready")).gpus.len(), 1);
        assert_eq!(inventory(any(), &tainted("team")).gpus, []);
        let mut tolerant = service().with("accelerator", any());
        tolerant = tolerant.with("scheduling", json!({"tolerations": [{"key": "team", "operator": "Exists"}]}));
        let tolerant = validate(&tolerant.build()).expect("valid");
        assert_eq!(Inventory::of(&tolerant, &tainted("team")).gpus.len(), 1);
    }

    #[test]
    fn what_is_claimed_is_not_counted_by_the_device_plugin() {
        let nodes = [gpu_node("NVIDIA-H200", 143_771, 8)];
        let claimed = json!({"type": "NvidiaGPU", "nvidiaGPU": {"resourceClaimTemplateName": "gpus"}});
        assert_eq!(inventory(claimed, &nodes).gpus, []);
    }

    #[test]
    fn the_largest_node_gives_the_memory_of_a_processor() {
        let nodes = [gpu_node("NVIDIA-L40S", 46_068, 1)];
        assert_eq!(inventory(json!({"type": "CPU"}), &nodes), Inventory { gpus: vec![], memory: Some(64 << 30) });
        assert_eq!(inventory(json!({"type": "CPU"}), &[]).memory, None);
    }
}
