//! The model's header is read before pods are made, and what it says decides how they are made, once.

use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};
use windlass_engine_contract::inspection::Inspection;
use windlass_engine_contract::termination::{self, Termination};

use crate::build::inspect_job;
use crate::names::{CHOSEN_QUANTIZATION, CHOSEN_TENSOR, INSPECTION, SERVICE_LABEL};
use crate::plan::{Kind, Object, Step};
use crate::pod::Pod;
use crate::testing::cluster::Cluster;
use crate::testing::restricted::violations;
use crate::testing::{ServiceBuilder, gpu_node, llama_8b, service};
use crate::validate::validate;

fn gpu() -> ServiceBuilder {
    service().with("accelerator", json!({"type": "NvidiaGPU"})).with("engine", json!({"maxModelTokens": 8192}))
}

/// A cluster of small GPUs, four to a node, whose operator reads headers.
fn inspecting(spec: ServiceBuilder) -> Cluster {
    let mut cluster = Cluster::new(spec.build());
    cluster.defaults.inspect_timeout = Some(Duration::from_secs(60));
    cluster.observed.nodes = Some(vec![gpu_node("Tesla-T4", 15_360, 4)]);
    cluster
}

/// The Job's pod, with its container in this state.
fn inspector(cluster: &mut Cluster, state: Value) {
    let source = validate(&cluster.service).expect("valid").source_hash;
    let pod = json!({
        "metadata": {"name": "inspector", "labels": {INSPECTION: source}},
        "status": {"containerStatuses": [{
            "name": "inspect", "image": "", "imageID": "", "ready": false, "restartCount": 0, "state": state,
        }]},
    });
    cluster.observed.inspectors = vec![Arc::new(serde_json::from_value::<Pod>(pod).expect("a pod"))];
}

/// Makes Jobs as old as that.
fn grow_old(cluster: &mut Cluster, seconds: i64) {
    for job in &mut cluster.observed.jobs {
        Arc::make_mut(job).metadata.creation_timestamp = Some(windlass_operator_api::status::time(cluster.now));
    }
    cluster.pass(seconds);
}

fn ended(code: i32, message: &str) -> Value {
    json!({"terminated": {"exitCode": code, "message": message}})
}

fn read_header(cluster: &mut Cluster) {
    let found = serde_json::to_string(&llama_8b()).expect("json");
    inspector(cluster, ended(0, &found));
}

fn args(cluster: &Cluster) -> Vec<String> {
    let pod = cluster.deployment("llama").and_then(|found| found.spec.clone()?.template.spec).expect("a pod");
    pod.containers[0].args.clone().unwrap_or_default()
}

#[test]
fn a_job_reads_the_header_first_and_no_pod_is_made_meanwhile() {
    let mut cluster = inspecting(gpu());
    let plan = cluster.reconcile();
    assert!(plan.steps.iter().any(|step| matches!(step, Step::Apply(Object::Job(_)))), "{:?}", plan.steps);
    assert_eq!((cluster.deployment("llama"), cluster.observed.revisions.len()), (None, 0));
    assert_eq!(cluster.condition("Fits"), ("Unknown".to_owned(), "Inspecting".to_owned()));
    assert_eq!(cluster.condition("Ready").1, "Inspecting");
    assert_eq!(cluster.reconcile().steps, vec![], "once");
}

#[test]
fn what_was_found_chooses_and_the_job_goes_once_it_is_kept() {
    let mut cluster = inspecting(gpu());
    cluster.reconcile();
    read_header(&mut cluster);
    let first = cluster.reconcile();
    assert!(!first.steps.iter().any(|step| matches!(step, Step::Delete { .. })), "status does not hold it yet");
    assert!(args(&cluster).contains(&"--tensor-parallel-size=2".to_owned()), "{:?}", args(&cluster));
    let is_job = |step: &Step| matches!(step, Step::Delete { kind: Kind::Job, .. });
    assert!(cluster.reconcile().steps.iter().any(is_job));
    cluster.observed.inspectors.clear();
    cluster.converge();
    assert_eq!(cluster.observed.jobs.len(), 0);
    assert_eq!(cluster.condition("Fits"), ("True".to_owned(), "Fits".to_owned()));
    let status = cluster.service.status.clone().expect("a status");
    let choices = status.choices.expect("choices");
    assert_eq!((choices.tensor, choices.reason.is_some()), (Some(2), true));
    assert_eq!(status.model.map(|model| model.weight_bytes), Some(16_060_522_496));
    assert_eq!(cluster.condition("Ready").0, "True", "{}", cluster.message("Ready"));
}

