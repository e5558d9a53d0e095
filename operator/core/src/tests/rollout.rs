//! Edits roll, upgrades do not, workloads roll one after the other, and no step loses replicas.

use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use serde_json::json;
use windlass_operator_api::status::condition;

use crate::names::DELETION_COST;
use crate::plan::{Kind, Mark, Step};
use crate::testing::cluster::Cluster;
use crate::testing::{ServiceBuilder, service, stats};

fn template_hash(cluster: &Cluster, name: &str) -> Option<String> {
    let annotations = cluster.deployment(name)?.metadata.annotations.as_ref()?;
    annotations.get(crate::names::TEMPLATE_HASH).cloned()
}

fn spot(replicas: i32, mode: &str) -> ServiceBuilder {
    service().with("replicas", json!(replicas)).with("spot", json!({"mode": mode, "onDemandBase": 1}))
}

#[test]
fn an_edit_of_any_pod_field_rolls() {
    let edits = [
        ("engine", json!({"maxModelTokens": 2048})),
        ("engine", json!({"image": "other:2"})),
        ("engine", json!({"extraArgs": ["--executor", "sim"]})),
        ("resources", json!({"requests": {"cpu": "1"}})),
        ("scheduling", json!({"nodeSelector": {"a": "b"}})),
        ("auth", json!({"apiKeysSecretRef": {"name": "keys"}})),
        ("imagePullSecrets", json!([{"name": "registry"}])),
        ("drainTimeoutSeconds", json!(10)),
        ("spot", json!({"mode": "Never"})),
        ("model", json!({"source": "pvc://models/llama.gguf", "revision": "2"})),
        ("rollout", json!({"restartedAt": "2026-11-21T19:30:00Z"})),
    ];
    for (field, value) in edits {
        let mut cluster = Cluster::serving(service().build());
        let before = template_hash(&cluster, "llama");
        cluster.edit(service().with(field, value).build());
        cluster.reconcile();
        assert_ne!(template_hash(&cluster, "llama"), before, "{field}");
    }
}

#[test]
fn replicas_autoscaling_and_peers_roll_nothing() {
    let edits = [
        service().with("replicas", json!(3)),
        service().builtin(1, 3, 500),
        service().with("network", json!({"allowFrom": [{"podSelector": {"matchLabels": {"a": "b"}}}]})),
        service().with("rollout", json!({"strategy": "Drain", "progressDeadlineSeconds": 120})),
    ];
    for edit in edits {
        let mut cluster = Cluster::serving(service().build());
        let before = template_hash(&cluster, "llama");
        cluster.edit(edit.build());
        cluster.reconcile();
        assert_eq!(template_hash(&cluster, "llama"), before);
    }
}

#[test]
fn another_default_image_rolls_nothing_until_the_spec_changes() {
    let mut cluster = Cluster::serving(service().build());
    let before = template_hash(&cluster, "llama");
    cluster.defaults.engine_image = "windlass-engine:2".into();
    assert_eq!(cluster.reconcile().steps, vec![]);
    cluster.edit(service().with("replicas", json!(2)).build());
    cluster.converge();
    assert_eq!(template_hash(&cluster, "llama"), before, "a change of replicas is no reason either");
    cluster.edit(service().with("engine", json!({"maxSequences": 4})).build());
    cluster.converge();
    let choices = cluster.service.status.as_ref().and_then(|status| status.choices.clone()).expect("choices");
    assert_eq!(choices.engine_image.as_deref(), Some("windlass-engine:2"));
}

#[test]
fn another_way_to_build_pods_rolls_nothing_and_scaling_still_works() {
    let mut cluster = Cluster::serving(service().build());
    // As if an earlier operator had made the template: the same spec, another result.
    cluster.defaults.image_pull_policy = Some("Always".into());
    assert_eq!(cluster.reconcile().steps, vec![]);
    cluster.edit(service().with("replicas", json!(3)).build());
    let plan = cluster.reconcile();
    assert_eq!(plan.steps, [Step::Scale { deployment: "llama".into(), replicas: 3 }]);
}

