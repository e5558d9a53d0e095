//! What a service becomes.

use std::sync::Arc;

use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::core::v1::{Container, PodSpec};
use proptest::prelude::*;
use serde_json::{Value, json};

use crate::build::network_policy;
use crate::names::WorkloadKind;
use crate::plan::{Object, Step};
use crate::testing::cluster::Cluster;
use crate::testing::restricted::violations;
use crate::testing::{SHA256, ServiceBuilder, defaults, service};
use crate::validate::validate;

pub(super) fn workload(service: ServiceBuilder, name: &str) -> Deployment {
    let mut cluster = Cluster::new(service.build());
    cluster.reconcile();
    cluster.deployment(name).expect("a Deployment").clone()
}

pub(super) fn pod(service: ServiceBuilder) -> PodSpec {
    pod_of(&workload(service, "llama"))
}

pub(super) fn pod_of(deployment: &Deployment) -> PodSpec {
    deployment.spec.clone().and_then(|spec| spec.template.spec).expect("a pod")
}

fn args(container: &Container) -> Vec<String> {
    container.args.clone().unwrap_or_default()
}

#[test]
fn the_first_plan_makes_every_child_and_the_workload_last() {
    let mut cluster = Cluster::new(service().build());
    let kinds: Vec<&str> = cluster
        .reconcile()
        .steps
        .iter()
        .map(|step| match step {
            Step::Apply(Object::ServiceAccount(_)) => "ServiceAccount",
            Step::Apply(Object::NetworkPolicy(_)) => "NetworkPolicy",
            Step::Apply(Object::Service(_)) => "Service",
            Step::Apply(Object::PodDisruptionBudget(_)) => "PodDisruptionBudget",
            Step::Apply(Object::ControllerRevision(_)) => "ControllerRevision",
            Step::Apply(Object::Deployment(_)) => "Deployment",
            other => panic!("{other:?}"),
        })
        .collect();
    assert_eq!(
        kinds,
        ["ServiceAccount", "NetworkPolicy", "Service", "PodDisruptionBudget", "ControllerRevision", "Deployment"]
    );
}

#[test]
fn every_child_belongs_to_the_service() {
    let mut cluster = Cluster::new(service().build());
    cluster.reconcile();
    let made = &cluster.observed;
    for child in [
        &made.service_accounts[0].metadata,
        &made.network_policies[0].metadata,
        &made.services[0].metadata,
        &made.disruption_budgets[0].metadata,
        &made.revisions[0].metadata,
        &made.deployments[0].metadata,
    ] {
        let name = child.name.as_deref().expect("a name");
        let owners = child.owner_references.as_ref().expect("owners");
        assert_eq!((owners[0].uid.as_str(), owners[0].controller), (crate::testing::UID, Some(true)), "{name}");
        assert_eq!(child.namespace.as_deref(), Some("demo"), "{name}");
        let label = child.labels.as_ref().and_then(|labels| labels.get(crate::names::SERVICE_LABEL));
        assert_eq!(label.map(String::as_str), Some("llama"), "{name}");
    }
}

#[test]
fn fields_become_managed_flags_and_extra_arguments_come_last() {
    let engine = json!({
        "quantization": "Q4_1", "kvCacheDataType": "BF16", "maxModelTokens": 4096, "maxSequences": 8,
        "extraArgs": ["--executor", "sim"],
    });
    let spec = service()
        .with("engine", engine)
        .model("servedNames", json!(["a", "b"]))
        .with("auth", json!({"apiKeysSecretRef": {"name": "keys"}}))
        .with("drainTimeoutSeconds", json!(60));
    let expected = [
        "serve",
        "/models/llama.gguf",
        "--served-model-name=a",
        "--served-model-name=b",
        "--host=::",
        "--port=8000",
        "--admin-host=::",
        "--admin-port=8001",
        "--device=cpu",
        "--tensor-parallel-size=1",
        "--quantization=q4_1",
        "--kv-cache-dtype=bf16",
        "--max-model-len=4096",
        "--max-num-seqs=8",
        "--api-key-dir=/etc/windlass/api-keys",
        "--drain-timeout-seconds=60",
        "--executor",
        "sim",
    ];
    let pod = pod(spec);
    assert_eq!(args(&pod.containers[0]), expected);
    assert_eq!(pod.termination_grace_period_seconds, Some(90));
}