#[test]
fn of_several_pods_of_a_job_the_newest_is_believed() {
    let found = serde_json::to_string(&llama_8b()).expect("json");
    let lost = Termination { reason: termination::Reason::ModelUnavailable, message: "no route".into() }.to_json();
    for (earlier, later, reason) in [
        (ended(1, &lost), ended(0, &found), "Fits"),
        (ended(1, &lost), json!({"running": {}}), "Inspecting"),
        (json!({"running": {}}), ended(1, &lost), "ModelUnavailable"),
    ] {
        let mut cluster = inspecting(gpu());
        cluster.reconcile();
        let mut pods = Vec::new();
        // A list names them in no order of time.
        for (state, age) in [(later, 10), (earlier, 20)] {
            inspector(&mut cluster, state);
            let mut pod = Pod::clone(&cluster.observed.inspectors[0]);
            let created = cluster.now - jiff::SignedDuration::from_secs(age);
            pod.metadata.creation_timestamp = Some(windlass_operator_api::status::time(created));
            pods.push(Arc::new(pod));
        }
        pods.rotate_left(usize::from(reason == "Fits"));
        cluster.observed.inspectors = pods;
        cluster.reconcile();
        assert_eq!(cluster.condition("Fits").1, reason);
    }
}

#[test]
fn a_choice_is_on_the_template_and_stands_until_the_spec_changes() {
    let mut cluster = inspecting(gpu());
    cluster.reconcile();
    read_header(&mut cluster);
    cluster.converge();
    let annotation = |cluster: &Cluster, key: &str| {
        let template = cluster.deployment("llama").and_then(|found| found.spec.clone()?.template.metadata);
        template.and_then(|meta| meta.annotations?.get(key).cloned())
    };
    assert_eq!(annotation(&cluster, CHOSEN_TENSOR).as_deref(), Some("2"));
    assert_eq!(annotation(&cluster, CHOSEN_QUANTIZATION), None, "as stored");
    cluster.observed.nodes = Some(vec![gpu_node("NVIDIA-H200", 143_771, 8)]);
    assert_eq!(cluster.reconcile().steps, vec![], "larger nodes change nothing");
    cluster.observed.nodes = Some(vec![gpu_node("Tesla-T4", 15_360, 1)]);
    assert_eq!(cluster.reconcile().steps, vec![], "nor do smaller ones: what serves fits");
    assert_eq!(cluster.condition("Fits").0, "True");
    cluster.edit(gpu().with("drainTimeoutSeconds", json!(10)).build());
    cluster.converge();
    assert!(args(&cluster).contains(&"--quantization=int8".to_owned()), "{:?}", args(&cluster));
}

#[test]
fn a_choice_stands_before_its_pods_serve_too() {
    let mut cluster = inspecting(gpu());
    cluster.reconcile();
    read_header(&mut cluster);
    cluster.reconcile();
    let before = args(&cluster);
    cluster.observed.nodes = Some(vec![gpu_node("Tesla-T4", 15_360, 1)]);
    cluster.reconcile();
    assert_eq!(args(&cluster), before);
}

#[test]
fn a_model_that_is_read_and_pods_that_were_made_where_they_fitted_are_on_their_way() {
    for (is_made, fits, ready) in [(false, "Inspecting", "Inspecting"), (true, "TooLarge", "Starting")] {
        let mut cluster = inspecting(gpu());
        cluster.reconcile();
        if is_made {
            read_header(&mut cluster);
            cluster.reconcile();
            cluster.run_controllers();
        }
        cluster.observed.nodes = Some(vec![gpu_node("GTX", 1024, 1)]);
        cluster.reconcile();
        let reasons = ["Fits", "Ready", "Progressing", "Stalled"].map(|kind| cluster.condition(kind).1);
        assert_eq!(reasons, [fits, ready, "ReplicasStarting", "Proceeding"]);
    }
}

#[test]
fn an_edit_keeps_the_earlier_choice_while_it_fits() {
    let mut cluster = inspecting(gpu());
    cluster.reconcile();
    read_header(&mut cluster);
    cluster.converge();
    cluster.observed.nodes = Some(vec![gpu_node("NVIDIA-H200", 143_771, 8)]);
    cluster.edit(gpu().with("drainTimeoutSeconds", json!(10)).build());
    cluster.converge();
    let args = args(&cluster);
    assert!(args.contains(&"--drain-timeout-seconds=10".to_owned()), "{args:?}");
    assert!(args.contains(&"--tensor-parallel-size=2".to_owned()), "{args:?}");
}

