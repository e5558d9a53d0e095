//! Replicas whose layers are divided over several nodes.

use k8s_openapi::api::apps::v1::StatefulSet;
use serde_json::{Value, json};
use std::sync::Arc;

use crate::names::NODES;
use crate::plan::{Object, Step};
use crate::pod::Pod;
use crate::testing::cluster::Cluster;
use crate::testing::restricted::violations;
use crate::testing::{ServiceBuilder, service};

fn divided(nodes: i32) -> ServiceBuilder {
    service().with("parallelism", json!({"pipeline": nodes})).with("replicas", json!(2))
}

/// Gives every pod that has none an address and a UID.
fn address(cluster: &mut Cluster) {
    for name in cluster.live() {
        let last = name.bytes().last().unwrap_or_default() - b'0';
        cluster.change_pod(&name, |pod| {
            pod.metadata.uid = Some(format!("uid-of-{name}"));
            pod.status.pod_ip.get_or_insert(format!("10.0.0.{last}").into());
        });
    }
}

fn made(steps: &[Step]) -> Vec<StatefulSet> {
    let made = |step: &Step| match step {
        Step::Apply(Object::StatefulSet(made)) => Some(made.as_ref().clone()),
        _ => None,
    };
    steps.iter().filter_map(made).collect()
}

/// Two replicas of three nodes, whose workers are there.
fn running() -> Cluster {
    let mut cluster = Cluster::serving(divided(3).build());
    address(&mut cluster);
    assert_eq!(made(&cluster.reconcile().steps).len(), 2);
    cluster
}

#[test]
fn each_leader_gets_workers_once_it_has_an_address() {
    let mut cluster = Cluster::serving(divided(3).build());
    assert_eq!(made(&cluster.reconcile().steps), [], "nobody could join");
    address(&mut cluster);
    let leader = cluster.live()[0].clone();
    let sets = made(&cluster.reconcile().steps);
    assert_eq!(sets.len(), 2);
    let set = serde_json::to_value(&sets[0]).expect("json");
    assert_eq!((&set["spec"]["replicas"], &set["spec"]["ordinals"]["start"]), (&json!(2), &json!(1)));
    let owner = &set["metadata"]["ownerReferences"];
    let expected = json!([{
        "apiVersion": "v1", "kind": "Pod", "name": leader, "uid": format!("uid-of-{leader}"), "controller": true,
    }]);
    assert_eq!(owner, &expected, "they go with their leader and with nothing else");
    assert_eq!(cluster.reconcile().steps, vec![], "and stay");
}

#[test]
fn a_worker_is_its_leader_but_for_what_serves() {
    let cluster = running();
    let pod = cluster.deployment("llama").and_then(|found| found.spec.clone()).expect("a Deployment").template;
    let leader = serde_json::to_value(&pod).expect("json");
    let set: &StatefulSet = &cluster.observed.stateful_sets[0];
    let template = &set.spec.as_ref().expect("a spec").template;
    let worker = serde_json::to_value(template).expect("json");
    let args = |pod: &Value| -> Vec<String> {
        serde_json::from_value(pod["spec"]["containers"][0]["args"].clone()).expect("arguments")
    };
    let [led, leads] = [args(&worker), args(&leader)];
    assert!(leads.contains(&"--pipeline-parallel-size=3".to_owned()), "{leads:?}");
    assert!(leads.contains(&"--master-addr=$(POD_IP)".to_owned()), "{leads:?}");
    let kept: Vec<_> = leads.iter().filter(|argument| !argument.starts_with("--master-addr=")).cloned().collect();
    assert_eq!(led[..kept.len()], kept);
    let own: Vec<_> = led.iter().filter(|argument| !leads.contains(argument)).cloned().collect();
    assert_eq!(own, ["--master-addr=10.0.0.1", "--node-rank=$(NODE_RANK)", "--headless"]);
    assert_eq!(worker["spec"]["volumes"], leader["spec"]["volumes"]);
    let engine = &worker["spec"]["containers"][0];
    for served in ["ports", "startupProbe", "readinessProbe", "livenessProbe"] {
        assert_eq!((&engine[served], leader["spec"]["containers"][0][served].is_null()), (&Value::Null, false));
    }
    let index = json!({"fieldRef": {"fieldPath": "metadata.labels['apps.kubernetes.io/pod-index']"}});
    assert_eq!(engine["env"], json!([{"name": "NODE_RANK", "valueFrom": index}]));
    assert_eq!(worker["spec"]["terminationGracePeriodSeconds"], 30, "nothing is left to finish");
    let whole = serde_json::to_value(set).expect("json");
    let name = cluster.live()[0].clone();
    assert_eq!(whole["spec"]["podManagementPolicy"], "Parallel", "they wait for each other");
    assert_eq!(whole["spec"]["selector"], json!({"matchLabels": {"windlass.dev/leader": name}}));
    assert_eq!(whole["metadata"]["annotations"], json!({"windlass.dev/leader-address": "10.0.0.1"}));
    let own = json!({
        "app.kubernetes.io/instance": "llama", "app.kubernetes.io/managed-by": "windlass-operator",
        "app.kubernetes.io/name": "windlass-worker", "windlass.dev/leader": name,
    });
    assert_eq!(worker["metadata"]["labels"], own);
    let labels = template.metadata.clone().and_then(|metadata| metadata.labels).expect("labels");
    assert!(!labels.contains_key(crate::names::SERVICE_LABEL), "no request may reach it");
    assert_eq!(set.spec.as_ref().expect("a spec").selector.match_labels.as_ref().map(|one| one.len()), Some(1));
    assert_eq!(violations(template.spec.as_ref().expect("a pod")), Vec::<String>::new());
}

