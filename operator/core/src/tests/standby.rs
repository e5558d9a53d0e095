//! Replicas to spare: reached by no request, called upon at once, never counted.

use k8s_openapi::api::core::v1::Service;

use crate::names::{DELETION_COST, ROUTED};
use crate::plan::{Mark, Step};
use crate::pod::Status;
use crate::testing::cluster::Cluster;
use crate::testing::{ServiceBuilder, service, stats};

/// Mode Builtin from one to four replicas, with so many to spare.
fn with_standby(replicas: i32) -> ServiceBuilder {
    service().builtin(1, 4, 500).standby(replicas)
}

/// Pods that requests reach, by the Service's own selector.
fn routed(cluster: &Cluster) -> Vec<String> {
    let service: &Service = &cluster.observed.services[0];
    let selector = service.spec.as_ref().and_then(|spec| spec.selector.clone()).expect("a selector");
    let is_selected = |labels: &std::collections::BTreeMap<String, String>| {
        selector.iter().all(|(key, value)| labels.get(key) == Some(value))
    };
    let pods = cluster.observed.pods.iter().filter(|pod| pod.metadata.labels.as_ref().is_some_and(is_selected));
    pods.filter_map(|pod| pod.metadata.name.clone()).collect()
}

/// Every pod that is reached has a queue that breaches the target.
fn flood(cluster: &mut Cluster) {
    for pod in routed(cluster) {
        let mut said = stats();
        (said.waiting, said.running, said.oldest_queue_age_seconds, said.utilization) = (9, 4, 2.0, Some(1.0));
        cluster.read(&pod, said);
    }
}

fn numbers(cluster: &Cluster) -> (i32, i32, i32, Option<i32>) {
    let status = cluster.service.status.clone().expect("a status");
    (status.desired_replicas, status.replicas, status.ready_replicas, status.standby_replicas)
}

#[test]
fn a_spare_is_loaded_reached_by_nobody_and_counted_apart() {
    let mut cluster = Cluster::serving(with_standby(1).build());
    assert_eq!((cluster.live().len(), routed(&cluster).len()), (2, 1));
    assert_eq!(numbers(&cluster), (1, 1, 1, Some(1)));
    assert_eq!(cluster.condition("Ready").0, "True", "{}", cluster.message("Ready"));
    assert_eq!(cluster.condition("Reconciling").0, "False", "{}", cluster.message("Reconciling"));
    cluster.pass(5);
    cluster.read_engines();
    assert_eq!(cluster.reconcile().steps, []);
}

#[test]
fn a_spare_is_called_upon_in_the_look_that_asks_for_more() {
    let mut cluster = Cluster::serving(with_standby(1).build());
    let (first, all) = (routed(&cluster), cluster.live());
    let spare = all.iter().find(|pod| !first.contains(pod)).cloned().expect("a spare");
    cluster.pass(5);
    flood(&mut cluster);
    let steps = cluster.reconcile().steps;
    let call = Step::MarkPod { pod: spare, mark: Mark::Label(ROUTED), value: Some("true".into()) };
    assert!(steps.contains(&call), "{steps:?}");
    assert_eq!((routed(&cluster), cluster.replicas("llama")), (all, Some(3)));
    cluster.run_controllers();
    cluster.start_pods();
    cluster.reconcile();
    assert_eq!((cluster.live().len(), routed(&cluster).len()), (3, 2), "the new one is spared");
}

#[test]
fn what_was_called_upon_gets_time_to_help_before_more_are_asked_for() {
    let mut cluster = Cluster::serving(with_standby(1).build());
    cluster.pass(5);
    flood(&mut cluster);
    cluster.reconcile();
    cluster.run_controllers();
    cluster.start_pods();
    for _ in 0..3 {
        cluster.pass(5);
        flood(&mut cluster);
        cluster.reconcile();
    }
    assert_eq!(numbers(&cluster).0, 2, "{:?}", cluster.service.status.and_then(|status| status.autoscaling));
}

#[test]
fn a_replica_that_is_needed_no_more_is_spared_and_a_spare_goes() {
    let mut cluster = Cluster::serving(with_standby(1).build());
    let spare = cluster.live().into_iter().find(|pod| !routed(&cluster).contains(pod)).expect("a spare");
    let mut two = with_standby(1).build();
    if let Some(autoscaling) = two.spec.autoscaling.as_mut() {
        autoscaling.min_replicas = Some(2);
    }
    cluster.edit(two);
    cluster.converge();
    assert_eq!((cluster.live().len(), numbers(&cluster).0), (3, 2));
    assert!(routed(&cluster).contains(&spare), "it was called upon");
    cluster.edit(with_standby(1).build());
    for _ in 0..40 {
        cluster.pass(20);
        cluster.converge();
    }
    assert_eq!((cluster.live().len(), routed(&cluster).len(), numbers(&cluster).0), (2, 1, 1));
}