#[test]
fn what_serves_fits_whatever_nodes_there_are_now() {
    let mut cluster = inspecting(gpu());
    cluster.reconcile();
    read_header(&mut cluster);
    cluster.converge();
    for nodes in [Some(vec![gpu_node("GTX", 1024, 1)]), Some(vec![]), None] {
        cluster.observed.nodes = nodes;
        assert_eq!(cluster.reconcile().steps, vec![]);
        assert_eq!(cluster.condition("Fits"), ("True".to_owned(), "Serving".to_owned()));
        let message = cluster.message("Fits");
        assert!(message.starts_with("replicas serve, so it fits where they are; as stored it needs"), "{message}");
    }
}

#[test]
fn a_pinned_revision_comes_back_whatever_nodes_there_are_now() {
    let mut cluster = inspecting(gpu());
    cluster.reconcile();
    read_header(&mut cluster);
    cluster.converge();
    let (first, before) = (cluster.service.status.as_ref().and_then(|status| status.revision.clone()), args(&cluster));
    let edited = gpu().with("drainTimeoutSeconds", json!(10));
    cluster.edit(edited.clone().build());
    cluster.converge();
    assert_ne!(args(&cluster), before);
    cluster.observed.nodes = Some(vec![gpu_node("GTX", 1024, 1)]);
    cluster.edit(edited.with("rollout", json!({"pinnedRevision": first})).build());
    cluster.reconcile();
    assert_eq!(args(&cluster), before);
}

#[test]
fn a_model_that_fits_nowhere_is_not_scheduled_and_its_alternatives_are_told() {
    let mut cluster =
        inspecting(gpu().with("parallelism", json!({"tensor": 1})).with("engine", json!({"quantization": "BF16"})));
    cluster.reconcile();
    read_header(&mut cluster);
    cluster.reconcile();
    assert_eq!(cluster.deployment("llama"), None);
    assert_eq!(cluster.condition("Fits"), ("False".to_owned(), "TooLarge".to_owned()));
    assert_eq!(cluster.condition("Ready"), ("False".to_owned(), "TooLarge".to_owned()));
    assert_eq!(cluster.condition("Stalled").0, "True");
    assert!(cluster.message("Fits").contains("parallelism.tensor: 2 fits"), "{}", cluster.message("Fits"));
    cluster.observed.nodes = Some(vec![gpu_node("NVIDIA-L40S", 46_068, 1)]);
    cluster.converge();
    assert_eq!(cluster.condition("Ready").0, "True", "a node came");
}

#[test]
fn an_edit_that_does_not_fit_leaves_what_serves_alone() {
    let mut cluster = inspecting(gpu());
    cluster.reconcile();
    read_header(&mut cluster);
    cluster.converge();
    let before = cluster.deployment("llama").expect("there").spec.clone().map(|spec| spec.template);
    cluster.edit(
        gpu()
            .with("engine", json!({"maxModelTokens": 131_072, "quantization": "BF16"}))
            .with("parallelism", json!({"tensor": 1}))
            .build(),
    );
    cluster.converge();
    assert_eq!(cluster.deployment("llama").expect("there").spec.clone().map(|spec| spec.template), before);
    assert_eq!(cluster.condition("Progressing"), ("False".to_owned(), "TooLarge".to_owned()));
    assert_eq!(cluster.live().len(), 1);
}

#[test]
fn what_cannot_be_read_holds_nothing_up() {
    let waiting = |reason: &str| json!({"waiting": {"reason": reason, "message": "it does not come"}});
    let last_word = r#"{"reason":"ModelUnavailable","message":"no such file"}"#;
    for (state, reason) in [
        (ended(10, last_word), "ModelUnavailable"),
        (waiting("ImagePullBackOff"), "ImagePullBackOff"),
        (waiting("CreateContainerConfigError"), "CreateContainerConfigError"),
    ] {
        let mut cluster = inspecting(gpu());
        cluster.reconcile();
        inspector(&mut cluster, state);
        let may_pass = reason != "ModelUnavailable";
        cluster.reconcile();
        assert_eq!(cluster.deployment("llama").is_none(), may_pass, "{reason} of a Job that was just made");
        grow_old(&mut cluster, 15);
        cluster.reconcile();
        assert!(cluster.deployment("llama").is_some(), "{reason}");
        assert_eq!(cluster.condition("Fits"), ("Unknown".to_owned(), reason.to_owned()));
    }
    let mut cluster = inspecting(gpu());
    cluster.reconcile();
    inspector(&mut cluster, waiting("ContainerCreating"));
    cluster.reconcile();
    assert_eq!(cluster.deployment("llama"), None, "that is on its way");
    grow_old(&mut cluster, 60);
    cluster.reconcile();
    assert_eq!(cluster.condition("Fits").1, "InspectionTimedOut");
    assert!(cluster.deployment("llama").is_some());
}

