//! The example of a LeaderWorkerSet: pods as the operator makes them for `cpu-pipeline`, grouped by somebody else.
//! `WINDLASS_UPDATE=1` writes it anew.

use std::path::PathBuf;

use k8s_openapi::api::apps::v1::StatefulSet;
use k8s_openapi::api::core::v1::{PodSpec, PodTemplateSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde::Serialize;
use serde_json::json;

use super::written::example;
use crate::plan::{Object, Step};
use crate::testing::cluster::Cluster;
use crate::testing::restricted::violations;
use crate::workers::from_field;

const NAME: &str = "llama-70b-group";
const HEAD: &str = "\
# A model over three CPU nodes as a LeaderWorkerSet (https://lws.sigs.k8s.io) instead of an InferenceService, for clusters that
# place and schedule pods of a group together by it: see `leaderworkerset.sigs.k8s.io/exclusive-topology`. Its pods are those
# that the operator makes of cpu-pipeline.yaml; nobody scales, rolls or watches them but Kubernetes. Not proven: no
# controller of this kind has run them. With `restartPolicy: None` the leader of a group that is removed drains before its
# workers go.
";

/// The pod of a replica that serves, and one of its workers.
fn pods() -> (PodSpec, PodSpec) {
    let mut cluster = Cluster::serving(example("cpu-pipeline"));
    let leader = cluster.live()[0].clone();
    cluster.change_pod(&leader, |pod| {
        pod.metadata.uid = Some("uid".into());
        pod.status.pod_ip = Some("10.0.0.1".into());
    });
    let made = cluster.reconcile().steps.into_iter().find_map(|step| match step {
        Step::Apply(Object::StatefulSet(made)) => Some(made),
        _ => None,
    });
    let deployment = cluster.deployment("llama-70b-cpu").and_then(|found| found.spec.clone()).expect("a Deployment");
    let StatefulSet { spec: Some(workers), .. } = *made.expect("workers") else { panic!("no spec") };
    (deployment.template.spec.expect("a pod"), workers.template.spec.expect("a pod"))
}

/// A template of the group, whose ServiceAccount is the namespace's own.
fn template(mut pod: PodSpec, role: &str) -> PodTemplateSpec {
    assert_eq!(violations(&pod), Vec::<String>::new());
    pod.service_account_name = None;
    let labels = [("app.kubernetes.io/name".to_owned(), format!("{NAME}-{role}"))].into();
    PodTemplateSpec { metadata: Some(ObjectMeta { labels: Some(labels), ..ObjectMeta::default() }), spec: Some(pod) }
}

/// A worker that finds leader and number where a LeaderWorkerSet tells them.
fn joining(mut worker: PodSpec) -> PodSpec {
    let engine = &mut worker.containers[0];
    let arguments = engine.args.iter_mut().flatten();
    let address = arguments.filter(|argument| argument.as_str() == "--master-addr=10.0.0.1");
    assert_eq!(address.map(|address| *address = "--master-addr=$(LWS_LEADER_ADDRESS)".to_owned()).count(), 1);
    assert!(engine.args.iter().flatten().any(|argument| argument == "--node-rank=$(NODE_RANK)"));
    engine.env = Some(vec![from_field("NODE_RANK", "metadata.labels['leaderworkerset.sigs.k8s.io/worker-index']")]);
    worker
}

fn document(object: &impl Serialize) -> String {
    serde_yaml_ng::to_string(object).expect("YAML")
}

#[test]
fn the_pods_of_the_example_are_those_that_the_operator_makes() {
    let (leader, worker) = pods();
    let group = json!({
        "apiVersion": "leaderworkerset.x-k8s.io/v1", "kind": "LeaderWorkerSet", "metadata": {"name": NAME},
        "spec": {
            "replicas": 1,
            "startupPolicy": "LeaderCreated",
            "rolloutStrategy": {
                "type": "RollingUpdate", "rollingUpdateConfiguration": {"maxSurge": 1, "maxUnavailable": 0},
            },
            "leaderWorkerTemplate": {
                "size": 3,
                "restartPolicy": "None",
                "leaderTemplate": template(leader, "leader"),
                "workerTemplate": template(joining(worker), "worker"),
            },
        },
    });
    let service = json!({
        "apiVersion": "v1", "kind": "Service", "metadata": {"name": NAME},
        "spec": {
            "selector": {"app.kubernetes.io/name": format!("{NAME}-leader")},
            "ports": [{"name": "http", "port": 8000, "targetPort": "http"}],
        },
    });
    let wanted = format!("{HEAD}{}---\n{}", document(&group), document(&service));
    let file = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../crds/examples/leader-worker-set.yaml");
    if std::env::var_os("WINDLASS_UPDATE").is_some() {
        std::fs::write(&file, &wanted).expect("written");
    }
    let found = std::fs::read_to_string(&file).unwrap_or_default();
    assert!(found == wanted, "the example is stale: run this test with WINDLASS_UPDATE=1 and look at it");
}
