//! Conditions, numbers, events, and when nothing is written.

use serde_json::json;
use windlass_engine_contract::stats::{StartPhases, Stats};
use windlass_operator_api::status::ScalingDecision;

use super::*;
use crate::names::{Reference, ReferenceKind};
use crate::testing::cluster::Cluster;
use crate::testing::{effective, service, stats};

fn reasons(cluster: &Cluster) -> Vec<&str> {
    cluster.events.iter().map(|event| event.reason.as_str()).collect()
}

fn status(cluster: &Cluster) -> &InferenceServiceStatus {
    cluster.service.status.as_ref().expect("a status")
}

#[test]
fn a_service_is_ready_when_what_was_built_is_known_to_be_what_was_asked() {
    let mut cluster = Cluster::new(service().build());
    cluster.reconcile();
    cluster.run_controllers();
    cluster.reconcile();
    assert_eq!(cluster.condition("Ready"), ("False".into(), "Starting".into()));
    assert_eq!(cluster.condition("Reconciling").0, "True");
    cluster.start_pods();
    cluster.run_controllers();
    cluster.reconcile();
    assert_eq!(cluster.condition("Ready"), ("False".into(), "VerifyingConfiguration".into()));
    cluster.read_engines();
    cluster.reconcile();
    assert_eq!(cluster.condition("Ready"), ("True".into(), "Serving".into()));
    assert_eq!(cluster.condition("Reconciling").0, "False");
    assert_eq!(cluster.condition("Progressing"), ("True".into(), "Complete".into()));
    assert_eq!(reasons(&cluster), ["Starting", "VerifyingConfiguration", "Ready"]);
    let status = status(&cluster);
    assert_eq!(status.url.as_deref(), Some("http://llama.demo.svc.cluster.local:8000/v1"));
    assert_eq!(status.selector.as_deref(), Some("windlass.dev/inference-service=llama"));
    assert_eq!((status.replicas, status.ready_replicas, status.available_replicas), (1, 1, 1));
    assert_eq!(status.cold_start.map(|start| start.load_milliseconds), Some(250));
}

#[test]
fn an_engine_that_built_something_else_is_not_ready_and_says_what() {
    let mut cluster = Cluster::serving(service().build());
    let mut said = stats();
    said.effective = Some(windlass_engine_contract::stats::EffectiveConfig { tensor_parallel: 2, ..effective() });
    let pod = cluster.live()[0].clone();
    cluster.read(&pod, said);
    cluster.reconcile();
    assert_eq!(cluster.condition("Ready"), ("False".into(), "EffectiveConfigMismatch".into()));
    assert!(cluster.message("Ready").contains("parallelism.tensor is 2, the spec asks for 1"));
    assert!(cluster.events.last().is_some_and(|event| event.warning));
}

#[test]
fn a_restarted_operator_believes_the_status_until_it_has_read_engines_again() {
    let mut cluster = Cluster::serving(service().with("replicas", json!(2)).build());
    let before = status(&cluster).clone();
    cluster.observed.load = Default::default();
    cluster.reconcile();
    assert_eq!(*status(&cluster), before);
    let [first, second] = <[String; 2]>::try_from(cluster.live()).expect("two pods");
    cluster.read(&first, stats());
    cluster.reconcile();
    assert_eq!(status(&cluster).available_replicas, 2, "the second is not read yet");
    let built = windlass_engine_contract::stats::EffectiveConfig { tensor_parallel: 2, ..effective() };
    cluster.read(&second, windlass_engine_contract::stats::Stats { effective: Some(built), ..stats() });
    cluster.reconcile();
    assert_eq!(status(&cluster).available_replicas, 1, "what is read counts");
    cluster.read(&second, stats());
    cluster.reconcile();
    cluster.edit(service().with("engine", json!({"maxSequences": 4})).build());
    cluster.reconcile();
    assert_eq!(cluster.condition("Ready").0, "False", "not for another spec");
}