#[test]
fn a_job_that_has_failed_or_finds_no_node_holds_nothing_up() {
    for (kind, status, reason) in
        [("Failed", "True", "InspectionFailed"), ("Failed", "False", "Inspecting"), ("Suspended", "True", "Inspecting")]
    {
        let mut cluster = inspecting(gpu());
        cluster.reconcile();
        let condition = json!({"type": kind, "status": status, "message": "it was tried often enough"});
        let told = serde_json::from_value(json!({"conditions": [condition]})).expect("a Job's status");
        Arc::make_mut(&mut cluster.observed.jobs[0]).status = Some(told);
        cluster.reconcile();
        assert_eq!(cluster.condition("Fits").1, reason, "{kind} {status}");
        assert_eq!(cluster.deployment("llama").is_some(), reason != "Inspecting", "{kind} {status}");
    }
    for (status, reason, expected) in [
        ("False", "Unschedulable", "Unschedulable"),
        ("False", "SchedulingGated", "Inspecting"),
        ("Unknown", "Unschedulable", "Inspecting"),
    ] {
        let mut cluster = inspecting(gpu());
        cluster.reconcile();
        inspector(&mut cluster, json!({}));
        let condition = json!({"type": "PodScheduled", "status": status, "reason": reason});
        let told = serde_json::from_value(json!({"conditions": [condition]})).expect("a pod's status");
        Arc::make_mut(&mut cluster.observed.inspectors[0]).status = told;
        cluster.reconcile();
        assert_eq!(cluster.condition("Fits").1, "Inspecting", "{status} {reason}: that may pass");
        grow_old(&mut cluster, 15);
        cluster.reconcile();
        assert_eq!(cluster.condition("Fits").1, expected, "{status} {reason}");
    }
}