#[test]
fn a_claim_is_read_in_place_and_read_only() {
    let pod = pod(service().model("source", json!("pvc://models/a/b.gguf")));
    assert!(args(&pod.containers[0]).contains(&"/models/a/b.gguf".to_owned()));
    let volume = &pod.volumes.expect("volumes")[0];
    let claim = volume.persistent_volume_claim.as_ref().expect("a claim");
    assert_eq!((claim.claim_name.as_str(), claim.read_only), ("models", Some(true)));
    assert_eq!(pod.init_containers, None);
}

#[test]
fn an_https_source_is_fetched_with_its_checksum_token_and_authority() {
    let spec = service()
        .https()
        .model("secretRef", json!({"name": "token"}))
        .model("caConfigMapRef", json!({"name": "ca"}))
        .model("cache", json!({"type": "PersistentVolumeClaim", "claimName": "cache"}));
    let pod = pod(spec);
    let fetch = &pod.init_containers.as_ref().expect("a container that fetches")[0];
    let file = format!("/var/cache/windlass/{SHA256}.gguf");
    assert_eq!(
        args(fetch),
        [
            "fetch",
            "https://models.example:8443/llama.gguf?x=1",
            &format!("--sha256={SHA256}"),
            &format!("--to={file}"),
            "--token-file=/etc/windlass/model-secret/token",
            "--ca-file=/etc/windlass/model-ca/ca.crt",
        ]
    );
    assert!(args(&pod.containers[0]).contains(&file));
    let mounts = |container: &Container| container.volume_mounts.clone().unwrap_or_default();
    let cache = |container| mounts(container).into_iter().find(|mount| mount.name == "model-cache").expect("a cache");
    assert_eq!((cache(fetch).read_only, cache(&pod.containers[0]).read_only), (None, Some(true)));
    assert!(!mounts(&pod.containers[0]).iter().any(|mount| mount.name == "model-secret"), "only fetching needs it");
}

#[test]
fn whoever_fetches_into_a_shared_cache_is_told_what_of_it_is_kept() {
    for (cache, claim, kept) in [
        (json!({"type": "EmptyDir", "sizeLimit": "1Gi"}), None, &[][..]),
        (json!({"type": "PersistentVolumeClaim", "claimName": "c"}), Some("c"), &[]),
        (
            json!({"type": "PersistentVolumeClaim", "claimName": "c", "sizeLimit": "1.5k", "keepUnusedSeconds": 7200}),
            Some("c"),
            &["--cache-max-bytes=1500", "--cache-keep-seconds=7200"],
        ),
        (json!({"type": "Node", "claimName": "c", "sizeLimit": "2Ki"}), Some("c"), &["--cache-max-bytes=2048"]),
    ] {
        let pod = pod(service().https().model("cache", cache));
        let fetch = &pod.init_containers.as_ref().expect("a container that fetches")[0];
        assert_eq!(args(fetch)[4..], *kept);
        let volume = pod.volumes.iter().flatten().find(|volume| volume.name == "model-cache").expect("a cache");
        let found = volume.persistent_volume_claim.as_ref();
        assert_eq!(found.map(|found| (found.claim_name.as_str(), found.read_only)), claim.map(|claim| (claim, None)));
    }
}