#[test]
fn a_restarted_operator_tells_of_the_longest_cold_start_when_it_has_read_all() {
    let starting = |seconds| {
        let phases = StartPhases { download_seconds: 0.0, load_seconds: seconds, warm_seconds: 0.0 };
        Stats { start: Some(phases), ..stats() }
    };
    let mut cluster = Cluster::serving(service().with("replicas", json!(2)).build());
    let [first, second] = <[String; 2]>::try_from(cluster.live()).expect("two pods");
    let told = |cluster: &mut Cluster, pod: &str, seconds| {
        cluster.read(pod, starting(seconds));
        cluster.reconcile();
        status(cluster).cold_start.as_ref().map(|start| start.load_milliseconds)
    };
    told(&mut cluster, &first, 1.0);
    assert_eq!(told(&mut cluster, &second, 3.0), Some(3000));
    cluster.observed.load = Default::default();
    assert_eq!(told(&mut cluster, &first, 1.0), Some(3000), "the other is not read yet");
    assert_eq!(told(&mut cluster, &second, 2.0), Some(2000));
}

#[test]
fn while_an_edit_rolls_the_old_replicas_are_told_of() {
    let mut cluster = Cluster::serving(service().build());
    cluster.edit(service().with("engine", json!({"maxSequences": 4})).build());
    cluster.reconcile();
    assert_eq!(cluster.condition("Ready"), ("False".into(), "RollingOut".into()));
    assert!(cluster.message("Ready").contains("1 of an earlier configuration serve"), "{}", cluster.message("Ready"));
    assert_eq!(cluster.condition("Progressing").1, "RollingOut");
    cluster.converge();
    assert_eq!(cluster.condition("Ready").0, "True");
    assert!(!cluster.events.iter().any(|event| event.warning));
}

#[test]
fn every_replica_that_was_asked_for_counts_and_those_that_load_added_do_not() {
    let lose_one = |cluster: &mut Cluster| {
        let pod = cluster.live()[0].clone();
        cluster.change_pod(&pod, |pod| pod.status = Default::default());
        cluster.reconcile();
        cluster.condition("Ready").0
    };
    let mut manual = Cluster::serving(service().with("replicas", json!(2)).build());
    assert_eq!(lose_one(&mut manual), "False");
    let mut builtin = Cluster::serving(service().builtin(1, 4, 500).build());
    builtin.carry_out(&crate::plan::Step::Scale { deployment: "llama".into(), replicas: 2 });
    builtin.run_controllers();
    builtin.start_pods();
    builtin.read_engines();
    assert_eq!(lose_one(&mut builtin), "True");
}

#[test]
fn no_replicas_are_not_ready() {
    let cluster = Cluster::serving(service().with("replicas", json!(0)).build());
    assert_eq!(cluster.condition("Ready"), ("False".into(), "ScaledToZero".into()));
    assert_eq!(cluster.condition("Reconciling").0, "False");
}

#[test]
fn a_missing_object_is_told_by_field() {
    let mut cluster = Cluster::new(service().build());
    let name = "models".to_owned();
    let kind = ReferenceKind::PersistentVolumeClaim;
    cluster.observed.absent = vec![Reference { kind, name, field: "spec.model.source" }];
    cluster.reconcile();
    assert_eq!(cluster.condition("Ready").1, "ReferenceNotFound");
    assert_eq!(cluster.message("Ready"), "spec.model.source: PersistentVolumeClaim models does not exist");
}

#[test]
fn a_refused_write_is_told_and_the_rest_of_the_status_stands() {
    let mut cluster = Cluster::new(service().build());
    let plan = crate::plan(&cluster.service, &cluster.observed, &cluster.defaults, cluster.now);
    let outcome = Outcome::Failed { attempt: "apply Deployment/llama".into(), message: "quota".into() };
    cluster.publish(&plan, &outcome);
    assert_eq!(cluster.condition("Ready").1, "ApplyFailed");
    assert!(cluster.message("Ready").contains("apply Deployment/llama: quota"));
    assert_eq!(cluster.condition("Reconciling"), ("True".into(), "ApplyFailed".into()));
}

