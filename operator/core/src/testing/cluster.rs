//! A cluster as planning sees it: steps are carried out on plain objects, pods follow their Deployments.

use std::sync::Arc;

use jiff::Timestamp;
use k8s_openapi::api::apps::v1::{Deployment, DeploymentStatus};
use k8s_openapi::api::core::v1::{ConfigMap, PodSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference, Time};
use windlass_engine_contract::stats::Stats;
use windlass_operator_api::InferenceService;

use super::{at, defaults, effective, stats};
use crate::choice::Choice;
use crate::fleet::Fleet;
use crate::names::TEMPLATE_HASH;
use crate::observed::{Defaults, Observed};
use crate::plan::{Kind, Mark, Object, Plan, Step};
use crate::pod::{Condition, Pod, Spec, Status};
use crate::status::{Event, Outcome, compute};
use crate::validate::{ValidatedService, validate};

/// A service with its cluster and a clock.
pub struct Cluster {
    /// The service, its status included.
    pub service: InferenceService,
    /// Everything in the cluster.
    pub observed: Observed,
    /// The operator's configuration.
    pub defaults: Defaults,
    /// The time.
    pub now: Timestamp,
    /// Events so far.
    pub events: Vec<Event>,
    /// How often the status was written.
    pub status_writes: usize,
    /// What was written of the autoscaler's learning.
    pub capacities: Vec<ConfigMap>,
    pods_made: usize,
}

impl Cluster {
    /// Nothing but the service.
    pub fn new(service: InferenceService) -> Self {
        Cluster {
            service,
            observed: Observed::default(),
            defaults: defaults(),
            now: at(100_000),
            events: Vec::new(),
            status_writes: 0,
            capacities: Vec::new(),
            pods_made: 0,
        }
    }

    /// A service whose pods all serve.
    pub fn serving(service: InferenceService) -> Self {
        let mut cluster = Cluster::new(service);
        cluster.converge();
        cluster
    }

    /// Plans, carries the plan out, writes the status.
    pub fn reconcile(&mut self) -> Plan {
        let plan = crate::plan(&self.service, &self.observed, &self.defaults, self.now);
        plan.steps.iter().for_each(|step| self.carry_out(step));
        self.observed.memory = plan.memory.clone();
        self.publish(&plan, &Outcome::Applied);
        plan
    }

    /// Writes the status of a plan with this outcome.
    pub fn publish(&mut self, plan: &Plan, outcome: &Outcome) {
        let change = compute(&self.service, plan, outcome, self.now);
        self.events.extend(change.events);
        if let Some(status) = change.status {
            self.service.status = Some(status);
            self.status_writes += 1;
        }
    }

    /// Reconciles and lets pods start and end until nothing is left to do.
    pub fn converge(&mut self) {
        for _ in 0..30 {
            self.reconcile();
            self.run_controllers();
            self.start_pods();
            self.read_engines();
            self.end_pods();
            self.run_controllers();
            self.pass(1);
            let leaves = self.observed.pods.iter().any(|pod| pod.metadata.deletion_timestamp.is_some());
            let next = crate::plan(&self.service, &self.observed, &self.defaults, self.now);
            if next.steps.is_empty() && !leaves {
                break;
            }
        }
        self.reconcile();
    }

    /// Lets time pass.
    pub fn pass(&mut self, seconds: i64) {
        self.now = at(self.now.as_second() + seconds);
    }

    /// Replaces the spec by that of `service`, as a user's edit does.
    pub fn edit(&mut self, service: InferenceService) {
        self.service.spec = service.spec;
        self.service.metadata.generation = self.service.metadata.generation.map(|generation| generation + 1);
    }

    /// The Deployment of this name.
    pub fn deployment(&self, name: &str) -> Option<&Deployment> {
        self.observed.deployments.iter().find(|found| found.metadata.name.as_deref() == Some(name)).map(Arc::as_ref)
    }

    /// Replicas asked of the Deployment of this name.
    pub fn replicas(&self, name: &str) -> Option<i32> {
        self.deployment(name)?.spec.as_ref()?.replicas
    }

    /// A condition's status and reason.
    pub fn condition(&self, kind: &str) -> (String, String) {
        let conditions = self.service.status.iter().flat_map(|status| &status.conditions);
        let found = conditions.into_iter().find(|condition| condition.type_ == kind).expect("the condition");
        (found.status.clone(), found.reason.clone())
    }

