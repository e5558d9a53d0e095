//! What the stores leave out of objects: of ten thousand pods, whatever nobody here looks at is tens of megabytes.

use k8s_openapi::api::autoscaling::v2::HorizontalPodAutoscaler;
use k8s_openapi::api::core::v1::{Node, NodeStatus, Pod, PodSpec, PodStatus};
use kube::Resource;
use windlass_operator_core::names::DELETION_COST;

/// What kubectl keeps of its last apply: a copy of the object.
const LAST_APPLIED: &str = "kubectl.kubernetes.io/last-applied-configuration";
/// What our own labels and annotations have in common.
const OURS: &str = "windlass.dev/";

/// Of any object, who owns which field, and what kubectl remembers of it.
pub fn object<K: Resource>(object: &mut K) {
    let meta = object.meta_mut();
    meta.managed_fields = None;
    meta.annotations.iter_mut().for_each(|annotations| drop(annotations.remove(LAST_APPLIED)));
}

/// Of a pod, all but its metadata, where and as whom it runs, and how it and its containers are.
pub fn pod(pod: &mut Pod) {
    object(pod);
    let annotations = pod.metadata.annotations.iter_mut();
    annotations.for_each(|annotations| annotations.retain(|key, _| key.starts_with(OURS) || key == DELETION_COST));
    pod.spec = pod.spec.take().map(|PodSpec { node_name, service_account_name, .. }| PodSpec {
        node_name,
        service_account_name,
        ..PodSpec::default()
    });
    pod.status = pod.status.take().map(|status| PodStatus {
        phase: status.phase,
        pod_ip: status.pod_ip,
        conditions: status.conditions,
        init_container_statuses: status.init_container_statuses,
        container_statuses: status.container_statuses,
        ..PodStatus::default()
    });
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

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_pod_keeps_what_plans_and_readings_look_at() {
        let read = json!({
            "metadata": {
                "name": "p", "namespace": "n", "uid": "u", "labels": {"windlass.dev/workload": "spot", "theirs": "1"},
                "annotations": {"windlass.dev/template-hash": "h", DELETION_COST: "7"},
                "ownerReferences": [{"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "r", "uid": "v"}],
            },
            "spec": {"nodeName": "node-1", "serviceAccountName": "s", "containers": []},
            "status": {
                "phase": "Running", "podIP": "10.0.0.1",
                "conditions": [{"type": "Ready", "status": "True"}],
                "containerStatuses": [{
                    "name": "engine", "image": "i", "imageID": "", "ready": true, "restartCount": 3,
                    "lastState": {"terminated": {"exitCode": 7}},
                }],
            },
        });
        let mut whole = read.clone();
        whole["metadata"]["managedFields"] = json!([{"manager": "kubelet", "fieldsV1": {"f:status": {}}}]);
        whole["metadata"]["annotations"][LAST_APPLIED] = json!("{}");
        whole["metadata"]["annotations"]["k8s.v1.cni.cncf.io/network-status"] = json!("[]");
        whole["spec"]["containers"] = json!([{"name": "engine", "args": ["serve"]}]);
        whole["spec"]["volumes"] = json!([{"name": "scratch", "emptyDir": {}}]);
        whole["status"]["hostIP"] = json!("10.0.0.9");
        let [mut pod, kept]: [Pod; 2] = [whole, read].map(|pod| serde_json::from_value(pod).expect("a pod"));
        super::pod(&mut pod);
        assert_eq!(pod, kept);
    }
}
