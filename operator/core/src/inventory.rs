//! What nodes offer one replica: GPUs by product, memory and number in a node, or a processor's memory.
//!
//! Read from the labels of NVIDIA's GPU feature discovery and from what the device plugin makes allocatable. A GPU split
//! by MIG with strategy `single` is labelled as its slices are; with strategy `mixed` its slices are other resources, which
//! a service has to ask for by their profile. Affinity to nodes is not weighed: a node too many is a smaller error than
//! one too few.

use std::collections::BTreeMap;
use std::sync::Arc;

use k8s_openapi::api::core::v1::{Node, Taint, Toleration};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

use crate::build::affinity::{GPU_MEMORY, GPU_PRODUCT};
use crate::build::pod::{GPU_RESOURCE, SPOT_TAINTS};
use crate::mig::MigProfile;
use crate::quantity;
use crate::validate::{Device, GpuAllocation, ValidatedService};

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

    fn key(&self) -> (String, u64) {
        (self.product.clone(), self.memory)
    }

    /// Its slices.
    fn split(self, profile: &MigProfile) -> GpuKind {
        GpuKind {
            product: profile.of(&self.product),
            memory: profile.memory(),
            in_a_node: self.in_a_node * profile.most_of_a_gpu(),
            ..self
        }
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
    let Device::NvidiaGpu { products, min_memory_mebibytes, allocation, .. } = &service.device else {
        return Vec::new();
    };
    let is_asked = |product: &str| products.is_empty() || products.iter().any(|asked| asked == product);
    let asked = nodes.iter().filter(|node| is_asked(&product_of(node)));
    let mut kinds = together(asked.filter_map(|node| offered(node, allocation)));
    // A node for it may be added once a pod asks for one.
    let known = products.iter().filter_map(|product| Some(GpuKind::absent(product, memory_of(product)?)));
    for kind in known.filter_map(|kind| expected(kind, allocation)) {
        kinds.entry(kind.key()).or_insert(kind);
    }
    let least = min_memory_mebibytes.unwrap_or(0) * MEBIBYTE;
    let mut kinds: Vec<_> = kinds.into_values().filter(|kind| kind.memory >= least).collect();
    // What is there makes what is only known superfluous.
    if kinds.iter().any(|kind| kind.nodes > 0) {
        kinds.retain(|kind| kind.nodes > 0);
    }
    kinds.sort_by(|left, right| (left.memory, &left.product).cmp(&(right.memory, &right.product)));
    kinds
}

/// Each kind once.
fn together(found: impl Iterator<Item = GpuKind>) -> BTreeMap<(String, u64), GpuKind> {
    let mut kinds: BTreeMap<(String, u64), GpuKind> = BTreeMap::new();
    for kind in found {
        let same = kinds.entry(kind.key()).or_insert_with(|| GpuKind { nodes: 0, ..kind.clone() });
        same.in_a_node = same.in_a_node.max(kind.in_a_node);
        same.nodes += kind.nodes;
    }
    kinds
}

/// What a node has for pods that get their GPUs so.
fn offered(node: &Node, allocation: &GpuAllocation) -> Option<GpuKind> {
    match allocation {
        GpuAllocation::Whole => gpu_of(node),
        GpuAllocation::Slice(profile) => slice_of(node, profile),
        // What a driver offers to claims is in ResourceSlices, which are not read.
        GpuAllocation::Claim(_) => None,
    }
}

/// What they would get of GPUs that are known and not there.
fn expected(kind: GpuKind, allocation: &GpuAllocation) -> Option<GpuKind> {
    match allocation {
        GpuAllocation::Whole => Some(kind),
        GpuAllocation::Slice(profile) => Some(kind.split(profile)),
        GpuAllocation::Claim(_) => None,
    }
}