    /// A condition's message.
    pub fn message(&self, kind: &str) -> String {
        let conditions = self.service.status.iter().flat_map(|status| &status.conditions);
        conditions.into_iter().find(|condition| condition.type_ == kind).expect("the condition").message.clone()
    }

    /// Names of pods that do not leave, in order.
    pub fn live(&self) -> Vec<String> {
        let live = self.observed.pods.iter().filter(|pod| pod.metadata.deletion_timestamp.is_none());
        let mut names: Vec<String> = live.filter_map(|pod| pod.metadata.name.clone()).collect();
        names.sort();
        names
    }

    /// Records what the engine in `pod` says.
    pub fn read(&mut self, pod: &str, stats: Stats) {
        let now = self.now;
        Arc::make_mut(&mut self.observed.load).record(pod, now, stats);
    }

    /// Records that every serving engine idles with what the service asked it to build.
    pub fn read_engines(&mut self) {
        let valid = self.asked();
        let mut said = stats();
        let mut built = effective();
        built.served_names = valid.served_names.clone();
        built.tensor_parallel = valid.device.tensor();
        built.pipeline_parallel = valid.nodes;
        built.device = if valid.device.tensor() > 1 { "sim".into() } else { built.device };
        built.max_model_tokens = valid.engine.max_model_tokens.unwrap_or(built.max_model_tokens);
        built.max_sequences = valid.engine.max_sequences.unwrap_or(built.max_sequences);
        built.quantization = valid.engine.quantization.built().unwrap_or(&built.quantization).to_owned();
        if matches!(valid.device, crate::validate::Device::NvidiaGpu { .. }) {
            built.device = "cuda".into();
        }
        said.effective = Some(built);
        for pod in self.live() {
            self.read(&pod, said.clone());
        }
    }

    /// The service that pods are made for: as pinned, with every choice made.
    fn asked(&self) -> ValidatedService {
        let (service, pinned) = crate::revision::pinned(&self.service, &self.observed).expect("a revision");
        let valid = validate(&service).expect("valid");
        let fleet = Fleet::of(&valid, &self.observed);
        let choice = pinned.or_else(|| Choice::of_spec(&valid, &fleet));
        choice.map_or_else(|| valid.clone(), |choice| valid.decided(&choice.picked))
    }

    /// Changes a pod.
    pub fn change_pod(&mut self, name: &str, change: impl FnOnce(&mut Pod)) {
        let found = self.observed.pods.iter_mut().find(|pod| pod.metadata.name.as_deref() == Some(name));
        change(Arc::make_mut(found.expect("the pod")));
    }

    /// Does one step as the API server would.
    pub fn carry_out(&mut self, step: &Step) {
        match step {
            Step::Apply(object) => self.apply(object),
            Step::MarkPod { pod, mark, value } => self.change_pod(pod, |pod| {
                let (marks, key) = match mark {
                    Mark::Label(key) => (&mut pod.metadata.labels, *key),
                    Mark::Annotation(key) => (&mut pod.metadata.annotations, *key),
                };
                match value {
                    Some(value) => marks.get_or_insert_default().insert(key.to_owned(), value.clone()),
                    None => marks.get_or_insert_default().remove(key),
                };
            }),
            Step::Scale { deployment, replicas } => {
                let found =
                    self.observed.deployments.iter_mut().find(|found| found.metadata.name.as_ref() == Some(deployment));
                let spec = Arc::make_mut(found.expect("the Deployment")).spec.as_mut();
                spec.expect("a spec").replicas = Some(*replicas);
            }
            Step::Withdraw { replica_set } => {
                let now = self.now;
                let owner = |pod: &Pod| Some(pod.metadata.owner_references.as_ref()?.first()?.name.clone());
                for pod in self.observed.pods.iter_mut().filter(|pod| owner(pod).as_ref() == Some(replica_set)) {
                    Arc::make_mut(pod).metadata.deletion_timestamp = Some(Time(now));
                }
            }
            Step::Evacuate { pod, budget, .. } => {
                let end = self.now + budget.unwrap_or_default();
                self.change_pod(pod, |pod| pod.metadata.deletion_timestamp = Some(Time(end)));
            }
            Step::Delete { kind, name, uid } => {
                let is_it = |meta: &ObjectMeta| meta.name.as_ref() == Some(name) && meta.uid.as_ref() == Some(uid);
                match kind {
                    Kind::Deployment => self.observed.deployments.retain(|object| !is_it(&object.metadata)),
                    Kind::ServiceAccount => self.observed.service_accounts.retain(|object| !is_it(&object.metadata)),
                    Kind::Job => self.observed.jobs.retain(|object| !is_it(&object.metadata)),
                    Kind::ControllerRevision => self.observed.revisions.retain(|object| !is_it(&object.metadata)),
                    Kind::HorizontalPodAutoscaler => {
                        self.observed.autoscalers.retain(|object| !is_it(&object.metadata))
                    }
                    other => panic!("no plan deletes a {other:?}"),
                }
            }
        }
    }

