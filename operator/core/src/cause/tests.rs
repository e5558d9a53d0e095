//! What the cluster tells about pods that do not serve.

use k8s_openapi::api::apps::v1::DeploymentCondition;
use serde_json::{Value, json};

use windlass_engine_contract::termination::Reason;

use super::*;
use crate::testing::cluster::Cluster;
use crate::testing::{at, service};

/// The Ready condition of a service whose only pod has this status.
fn ready(status: Value) -> (String, String) {
    let mut cluster = starting(status);
    cluster.reconcile();
    (cluster.condition("Ready").1, cluster.message("Ready"))
}

fn starting(status: Value) -> Cluster {
    let mut cluster = Cluster::new(service().build());
    cluster.reconcile();
    cluster.run_controllers();
    change_newest(&mut cluster, status);
    cluster
}

fn change_newest(cluster: &mut Cluster, status: Value) {
    let pod = cluster.live().pop().expect("a pod");
    let status = serde_json::from_value(status).expect("a pod's status");
    cluster.change_pod(&pod, |pod| pod.status = status);
}

fn container(state: Value, last_state: Value) -> Value {
    let container = json!({
        "name": "engine", "image": "engine:1", "imageID": "", "ready": false, "restartCount": 1,
        "state": state, "lastState": last_state,
    });
    json!({"containerStatuses": [container]})
}

fn ended(code: i32, reason: &str, message: &str) -> Value {
    json!({"terminated": {"exitCode": code, "reason": reason, "message": message}})
}

fn last_word(reason: Reason) -> String {
    Termination { reason, message: "needs 9 bytes, has 3".into() }.to_json()
}

#[test]
fn an_engine_s_last_word_becomes_the_condition() {
    for (reason, name, terminal) in [
        (Reason::OutOfMemory, "OutOfMemory", "True"),
        (Reason::ChecksumMismatch, "ChecksumMismatch", "True"),
        (Reason::ModelUnavailable, "ModelUnavailable", "False"),
        (Reason::Internal, "Internal", "False"),
    ] {
        let mut cluster = starting(container(json!({}), ended(14, "Error", &last_word(reason))));
        cluster.reconcile();
        assert_eq!(cluster.condition("Ready"), ("False".into(), name.into()));
        assert!(cluster.message("Ready").contains("needs 9 bytes, has 3"));
        assert_eq!(cluster.condition("Stalled").0, terminal, "{name}");
    }
}

#[test]
fn a_rollout_goes_on_unless_its_new_pod_fails_for_good() {
    for (reason, status, told, text) in [
        (Reason::OutOfMemory, "False", "OutOfMemory", ", which cannot serve: needs 9 bytes, has 3"),
        (Reason::Internal, "True", "RollingOut", ": Internal: needs 9 bytes, has 3"),
    ] {
        let mut cluster = Cluster::serving(service().build());
        cluster.edit(service().with("engine", json!({"maxSequences": 4})).build());
        cluster.reconcile();
        cluster.run_controllers();
        change_newest(&mut cluster, container(json!({}), ended(14, "Error", &last_word(reason))));
        cluster.reconcile();
        assert_eq!(cluster.condition("Progressing"), (status.into(), told.into()));
        assert!(cluster.message("Progressing").ends_with(text), "{}", cluster.message("Progressing"));
    }
}

#[test]
fn a_pod_that_fails_for_good_stalls_nothing_while_as_many_serve_as_ready_is_about() {
    for (mode, ready, stalled) in [("Manual", "False", "True"), ("External", "True", "False")] {
        let spec = service().with("replicas", json!(2)).with("autoscaling", json!({"mode": mode}));
        let mut cluster = Cluster::serving(spec.build());
        change_newest(&mut cluster, container(json!({}), ended(14, "Error", &last_word(Reason::OutOfMemory))));
        cluster.reconcile();
        assert_eq!((cluster.condition("Ready").0, cluster.condition("Stalled").0), (ready.into(), stalled.into()));
    }
}

#[test]
fn the_cause_stays_while_the_container_is_tried_again() {
    let last = ended(12, "Error", &last_word(Reason::ModelInvalid));
    let waiting = json!({"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 20s"}});
    let told = ready(container(waiting, last.clone()));
    assert_eq!(told.0, "ModelInvalid");
    assert_eq!(ready(container(json!({"running": {}}), last.clone())), told);
    assert_eq!(ready(container(last, json!({}))), told);
}

#[test]
fn a_container_without_a_last_word_is_told_by_its_code_and_log() {
    let (reason, message) = ready(container(json!({}), ended(101, "Error", "thread panicked")));
    assert_eq!(reason, "EngineFailed");
    assert!(message.contains("code 101: thread panicked"), "{message}");
    assert_eq!(ready(container(json!({}), ended(137, "OOMKilled", ""))).0, "OutOfMemory");
}