#[test]
fn a_template_changed_by_hand_is_mended() {
    let mut cluster = Cluster::serving(service().build());
    let deployment = std::sync::Arc::make_mut(&mut cluster.observed.deployments[0]);
    let pod = deployment.spec.as_mut().and_then(|spec| spec.template.spec.as_mut()).expect("a pod");
    pod.containers[0].image = Some("evil:1".into());
    assert_eq!(cluster.reconcile().steps.len(), 1);
    let pod = cluster.deployment("llama").and_then(|found| found.spec.clone()?.template.spec).expect("a pod");
    assert_eq!(pod.containers[0].image.as_deref(), Some("windlass-engine:1"));
}

#[test]
fn workloads_roll_one_after_the_other() {
    let mut cluster = Cluster::serving(spot(3, "Prefer").build());
    let before = template_hash(&cluster, "llama-spot");
    cluster.edit(spot(3, "Prefer").with("engine", json!({"maxSequences": 4})).build());
    cluster.reconcile();
    assert_eq!(template_hash(&cluster, "llama-spot"), before, "the first workload has not rolled yet");
    cluster.run_controllers();
    cluster.reconcile();
    assert_eq!(template_hash(&cluster, "llama-spot"), before, "old pods of the first are still leaving");
    cluster.converge();
    assert_ne!(template_hash(&cluster, "llama-spot"), before);
    assert_eq!(cluster.condition("Ready").0, "True");
}

#[test]
fn a_workload_that_is_no_longer_wanted_goes_only_when_others_serve() {
    let mut cluster = Cluster::serving(spot(3, "Require").build());
    assert_eq!((cluster.replicas("llama"), cluster.replicas("llama-spot")), (Some(1), Some(2)));
    cluster.edit(service().with("replicas", json!(3)).build());
    cluster.reconcile();
    assert_eq!((cluster.replicas("llama"), cluster.replicas("llama-spot")), (Some(3), Some(2)), "one serves");
    cluster.converge();
    assert_eq!((cluster.replicas("llama"), cluster.deployment("llama-spot")), (Some(3), None));
}

#[test]
fn moving_replicas_between_workloads_keeps_as_many_serving() {
    let mut cluster = Cluster::serving(spot(4, "Prefer").build());
    let base = json!({"mode": "Prefer", "onDemandBase": 3});
    cluster.edit(service().with("replicas", json!(4)).with("spot", base).build());
    for _ in 0..6 {
        cluster.reconcile();
        cluster.run_controllers();
        let serving = cluster
            .observed
            .pods
            .iter()
            .filter(|pod| pod.metadata.deletion_timestamp.is_none() && crate::testing::cluster::is_ready(pod))
            .count();
        // A rolling template replaces pods too; none of that may take a serving pod without another in its place.
        assert!(serving >= 3, "{serving}");
        cluster.start_pods();
        cluster.read_engines();
        cluster.end_pods();
        cluster.pass(5);
    }
    assert_eq!((cluster.replicas("llama"), cluster.replicas("llama-spot")), (Some(3), Some(1)));
}

#[test]
fn the_victim_has_the_fewest_tokens_to_go_then_the_coldest_cache() {
    for (remaining, cached, victim) in
        [([900, 20, 500], [1, 9, 1], 1), ([7, 7, 7], [30, 20, 10], 2), ([0, 0, 5], [4, 9, 0], 0)]
    {
        let mut cluster = Cluster::serving(service().with("replicas", json!(3)).build());
        let pods = cluster.live();
        for (index, pod) in pods.iter().enumerate() {
            let mut said = stats();
            (said.remaining_tokens, said.cached_blocks) = (remaining[index], cached[index]);
            cluster.read(pod, said);
        }
        cluster.edit(service().with("replicas", json!(2)).build());
        let plan = cluster.reconcile();
        let annotate = Step::MarkPod {
            pod: pods[victim].clone(),
            mark: Mark::Annotation(DELETION_COST),
            value: Some("-1".into()),
        };
        assert_eq!(plan.steps, [annotate, Step::Scale { deployment: "llama".into(), replicas: 2 }]);
        cluster.run_controllers();
        assert!(!cluster.live().contains(&pods[victim]));
        assert_eq!(cluster.reconcile().steps, vec![]);
    }
}

#[test]
fn a_pod_that_stays_after_all_loses_its_mark() {
    let mut cluster = Cluster::serving(service().with("replicas", json!(2)).build());
    let pod = cluster.live()[0].clone();
    cluster.change_pod(&pod, |pod| {
        pod.metadata.annotations.get_or_insert_default().insert(DELETION_COST.into(), "-1".into());
    });
    assert_eq!(cluster.reconcile().steps, [Step::MarkPod { pod, mark: Mark::Annotation(DELETION_COST), value: None }]);
}

