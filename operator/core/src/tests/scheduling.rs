//! Where pods go: accelerators, spot, zones.

use k8s_openapi::api::core::v1::TopologySpreadConstraint;
use serde_json::{Value, json};

use super::children::{pod, pod_of, workload};
use crate::names::{WorkloadKind, selector_labels, workload_labels};
use crate::testing::{ServiceBuilder, service};

#[test]
fn an_accelerator_s_needs_are_joined_to_each_of_the_user_s_alternatives() {
    let zone = |name: &str| json!({"matchExpressions": [{"key": "zone", "operator": "In", "values": [name]}]});
    let affinity = json!({"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {
        "nodeSelectorTerms": [zone("a"), zone("b")],
    }}});
    let spec = service()
        .with("scheduling", json!({"affinity": affinity}))
        .with("accelerator", json!({"type": "NvidiaGPU", "nvidiaGPU": {"products": ["H200"]}}));
    let affinity = serde_json::to_value(pod(spec).affinity).expect("json");
    let terms = affinity["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"].clone();
    let keys = |term: &Value| -> Vec<String> {
        let expressions = term["matchExpressions"].as_array().expect("expressions");
        expressions.iter().map(|one| one["key"].as_str().unwrap_or_default().to_owned()).collect()
    };
    let found: Vec<_> = terms.as_array().expect("terms").iter().map(keys).collect();
    assert_eq!(found, [["zone", "nvidia.com/gpu.product"], ["zone", "nvidia.com/gpu.product"]]);
}

#[test]
fn spot_pods_go_where_spot_is_and_the_base_stays_off_it() {
    let with = |mode: &str| {
        service().with("replicas", json!(3)).with(
            "spot",
            json!({"mode": mode, "onDemandBase": 1, "nodeSelector": {"pool": "spot"}, "tolerations": [{"key": "s"}]}),
        )
    };
    let text = |service: ServiceBuilder, name: &str| {
        let pod = pod_of(&workload(service, name));
        (serde_json::to_string(&pod.affinity).expect("json"), pod.tolerations.unwrap_or_default().len())
    };
    let requirement = |operator: &str| format!(r#"{{"key":"pool","operator":"{operator}","values":["spot"]}}"#);
    let (base, tolerated) = text(with("Prefer"), "llama");
    assert!(base.contains(&requirement("NotIn")) && base.contains("required"), "{base}");
    assert_eq!(tolerated, 0);
    let (prefer, tolerated) = text(with("Prefer"), "llama-spot");
    assert!(prefer.contains(&requirement("In")) && !prefer.contains("required"), "{prefer}");
    assert_eq!(tolerated, 1);
    let (require, _) = text(with("Require"), "llama-spot");
    assert!(require.contains(&requirement("In")) && require.contains("required"), "{require}");
}

#[test]
fn without_an_opinion_on_spot_nothing_is_asked_of_nodes() {
    assert_eq!(pod(service()).affinity, None);
    assert!(pod(service().with("spot", json!({"mode": "Never"}))).affinity.is_some());
}

#[test]
fn a_spread_constraint_without_selector_counts_this_service() {
    let constraint = json!({"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule"});
    let pod = pod(service().with("scheduling", json!({"topologySpreadConstraints": [constraint]})));
    let selector = pod.topology_spread_constraints.expect("constraints")[0].label_selector.clone();
    assert_eq!(selector.and_then(|selector| selector.match_labels), Some(selector_labels("llama")));
}

#[test]
fn spot_pods_spread_over_zones_and_nodes_as_far_as_there_are() {
    let spot = || service().with("replicas", json!(3)).with("spot", json!({"mode": "Prefer", "onDemandBase": 1}));
    let spread = |service: ServiceBuilder, name: &str| {
        pod_of(&workload(service, name)).topology_spread_constraints.unwrap_or_default()
    };
    let told = |constraints: &[TopologySpreadConstraint]| -> Vec<String> {
        constraints.iter().map(|one| format!("{} {}", one.topology_key, one.when_unsatisfiable)).collect()
    };
    let added = spread(spot(), "llama-spot");
    assert_eq!(told(&added), ["topology.kubernetes.io/zone ScheduleAnyway", "kubernetes.io/hostname ScheduleAnyway"]);
    let counted = added[0].label_selector.clone().and_then(|selector| selector.match_labels);
    assert_eq!(counted, Some(workload_labels("llama", WorkloadKind::Spot)));
    assert_eq!(spread(spot(), "llama"), [], "the base is spread as the cluster has it");
    let own = json!({"maxSkew": 2, "topologyKey": "topology.kubernetes.io/zone", "whenUnsatisfiable": "DoNotSchedule"});
    let given = spread(spot().with("scheduling", json!({"topologySpreadConstraints": [own]})), "llama-spot");
    assert_eq!(told(&given), ["topology.kubernetes.io/zone DoNotSchedule", "kubernetes.io/hostname ScheduleAnyway"]);
}

#[test]
fn several_gpus_of_a_pod_are_looked_for_where_nvlink_joins_them() {
    let preferred = |tensor: u32| {
        let spec = service().with("accelerator", json!({"type": "NvidiaGPU"}));
        let affinity = serde_json::to_value(pod(spec.with("parallelism", json!({"tensor": tensor}))).affinity);
        affinity.expect("json")["nodeAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"].clone()
    };
    assert_eq!(preferred(1), Value::Null);
    let joined = json!({"matchExpressions": [{"key": "nvidia.com/gpu.clique", "operator": "Exists"}]});
    assert_eq!(preferred(2), json!([{"preference": joined, "weight": 100}]));
}

#[test]
fn a_slice_is_asked_for_by_its_profile() {
    let slice =
        json!({"type": "NvidiaGPU", "nvidiaGPU": {"migProfile": "1g.10gb", "products": ["NVIDIA-A100-SXM4-80GB"]}});
    let pod = serde_json::to_value(pod(service().with("accelerator", slice))).expect("json");
    let asked = json!({"nvidia.com/mig-1g.10gb": "1"});
    assert_eq!(pod["containers"][0]["resources"], json!({"limits": asked, "requests": asked}));
    assert_eq!(pod["tolerations"][0]["key"], "nvidia.com/gpu", "its node is one with GPUs");
    let required = &pod["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"];
    assert_eq!(required["nodeSelectorTerms"][0]["matchExpressions"][0]["key"], "nvidia.com/gpu.product");
}

#[test]
fn claimed_gpus_are_asked_for_by_the_claim_alone() {
    let accelerator = json!({"type": "NvidiaGPU", "nvidiaGPU": {"resourceClaimTemplateName": "two-gpus"}});
    let spec = service().with("accelerator", accelerator).with("parallelism", json!({"tensor": 2}));
    let pod = pod(spec.https());
    assert!(pod.containers[0].args.iter().flatten().any(|argument| argument == "--tensor-parallel-size=2"));
    let pod = serde_json::to_value(pod).expect("json");
    assert_eq!(pod["resourceClaims"], json!([{"name": "gpus", "resourceClaimTemplateName": "two-gpus"}]));
    assert_eq!(pod["containers"][0]["resources"], json!({"claims": [{"name": "gpus"}]}));
    assert_eq!(pod["initContainers"][0]["resources"], json!({}), "fetching needs no GPU");
}
