//! The pod template of a workload. It passes Pod Security *restricted* whatever the spec says.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{
    Capabilities, Container, ContainerPort, HTTPGetAction, LocalObjectReference, PodResourceClaim, PodSecurityContext,
    PodSpec, PodTemplateSpec, Probe, ResourceClaim, ResourceRequirements, SeccompProfile, SecurityContext, Toleration,
    TopologySpreadConstraint,
};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{LabelSelector, ObjectMeta};
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use windlass_engine_contract::{ADMIN_PORT, API_PORT, paths};

use super::{affinity, args, service, service_account, some, volumes};
use crate::names::{self, ENGINE_CONTAINER, FETCH_CONTAINER, WorkloadKind};
use crate::observed::Defaults;
use crate::source::ModelSource;
use crate::standby;
use crate::validate::{Device, GpuAllocation, ValidatedService};
use crate::workers;

/// User and group of engine processes.
const NOBODY: i64 = 65_532;
/// Beyond the drain timeout: for the process to notice, end and be reaped.
const GRACE_AFTER_DRAIN_SECONDS: u32 = 30;
/// The resource that NVIDIA's device plugin offers, also the key of the taint on its nodes.
pub const GPU_RESOURCE: &str = "nvidia.com/gpu";
const ADMIN_PORT_NAME: &str = "admin";
/// Name of the claim in a pod whose GPUs are claimed.
const GPU_CLAIM: &str = "gpus";
/// What the pods of the spot workload are spread over: spot nodes of a zone are taken back together.
const SPOT_SPREAD: [&str; 2] = ["topology.kubernetes.io/zone", "kubernetes.io/hostname"];

/// The template of pods of one workload with this engine image, its own fingerprint left out.
pub fn build(service: &ValidatedService, workload: WorkloadKind, image: &str, defaults: &Defaults) -> PodTemplateSpec {
    let mut labels = names::labels(&service.name);
    labels.extend(names::workload_labels(&service.name, workload));
    labels.extend(service.has_standby().then(|| (names::ROUTED.to_owned(), standby::ON.to_owned())));
    PodTemplateSpec {
        metadata: Some(ObjectMeta { labels: Some(labels), annotations: markers(service), ..ObjectMeta::default() }),
        spec: Some(spec(service, workload, image, defaults)),
    }
}

/// The user's version marker, the last restart asked for, and how many nodes a replica has, so that a change of either is a
/// change of the template.
fn markers(service: &ValidatedService) -> Option<BTreeMap<String, String>> {
    let revision = service.revision.clone().map(|revision| (names::MODEL_REVISION.to_owned(), revision));
    let restart = service.rollout.restarted_at.clone().map(|at| (names::RESTARTED_AT.to_owned(), at));
    let nodes = (service.nodes > 1).then(|| (names::NODES.to_owned(), service.nodes.to_string()));
    let markers: BTreeMap<_, _> = revision.into_iter().chain(restart).chain(nodes).collect();
    (!markers.is_empty()).then_some(markers)
}

fn spec(service: &ValidatedService, workload: WorkloadKind, image: &str, defaults: &Defaults) -> PodSpec {
    let scheduling = &service.scheduling;
    let mounted = volumes::build(service);
    let grace = service.drain_timeout_seconds + GRACE_AFTER_DRAIN_SECONDS;
    PodSpec {
        init_containers: fetch(service, image, defaults, &mounted).map(|container| vec![container]),
        containers: vec![engine(service, image, defaults, &mounted)],
        volumes: Some(mounted.into_iter().map(|mounted| mounted.volume).collect()),
        service_account_name: Some(service_account::name(service)),
        automount_service_account_token: Some(false),
        enable_service_links: Some(false),
        image_pull_secrets: some(
            service.image_pull_secrets.iter().map(|name| LocalObjectReference { name: name.clone() }).collect(),
        ),
        security_context: Some(pod_security()),
        termination_grace_period_seconds: Some(grace.into()),
        node_selector: (!scheduling.node_selector.is_empty()).then(|| scheduling.node_selector.clone()),
        tolerations: some(tolerations(service, workload)),
        affinity: affinity::build(service, workload),
        topology_spread_constraints: some(spread(service, workload)),
        resource_claims: claim_template(service).map(|template| {
            let template = Some(template.to_owned());
            vec![PodResourceClaim {
                name: GPU_CLAIM.into(),
                resource_claim_template_name: template,
                ..PodResourceClaim::default()
            }]
        }),
        priority_class_name: scheduling.priority_class_name.clone(),
        runtime_class_name: scheduling.runtime_class_name.clone(),
        ..PodSpec::default()
    }
}