#[test]
fn each_kind_of_source_is_fetched_by_what_it_needs() {
    let fetched = |source: &str| {
        let model = service().model("source", json!(source)).model("secretRef", json!({"name": "a"}));
        let pod = pod(model.model("revision", json!("v1")));
        (args(&pod.init_containers.as_ref().expect("one that fetches")[0]), args(&pod.containers[0]))
    };
    let token = "--token-file=/etc/windlass/model-secret/token";
    let settings = "--credentials-dir=/etc/windlass/model-secret";
    for (source, version, credentials) in [
        ("hf://org/name", Some("--revision=v1"), token),
        ("hf://org/name/a.gguf", Some("--revision=v1"), token),
        ("s3://bucket/llama", None, settings),
        ("gs://bucket", None, settings),
        ("az://container/a.gguf", None, settings),
        ("oci://registry:5000/team/llama:8b", None, token),
    ] {
        let (fetch, serve) = fetched(source);
        let to = fetch.iter().find_map(|argument| argument.strip_prefix("--to=")).expect("a place");
        let given: Vec<_> =
            fetch.iter().map(String::as_str).filter(|argument| !argument.starts_with("--to=")).collect();
        let expected: Vec<_> = ["fetch", source].into_iter().chain(version).chain([credentials]).collect();
        assert_eq!(given, expected);
        assert_eq!(serve[1], to, "what was fetched is served");
        assert_eq!(to.ends_with(".gguf"), source.ends_with(".gguf"), "{to}: a file for a file, else a folder");
    }
    let place = |revision: &str| {
        let model = service().model("source", json!("hf://org/name")).model("revision", json!(revision));
        args(&pod(model).containers[0])[1].clone()
    };
    assert_ne!(place("v1"), place("v2"), "pods of both can share a claim");
}

#[test]
fn a_pod_that_fetches_goes_to_its_source_and_nowhere_else() {
    let ports = |source: &str| -> Vec<Value> {
        let model = service().model("source", json!(source)).build();
        let policy = network_policy::build(&validate(&model).expect("valid"), &defaults());
        let policy = serde_json::to_value(policy.spec).expect("json");
        policy["egress"].as_array().expect("rules").iter().map(|rule| rule["ports"][0]["port"].clone()).collect()
    };
    assert_eq!(ports("pvc://models/a"), Vec::<Value>::new());
    assert_eq!(ports("hf://org/name"), [json!(53), json!(443)]);
    assert_eq!(ports("oci://registry:5000/llama"), [json!(53), json!(5000)]);
    assert_eq!(ports("s3://bucket"), [json!(53), Value::Null], "its endpoint may be in a Secret, with any port");
}

#[test]
fn tensor_parallel_size_becomes_gpus_a_flag_and_shared_memory() {
    let spec = service()
        .with("accelerator", json!({"type": "NvidiaGPU", "nvidiaGPU": {"products": ["H200"], "minMemory": "80Gi"}}))
        .with("parallelism", json!({"tensor": 4}))
        .with("resources", json!({"requests": {"cpu": "4"}}));
    let deployment = workload(spec, "llama");
    let pod = pod_of(&deployment);
    let resources = pod.containers[0].resources.clone().expect("resources");
    assert_eq!(resources.limits.expect("limits")["nvidia.com/gpu"].0, "4");
    assert!(args(&pod.containers[0]).contains(&"--tensor-parallel-size=4".to_owned()));
    assert!(pod.volumes.iter().flatten().any(|volume| volume.name == "shared-memory"));
    assert!(pod.tolerations.iter().flatten().any(|toleration| toleration.key.as_deref() == Some("nvidia.com/gpu")));
    let affinity = serde_json::to_value(&pod.affinity).expect("json");
    let terms = &affinity["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"];
    assert_eq!(
        terms,
        &json!([{"matchExpressions": [
            {"key": "nvidia.com/gpu.product", "operator": "In", "values": ["H200"]},
            {"key": "nvidia.com/gpu.memory", "operator": "Gt", "values": ["81919"]},
        ]}])
    );
}

#[test]
fn a_new_pod_comes_before_an_old_one_goes_unless_that_is_to_drain_first() {
    let rolling = |service: ServiceBuilder| {
        let rolling = workload(service, "llama").spec.and_then(|spec| spec.strategy?.rolling_update);
        serde_json::to_value(rolling).expect("json")
    };
    assert_eq!(rolling(service()), json!({"maxSurge": 1, "maxUnavailable": 0}));
    let drain = service().with("rollout", json!({"strategy": "Drain"}));
    assert_eq!(rolling(drain), json!({"maxSurge": 0, "maxUnavailable": 1}));
}

