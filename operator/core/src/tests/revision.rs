//! History, the way back, and upgrades of the engine.

use serde_json::json;

use crate::choice::{Choice, Picked};
use crate::observed::Observed;
use crate::revision::Recipe;
use crate::testing::cluster::Cluster;
use crate::testing::{ServiceBuilder, service};

fn tokens(count: i32) -> ServiceBuilder {
    service().with("engine", json!({"maxModelTokens": count}))
}

fn args(cluster: &Cluster) -> Vec<String> {
    let pod = cluster.deployment("llama").and_then(|found| found.spec.clone()?.template.spec).expect("a pod");
    pod.containers[0].args.clone().unwrap_or_default()
}

fn image(cluster: &Cluster) -> Option<String> {
    cluster.service.status.as_ref()?.choices.as_ref()?.engine_image.clone()
}

fn revision(cluster: &Cluster) -> String {
    cluster.service.status.as_ref().and_then(|status| status.revision.clone()).expect("a revision")
}

/// Names that status tells, newest first.
fn known(cluster: &Cluster) -> Vec<String> {
    let revisions = cluster.service.status.as_ref().map(|status| status.revisions.clone()).unwrap_or_default();
    revisions.into_iter().map(|revision| revision.name).collect()
}

#[test]
fn an_edit_of_pods_is_a_revision_and_one_of_replicas_is_none() {
    let mut cluster = Cluster::serving(tokens(1024).build());
    assert_eq!(known(&cluster), [revision(&cluster)]);
    cluster.edit(tokens(1024).with("replicas", json!(3)).build());
    cluster.converge();
    assert_eq!(known(&cluster).len(), 1);
    cluster.edit(tokens(2048).build());
    cluster.converge();
    assert_eq!((known(&cluster).len(), known(&cluster)[0].clone()), (2, revision(&cluster)));
}

#[test]
fn a_pinned_revision_serves_what_it_served_with_the_image_it_had() {
    let mut cluster = Cluster::serving(tokens(1024).build());
    let first = revision(&cluster);
    cluster.defaults.engine_image = "windlass-engine:2".into();
    cluster.edit(tokens(2048).build());
    cluster.converge();
    assert_eq!(image(&cluster).as_deref(), Some("windlass-engine:2"));
    let pinned = tokens(2048).with("rollout", json!({"pinnedRevision": first})).with("replicas", json!(2));
    cluster.edit(pinned.build());
    cluster.converge();
    assert!(args(&cluster).contains(&"--max-model-len=1024".to_owned()), "{:?}", args(&cluster));
    assert_eq!((image(&cluster).as_deref(), revision(&cluster)), (Some("windlass-engine:1"), first));
    assert_eq!(cluster.live().len(), 2, "replicas follow the spec");
    assert_eq!(cluster.condition("Ready").0, "True", "{}", cluster.message("Ready"));
    assert_eq!((known(&cluster).len(), cluster.reconcile().steps), (2, vec![]));
    cluster.edit(tokens(2048).build());
    cluster.converge();
    assert!(args(&cluster).contains(&"--max-model-len=2048".to_owned()), "unpinned");
}

#[test]
fn a_pinned_revision_keeps_its_spot_workload_and_follows_the_specs_shares() {
    let spot = |base: i32| json!({"mode": "Prefer", "onDemandBase": base, "fallbackAfterSeconds": 60 + base});
    let mut cluster = Cluster::serving(tokens(1024).with("replicas", json!(4)).with("spot", spot(1)).build());
    let first = revision(&cluster);
    cluster.edit(tokens(2048).with("replicas", json!(4)).with("spot", spot(1)).build());
    cluster.converge();
    let pinned = tokens(2048).with("replicas", json!(4)).with("spot", spot(3));
    cluster.edit(pinned.with("rollout", json!({"pinnedRevision": first})).build());
    cluster.converge();
    assert_eq!(revision(&cluster), first);
    assert_eq!((cluster.replicas("llama"), cluster.replicas("llama-spot")), (Some(3), Some(1)));
}

#[test]
fn a_pinned_revision_follows_the_spec_in_all_that_no_pod_is_made_of() {
    let mut cluster = Cluster::serving(tokens(1024).build());
    let first = revision(&cluster);
    cluster.edit(tokens(2048).build());
    cluster.converge();
    let peers = json!([{"ipBlock": {"cidr": "10.0.0.0/8"}}]);
    let pinned = tokens(2048).builtin(3, 4, 500).with("network", json!({"allowFrom": peers}));
    cluster.edit(pinned.with("rollout", json!({"pinnedRevision": first, "progressDeadlineSeconds": 120})).build());
    cluster.converge();
    assert_eq!((revision(&cluster), cluster.replicas("llama")), (first, Some(3)));
    let policy = serde_json::to_value(&cluster.observed.network_policies[0].spec).expect("json");
    assert_eq!(policy["ingress"][0]["from"], peers);
    let deadline = cluster.deployment("llama").and_then(|found| found.spec.as_ref()?.progress_deadline_seconds);
    assert_eq!(deadline, Some(120));
}