    fn apply(&mut self, object: &Object) {
        let observed = &mut self.observed;
        match object {
            Object::ServiceAccount(object) => put(&mut observed.service_accounts, object, |one| &mut one.metadata),
            Object::Service(object) => put(&mut observed.services, object, |one| &mut one.metadata),
            Object::NetworkPolicy(object) => put(&mut observed.network_policies, object, |one| &mut one.metadata),
            Object::PodDisruptionBudget(object) => {
                put(&mut observed.disruption_budgets, object, |one| &mut one.metadata)
            }
            Object::ConfigMap(object) => self.capacities.push(object.clone()),
            Object::StatefulSet(object) => put(&mut observed.stateful_sets, object.as_ref(), |one| &mut one.metadata),
            Object::Job(object) => put(&mut observed.jobs, object.as_ref(), |one| &mut one.metadata),
            Object::ControllerRevision(object) => put(&mut observed.revisions, object, |one| &mut one.metadata),
            Object::HorizontalPodAutoscaler(object) => {
                put(&mut observed.autoscalers, object.as_ref(), |one| &mut one.metadata)
            }
            Object::Deployment(object) => put(&mut observed.deployments, object.as_ref(), |one| &mut one.metadata),
        }
    }

    /// What Deployment and ReplicaSet controllers do in one round: outdated and surplus pods begin to leave, missing
    /// ones are made, the status follows.
    pub fn run_controllers(&mut self) {
        for index in 0..self.observed.deployments.len() {
            let deployment = self.observed.deployments[index].clone();
            self.run_controller(&deployment);
            let status = self.deployment_status(&deployment);
            Arc::make_mut(&mut self.observed.deployments[index]).status = Some(status);
        }
        let workloads: Vec<String> =
            self.observed.deployments.iter().filter_map(|found| found.metadata.name.clone()).collect();
        let now = self.now;
        for pod in &mut self.observed.pods {
            let owner = pod.metadata.labels.as_ref().and_then(|labels| labels.get("test/deployment"));
            if !owner.is_some_and(|owner| workloads.contains(owner)) && pod.metadata.deletion_timestamp.is_none() {
                Arc::make_mut(pod).metadata.deletion_timestamp = Some(Time(now));
            }
        }
    }

    fn run_controller(&mut self, deployment: &Deployment) {
        let spec = deployment.spec.as_ref().expect("a spec");
        let wanted = usize::try_from(spec.replicas.unwrap_or(1)).expect("not negative");
        let name = deployment.metadata.name.clone().expect("a name");
        let template = spec.template.metadata.clone().unwrap_or_default();
        let is_current = |pod: &Pod| {
            pod.metadata.annotations.as_ref().is_some_and(|found| {
                template.annotations.iter().flatten().all(|(key, value)| found.get(key) == Some(value))
            })
        };
        let mut mine: Vec<usize> = (0..self.observed.pods.len())
            .filter(|&index| {
                let pod = &self.observed.pods[index];
                let label = pod.metadata.labels.as_ref().and_then(|labels| labels.get("test/deployment"));
                label == Some(&name) && pod.metadata.deletion_timestamp.is_none()
            })
            .collect();
        // Outdated ones first, then unready ones, then by deletion cost.
        mine.sort_by_key(|&index| {
            let pod = &self.observed.pods[index];
            let cost = pod.metadata.annotations.as_ref().and_then(|found| found.get(crate::names::DELETION_COST));
            (is_current(pod), pod.is_ready(), cost.is_none())
        });
        let current = mine.iter().filter(|&&index| is_current(&self.observed.pods[index])).count();
        let outdated = mine.len() - current;
        let leave = if current >= wanted { outdated + current - wanted } else { mine.len().saturating_sub(wanted) };
        for &index in mine.iter().take(leave) {
            Arc::make_mut(&mut self.observed.pods[index]).metadata.deletion_timestamp = Some(Time(self.now));
        }
        for _ in current..wanted {
            self.make_pod(&name, &template, spec.template.spec.clone());
        }
    }

