//! Edits roll, upgrades do not, workloads roll one after the other, and no step loses replicas.

use std::sync::Arc;

use k8s_openapi::api::apps::v1::{Deployment, DeploymentCondition, DeploymentStatus};
use k8s_openapi::api::core::v1::PodTemplateSpec;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use serde_json::{Value, json};
use windlass_operator_api::status::condition;

use crate::names::{DELETION_COST, GIVEN_UP, TEMPLATE_HASH};
use crate::plan::{Kind, Mark, Step};
use crate::pod::Status;
use crate::testing::cluster::Cluster;
use crate::testing::{ServiceBuilder, service, stats};

fn template_hash(cluster: &Cluster, name: &str) -> Option<String> {
    let annotations = cluster.deployment(name)?.metadata.annotations.as_ref()?;
    annotations.get(TEMPLATE_HASH).cloned()
}

/// The template of the Deployment.
fn pods(cluster: &Cluster) -> Option<PodTemplateSpec> {
    cluster.deployment("llama")?.spec.as_ref().map(|spec| spec.template.clone())
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

/// As one was before engines listened at every address of IPv6, too, with the fingerprint that it had by then.
fn earlier(deployment: &mut Deployment, hash: &str) {
    let of_spec = deployment.spec.as_mut().expect("a spec");
    let of_template = of_spec.template.metadata.get_or_insert_default();
    for annotations in [&mut deployment.metadata.annotations, &mut of_template.annotations] {
        annotations.get_or_insert_default().insert(TEMPLATE_HASH.into(), hash.into());
    }
    let containers = &mut of_spec.template.spec.as_mut().expect("pods").containers;
    let arguments = containers.iter_mut().flat_map(|container| container.args.iter_mut().flatten());
    let addresses = arguments.filter(|argument| argument.ends_with("host=::"));
    addresses.for_each(|argument| *argument = argument.replace("::", "0.0.0.0"));
}

#[test]
fn pods_with_an_earlier_operators_arguments_stay_until_the_spec_changes() {
    let mut cluster = Cluster::serving(service().build());
    let now = pods(&cluster);
    earlier(Arc::make_mut(&mut cluster.observed.deployments[0]), "0123456789abcdef");
    for pod in cluster.live() {
        cluster.change_pod(&pod, |pod| {
            let annotations = pod.metadata.annotations.get_or_insert_default();
            annotations.insert(TEMPLATE_HASH.into(), "0123456789abcdef".into());
        });
    }
    let before = pods(&cluster);
    assert_ne!(before, now);
    assert_eq!(cluster.reconcile().steps, vec![]);
    cluster.edit(service().with("replicas", json!(2)).build());
    cluster.converge();
    assert_eq!((pods(&cluster), cluster.replicas("llama")), (before.clone(), Some(2)));
    cluster.edit(service().with("engine", json!({"maxSequences": 4})).build());
    cluster.converge();
    let arguments = serde_json::to_string(&pods(&cluster)).expect("JSON");
    assert!(arguments.contains("--host=::") && !arguments.contains("0.0.0.0"), "{arguments}");
}

#[test]
fn a_template_of_another_operator_is_kept_and_how_it_rolls_follows_the_spec() {
    let spec = |rollout: Value| service().with("rollout", rollout).build();
    let mut cluster = Cluster::serving(spec(json!({"paused": true})));
    let (hash, template) = (template_hash(&cluster, "llama"), pods(&cluster));
    cluster.defaults.image_pull_policy = Some("Always".into());
    assert_eq!(cluster.reconcile().steps, vec![]);
    let told = |cluster: &Cluster| {
        let spec = cluster.deployment("llama").and_then(|found| found.spec.clone()).expect("a spec");
        (spec.paused, spec.progress_deadline_seconds, pace(cluster))
    };
    for (rollout, expected) in [
        (json!({"paused": false}), (None, Some(600), surge())),
        (json!({"strategy": "Drain"}), (None, Some(600), drain())),
        (json!({"progressDeadlineSeconds": 120}), (None, Some(120), surge())),
        (json!({"paused": true}), (Some(true), Some(600), surge())),
    ] {
        cluster.edit(spec(rollout.clone()));
        cluster.reconcile();
        assert_eq!(told(&cluster), expected, "{rollout}");
        assert_eq!((template_hash(&cluster, "llama"), pods(&cluster)), (hash.clone(), template.clone()), "{rollout}");
        assert_eq!(cluster.reconcile().steps, vec![], "{rollout}");
    }
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
fn no_workload_follows_one_that_was_given_up() {
    let mut cluster = Cluster::serving(spot(3, "Prefer").build());
    let before = template_hash(&cluster, "llama-spot");
    cluster.edit(spot(3, "Prefer").with("engine", json!({"maxSequences": 4})).build());
    cluster.reconcile();
    let deployment = std::sync::Arc::make_mut(&mut cluster.observed.deployments[0]);
    deployment.metadata.annotations.get_or_insert_default().insert(GIVEN_UP.into(), "true".into());
    deployment.spec.get_or_insert_default().paused = Some(true);
    deployment.status = Some(DeploymentStatus {
        observed_generation: deployment.metadata.generation,
        replicas: Some(1),
        updated_replicas: Some(0),
        ..DeploymentStatus::default()
    });
    cluster.reconcile();
    assert_eq!(template_hash(&cluster, "llama-spot"), before);
}

#[test]
fn templates_changed_by_hand_are_mended_one_after_the_other() {
    let mut cluster = Cluster::serving(spot(3, "Prefer").build());
    let image = |cluster: &Cluster, name: &str| {
        let pod = cluster.deployment(name).and_then(|found| found.spec.clone()?.template.spec).expect("a pod");
        pod.containers[0].image.clone().unwrap_or_default()
    };
    for deployment in &mut cluster.observed.deployments {
        let spec = std::sync::Arc::make_mut(deployment).spec.as_mut();
        spec.and_then(|spec| spec.template.spec.as_mut()).expect("a pod").containers[0].image = Some("evil:1".into());
    }
    let own = "windlass-engine:1";
    cluster.reconcile();
    assert_eq!((image(&cluster, "llama").as_str(), image(&cluster, "llama-spot").as_str()), (own, "evil:1"));
    cluster.converge();
    assert_eq!((image(&cluster, "llama").as_str(), image(&cluster, "llama-spot").as_str()), (own, own));
}

#[test]
fn a_retired_workload_is_there_until_its_last_pod_leaves() {
    let mut cluster = Cluster::serving(spot(1, "Prefer").build());
    cluster.carry_out(&Step::Scale { deployment: "llama-spot".into(), replicas: 1 });
    cluster.run_controllers();
    cluster.start_pods();
    cluster.edit(service().build());
    cluster.reconcile();
    cluster.reconcile();
    assert_eq!((cluster.replicas("llama-spot"), cluster.live().len()), (Some(0), 2));
    cluster.run_controllers();
    cluster.reconcile();
    assert_eq!(cluster.replicas("llama-spot"), None);
}

#[test]
fn a_retired_workload_that_has_lost_its_pods_stays_until_others_serve() {
    let mut cluster = Cluster::serving(spot(3, "Require").build());
    for name in cluster.live().into_iter().filter(|name| name.starts_with("llama-spot")) {
        let now = cluster.now;
        cluster.change_pod(&name, |pod| pod.metadata.deletion_timestamp = Some(Time(now)));
    }
    cluster.edit(service().with("replicas", json!(3)).build());
    cluster.reconcile();
    assert_eq!(cluster.replicas("llama-spot"), Some(2));
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
        let serving = cluster.observed.pods.iter().filter(|pod| !pod.is_leaving() && pod.is_ready()).count();
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
        for (index, pod) in pods.iter().enumerate() {
            let mut said = stats();
            said.remaining_tokens = if index == victim { 9 } else { 0 };
            cluster.read(pod, said);
        }
        assert_eq!(cluster.reconcile().steps, vec![], "who is to go has been said");
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
fn where_nothing_serves_no_pod_is_kept_for_want_of_room() {
    let mut cluster = crowded(3, "Surge");
    for name in cluster.live() {
        cluster.change_pod(&name, |pod| pod.status.ready = None);
    }
    cluster.reconcile();
    assert_ne!(cluster.condition(condition::PROGRESSING).1, "NoCapacity");
}

/// What has become of a rollout of three replicas in which an old pod went first.
#[derive(Clone, Copy)]
struct Outcome {
    /// Old pods that are left.
    old: usize,
    is_placed: bool,
    is_ready: bool,
    is_overdue: bool,
}

const IN_VAIN: Outcome = Outcome { old: 2, is_placed: true, is_ready: false, is_overdue: true };

fn became(outcome: Outcome) -> Cluster {
    let mut cluster = crowded(3, "Auto");
    cluster.reconcile();
    let pods = cluster.live();
    let (new, old) = pods.split_last().expect("pods");
    for gone in &old[outcome.old..] {
        let now = cluster.now;
        cluster.change_pod(gone, |pod| pod.metadata.deletion_timestamp = Some(Time(now)));
    }
    cluster.end_pods();
    cluster.change_pod(new, |pod| {
        pod.status = Status::default();
        pod.spec.node_name = outcome.is_placed.then(|| "node".into());
    });
    if outcome.is_ready {
        cluster.start_pod(new);
    }
    told(&mut cluster, outcome.is_overdue);
    cluster
}

/// The Deployment's controller tells how the rollout stands.
fn told(cluster: &mut Cluster, is_overdue: bool) {
    let deployment = std::sync::Arc::make_mut(&mut cluster.observed.deployments[0]);
    let reason = if is_overdue { "ProgressDeadlineExceeded" } else { "ReplicaSetUpdated" };
    let progressing =
        DeploymentCondition { type_: "Progressing".into(), reason: Some(reason.into()), ..Default::default() };
    deployment.status = Some(DeploymentStatus {
        observed_generation: deployment.metadata.generation,
        replicas: Some(3),
        updated_replicas: Some(1),
        conditions: Some(vec![progressing]),
        ..DeploymentStatus::default()
    });
}

fn is_given_up(cluster: &Cluster) -> bool {
    let deployment = cluster.deployment("llama").expect("a workload");
    let is_marked = deployment.metadata.annotations.as_ref().is_some_and(|found| found.contains_key(GIVEN_UP));
    let is_paused = deployment.spec.as_ref().and_then(|spec| spec.paused) == Some(true);
    assert_eq!(is_marked, is_paused);
    is_paused
}

#[test]
fn an_old_pod_that_made_room_in_vain_comes_back_when_the_deadline_has_passed() {
    let mut cluster = became(IN_VAIN);
    let new = cluster.live().pop().expect("a new pod");
    cluster.reconcile();
    assert!(is_given_up(&cluster));
    assert_eq!(cluster.reconcile().steps, vec![], "first the Deployment has to know");
    assert!(cluster.live().contains(&new));
    told(&mut cluster, true);
    let plan = cluster.reconcile();
    let replica_set = format!("llama-{}", template_hash(&cluster, "llama").expect("a hash"));
    assert_eq!(plan.steps, [Step::Withdraw { replica_set }]);
    cluster.end_pods();
    assert!(!cluster.live().contains(&new));
    assert_eq!(cluster.reconcile().steps, vec![], "and stays");
    assert!(is_given_up(&cluster));
    assert_eq!(cluster.condition(condition::PROGRESSING), ("False".into(), "ProgressDeadlineExceeded".into()));
    assert!(cluster.message(condition::PROGRESSING).contains("are back"), "{}", cluster.message("Progressing"));
    let again = service().with("replicas", json!(3)).with("engine", json!({"maxModelTokens": 4096}));
    cluster.edit(again.build());
    cluster.reconcile();
    assert!(!is_given_up(&cluster), "another template is tried");
}

#[test]
fn a_rollout_that_may_yet_come_or_has_cost_nothing_is_not_given_up() {
    for (outcome, why) in [
        (Outcome { is_overdue: false, ..IN_VAIN }, "there is time"),
        (Outcome { is_ready: true, ..IN_VAIN }, "the template starts"),
        (Outcome { is_placed: false, ..IN_VAIN }, "no old pod would find a node either"),
        (Outcome { old: 3, ..IN_VAIN }, "none has gone"),
        (Outcome { old: 0, ..IN_VAIN }, "none is left to be made again"),
    ] {
        let mut cluster = became(outcome);
        cluster.reconcile();
        assert!(!is_given_up(&cluster), "{why}");
    }
}

#[test]
fn the_only_replica_of_a_workload_makes_room_where_the_other_workload_serves() {
    let with = |tokens: i32| spot(2, "Require").with("engine", json!({"maxModelTokens": tokens})).build();
    let mut cluster = Cluster::serving(with(1024));
    assert_eq!((cluster.replicas("llama"), cluster.replicas("llama-spot")), (Some(1), Some(1)));
    cluster.edit(with(2048));
    cluster.reconcile();
    let template = cluster.deployment("llama").and_then(|found| found.spec.clone()).map(|spec| spec.template);
    cluster.strand_new("llama", template.and_then(|template| template.metadata).expect("a template"));
    let other = cluster.live().into_iter().find(|name| name.starts_with("llama-spot")).expect("a spot pod");
    let mut alone = cluster.observed.pods.clone();
    alone.retain(|pod| pod.metadata.name.as_ref() != Some(&other));
    cluster.reconcile();
    assert_eq!(pace(&cluster), drain());
    assert_ne!(cluster.condition(condition::PROGRESSING).1, "NoCapacity");
    cluster.observed.pods = alone;
    cluster.reconcile();
    assert_eq!((pace(&cluster), cluster.condition(condition::PROGRESSING).1.as_str()), (surge(), "NoCapacity"));
}

#[test]
fn a_smaller_number_waits_for_the_pod_that_took_the_place_of_an_old_one() {
    let smaller = |cluster: &mut Cluster| {
        let spec = service().with("replicas", json!(2)).with("rollout", json!({"strategy": "Auto"}));
        cluster.edit(spec.with("engine", json!({"maxModelTokens": 2048})).build());
        cluster.reconcile();
        cluster.replicas("llama")
    };
    let starting = Outcome { is_overdue: false, ..IN_VAIN };
    assert_eq!(smaller(&mut became(starting)), Some(3), "one of two that serve would go");
    assert_eq!(smaller(&mut became(Outcome { is_ready: true, ..starting })), Some(2));
    assert_eq!(smaller(&mut became(Outcome { old: 3, ..starting })), Some(2), "three serve");
    assert_eq!(smaller(&mut became(Outcome { old: 1, is_ready: true, ..starting })), Some(2), "none is starting");
    let mut homeless = became(Outcome { is_placed: false, ..starting });
    let new = homeless.live().pop().expect("a new pod");
    homeless.strand(&new);
    assert_eq!(smaller(&mut homeless), Some(2), "one that has no room is not waited for");
    assert_eq!(smaller(&mut became(IN_VAIN)), Some(2), "nor one that does not come in time");
    let mut paused = became(starting);
    let spec = service().with("replicas", json!(2)).with("rollout", json!({"strategy": "Auto", "paused": true}));
    paused.edit(spec.with("engine", json!({"maxModelTokens": 2048})).build());
    paused.reconcile();
    assert_eq!(paused.replicas("llama"), Some(2), "nor while nothing rolls");
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