#[test]
fn a_replica_that_ends_is_replaced_by_a_spare() {
    let mut cluster = Cluster::serving(with_standby(1).build());
    let first = routed(&cluster);
    cluster.change_pod(&first[0], |pod| pod.status = Status::default());
    cluster.reconcile();
    let serving: Vec<_> = routed(&cluster).into_iter().filter(|pod| *pod != first[0]).collect();
    assert_eq!(serving.len(), 1, "the spare");
}

#[test]
fn all_pods_are_reached_until_each_of_them_has_the_label() {
    let mut cluster = Cluster::serving(with_standby(0).build());
    cluster.edit(with_standby(1).build());
    for _ in 0..20 {
        cluster.reconcile();
        assert!(!routed(&cluster).is_empty(), "somebody is reached at all times");
        cluster.run_controllers();
        cluster.start_pods();
        cluster.read_engines();
        cluster.reconcile();
        assert!(!routed(&cluster).is_empty(), "somebody is reached at all times");
        cluster.end_pods();
    }
    cluster.converge();
    assert_eq!((cluster.live().len(), routed(&cluster).len()), (2, 1));
    cluster.edit(with_standby(0).build());
    cluster.reconcile();
    assert_eq!(routed(&cluster).len(), 2, "spares are reached as soon as none are wanted");
}

#[test]
fn who_came_last_is_spared_and_stays_so() {
    let mut spec = with_standby(1).build();
    spec.spec.autoscaling.as_mut().expect("autoscaling").min_replicas = Some(2);
    let mut cluster = Cluster::serving(spec);
    let pods = cluster.live();
    let start = |cluster: &mut Cluster, pod: &String| {
        cluster.pass(10);
        cluster.start_pod(pod);
        cluster.read_engines();
    };
    for pod in &pods {
        cluster.change_pod(pod, |pod| {
            drop(pod.metadata.labels.get_or_insert_default().insert(ROUTED.into(), "true".into()))
        });
    }
    for index in [0, 2, 1] {
        start(&mut cluster, &pods[index]);
    }
    let spare = Step::MarkPod { pod: pods[1].clone(), mark: Mark::Label(ROUTED), value: Some("false".into()) };
    assert_eq!(cluster.reconcile().steps, [spare]);
    start(&mut cluster, &pods[2]);
    assert_eq!(cluster.reconcile().steps, [], "another that comes changes nothing");
}

#[test]
fn a_spare_goes_before_a_replica_that_has_less_to_lose() {
    let mut cluster = Cluster::serving(with_standby(2).build());
    let reached = routed(&cluster);
    for spare in cluster.live().iter().filter(|pod| !reached.contains(pod)) {
        let mut said = stats();
        (said.remaining_tokens, said.cached_blocks) = (9, 9);
        cluster.read(spare, said);
    }
    cluster.edit(with_standby(1).build());
    let marked = |step: &Step| match step {
        Step::MarkPod { pod, mark: Mark::Annotation(DELETION_COST), .. } => Some(pod.clone()),
        _ => None,
    };
    let marked: Vec<_> = cluster.reconcile().steps.iter().filter_map(marked).collect();
    assert!(marked.len() == 1 && !reached.contains(&marked[0]), "{marked:?} {reached:?}");
}

#[test]
fn a_label_that_somebody_took_off_is_put_back() {
    let mut cluster = Cluster::serving(with_standby(1).build());
    let pod = routed(&cluster)[0].clone();
    cluster.change_pod(&pod, |pod| drop(pod.metadata.labels.as_mut().and_then(|labels| labels.remove(ROUTED))));
    cluster.converge();
    assert_eq!((cluster.live().len(), routed(&cluster).len()), (2, 1));
}

#[test]
fn more_spares_roll_nothing() {
    let mut cluster = Cluster::serving(with_standby(1).build());
    let template = |cluster: &Cluster| cluster.deployment("llama").and_then(|found| Some(found.spec.clone()?.template));
    let before = template(&cluster);
    cluster.edit(with_standby(2).build());
    cluster.converge();
    assert_eq!(template(&cluster), before);
    assert_eq!((cluster.live().len(), routed(&cluster).len()), (3, 1));
}

#[test]
fn in_shadow_nothing_is_spared() {
    let mut shadow = with_standby(1).build();
    if let Some(autoscaling) = shadow.spec.autoscaling.as_mut() {
        autoscaling.shadow = Some(true);
    }
    let cluster = Cluster::serving(shadow);
    assert_eq!((cluster.live().len(), numbers(&cluster).3), (1, None));
    let labels = cluster.observed.pods[0].metadata.labels.clone().unwrap_or_default();
    assert_eq!(labels.get(ROUTED), None);
}