#[test]
fn pods_made_blindly_are_made_anew_when_the_header_is_read_after_all() {
    let mut cluster = inspecting(gpu());
    cluster.reconcile();
    inspector(&mut cluster, ended(10, r#"{"reason":"ModelUnavailable","message":"no answer"}"#));
    cluster.reconcile();
    assert!(args(&cluster).contains(&"--tensor-parallel-size=1".to_owned()));
    read_header(&mut cluster);
    cluster.reconcile();
    assert!(args(&cluster).contains(&"--tensor-parallel-size=2".to_owned()));
}

#[test]
fn the_simulator_and_an_operator_that_reads_none_need_no_header() {
    for arguments in [json!(["--executor=sim"]), json!(["--executor", "sim"])] {
        let mut cluster = inspecting(service().with("engine", json!({"extraArgs": arguments})));
        cluster.reconcile();
        assert!(cluster.observed.jobs.is_empty() && cluster.deployment("llama").is_some());
    }
    let mut cluster = inspecting(service());
    cluster.defaults.inspect_timeout = None;
    cluster.converge();
    assert_eq!(cluster.condition("Fits"), ("True".to_owned(), "Serving".to_owned()));
}

#[test]
fn a_service_that_served_before_this_operator_came_is_not_read() {
    let mut cluster = Cluster::serving(service().build());
    cluster.defaults.inspect_timeout = Some(Duration::from_secs(60));
    assert_eq!(cluster.reconcile().steps, vec![]);
    cluster.edit(service().with("engine", json!({"maxModelTokens": 2048})).build());
    cluster.reconcile();
    assert_eq!(cluster.observed.jobs.len(), 1, "before it gets another template");
}

#[test]
fn what_is_divided_over_nodes_is_made_without_a_look() {
    let mut cluster = inspecting(service().with("parallelism", json!({"pipeline": 2})));
    cluster.reconcile();
    assert!(cluster.observed.jobs.is_empty());
    assert_eq!(cluster.condition("Fits"), ("Unknown".to_owned(), "NotInspected".to_owned()));
}

#[test]
fn headers_of_every_source_are_read_with_its_revision_and_credentials() {
    for (source, more, expected) in [
        ("hf://organization/name", None, None),
        ("hf://organization/name", Some(("revision", json!("v2"))), Some("--revision=v2")),
        ("s3://bucket/name", Some(("secretRef", json!({"name": "keys"}))), Some("--credentials-dir=")),
        ("oci://registry/name:1", Some(("secretRef", json!({"name": "token"}))), Some("--token-file=")),
    ] {
        let spec = service().model("source", json!(source));
        let spec = more.into_iter().fold(spec, |spec, (field, value)| spec.model(field, value));
        let mut cluster = inspecting(spec);
        cluster.reconcile();
        let pod = cluster.observed.jobs[0].spec.clone().and_then(|job| job.template.spec).expect("a pod");
        let args = pod.containers[0].args.clone().unwrap_or_default();
        assert_eq!(args[..3], ["inspect", source, "--summary"]);
        assert_eq!(args.get(3).map(|arg| expected.is_some_and(|start| arg.starts_with(start))), expected.map(|_| true));
    }
}

/// What a branch means may have changed by the time that another replica starts.
#[test]
fn all_pods_fetch_the_commit_whose_header_was_read() {
    const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";
    let fetch = |cluster: &Cluster| {
        let pod = cluster.deployment("llama").and_then(|found| found.spec.clone()?.template.spec).expect("a pod");
        pod.init_containers.unwrap_or_default()[0].args.clone().unwrap_or_default()
    };
    let mut cluster = inspecting(gpu().model("source", json!("hf://organization/name")));
    cluster.reconcile();
    let told = Inspection { revision: Some(COMMIT.to_owned()), ..llama_8b() };
    inspector(&mut cluster, ended(0, &serde_json::to_string(&told).expect("json")));
    cluster.converge();
    assert!(fetch(&cluster).contains(&format!("--revision={COMMIT}")), "{:?}", fetch(&cluster));
    let before = fetch(&cluster);
    // Nobody knows any more what was read.
    cluster.observed.inspectors.clear();
    cluster.service.status.as_mut().expect("a status").model = None;
    cluster.defaults.inspect_timeout = None;
    cluster.reconcile();
    assert_eq!(fetch(&cluster), before);
    cluster.edit(gpu().model("source", json!("hf://organization/name")).model("revision", json!("v2")).build());
    cluster.reconcile();
    assert!(fetch(&cluster).contains(&"--revision=v2".to_owned()), "{:?}", fetch(&cluster));
}

#[test]
fn another_source_gets_another_job_and_the_first_goes() {
    let mut cluster = inspecting(gpu());
    cluster.reconcile();
    let before = cluster.observed.jobs[0].metadata.name.clone();
    cluster.edit(gpu().model("source", json!("pvc://models/other")).build());
    cluster.reconcile();
    assert_eq!(cluster.observed.jobs.len(), 1);
    assert_ne!(cluster.observed.jobs[0].metadata.name, before);
}

#[test]
fn the_job_is_restricted_and_unknown_to_service_and_budget() {
    let spec =
        service().https().model("secretRef", json!({"name": "token"})).model("caConfigMapRef", json!({"name": "ca"}));
    let service = spec.valid();
    let job = inspect_job::build(&service, &crate::testing::defaults());
    let name = job.metadata.name.clone().unwrap_or_default();
    assert!(name.len() <= 63 && name.starts_with("llama-i-"), "{name}");
    let template = job.spec.expect("a spec").template;
    let labels = template.metadata.and_then(|meta| meta.labels).unwrap_or_default();
    assert!(!labels.contains_key(SERVICE_LABEL), "{labels:?}");
    let pod = template.spec.expect("a pod");
    assert_eq!(violations(&pod), Vec::<String>::new());
    let args = pod.containers[0].args.clone().unwrap_or_default();
    assert_eq!(
        args,
        [
            "inspect",
            "https://models.example:8443/llama.gguf?x=1",
            "--summary",
            "--token-file=/etc/windlass/model-secret/token",
            "--ca-file=/etc/windlass/model-ca/ca.crt",
        ]
    );
    let mounts: Vec<_> = pod.containers[0].volume_mounts.iter().flatten().map(|mount| mount.name.as_str()).collect();
    assert_eq!(mounts, ["model-secret", "model-ca", "scratch"]);
}