fn gpu_of(node: &Node) -> Option<GpuKind> {
    let (in_a_node, product) = (devices(node, GPU_RESOURCE)?, product_of(node));
    let labelled = label(node, GPU_MEMORY).and_then(|text| text.parse().ok());
    Some(GpuKind { memory: labelled.or_else(|| memory_of(&product))? * MEBIBYTE, product, in_a_node, nodes: 1 })
}

fn slice_of(node: &Node, profile: &MigProfile) -> Option<GpuKind> {
    let in_a_node = devices(node, &profile.resource())?;
    Some(GpuKind { product: profile.of(&product_of(node)), memory: profile.memory(), in_a_node, nodes: 1 })
}

/// How many of a resource of the device plugin a node has, if it has any.
fn devices(node: &Node, resource: &str) -> Option<u32> {
    u32::try_from(allocatable(node, resource)?).ok().filter(|count| *count > 0)
}

fn product_of(node: &Node) -> String {
    label(node, GPU_PRODUCT).unwrap_or("a GPU without a product label").to_owned()
}

fn label<'a>(node: &'a Node, key: &str) -> Option<&'a str> {
    node.metadata.labels.as_ref()?.get(key).map(String::as_str)
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
    use serde_json::{Value, json};

    fn inventory(accelerator: Value, nodes: &[Arc<Node>]) -> Inventory {
        Inventory::of(&service().with("accelerator", accelerator).valid(), nodes)
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
        let two = inventory(json!({"type": "NvidiaGPU", "nvidiaGPU": {"products": ["NVIDIA-L40S"]}}), &nodes).gpus;
        assert_eq!(two[0].in_a_node, 2, "as many as there are, not as anybody builds");
        assert_eq!(chosen(json!({"minMemory": "80Gi"})), [("NVIDIA-H200".to_owned(), 1)]);
        assert_eq!(chosen(json!({"products": ["NVIDIA-H100-80GB-HBM3"]})), [("NVIDIA-H100-80GB-HBM3".to_owned(), 0)]);
        assert_eq!(
            chosen(json!({"products": ["NVIDIA-H100-80GB-HBM3", "NVIDIA-L40S"]})),
            [("NVIDIA-L40S".to_owned(), 1)],
            "what is there makes what is only known superfluous"
        );
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
    fn slices_of_a_split_gpu_are_counted_by_their_profile() {
        let mut split = Node::clone(&gpu_node("NVIDIA-A100-SXM4-80GB", 81_920, 6));
        let offered = split.status.get_or_insert_default().allocatable.get_or_insert_default();
        offered.insert("nvidia.com/mig-1g.10gb".into(), Quantity("9".into()));
        offered.insert("nvidia.com/mig-3g.40gb".into(), Quantity("0".into()));
        let nodes = [Arc::new(split), gpu_node("NVIDIA-L40S", 46_068, 2)];
        let found = |wish: Value| inventory(json!({"type": "NvidiaGPU", "nvidiaGPU": wish}), &nodes).gpus;
        let slices = found(json!({"migProfile": "1g.10gb"}));
        let slice = ("NVIDIA-A100-SXM4-80GB-MIG-1g.10gb", 9_500_000_000, 9, 1);
        assert_eq!(slices.iter().map(told).collect::<Vec<_>>(), [slice]);
        assert!(slices[0].is_slice());
        assert_eq!(found(json!({"migProfile": "1g.10gb", "products": ["NVIDIA-A100-SXM4-80GB"]})), slices);
        assert_eq!(found(json!({"migProfile": "1g.10gb", "products": ["NVIDIA-A30"]})), []);
        assert_eq!(found(json!({"migProfile": "3g.40gb"})), [], "they are all taken away");
        // Of a product without a node, what is known of it.
        let absent = found(json!({"migProfile": "3g.40gb", "products": ["NVIDIA-H100-80GB-HBM3"]}));
        let told: Vec<_> = absent.iter().map(told).collect();
        assert_eq!(told, [("NVIDIA-H100-80GB-HBM3-MIG-3g.40gb", 38_000_000_000, 16, 0)]);
    }

    fn told(kind: &GpuKind) -> (&str, u64, u32, u32) {
        (&kind.product, kind.memory, kind.in_a_node, kind.nodes)
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
        let tolerant = tolerant.valid();
        assert_eq!(Inventory::of(&tolerant, &tainted("team")).gpus.len(), 1);
    }

    #[test]
    fn a_node_counts_where_a_pod_of_the_service_may_run() {
        let plain = || service().with("accelerator", any());
        let tolerating = |toleration: Value| plain().with("scheduling", json!({"tolerations": [toleration]}));
        let spot = |mode: &str| plain().with("spot", json!({"mode": mode}));
        let selecting = |key: &str, value: &str| plain().with("scheduling", json!({"nodeSelector": {key: value}}));
        let taint = |effect: &str| json!({"key": "team", "value": "a", "effect": effect});
        let gke_spot = json!({"key": "cloud.google.com/gke-spot", "value": "true", "effect": "NoSchedule"});
        let gpu = json!({"key": "nvidia.com/gpu", "effect": "NoSchedule"});
        let equal = |key: &str, value: &str, effect: &str| json!({"key": key, "value": value, "effect": effect});
        for (spec, taints, counts) in [
            (plain(), json!([]), true),
            (selecting("nvidia.com/gpu.product", "NVIDIA-L40S"), json!([]), true),
            (selecting("nvidia.com/gpu.product", "NVIDIA-L4"), json!([]), false),
            (selecting("pool", "NVIDIA-L40S"), json!([]), false),
            (selecting("nvidia.com/gpu.product", "NVIDIA-L40S"), json!([taint("NoSchedule")]), false),
            (plain(), json!([taint("NoSchedule")]), false),
            (plain(), json!([taint("NoExecute")]), false),
            (plain(), json!([taint("PreferNoSchedule")]), true),
            (plain(), json!([gpu]), true),
            (plain(), json!([gpu, taint("NoSchedule")]), false),
            (service(), json!([gpu]), false),
            (plain(), json!([gke_spot]), false),
            (spot("Never"), json!([gke_spot]), false),
            (spot("Prefer"), json!([gke_spot]), true),
            (spot("Prefer"), json!([taint("NoSchedule")]), false),
            (tolerating(equal("team", "a", "NoSchedule")), json!([taint("NoSchedule")]), true),
            (tolerating(equal("team", "a", "NoSchedule")), json!([taint("NoExecute")]), false),
            (tolerating(equal("team", "b", "NoSchedule")), json!([taint("NoSchedule")]), false),
            (tolerating(equal("other", "a", "NoSchedule")), json!([taint("NoSchedule")]), false),
            (tolerating(json!({"key": "team", "value": "a"})), json!([taint("NoExecute")]), true),
            (tolerating(json!({"key": "team", "value": "a", "effect": ""})), json!([taint("NoExecute")]), true),
            (tolerating(json!({"key": "team", "operator": "Equal"})), json!([taint("NoSchedule")]), false),
            (tolerating(json!({"key": "other", "operator": "Exists"})), json!([taint("NoSchedule")]), false),
            (tolerating(json!({"operator": "Exists"})), json!([taint("NoSchedule"), gke_spot]), true),
            (
                plain().with("spot", json!({"mode": "Prefer", "tolerations": [{"key": "team", "operator": "Exists"}]})),
                json!([taint("NoSchedule")]),
                true,
            ),
        ] {
            let told = format!("{spec:?} {taints}");
            let mut node = Node::clone(&gpu_node("NVIDIA-L40S", 46_068, 1));
            node.spec = Some(serde_json::from_value(json!({"taints": taints})).expect("a node's spec"));
            let found = Inventory::of(&spec.valid(), &[Arc::new(node)]);
            assert_eq!(found.memory.is_some(), counts, "{told}");
        }
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
