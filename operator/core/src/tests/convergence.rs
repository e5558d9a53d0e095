//! A plan carried out leaves nothing to plan.

use proptest::prelude::*;

use super::children::specs;
use crate::testing::cluster::Cluster;
use crate::testing::service;

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    /// Planning on its own result, before any controller has moved, writes nothing.
    #[test]
    fn planning_again_changes_nothing(spec in specs()) {
        let mut cluster = Cluster::new(spec.build());
        prop_assert!(!cluster.reconcile().steps.is_empty());
        prop_assert_eq!(cluster.reconcile().steps, vec![]);
    }

    /// Once pods serve, a minute of looking writes neither objects nor status.
    #[test]
    fn at_rest_nothing_is_written(spec in specs()) {
        let mut cluster = Cluster::serving(spec.build());
        let (ready, _) = cluster.condition("Ready");
        let is_off = cluster.service.spec.replicas == 0 && cluster.service.spec.autoscaling.is_none();
        prop_assert_eq!(ready, if is_off { "False" } else { "True" }, "{}", cluster.message("Ready"));
        cluster.pass(400);
        cluster.read_engines();
        cluster.reconcile();
        let writes = cluster.status_writes;
        for _ in 0..24 {
            cluster.pass(5);
            cluster.read_engines();
            prop_assert_eq!(cluster.reconcile().steps, vec![]);
        }
        prop_assert_eq!(cluster.status_writes, writes);
    }

    /// From any spec to any other and to rest; what is left is what a fresh start would have made.
    #[test]
    fn the_way_does_not_matter(first in specs(), second in specs()) {
        let mut edited = Cluster::serving(first.build());
        edited.edit(second.clone().build());
        edited.converge();
        edited.pass(400);
        edited.converge();
        let fresh = Cluster::serving(second.build());
        let names = |cluster: &Cluster| {
            let mut names: Vec<_> = cluster.observed.deployments.iter().map(|found| found.metadata.name.clone()).collect();
            names.sort();
            names
        };
        prop_assert_eq!(names(&edited), names(&fresh));
        for name in names(&fresh).into_iter().flatten() {
            let template = |cluster: &Cluster| cluster.deployment(&name).and_then(|found| found.spec.clone()).map(|spec| spec.template);
            prop_assert_eq!(template(&edited), template(&fresh));
            if edited.service.spec.autoscaling.is_none() {
                prop_assert_eq!(edited.replicas(&name), fresh.replicas(&name));
            }
        }
        prop_assert_eq!(edited.condition("Ready"), fresh.condition("Ready"));
    }
}

#[test]
fn a_lost_child_is_made_again_and_a_changed_one_mended() {
    let mut cluster = Cluster::serving(service().build());
    cluster.observed.services.clear();
    assert_eq!(cluster.reconcile().steps.len(), 1);
    let policy = std::sync::Arc::make_mut(&mut cluster.observed.network_policies[0]);
    policy.spec.as_mut().expect("a spec").egress = Some(vec![Default::default()]);
    assert_eq!(cluster.reconcile().steps.len(), 1, "an opened policy is closed again");
    assert_eq!(cluster.reconcile().steps, vec![]);
}

#[test]
fn a_service_that_is_being_deleted_is_left_alone() {
    let mut cluster = Cluster::serving(service().build());
    cluster.service.metadata.deletion_timestamp = Some(windlass_operator_api::status::time(cluster.now));
    cluster.observed.services.clear();
    let writes = cluster.status_writes;
    assert_eq!(cluster.reconcile().steps, vec![]);
    assert_eq!(cluster.status_writes, writes);
}

#[test]
fn a_workload_that_was_deleted_comes_back_as_large_as_it_was() {
    let mut cluster = Cluster::serving(service().builtin(1, 8, 500).build());
    cluster.carry_out(&crate::plan::Step::Scale { deployment: "llama".into(), replicas: 5 });
    cluster.run_controllers();
    cluster.start_pods();
    cluster.read_engines();
    cluster.reconcile();
    cluster.observed.deployments.clear();
    cluster.reconcile();
    assert_eq!(cluster.replicas("llama"), Some(5));
}

#[test]
fn a_service_at_its_minimum_is_looked_at_seldom_and_one_that_may_shrink_often() {
    let mut cluster = Cluster::serving(service().builtin(1, 8, 500).build());
    assert_eq!(cluster.reconcile().requeue_after, cluster.defaults.scrape_idle);
    cluster.carry_out(&crate::plan::Step::Scale { deployment: "llama".into(), replicas: 2 });
    cluster.run_controllers();
    cluster.start_pods();
    cluster.read_engines();
    assert_eq!(cluster.reconcile().requeue_after, cluster.defaults.scrape_active);
}