    fn make_pod(&mut self, deployment: &str, template: &ObjectMeta, spec: Option<PodSpec>) -> String {
        self.pods_made += 1;
        let mut metadata = template.clone();
        let name = format!("{deployment}-{:03}", self.pods_made);
        let hash = template.annotations.as_ref().and_then(|found| found.get(TEMPLATE_HASH));
        let replica_set = OwnerReference {
            kind: "ReplicaSet".into(),
            name: format!("{deployment}-{}", hash.map_or("", String::as_str)),
            ..OwnerReference::default()
        };
        metadata.owner_references = Some(vec![replica_set]);
        metadata.name = Some(name.clone());
        metadata.creation_timestamp = Some(Time(self.now));
        metadata.labels.get_or_insert_default().insert("test/deployment".into(), deployment.to_owned());
        let account = spec.and_then(|spec| spec.service_account_name).map(Into::into);
        let spec = Spec { node_name: None, service_account_name: account };
        self.observed.pods.push(Arc::new(Pod { metadata, spec, status: Status::default() }));
        name
    }

    /// A pod of the Deployment's new template is made beside the others, and the scheduler finds no node for it.
    pub fn strand_new(&mut self, deployment: &str, template: ObjectMeta) {
        let name = self.make_pod(deployment, &template, None);
        self.strand(&name);
    }

    /// The scheduler finds no node for the pod.
    pub fn strand(&mut self, name: &str) {
        let since = Some(self.now);
        let scheduled = Condition { holds: Some(false), reason: Some("Unschedulable".into()), message: None, since };
        let status = Status { scheduled: Some(scheduled), ..Status::default() };
        self.change_pod(name, |pod| pod.status = status);
    }

    /// The pod serves from now on.
    pub fn start_pod(&mut self, name: &str) {
        let ready = Condition { holds: Some(true), since: Some(self.now), ..Condition::default() };
        let status = Status { ready: Some(ready), ..Status::default() };
        self.change_pod(name, |pod| pod.status = status);
    }

    fn deployment_status(&self, deployment: &Deployment) -> DeploymentStatus {
        let name = deployment.metadata.name.as_ref();
        let template = deployment.spec.as_ref().and_then(|spec| spec.template.metadata.clone()).unwrap_or_default();
        let mine = self.observed.pods.iter().filter(|pod| {
            pod.metadata.labels.as_ref().and_then(|labels| labels.get("test/deployment")) == name
                && pod.metadata.deletion_timestamp.is_none()
        });
        let hash = template.annotations.as_ref().and_then(|found| found.get(TEMPLATE_HASH));
        let updated = mine
            .clone()
            .filter(|pod| pod.metadata.annotations.as_ref().and_then(|found| found.get(TEMPLATE_HASH)) == hash);
        DeploymentStatus {
            observed_generation: deployment.metadata.generation,
            replicas: i32::try_from(mine.clone().count()).ok(),
            updated_replicas: i32::try_from(updated.count()).ok(),
            ready_replicas: i32::try_from(mine.filter(|pod| pod.is_ready()).count()).ok(),
            ..DeploymentStatus::default()
        }
    }

    /// Every pod that does not leave serves from now on.
    pub fn start_pods(&mut self) {
        let is_starting = |pod: &&Arc<Pod>| pod.metadata.deletion_timestamp.is_none() && !pod.is_ready();
        let starting = self.observed.pods.iter().filter(is_starting).filter_map(|pod| pod.metadata.name.clone());
        for name in starting.collect::<Vec<_>>() {
            self.start_pod(&name);
        }
    }

    /// Every pod that leaves is gone.
    pub fn end_pods(&mut self) {
        self.observed.pods.retain(|pod| pod.metadata.deletion_timestamp.is_none());
    }
}

/// Server-side apply: the object takes the place of that of the same name, which keeps its UID.
fn put<K: Clone>(objects: &mut Vec<Arc<K>>, object: &K, meta: fn(&mut K) -> &mut ObjectMeta) {
    let mut new = object.clone();
    let name = meta(&mut new).name.clone();
    let place = objects.iter().position(|found| meta(&mut K::clone(found)).name == name);
    let before = place.map(|place| meta(&mut K::clone(&objects[place])).clone());
    let metadata = meta(&mut new);
    metadata.uid = before.as_ref().and_then(|before| before.uid.clone()).or_else(|| Some(format!("uid-{name:?}")));
    metadata.generation = Some(before.and_then(|before| before.generation).unwrap_or(0) + 1);
    match place {
        Some(place) => objects[place] = Arc::new(new),
        None => objects.push(Arc::new(new)),
    }
}
