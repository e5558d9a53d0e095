//! The other nodes of replicas whose layers are divided over several: the workers.
//!
//! A replica is led by a pod of its Deployment, which serves. Its workers are the pods of a StatefulSet that belongs to that
//! very pod: they are told its address, live as long as it does, its drain included, and go with it, whoever deletes it. So
//! scaling, rollouts and evacuations know leaders alone.
//!
//! Workers are made from the template of their leader, once. A StatefulSet that is there stays as it is, whichever version
//! of the operator made it, unless its leader has another address.

use std::collections::BTreeMap;

use k8s_openapi::api::apps::v1::{StatefulSet, StatefulSetOrdinals, StatefulSetSpec};
use k8s_openapi::api::core::v1::{Container, EnvVar, EnvVarSource, ObjectFieldSelector, PodTemplateSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{LabelSelector, ObjectMeta, OwnerReference};
use windlass_engine_contract::flags;

use crate::digest::fingerprint;
use crate::fleet::{Fleet, FleetPod, Workload};
use crate::names::{self, ENGINE_CONTAINER, LEADER, LEADER_ADDRESS, NODES};
use crate::observed::Observed;
use crate::plan::{Object, Step};
use crate::validate::ValidatedService;

/// Characters of the service's name in that of a StatefulSet, whose own may have 52 with its revisions' digits.
const NAME_CHARS: usize = 43;
const DIGITS: usize = 8;
/// The label by which a pod of a StatefulSet knows its number.
const POD_INDEX: &str = "apps.kubernetes.io/pod-index";
/// The variable that holds it.
const NODE_RANK: &str = "NODE_RANK";
/// A worker whose leader is gone has nothing to finish.
const GRACE_SECONDS: i64 = 30;

/// Makes the workers of each leader that has none, or has another address since.
pub fn steps(service: &ValidatedService, fleet: &Fleet<'_>, observed: &Observed) -> Vec<Step> {
    let wanted = |workload: &Workload<'_>| -> Vec<StatefulSet> {
        let Some(template) = template(workload) else { return Vec::new() };
        let leaders = workload.live().filter(|pod| pod.updated);
        leaders.filter_map(|pod| build(service, &Leader::of(pod)?, template)).collect()
    };
    let is_there = |wanted: &StatefulSet| {
        let known = observed.stateful_sets.iter().filter(|known| known.metadata.name == wanted.metadata.name);
        known.into_iter().any(|known| address(&known.metadata) == address(&wanted.metadata))
    };
    let all = fleet.workloads.iter().flat_map(wanted).filter(|wanted| !is_there(wanted));
    all.map(|wanted| Step::Apply(Object::StatefulSet(Box::new(wanted)))).collect()
}

fn template<'a>(workload: &Workload<'a>) -> Option<&'a PodTemplateSpec> {
    Some(&workload.deployment?.spec.as_ref()?.template)
}

fn address(metadata: &ObjectMeta) -> Option<&String> {
    metadata.annotations.as_ref()?.get(LEADER_ADDRESS)
}

/// A pod that workers can join.
struct Leader<'a> {
    name: &'a str,
    uid: &'a str,
    address: &'a str,
    /// Nodes of the replica, its own included.
    nodes: i32,
}

impl<'a> Leader<'a> {
    /// `None` for a pod that is a replica by itself, or has no address yet.
    fn of(pod: &FleetPod<'a>) -> Option<Leader<'a>> {
        let nodes = pod.pod.annotation(NODES)?.parse().ok().filter(|nodes| *nodes > 1)?;
        let address = pod.pod.status.pod_ip.as_deref()?;
        Some(Leader { name: pod.name, uid: pod.pod.metadata.uid.as_deref()?, address, nodes })
    }

    fn workers(&self) -> BTreeMap<String, String> {
        [(LEADER.to_owned(), self.name.to_owned())].into()
    }

    fn owner(&self) -> OwnerReference {
        OwnerReference {
            api_version: "v1".into(),
            kind: "Pod".into(),
            name: self.name.to_owned(),
            uid: self.uid.to_owned(),
            controller: Some(true),
            block_owner_deletion: None,
        }
    }
}

fn build(service: &ValidatedService, leader: &Leader<'_>, template: &PodTemplateSpec) -> Option<StatefulSet> {
    let digits = fingerprint(&(leader.name, leader.uid));
    let clipped = &service.name[..service.name.floor_char_boundary(NAME_CHARS)];
    Some(StatefulSet {
        metadata: ObjectMeta {
            owner_references: Some(vec![leader.owner()]),
            annotations: Some([(LEADER_ADDRESS.to_owned(), leader.address.to_owned())].into()),
            ..crate::build::metadata(service, format!("{clipped}-{}", digits.get(..DIGITS)?))
        },
        spec: Some(StatefulSetSpec {
            replicas: Some(leader.nodes - 1),
            // The leader is node 0.
            ordinals: Some(StatefulSetOrdinals { start: Some(1) }),
            // They wait for each other, so none waits to be started.
            pod_management_policy: Some("Parallel".into()),
            selector: LabelSelector { match_labels: Some(leader.workers()), ..LabelSelector::default() },
            template: joining(service, leader, template),
            ..StatefulSetSpec::default()
        }),
        status: None,
    })
}

/// The template of pods that join `leader`, which was made from `template`.
fn joining(service: &ValidatedService, leader: &Leader<'_>, template: &PodTemplateSpec) -> PodTemplateSpec {
    // None of the labels by which the Service and the budget know replicas.
    let mut labels = names::instance_labels(&service.name);
    labels.insert("app.kubernetes.io/name".into(), "windlass-worker".into());
    labels.extend(leader.workers());
    let mut spec = template.spec.clone().unwrap_or_default();
    spec.termination_grace_period_seconds = Some(GRACE_SECONDS);
    spec.containers.iter_mut().filter(|container| container.name == ENGINE_CONTAINER).for_each(|container| {
        compute_only(container, leader);
    });
    PodTemplateSpec { metadata: Some(ObjectMeta { labels: Some(labels), ..ObjectMeta::default() }), spec: Some(spec) }
}

/// The engine serves nothing: it has no ports and answers no probes, and ends when its leader does.
fn compute_only(engine: &mut Container, leader: &Leader<'_>) {
    let is_of_leader = |argument: &String| argument.starts_with(&format!("{}=", flags::MASTER_ADDR));
    let arguments = engine.args.get_or_insert_default();
    arguments.retain(|argument| !is_of_leader(argument));
    arguments.extend([
        format!("{}={}", flags::MASTER_ADDR, leader.address),
        format!("{}=$({NODE_RANK})", flags::NODE_RANK),
        flags::HEADLESS.to_owned(),
    ]);
    engine.env = Some(vec![from_field(NODE_RANK, &format!("metadata.labels['{POD_INDEX}']"))]);
    engine.ports = None;
    engine.startup_probe = None;
    engine.readiness_probe = None;
    engine.liveness_probe = None;
}

/// A variable with what a field of the pod holds.
pub fn from_field(name: &str, path: &str) -> EnvVar {
    let field = ObjectFieldSelector { api_version: None, field_path: path.to_owned() };
    EnvVar {
        name: name.to_owned(),
        value: None,
        value_from: Some(EnvVarSource { field_ref: Some(field), ..EnvVarSource::default() }),
    }
}