#[test]
fn a_transition_time_is_that_of_the_change_of_status() {
    let mut cluster = Cluster::serving(service().build());
    let ready_since = |cluster: &Cluster| {
        of_type(status(cluster), condition::READY).map(|ready| ready.last_transition_time.0).expect("a condition")
    };
    let before = ready_since(&cluster);
    cluster.pass(100);
    cluster.edit(service().with("replicas", json!(2)).build());
    cluster.converge();
    assert!(ready_since(&cluster) > before, "it was not ready for a moment");
    let before = ready_since(&cluster);
    cluster.pass(100);
    cluster.reconcile();
    assert_eq!(ready_since(&cluster), before);
    assert!(status(&cluster).conditions.iter().all(|condition| condition.observed_generation == Some(2)));
}

#[test]
fn measured_values_alone_are_written_once_a_minute_at_most() {
    let mut cluster = Cluster::serving(service().build());
    cluster.pass(100);
    let pod = cluster.live()[0].clone();
    let before = cluster.status_writes;
    let mut said = stats();
    for second in 0..120 {
        said.uptime_seconds += 1.0;
        said.running = 1 + second % 7;
        cluster.read(&pod, said.clone());
        cluster.reconcile();
        cluster.pass(1);
    }
    assert_eq!(cluster.status_writes - before, 2);
    assert!(status(&cluster).load.as_ref().is_some_and(|load| load.running_requests > 0));
    // The same values again are no news, however late.
    cluster.pass(1000);
    said.uptime_seconds += 1000.0;
    cluster.read(&pod, said.clone());
    cluster.reconcile();
    let before = cluster.status_writes;
    cluster.pass(1000);
    said.uptime_seconds += 1000.0;
    cluster.read(&pod, said);
    cluster.reconcile();
    assert_eq!(cluster.status_writes, before);
}

#[test]
fn a_measured_value_is_written_a_minute_after_the_one_before() {
    for spec in [service(), service().builtin(1, 4, 500)] {
        let mut cluster = Cluster::serving(spec.build());
        let pod = cluster.live()[0].clone();
        let mut said = stats();
        let mut told = Vec::new();
        for (running, wait) in [(1, 100), (2, 59), (3, 1), (4, 59), (5, 1)] {
            cluster.pass(wait);
            said.uptime_seconds += wait as f64;
            said.running = running;
            // The autoscaler has other words for each reading, and the same reason.
            said.utilization = Some(f64::from(running) / 100.0);
            (0..30).for_each(|_| said.time_to_first_token.observe(900.0));
            cluster.read(&pod, said.clone());
            cluster.reconcile();
            told.push(status(&cluster).load.as_ref().map_or(0, |load| load.running_requests));
        }
        assert_eq!(told, [1, 1, 3, 3, 5]);
    }
}

#[test]
fn the_last_scaling_is_that_which_was_done() {
    let mut cluster = overloaded(service().builtin(1, 4, 500).build());
    let last = |cluster: &Cluster| {
        status(cluster).autoscaling.as_ref().and_then(|told| told.last_scale_time.as_ref()).map(|told| told.0)
    };
    let plan = crate::plan(&cluster.service, &cluster.observed, &cluster.defaults, cluster.now);
    cluster.publish(&plan, &Outcome::Failed { attempt: "scale Deployment/llama".into(), message: "quota".into() });
    assert_eq!(last(&cluster), None, "it was not done");
    cluster.reconcile();
    let scaled = cluster.now;
    assert_eq!(last(&cluster), Some(scaled));
    cluster.pass(5);
    cluster.reconcile();
    assert_eq!(status(&cluster).autoscaling.as_ref().map(|told| told.decision), Some(ScalingDecision::Hold));
    assert_eq!(last(&cluster), Some(scaled));
}