#[test]
fn revisions_are_numbered_as_they_come_and_told_newest_first_with_their_image() {
    let mut cluster = Cluster::serving(tokens(1000).build());
    for count in 1001..1003 {
        cluster.defaults.engine_image = format!("windlass-engine:{count}");
        cluster.edit(tokens(count).build());
        cluster.converge();
    }
    let revisions = cluster.service.status.as_ref().map(|status| status.revisions.clone()).unwrap_or_default();
    let told: Vec<_> = revisions.iter().map(|one| (one.number, one.engine_image.as_deref().unwrap_or(""))).collect();
    assert_eq!(told, [(3, "windlass-engine:1002"), (2, "windlass-engine:1001"), (1, "windlass-engine:1")]);
}

#[test]
fn a_revision_s_name_follows_from_what_pods_are_made_of_and_not_from_why() {
    let picked = |tensor: u32, reason: &str| Picked {
        tensor: Some(tensor),
        reason: Some(reason.to_owned()),
        ..Picked::default()
    };
    let name = |spec: ServiceBuilder, tensor: u32, reason: &str| {
        let choice = Choice { image: "windlass-engine:1".into(), picked: picked(tensor, reason) };
        Recipe::of(&spec.build(), &choice).name("llama")
    };
    let first = name(tokens(1024), 2, "it fits");
    assert_eq!(name(tokens(1024), 2, "another node came"), first);
    assert_eq!(name(tokens(1024).with("replicas", json!(3)), 2, "it fits"), first);
    let restarted = json!({"restartedAt": "2026-11-21T19:30:00Z"});
    assert_eq!(
        name(tokens(1024).with("rollout", restarted), 2, "it fits"),
        first,
        "a restart makes the same pods again"
    );
    assert_ne!(name(tokens(1024), 4, "it fits"), first);
    assert_ne!(name(tokens(2048), 2, "it fits"), first);
}

#[test]
fn revisions_of_a_namesake_that_was_deleted_are_nobody_s() {
    let mut cluster = Cluster::serving(tokens(1024).build());
    let first = revision(&cluster);
    cluster.service.metadata.uid = Some("another".into());
    cluster.observed = Observed { revisions: cluster.observed.revisions.clone(), ..Observed::default() };
    cluster.edit(tokens(2048).with("rollout", json!({"pinnedRevision": first})).build());
    cluster.reconcile();
    assert_eq!(cluster.condition("Ready").1, "InvalidSpec");
    cluster.edit(tokens(2048).with("rollout", json!({"revisionHistoryLimit": 0})).build());
    cluster.converge();
    assert_eq!((known(&cluster), cluster.observed.revisions.len()), (vec![revision(&cluster)], 2));
}

#[test]
fn a_revision_that_is_not_there_is_refused_by_name_and_changes_nothing() {
    let mut cluster = Cluster::serving(tokens(1024).build());
    cluster.edit(tokens(2048).with("rollout", json!({"pinnedRevision": "llama-gone"})).build());
    assert_eq!(cluster.reconcile().steps, vec![]);
    assert_eq!(cluster.condition("Ready"), ("False".to_owned(), "InvalidSpec".to_owned()));
    assert!(cluster.message("Ready").contains("spec.rollout.pinnedRevision"), "{}", cluster.message("Ready"));
}

#[test]
fn no_more_earlier_revisions_are_kept_than_asked_for() {
    let kept = |limit: i32| json!({"revisionHistoryLimit": limit});
    let mut cluster = Cluster::serving(tokens(1000).with("rollout", kept(2)).build());
    for count in 1001..1006 {
        cluster.edit(tokens(count).with("rollout", kept(2)).build());
        cluster.converge();
    }
    assert_eq!(known(&cluster).len(), 3);
    cluster.edit(tokens(1005).with("rollout", kept(0)).build());
    cluster.converge();
    cluster.converge();
    assert_eq!(known(&cluster), [revision(&cluster)]);
}

#[test]
fn a_new_default_image_is_taken_at_once_only_where_asked_for_and_in_turn() {
    for (rollout, is_turn, expected) in [
        (json!({}), true, "windlass-engine:1"),
        (json!({"engineUpgrade": "OnSpecChange"}), true, "windlass-engine:1"),
        (json!({"engineUpgrade": "Automatic"}), false, "windlass-engine:1"),
        (json!({"engineUpgrade": "Automatic", "paused": true}), true, "windlass-engine:1"),
        (json!({"engineUpgrade": "Automatic"}), true, "windlass-engine:2"),
    ] {
        let mut cluster = Cluster::serving(service().with("rollout", rollout.clone()).build());
        cluster.defaults.engine_image = "windlass-engine:2".into();
        cluster.observed.is_upgrade_turn = is_turn;
        cluster.converge();
        assert_eq!(image(&cluster).as_deref(), Some(expected), "{rollout} {is_turn}");
        assert_eq!(cluster.condition("Ready").0, "True");
    }
}

#[test]
fn an_upgrade_leaves_a_revision_to_go_back_to() {
    let mut cluster = Cluster::serving(service().with("rollout", json!({"engineUpgrade": "Automatic"})).build());
    let first = revision(&cluster);
    cluster.defaults.engine_image = "windlass-engine:2".into();
    cluster.observed.is_upgrade_turn = true;
    cluster.converge();
    assert_ne!(revision(&cluster), first);
    let pinned = json!({"engineUpgrade": "Automatic", "pinnedRevision": first});
    cluster.edit(service().with("rollout", pinned).build());
    cluster.converge();
    assert_eq!(image(&cluster).as_deref(), Some("windlass-engine:1"));
}
