//! What the status says of pods, load and starts.

use serde_json::json;
use windlass_operator_api::status::{InferenceServiceStatus, Load};

use crate::autoscale::signals::MIN_SAMPLES;
use crate::plan::Step;
use crate::testing::cluster::Cluster;
use crate::testing::{service, stats};
use windlass_engine_contract::stats::{StartPhases, Stats};

fn status(cluster: &Cluster) -> &InferenceServiceStatus {
    cluster.service.status.as_ref().expect("a status")
}

/// Two replicas that serve, a minute later.
fn two() -> Cluster {
    let mut cluster = Cluster::serving(service().with("replicas", json!(2)).build());
    cluster.pass(60);
    cluster
}

/// What the status says of load once the replicas have said this.
fn load(said: [Stats; 2]) -> Load {
    let mut cluster = two();
    for (pod, said) in cluster.live().into_iter().zip(said) {
        cluster.read(&pod, said);
    }
    cluster.reconcile();
    status(&cluster).load.clone().expect("engines were read")
}

fn later(change: impl FnOnce(&mut Stats)) -> Stats {
    let mut said = stats();
    said.uptime_seconds += 60.0;
    change(&mut said);
    said
}

#[test]
fn utilization_is_the_mean_of_the_replicas_that_tell_theirs() {
    let using = |utilization: Option<f64>| later(|said| said.utilization = utilization);
    for (shares, percent) in [
        ([Some(0.5), Some(0.7)], Some(60)),
        ([Some(0.5), None], Some(50)),
        ([None, None], None),
        ([Some(0.0), Some(0.0)], Some(0)),
        ([Some(3.0), Some(3.0)], Some(100)),
    ] {
        assert_eq!(load(shares.map(using)).utilization_percent, percent, "{shares:?}");
    }
}

#[test]
fn a_percentile_is_told_of_enough_requests() {
    for (samples, is_told) in [(MIN_SAMPLES - 1, false), (MIN_SAMPLES, true)] {
        let slow = |count: u64| later(|said| (0..count).for_each(|_| said.time_to_first_token.observe(900.0)));
        let load = load([slow(samples / 2), slow(samples - samples / 2)]);
        assert_eq!(load.time_to_first_token_p95_milliseconds.is_some(), is_told, "{samples}");
        assert_eq!(load.inter_token_p95_milliseconds, None);
    }
}

#[test]
fn the_cold_start_that_is_told_is_the_longest_of_all_phases_together() {
    let phases = |download_seconds, load_seconds, warm_seconds| {
        later(|said| said.start = Some(StartPhases { download_seconds, load_seconds, warm_seconds }))
    };
    for (said, load_milliseconds) in [
        ([phases(1.0, 2.0, 2.0), phases(0.0, 4.0, 0.5)], 2000),
        ([phases(3.0, 1.0, 0.1), phases(0.0, 4.0, 0.0)], 1000),
        ([phases(0.1, 1.0, 3.0), phases(0.0, 4.0, 0.0)], 1000),
        ([phases(0.9, 0.9, 0.9), phases(2.5, 0.1, 0.0)], 900),
        ([phases(0.1, 0.5, 3.0), phases(0.0, 2.0, 1.0)], 500),
        ([phases(3.0, 0.5, 0.1), phases(1.0, 2.0, 0.0)], 500),
    ] {
        let mut cluster = two();
        for (pod, said) in cluster.live().into_iter().zip(said.clone()) {
            cluster.read(&pod, said);
        }
        cluster.reconcile();
        let told = status(&cluster).cold_start.as_ref().map(|start| start.load_milliseconds);
        assert_eq!(told, Some(load_milliseconds), "{said:?}");
    }
}

#[test]
fn an_engine_that_says_it_is_simulated_is_told_so_whoever_asked_for_it() {
    let mut cluster = two();
    let pod = cluster.live().remove(0);
    cluster.read(&pod, later(|said| said.simulated = true));
    cluster.reconcile();
    assert!(cluster.message("Ready").contains("simulated"), "{}", cluster.message("Ready"));
}

#[test]
fn a_workload_that_is_made_is_a_rollout() {
    let mut cluster = Cluster::new(service().build());
    let plan = cluster.reconcile();
    assert!(plan.steps.iter().any(|step| matches!(step, Step::Apply(_))));
    assert_eq!(cluster.condition("Progressing").1, "RollingOut");
}

#[test]
fn spot_replicas_are_counted_where_there_are_any_or_may_be() {
    let told = |spec| status(&Cluster::serving(spec)).spot_replicas;
    let spot = |base: i32| json!({"mode": "Prefer", "onDemandBase": base});
    let of = |base: i32| service().with("replicas", json!(4)).with("spot", spot(base)).build();
    assert_eq!((told(of(1)), told(of(4)), told(service().build())), (Some(3), Some(0), None));
    let mut leaving = Cluster::serving(of(1));
    leaving.edit(service().with("replicas", json!(4)).build());
    leaving.reconcile();
    assert_eq!(status(&leaving).spot_replicas, Some(3), "until they are gone");
}