#[test]
fn the_policy_closes_everything_but_what_is_needed() {
    let policy = |service: ServiceBuilder| {
        let policy = network_policy::build(&service.valid(), &defaults());
        serde_json::to_value(policy.spec).expect("json")
    };
    let closed = policy(service());
    assert_eq!(closed["policyTypes"], json!(["Ingress", "Egress"]));
    assert_eq!(closed["egress"], json!([]));
    assert_eq!(closed["ingress"][0]["from"], json!([{"podSelector": {}}]), "the namespace by default");
    assert_eq!(closed["ingress"][1]["ports"][0]["port"], json!(8001));
    assert_eq!(
        closed["ingress"][1]["from"],
        json!([{
            "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "windlass"}},
            "podSelector": {"matchLabels": {"app": "windlass-operator"}},
        }])
    );
    let fetching = policy(service().https());
    let ports: Vec<_> = fetching["egress"]
        .as_array()
        .expect("rules")
        .iter()
        .flat_map(|rule| rule["ports"].as_array().expect("ports"))
        .map(|port| port["port"].clone())
        .collect();
    assert_eq!(ports, [json!(53), json!(53), json!(8443)]);
    let peers = json!([{"ipBlock": {"cidr": "10.0.0.0/8"}}]);
    assert_eq!(policy(service().with("network", json!({"allowFrom": peers})))["ingress"][0]["from"], peers);
}

#[test]
fn a_policy_that_is_to_say_less_is_written_too() {
    let caller = json!([{"podSelector": {"matchLabels": {"a": "b"}}}]);
    let (anywhere, here) = (json!([{"namespaceSelector": {}, "podSelector": {}}]), json!([{"podSelector": {}}]));
    let allowing = |from: &Value| service().with("network", json!({"allowFrom": from}));
    let from = |source: &str| service().model("source", json!(source));
    for (before, after) in [
        (allowing(&caller), service()),
        (allowing(&anywhere), allowing(&here)),
        (from("hf://org/name"), from("s3://bucket")),
    ] {
        let mut cluster = Cluster::new(before.build());
        cluster.reconcile();
        cluster.edit(after.build());
        cluster.reconcile();
        let wanted = network_policy::build(&validate(&cluster.service).expect("valid"), &defaults());
        assert_eq!(cluster.observed.network_policies[0].spec, wanted.spec);
    }
}

#[test]
fn outside_a_cluster_no_rule_is_left_without_peers() {
    let mut defaults = defaults();
    defaults.operator_namespace = None;
    let policy = network_policy::build(&service().valid(), &defaults);
    assert_eq!(policy.spec.and_then(|spec| spec.ingress).expect("rules").len(), 1);
}

#[test]
fn the_admin_port_is_in_no_service() {
    let mut cluster = Cluster::new(service().build());
    cluster.reconcile();
    let ports = cluster.observed.services[0].spec.clone().and_then(|spec| spec.ports).expect("ports");
    assert_eq!(ports.iter().map(|port| port.port).collect::<Vec<_>>(), [8000]);
}

#[test]
fn a_service_account_of_the_user_s_takes_the_place_of_ours() {
    let mut cluster = Cluster::serving(service().build());
    assert_eq!(cluster.observed.service_accounts.len(), 1);
    cluster.edit(service().with("serviceAccountName", json!("theirs")).build());
    cluster.reconcile();
    assert_eq!(cluster.observed.service_accounts.len(), 1, "a pod runs as it still");
    cluster.converge();
    assert_eq!(cluster.observed.service_accounts.len(), 0);
    let pod = pod_of(cluster.deployment("llama").expect("a workload"));
    assert_eq!(pod.service_account_name.as_deref(), Some("theirs"));
}

