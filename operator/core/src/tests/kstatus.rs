//! What kstatus, by which Flux, kpt and `helm --wait` judge resources, makes of the conditions.

use k8s_openapi::api::apps::v1::{DeploymentCondition, DeploymentStatus};
use serde_json::json;
use std::sync::Arc;
use windlass_operator_api::InferenceService;
use windlass_operator_api::status::condition;

use crate::plan::Step;
use crate::status::Outcome;
use crate::testing::cluster::Cluster;
use crate::testing::service;

/// The status of a custom resource by the rules of cli-utils (`pkg/kstatus/status/generic.go`).
fn kstatus(service: &InferenceService) -> &'static str {
    let Some(status) = &service.status else { return "InProgress" };
    let is = |kind: &str, value: &str| status.conditions.iter().any(|one| one.type_ == kind && one.status == value);
    match () {
        () if status.observed_generation != service.metadata.generation => "InProgress",
        () if is(condition::RECONCILING, "True") => "InProgress",
        () if is(condition::STALLED, "True") => "Failed",
        () if is(condition::READY, "True") => "Current",
        () => "InProgress",
    }
}

/// A rollout, or the first start, of which the Deployment's controller says that it is overdue, with a pod whose image does
/// not come.
fn overdue(mut cluster: Cluster) -> Cluster {
    cluster.reconcile();
    let deployment = Arc::make_mut(&mut cluster.observed.deployments[0]);
    let overdue = DeploymentCondition {
        type_: "Progressing".into(),
        status: "False".into(),
        reason: Some("ProgressDeadlineExceeded".into()),
        message: Some("timed out".into()),
        ..DeploymentCondition::default()
    };
    deployment.status = Some(DeploymentStatus {
        observed_generation: deployment.metadata.generation,
        conditions: Some(vec![overdue]),
        ..DeploymentStatus::default()
    });
    let template = deployment.spec.as_ref().and_then(|spec| spec.template.metadata.clone());
    cluster.strand_new("llama", template.expect("a template"));
    let new = cluster.live().pop().expect("a new pod");
    let status = json!({"containerStatuses": [{
        "name": "engine", "image": "engine:1", "imageID": "", "ready": false, "restartCount": 0,
        "state": {"waiting": {"reason": "ImagePullBackOff", "message": "not found"}},
    }]});
    cluster.change_pod(&new, |pod| pod.status = serde_json::from_value(status).expect("a status"));
    cluster.reconcile();
    cluster
}

#[test]
fn what_never_serves_is_failed_with_its_cause_and_what_is_on_its_way_is_not() {
    let serving = Cluster::serving(service().build());
    assert_eq!(kstatus(&serving.service), "Current");

    let mut starting = Cluster::new(service().build());
    starting.reconcile();
    assert_eq!(kstatus(&starting.service), "InProgress");

    let mut edited = Cluster::serving(service().build());
    edited.edit(service().with("engine", json!({"maxModelTokens": 512})).build());
    assert_eq!(kstatus(&edited.service), "InProgress", "not seen yet");
    edited.reconcile();
    assert_eq!(kstatus(&edited.service), "InProgress", "its old pods serve");

    let first = overdue(Cluster::new(service().build()));
    let rollout = overdue(edited);
    for cluster in [first, rollout] {
        assert_eq!(kstatus(&cluster.service), "Failed");
        assert_eq!(cluster.condition(condition::PROGRESSING), ("False".into(), "ProgressDeadlineExceeded".into()));
        assert_eq!(cluster.condition(condition::READY).0, "False");
        let message = cluster.message(condition::STALLED);
        assert!(message.starts_with("timed out: ImagePullFailed: "), "{message}");
    }

    let mut refused = Cluster::serving(service().build());
    refused.edit(service().with("parallelism", json!({"tensor": 2})).build());
    refused.reconcile();
    assert_eq!(kstatus(&refused.service), "Failed");

    let mut paused = Cluster::serving(service().build());
    let held = service().with("rollout", json!({"paused": true})).with("engine", json!({"maxModelTokens": 512}));
    paused.edit(held.build());
    paused.reconcile();
    assert_eq!(kstatus(&paused.service), "InProgress", "it waits for somebody, and nothing has failed");
}

#[test]
fn a_write_that_is_tried_again_is_in_progress() {
    let mut cluster = Cluster::new(service().build());
    let plan = crate::plan(&cluster.service, &cluster.observed, &cluster.defaults, cluster.now);
    assert!(plan.steps.iter().any(|step| matches!(step, Step::Apply(_))));
    cluster.publish(&plan, &Outcome::Failed { attempt: "apply Service/llama".into(), message: "refused".into() });
    assert_eq!(kstatus(&cluster.service), "InProgress");
    assert_eq!(cluster.condition(condition::RECONCILING).1, "ApplyFailed");
}