fn engine(service: &ValidatedService, image: &str, defaults: &Defaults, mounted: &[volumes::Mounted]) -> Container {
    Container {
        args: Some(args::serve(service)),
        env: (service.nodes > 1).then(|| vec![workers::from_field(args::POD_IP, "status.podIP")]),
        ports: Some(vec![port(service::PORT_NAME, API_PORT), port(ADMIN_PORT_NAME, ADMIN_PORT)]),
        // Loading may take long and a broken load ends by itself, so the limit is an hour and asking is cheap.
        startup_probe: Some(probe(paths::READYZ, 1, 3, 3600)),
        readiness_probe: Some(probe(paths::READYZ, 2, 2, 2)),
        liveness_probe: Some(probe(paths::LIVEZ, 10, 5, 6)),
        resources: Some(resources(service, true)),
        volume_mounts: Some(mounted.iter().filter_map(|mounted| mounted.engine.clone()).collect()),
        ..container(ENGINE_CONTAINER, image, defaults)
    }
}

fn fetch(
    service: &ValidatedService,
    image: &str,
    defaults: &Defaults,
    mounted: &[volumes::Mounted],
) -> Option<Container> {
    let ModelSource::Fetched(source) = &service.source else { return None };
    Some(Container {
        args: Some(args::fetch(source)),
        resources: Some(resources(service, false)),
        volume_mounts: Some(mounted.iter().filter_map(|mounted| mounted.fetch.clone()).collect()),
        ..container(FETCH_CONTAINER, image, defaults)
    })
}

/// What both containers share. The image's entry point is `windlass-engine`.
pub(super) fn container(name: &str, image: &str, defaults: &Defaults) -> Container {
    Container {
        name: name.into(),
        image: Some(image.to_owned()),
        image_pull_policy: defaults.image_pull_policy.clone(),
        security_context: Some(container_security()),
        termination_message_policy: Some("FallbackToLogsOnError".into()),
        ..Container::default()
    }
}

pub(super) fn pod_security() -> PodSecurityContext {
    PodSecurityContext {
        run_as_non_root: Some(true),
        run_as_user: Some(NOBODY),
        run_as_group: Some(NOBODY),
        fs_group: Some(NOBODY),
        fs_group_change_policy: Some("OnRootMismatch".into()),
        seccomp_profile: Some(SeccompProfile { type_: "RuntimeDefault".into(), localhost_profile: None }),
        ..PodSecurityContext::default()
    }
}

fn container_security() -> SecurityContext {
    SecurityContext {
        allow_privilege_escalation: Some(false),
        read_only_root_filesystem: Some(true),
        capabilities: Some(Capabilities { drop: Some(vec!["ALL".into()]), add: None }),
        ..SecurityContext::default()
    }
}

/// The user's amounts, and in the engine container the GPUs.
fn resources(service: &ValidatedService, with_gpus: bool) -> ResourceRequirements {
    let mut requests = service.resources.requests.clone();
    let mut limits = service.resources.limits.clone();
    if let Some((resource, count)) = counted(&service.device).filter(|_| with_gpus) {
        for amounts in [&mut requests, &mut limits] {
            amounts.insert(resource.clone(), Quantity(count.to_string()));
        }
    }
    ResourceRequirements {
        requests: (!requests.is_empty()).then_some(requests),
        limits: (!limits.is_empty()).then_some(limits),
        claims: claim_template(service)
            .filter(|_| with_gpus)
            .map(|_| vec![ResourceClaim { name: GPU_CLAIM.into(), request: None }]),
    }
}