/// Specs that touch what pods are made from.
pub fn specs() -> impl Strategy<Value = ServiceBuilder> {
    let source = prop_oneof![
        Just(service()),
        Just(service().https()),
        Just(service().https().model("secretRef", json!({"name": "t"})).model("caConfigMapRef", json!({"name": "c"}))),
        Just(service().https().model("cache", json!({"type": "EmptyDir", "sizeLimit": "10Gi"}))),
        Just(service().https().model("cache", json!({"type": "PersistentVolumeClaim", "claimName": "c"}))),
        Just(service().https().model("cache", json!({"type": "Node", "claimName": "c", "sizeLimit": "1Gi"}))),
    ];
    let accelerator = prop_oneof![
        Just(None),
        Just(Some((json!({"type": "NvidiaGPU"}), 1))),
        Just(Some((json!({"type": "NvidiaGPU", "nvidiaGPU": {"products": ["a", "b"], "minMemory": "0.5Ti"}}), 4))),
    ];
    let spot = prop_oneof![
        Just(None),
        Just(Some(json!({"mode": "Never"}))),
        Just(Some(json!({"mode": "Prefer", "onDemandBase": 1}))),
        Just(Some(json!({"mode": "Require", "maxPercentAboveBase": 50, "nodeSelector": {"a": "b", "c": "d"}}))),
    ];
    let resources =
        prop_oneof![Just(None), Just(Some(json!({"requests": {"cpu": "0.5"}, "limits": {"memory": "1024Mi"}})))];
    let auth = prop_oneof![Just(None), Just(Some(json!({"apiKeysSecretRef": {"name": "keys"}})))];
    let standby = prop_oneof![2 => Just(None), 1 => Just(Some(0)), 1 => Just(Some(2))];
    (source, accelerator, spot, resources, auth, 0..5_i32, standby).prop_map(
        |(mut spec, accelerator, spot, resources, auth, replicas, standby)| {
            if let Some((accelerator, tensor)) = accelerator {
                spec = spec.with("accelerator", accelerator).with("parallelism", json!({"tensor": tensor}));
            }
            for (field, value) in [("spot", spot), ("resources", resources), ("auth", auth)] {
                spec = value.map_or(spec.clone(), |value| spec.with(field, value));
            }
            match standby {
                Some(standby) => spec.builtin(1, 4, 500).standby(standby),
                None => spec.with("replicas", json!(replicas)),
            }
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    #[test]
    fn every_pod_passes_restricted(spec in specs()) {
        let mut cluster = Cluster::new(spec.build());
        cluster.reconcile();
        for deployment in &cluster.observed.deployments {
            let found = violations(&pod_of(deployment));
            prop_assert!(found.is_empty(), "{found:?}");
        }
    }
}

#[test]
fn the_restricted_checker_sees_each_violation() {
    let good = pod(service().https());
    assert_eq!(violations(&good), Vec::<String>::new());
    type Break = (&'static str, fn(&mut PodSpec));
    let breaks: [Break; 7] = [
        ("host namespaces", |pod| pod.host_network = Some(true)),
        ("service account token", |pod| pod.automount_service_account_token = None),
        ("runAsNonRoot", |pod| pod.security_context.get_or_insert_default().run_as_non_root = None),
        ("seccomp", |pod| pod.security_context.get_or_insert_default().seccomp_profile = None),
        ("volume scratch", |pod| {
            let volume = pod.volumes.iter_mut().flatten().find(|volume| volume.name == "scratch").expect("scratch");
            volume.empty_dir = None;
            volume.host_path = Some(Default::default());
        }),
        ("container fetch: readOnlyRootFilesystem", |pod| {
            let fetch = &mut pod.init_containers.as_mut().expect("fetch")[0];
            fetch.security_context.get_or_insert_default().read_only_root_filesystem = None;
        }),
        ("container engine: capabilities.drop", |pod| {
            pod.containers[0].security_context.get_or_insert_default().capabilities = None;
        }),
    ];
    for (name, break_it) in breaks {
        let mut broken = good.clone();
        break_it(&mut broken);
        assert_eq!(violations(&broken), [name]);
    }
}

#[test]
fn names_of_both_workloads_fit_and_differ() {
    let longest = "a".repeat(windlass_operator_api::MAX_NAME_CHARS);
    let names = WorkloadKind::ALL.map(|kind| kind.deployment(&longest));
    assert_ne!(names[0], names[1]);
    assert!(names.iter().all(|name| name.len() <= 63));
    let mut cluster = Cluster::new(service().named(&longest).build());
    assert_eq!(cluster.reconcile().steps.len(), 6);
    assert!(Arc::strong_count(&cluster.observed.deployments[0]) == 1);
}
