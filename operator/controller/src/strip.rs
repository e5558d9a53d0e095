//! What the stores leave out of objects, because nobody here looks at it. Of pods it is never even parsed:
//! [`windlass_operator_core::pod`].

use k8s_openapi::api::autoscaling::v2::HorizontalPodAutoscaler;
use k8s_openapi::api::core::v1::{Node, NodeStatus};
use kube::Resource;

/// What kubectl keeps of its last apply: a copy of the object.
const LAST_APPLIED: &str = "kubectl.kubernetes.io/last-applied-configuration";

/// Of any object, who owns which field, and what kubectl remembers of it.
pub fn object<K: Resource>(object: &mut K) {
    let meta = object.meta_mut();
    meta.managed_fields = None;
    meta.annotations.iter_mut().for_each(|annotations| drop(annotations.remove(LAST_APPLIED)));
}

/// Of a node, all but its labels and taints, and what it offers.
pub fn node(node: &mut Node) {
    object(node);
    node.metadata.annotations = None;
    let Some(status) = &mut node.status else { return };
    let allocatable = status.allocatable.take();
    *status = NodeStatus { allocatable, ..NodeStatus::default() };
}

/// Of an autoscaler, what it was told and what it last measured.
pub fn autoscaler(hpa: &mut HorizontalPodAutoscaler) {
    object(hpa);
    hpa.metadata.annotations = None;
    if let Some(status) = &mut hpa.status {
        status.current_metrics = None;
    }
}