/// The resource of the device plugin that a pod asks for, and how much of it.
fn counted(device: &Device) -> Option<(String, u32)> {
    let Device::NvidiaGpu { count, allocation, .. } = device else { return None };
    match allocation {
        GpuAllocation::Whole => Some((GPU_RESOURCE.to_owned(), *count)),
        GpuAllocation::Slice(profile) => Some((profile.resource(), *count)),
        GpuAllocation::Claim(_) => None,
    }
}

fn claim_template(service: &ValidatedService) -> Option<&str> {
    match &service.device {
        Device::NvidiaGpu { allocation: GpuAllocation::Claim(template), .. } => Some(template),
        _ => None,
    }
}

fn port(name: &str, number: u16) -> ContainerPort {
    ContainerPort {
        name: Some(name.into()),
        container_port: number.into(),
        protocol: Some("TCP".into()),
        ..ContainerPort::default()
    }
}

fn probe(path: &str, period_seconds: i32, timeout_seconds: i32, failure_threshold: i32) -> Probe {
    Probe {
        http_get: Some(HTTPGetAction {
            path: Some(path.to_owned()),
            port: IntOrString::String(ADMIN_PORT_NAME.into()),
            ..HTTPGetAction::default()
        }),
        period_seconds: Some(period_seconds),
        timeout_seconds: Some(timeout_seconds),
        failure_threshold: Some(failure_threshold),
        ..Probe::default()
    }
}

/// Taints by which GKE and AKS keep other pods off spot nodes.
pub(crate) const SPOT_TAINTS: [(&str, &str); 2] =
    [("cloud.google.com/gke-spot", "true"), ("kubernetes.azure.com/scalesetpriority", "spot")];

/// The user's tolerations, that of GPU nodes, and in the spot workload those of spot nodes.
fn tolerations(service: &ValidatedService, workload: WorkloadKind) -> Vec<Toleration> {
    let gpu = matches!(service.device, Device::NvidiaGpu { .. }).then(|| Toleration {
        key: Some(GPU_RESOURCE.into()),
        operator: Some("Exists".into()),
        effect: Some("NoSchedule".into()),
        ..Toleration::default()
    });
    let spot = match workload {
        WorkloadKind::OnDemand => Vec::new(),
        WorkloadKind::Spot if service.spot.tolerations.is_empty() => SPOT_TAINTS.map(spot_taint).to_vec(),
        WorkloadKind::Spot => service.spot.tolerations.clone(),
    };
    service.scheduling.tolerations.iter().cloned().chain(gpu).chain(spot).collect()
}

fn spot_taint((key, value): (&str, &str)) -> Toleration {
    Toleration {
        key: Some(key.into()),
        operator: Some("Equal".into()),
        value: Some(value.into()),
        effect: Some("NoSchedule".into()),
        ..Toleration::default()
    }
}

/// The user's constraints, those without a selector about this service's pods; and in the spot workload, which the
/// cluster's own defaults no longer spread then, what can be had of [`SPOT_SPREAD`].
fn spread(service: &ValidatedService, workload: WorkloadKind) -> Vec<TopologySpreadConstraint> {
    let about = |labels| LabelSelector { match_labels: Some(labels), ..LabelSelector::default() };
    let mut constraints = service.scheduling.topology_spread_constraints.clone();
    constraints.iter_mut().for_each(|constraint| {
        constraint.label_selector.get_or_insert_with(|| about(names::selector_labels(&service.name)));
    });
    let is_open = |topology: &&str| !constraints.iter().any(|constraint| constraint.topology_key == *topology);
    let topologies = SPOT_SPREAD.into_iter().filter(|_| workload == WorkloadKind::Spot).filter(is_open);
    let added: Vec<_> = topologies
        .map(|topology| TopologySpreadConstraint {
            topology_key: topology.to_owned(),
            max_skew: 1,
            when_unsatisfiable: "ScheduleAnyway".into(),
            label_selector: Some(about(names::workload_labels(&service.name, workload))),
            ..TopologySpreadConstraint::default()
        })
        .collect();
    constraints.into_iter().chain(added).collect()
}