#[test]
fn on_gpus_every_node_asks_for_those_that_share_a_layer() {
    let gpus = divided(2).with("accelerator", json!({"type": "NvidiaGPU"}));
    let mut cluster = Cluster::serving(gpus.with("parallelism", json!({"tensor": 4, "pipeline": 2})).build());
    address(&mut cluster);
    let sets = made(&cluster.reconcile().steps);
    assert_eq!(sets.len(), 2);
    let set = serde_json::to_value(&sets[0]).expect("json");
    let deployment = serde_json::to_value(cluster.deployment("llama").expect("a Deployment")).expect("json");
    for workload in [&set, &deployment] {
        let spec = &workload["spec"]["template"]["spec"];
        let engine = &spec["containers"][0];
        assert_eq!(engine["resources"]["limits"]["nvidia.com/gpu"], "4");
        assert_eq!(spec["tolerations"][0]["key"], "nvidia.com/gpu");
        let asked = serde_json::to_string(&engine["args"]).expect("json");
        assert!(
            ["--tensor-parallel-size=4", "--pipeline-parallel-size=2"].iter().all(|flag| asked.contains(flag)),
            "{asked}"
        );
        assert!(!asked.contains("--device"), "{asked}");
    }
}

#[test]
fn a_leader_that_moved_tells_its_workers_and_nothing_else_changes_them() {
    let mut cluster = running();
    let moved = cluster.live()[1].clone();
    cluster.change_pod(&moved, |pod| pod.status.pod_ip = Some("10.0.0.9".into()));
    let sets = made(&cluster.reconcile().steps);
    assert_eq!(sets.len(), 1);
    assert!(serde_json::to_string(&sets[0]).expect("json").contains("--master-addr=10.0.0.9"));
    for set in &mut cluster.observed.stateful_sets {
        Arc::make_mut(set).spec.get_or_insert_default().template.spec.get_or_insert_default().host_network = Some(true);
    }
    assert_eq!(made(&cluster.reconcile().steps), [], "as another version of the operator may have made them");
}

#[test]
fn a_rollout_makes_workers_for_new_leaders_and_leaves_the_old_ones_theirs() {
    let mut cluster = running();
    let before = cluster.observed.stateful_sets.clone();
    cluster.edit(divided(2).build());
    cluster.reconcile();
    cluster.run_controllers();
    address(&mut cluster);
    let sets = made(&cluster.reconcile().steps);
    assert!(!sets.is_empty());
    assert!(sets.iter().all(|set| set.spec.as_ref().and_then(|spec| spec.replicas) == Some(1)), "of the new number");
    assert!(
        before.iter().all(|set| cluster.observed.stateful_sets.contains(set)),
        "streams of old leaders need theirs"
    );
}

#[test]
fn one_node_is_a_replica_by_itself() {
    let mut cluster = Cluster::serving(divided(1).build());
    address(&mut cluster);
    assert_eq!(made(&cluster.reconcile().steps), []);
    for name in cluster.live() {
        let mark = |pod: &mut Pod| pod.metadata.annotations.get_or_insert_default().insert(NODES.into(), "1".into());
        cluster.change_pod(&name, |pod| drop(mark(pod)));
    }
    assert_eq!(made(&cluster.reconcile().steps), [], "nor where it says so");
    let template = serde_json::to_string(&cluster.deployment("llama")).expect("json");
    assert!(!template.contains("pipeline"), "{template}");
}

#[test]
fn what_hinders_a_worker_is_told_as_the_cause() {
    let mut cluster = running();
    let leader = cluster.live()[0].clone();
    cluster.change_pod(&leader, |pod| (pod.status.ready, pod.status.scheduled) = (None, None));
    let condition = json!({
        "type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/1 nodes: Insufficient cpu",
    });
    let worker = json!({"metadata": {"name": "llama-0-1"}, "status": {"conditions": [condition]}});
    cluster.observed.workers = vec![Arc::new(serde_json::from_value(worker).expect("a pod"))];
    cluster.reconcile();
    assert_eq!(cluster.condition("Ready").1, "Unschedulable");
    assert!(cluster.message("Ready").contains("worker llama-0-1: 0/1 nodes"), "{}", cluster.message("Ready"));
}

#[test]
fn only_pods_of_the_service_reach_a_leader() {
    let cluster = running();
    let policy = serde_json::to_value(&cluster.observed.network_policies[0].spec).expect("json");
    let own = json!([{"podSelector": {"matchLabels": {
        "app.kubernetes.io/instance": "llama", "app.kubernetes.io/managed-by": "windlass-operator",
    }}}]);
    let ports = json!([{"port": 29501, "protocol": "TCP"}]);
    let has = |rules: &Value, side: &str| {
        rules.as_array().expect("rules").iter().any(|rule| rule[side] == own && rule["ports"] == ports)
    };
    assert!(has(&policy["ingress"], "from") && has(&policy["egress"], "to"), "{policy}");
}