#[test]
fn what_tokens_need_is_told_in_percent_of_a_replica() {
    let need = Need { load: 1.504, forecast: 2.25, kv: 0.5, fill: 0.8 };
    let expected =
        TokenNeed { load_percent: 150, forecast_percent: 225, planned_fill_percent: 80, cold_start_seconds: 90 };
    assert_eq!(token_need(need, Duration::from_millis(90_900)), expected);
}

#[test]
fn scaling_by_hand_is_an_event() {
    let mut cluster = Cluster::serving(service().build());
    cluster.edit(service().with("replicas", json!(3)).build());
    cluster.converge();
    assert!(reasons(&cluster).contains(&"ScaledUp"));
    cluster.edit(service().build());
    cluster.converge();
    assert!(reasons(&cluster).contains(&"ScaledDown"));
}

/// A service with a breached target on a busy engine.
fn overloaded(spec: InferenceService) -> Cluster {
    let mut cluster = Cluster::serving(spec);
    let pod = cluster.live()[0].clone();
    let mut said = stats();
    said.uptime_seconds += 30.0;
    said.utilization = Some(0.95);
    said.running = 4;
    (0..30).for_each(|_| said.time_to_first_token.observe(900.0));
    cluster.pass(30);
    cluster.read(&pod, said);
    cluster
}

#[test]
fn the_autoscaler_s_decision_is_explained_and_told_once() {
    let mut cluster = overloaded(service().builtin(1, 4, 500).build());
    cluster.reconcile();
    let decision = status(&cluster).autoscaling.clone().expect("a decision");
    assert_eq!((decision.decision, decision.reason.as_str()), (ScalingDecision::ScaleUp, "TargetBreached"));
    assert_eq!((decision.recommended_replicas, status(&cluster).desired_replicas), (2, 2));
    assert!(decision.message.contains("above 500 ms"), "{}", decision.message);
    assert!(decision.last_scale_time.is_some());
    assert_eq!(cluster.replicas("llama"), Some(2));
    assert_eq!(cluster.condition("ScalingActive"), ("True".into(), "TargetBreached".into()));
    assert!(cluster.message("ScalingActive").contains("spec.replicas is not used"));
    cluster.reconcile();
    assert_eq!(cluster.condition("ScalingActive").1, "AwaitingReplicas");
    assert_eq!(reasons(&cluster).iter().filter(|reason| **reason == "ScaledUp").count(), 1);
}

#[test]
fn in_shadow_the_spec_is_obeyed_and_the_decision_shown() {
    let mut spec = service().builtin(1, 4, 500).build();
    spec.spec.autoscaling.as_mut().expect("autoscaling").shadow = Some(true);
    let mut cluster = overloaded(spec);
    cluster.reconcile();
    let decision = status(&cluster).autoscaling.clone().expect("a decision");
    assert_eq!((decision.recommended_replicas, decision.shadow), (2, true));
    assert_eq!((status(&cluster).desired_replicas, cluster.replicas("llama")), (1, Some(1)));
    assert_eq!(decision.last_scale_time, None);
}

#[test]
fn a_breach_that_is_no_matter_of_capacity_is_a_condition_and_a_warning() {
    let mut cluster = Cluster::serving(service().builtin(1, 4, 500).build());
    let pod = cluster.live()[0].clone();
    let mut said = stats();
    said.uptime_seconds += 30.0;
    said.utilization = Some(0.1);
    said.running = 1;
    (0..30).for_each(|_| said.time_to_first_token.observe(900.0));
    cluster.pass(30);
    cluster.read(&pod, said);
    cluster.reconcile();
    cluster.reconcile();
    assert_eq!(cluster.condition("ScalingActive"), ("True".into(), "LatencyNotCapacity".into()));
    assert_eq!(reasons(&cluster).iter().filter(|reason| **reason == "LatencyNotCapacity").count(), 1);
}