#[test]
fn an_image_that_does_not_come_reads_the_same_in_both_of_its_states() {
    let waiting =
        |reason: &str, message: &str| container(json!({"waiting": {"reason": reason, "message": message}}), json!({}));
    let pulling = ready(waiting("ErrImagePull", "not found"));
    let backing_off =
        ready(waiting("ImagePullBackOff", "Back-off pulling image \"engine:1\": ErrImagePull: not found"));
    assert_eq!(pulling.0, "ImagePullFailed");
    assert!(pulling.1.ends_with("image engine:1 cannot be pulled: not found"), "{}", pulling.1);
    assert_eq!(pulling, backing_off);
    for unexplained in ["", "Back-off pulling image \"engine:1\""] {
        let (_, message) = ready(waiting("ImagePullBackOff", unexplained));
        assert!(message.ends_with("image engine:1 cannot be pulled"), "{message}");
    }
    assert_eq!(ready(waiting("ErrImageNeverPull", "absent")).0, "ImagePullFailed");
    assert_eq!(ready(waiting("CreateContainerConfigError", "no")).0, "CreateContainerConfigError");
    assert_eq!(ready(waiting("ContainerCreating", "")).0, "Starting");
}

#[test]
fn pods_of_the_current_template_come_first() {
    let waiting = |reason: &str| container(json!({"waiting": {"reason": reason}}), json!({}));
    let mut cluster = starting(waiting("RunContainerError"));
    cluster.edit(service().with("drainTimeoutSeconds", json!(10)).build());
    cluster.reconcile();
    cluster.run_controllers();
    let [before, now] = &cluster.live()[..] else { panic!("{:?}", cluster.live()) };
    assert!(before < now);
    cluster.reconcile();
    assert_eq!(cluster.condition("Ready").1, "RunContainerError", "the new one tells nothing yet");
    let status = serde_json::from_value(waiting("CreateContainerError")).expect("a pod's status");
    cluster.change_pod(now, |pod| pod.status = status);
    cluster.reconcile();
    assert_eq!(cluster.condition("Ready").1, "CreateContainerError");
}

#[test]
fn an_unschedulable_pod_is_told_in_the_scheduler_s_words() {
    let condition = json!({
        "type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/1 nodes: Insufficient cpu",
    });
    let (reason, message) = ready(json!({"conditions": [condition]}));
    assert_eq!(reason, "Unschedulable");
    assert!(message.contains("Insufficient cpu"));
}

#[test]
fn a_quota_is_told_without_the_name_of_a_pod_that_never_was() {
    let mut cluster = starting(json!({}));
    let refused = |name: &str| DeploymentCondition {
        type_: "ReplicaFailure".into(),
        status: "True".into(),
        reason: Some("FailedCreate".into()),
        message: Some(format!("pods \"llama-{name}\" is forbidden: exceeded quota: small, used: cpu=1")),
        ..DeploymentCondition::default()
    };
    let mut messages = Vec::new();
    for name in ["abc", "xyz"] {
        let deployment = std::sync::Arc::make_mut(&mut cluster.observed.deployments[0]);
        deployment.status.get_or_insert_default().conditions = Some(vec![refused(name)]);
        cluster.reconcile();
        assert_eq!(cluster.condition("Ready").1, "QuotaExceeded");
        messages.push(cluster.message("Ready"));
    }
    assert!(messages[0].contains("exceeded quota: small"), "{messages:?}");
    assert_eq!(messages[0], messages[1]);
}

#[test]
fn a_warning_about_the_pod_explains_what_its_status_does_not() {
    let mut cluster = starting(json!({}));
    let pod = cluster.live()[0].clone();
    let warning = |about: &str, reason: &str| Warning {
        about: about.into(),
        reason: reason.into(),
        message: "secret \"keys\" not found".into(),
        at: at(1),
    };
    cluster.observed.warnings = vec![warning("Pod/other", "FailedMount"), warning(&format!("Pod/{pod}"), "Unhealthy")];
    cluster.reconcile();
    assert_eq!(cluster.condition("Ready").1, "Starting");
    cluster.observed.warnings.push(warning(&format!("Pod/{pod}"), "FailedMount"));
    cluster.reconcile();
    assert_eq!(cluster.condition("Ready").1, "FailedMount");
    assert!(cluster.message("Ready").contains("secret \"keys\" not found"));
}

#[test]
fn a_rollout_past_its_deadline_is_stalled() {
    let mut cluster = starting(json!({}));
    let late = DeploymentCondition {
        type_: "Progressing".into(),
        status: "False".into(),
        reason: Some("ProgressDeadlineExceeded".into()),
        message: Some("timed out".into()),
        ..DeploymentCondition::default()
    };
    let deployment = std::sync::Arc::make_mut(&mut cluster.observed.deployments[0]);
    deployment.status.get_or_insert_default().conditions = Some(vec![late]);
    cluster.reconcile();
    assert_eq!(cluster.condition("Progressing"), ("False".into(), "ProgressDeadlineExceeded".into()));
    assert_eq!(cluster.condition("Stalled").0, "True");
    assert_eq!(cluster.condition("Reconciling").0, "False");
}

#[test]
fn what_hinders_a_replica_beyond_the_floor_is_told_though_the_service_is_ready() {
    let mut cluster = Cluster::serving(service().builtin(1, 4, 500).build());
    cluster.carry_out(&crate::plan::Step::Scale { deployment: "llama".into(), replicas: 2 });
    cluster.run_controllers();
    let condition = json!({
        "type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/1 nodes: Insufficient cpu",
    });
    let pod = cluster.live()[1].clone();
    let status = serde_json::from_value(json!({"conditions": [condition]})).expect("a pod's status");
    cluster.change_pod(&pod, |pod| pod.status = status);
    cluster.reconcile();
    assert_eq!(cluster.condition("Ready").0, "True");
    assert_eq!(cluster.message("Progressing"), "1 of 2 replicas serve: Unschedulable: 0/1 nodes: Insufficient cpu");
}