#[test]
fn a_retired_workload_is_deleted_by_its_uid() {
    let mut cluster = Cluster::serving(spot(1, "Prefer").build());
    let uid = cluster.deployment("llama-spot").and_then(|found| found.metadata.uid.clone()).expect("a UID");
    cluster.edit(service().build());
    let plan = cluster.reconcile();
    assert!(plan.steps.contains(&Step::Delete { kind: Kind::Deployment, name: "llama-spot".into(), uid }));
}

/// (maxSurge, maxUnavailable) of the Deployment.
fn pace(cluster: &Cluster) -> (String, String) {
    let spec = cluster.deployment("llama").and_then(|found| found.spec.clone()).expect("a spec");
    let rolling = spec.strategy.and_then(|strategy| strategy.rolling_update).expect("a rolling update");
    let text = |value: Option<IntOrString>| format!("{:?}", value.expect("a number"));
    (text(rolling.max_surge), text(rolling.max_unavailable))
}

fn surge() -> (String, String) {
    ("Int(1)".into(), "Int(0)".into())
}

fn drain() -> (String, String) {
    ("Int(0)".into(), "Int(1)".into())
}

/// Of so many replicas one has been given a successor that finds no node.
fn crowded(replicas: i32, strategy: &str) -> Cluster {
    let spec = |tokens: i32| {
        let spec = service().with("replicas", json!(replicas)).with("rollout", json!({"strategy": strategy}));
        spec.with("engine", json!({"maxModelTokens": tokens})).build()
    };
    let mut cluster = Cluster::serving(spec(1024));
    cluster.edit(spec(2048));
    cluster.reconcile();
    let template = cluster.deployment("llama").and_then(|found| found.spec.clone()).map(|spec| spec.template);
    cluster.strand_new("llama", template.and_then(|template| template.metadata).expect("a template"));
    cluster
}

#[test]
fn a_rollout_that_finds_no_room_drains_one_pod_at_a_time_where_another_serves() {
    let mut cluster = crowded(3, "Auto");
    assert_eq!(pace(&cluster), surge());
    cluster.reconcile();
    assert_eq!(pace(&cluster), drain());
    cluster.converge();
    assert_eq!(pace(&cluster), surge(), "the next rollout begins as every one");
}

#[test]
fn the_last_pod_is_not_given_up_unless_that_is_asked_for() {
    let mut cluster = crowded(1, "Auto");
    cluster.reconcile();
    assert_eq!((pace(&cluster), cluster.condition(condition::PROGRESSING).1.as_str()), (surge(), "NoCapacity"));
    let mut asked = crowded(1, "Drain");
    asked.reconcile();
    assert_eq!(pace(&asked), drain());
    assert_ne!(asked.condition(condition::PROGRESSING).1, "NoCapacity");
    let mut never = crowded(3, "Surge");
    never.reconcile();
    assert_eq!((pace(&never), never.condition(condition::PROGRESSING).1.as_str()), (surge(), "NoCapacity"));
}

#[test]
fn a_paused_rollout_keeps_pods_and_goes_on_when_it_is_resumed() {
    let spec = |paused: bool, tokens: i32| {
        let spec = service().with("rollout", json!({"paused": paused, "progressDeadlineSeconds": 120}));
        spec.with("engine", json!({"maxModelTokens": tokens})).build()
    };
    let mut cluster = Cluster::serving(spec(false, 1024));
    let is_paused = |cluster: &Cluster| cluster.deployment("llama").and_then(|found| found.spec.as_ref()?.paused);
    let before = template_hash(&cluster, "llama");
    cluster.edit(spec(true, 1024));
    cluster.reconcile();
    assert_eq!((is_paused(&cluster), template_hash(&cluster, "llama")), (Some(true), before));
    cluster.edit(spec(true, 2048));
    cluster.reconcile();
    cluster.reconcile();
    assert_eq!(cluster.condition(condition::PROGRESSING).1, "Paused");
    cluster.edit(spec(false, 2048));
    cluster.reconcile();
    assert_eq!(is_paused(&cluster), None);
    let deadline = cluster.deployment("llama").and_then(|found| found.spec.as_ref()?.progress_deadline_seconds);
    assert_eq!(deadline, Some(120));
}