#[test]
fn silence_makes_scaling_inactive() {
    let mut cluster = Cluster::serving(service().builtin(1, 4, 500).build());
    cluster.pass(1000);
    cluster.reconcile();
    assert_eq!(cluster.condition("ScalingActive"), ("False".into(), "StaleMetrics".into()));
    assert_eq!(cluster.condition("Ready").0, "True", "serving is not scaling");
}

#[test]
fn mode_manual_has_no_autoscaling_status() {
    let cluster = Cluster::serving(service().build());
    assert_eq!(status(&cluster).autoscaling, None);
    assert_eq!(cluster.condition("ScalingActive"), ("False".into(), "Manual".into()));
}

#[test]
fn replicas_left_to_another_autoscaler_are_obeyed_and_one_of_them_is_enough_for_ready() {
    let external = |replicas: i32| {
        let mode = json!({"mode": "External"});
        service().with("replicas", json!(replicas)).with("autoscaling", mode).build()
    };
    let mut cluster = Cluster::serving(external(1));
    cluster.edit(external(4));
    cluster.reconcile();
    assert_eq!(cluster.replicas("llama"), Some(4));
    assert_eq!(cluster.condition(condition::SCALING_ACTIVE), ("False".to_owned(), "External".to_owned()));
    assert_eq!(cluster.condition(condition::READY).0, "True", "{}", cluster.message(condition::READY));
}

#[test]
fn what_goes_wrong_is_told_when_it_begins() {
    let with = |kind: &str, status: &str, reason: &str| {
        let since = crate::testing::at(0).to_string();
        let found =
            json!({"type": kind, "status": status, "reason": reason, "message": "", "lastTransitionTime": since});
        let conditions = serde_json::from_value(json!([found])).expect("conditions");
        InferenceServiceStatus { conditions, ..InferenceServiceStatus::default() }
    };
    let told = |before: &InferenceServiceStatus, next: &InferenceServiceStatus| {
        events::of(Some(before), next).into_iter().map(|event| event.reason).collect::<Vec<_>>()
    };
    for (kind, fine, wrong) in [
        (condition::FITS, ("True", "Fits"), ("False", "TooLarge")),
        (condition::SCALING_ACTIVE, ("True", "TargetsHeld"), ("True", "LatencyNotCapacity")),
    ] {
        let [before, after] = [fine, wrong].map(|(status, reason)| with(kind, status, reason));
        assert_eq!(told(&before, &after), [wrong.1]);
        assert_eq!((told(&after, &after), told(&after, &before)), (vec![], vec![]), "{kind}");
    }
}

#[test]
fn a_node_that_is_taken_back_is_told_once() {
    let taken = |nodes: &[&str]| InferenceServiceStatus {
        interrupted_nodes: nodes.iter().map(|node| (*node).to_owned()).collect(),
        ..InferenceServiceStatus::default()
    };
    let told = events::of(Some(&taken(&["a"])), &taken(&["a", "b"]));
    assert!(told.len() == 1 && told[0].message.starts_with("b will be taken back"), "{told:?}");
    assert_eq!(events::of(Some(&taken(&["b"])), &taken(&["b"])), []);
}

#[test]
fn more_replicas_than_serve_are_starting_and_fewer_are_converged_upon() {
    let of = |replicas: i32| service().with("replicas", json!(replicas)).build();
    for (replicas, kind, status, reason) in
        [(3, "Ready", "False", "Starting"), (1, "Reconciling", "True", "Converging")]
    {
        let mut cluster = Cluster::serving(of(2));
        cluster.edit(of(replicas));
        cluster.reconcile();
        assert_eq!(cluster.condition(kind), (status.to_owned(), reason.to_owned()));
    }
}
