//! The service's workloads and pods as they are, sorted out once.

use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::apps::v1::{Deployment, DeploymentCondition};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

use crate::names::{DELETION_COST, ENGINE_CONTAINER, GIVEN_UP, ROUTED, TEMPLATE_HASH, WORKLOAD_LABEL, WorkloadKind};
use crate::observed::Observed;
use crate::pod::{Condition, Pod, Status};
use crate::standby;
use crate::validate::ValidatedService;

/// What took longer was no start: a pod that became unready on its way, or waited for a node that somebody had to add.
const LONGEST_COLD_START: Duration = Duration::from_secs(1800);

/// Workloads of one service, in the order in which they roll; one that does not exist is there without a Deployment.
#[derive(Debug)]
pub struct Fleet<'a> {
    /// On-demand, then spot.
    pub workloads: Vec<Workload<'a>>,
}

/// One workload.
#[derive(Debug)]
pub struct Workload<'a> {
    /// Which.
    pub kind: WorkloadKind,
    /// Its Deployment, if there is one of ours.
    pub deployment: Option<&'a Deployment>,
    /// Its pods, by name, those that have ended left out.
    pub pods: Vec<FleetPod<'a>>,
}

/// One pod.
#[derive(Clone, Copy, Debug)]
pub struct FleetPod<'a> {
    /// Its name.
    pub name: &'a str,
    /// The object.
    pub pod: &'a Pod,
    /// Where it is in its life.
    pub stage: Stage,
    /// Made from the Deployment's current template.
    pub updated: bool,
}

/// Stages of a pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// Not serving yet, or not now.
    Waiting,
    /// Serving.
    Ready {
        /// Since when.
        since: Timestamp,
    },
    /// Draining or being removed.
    Leaving,
}

impl<'a> Fleet<'a> {
    /// Sorts out what was observed.
    pub fn of(service: &ValidatedService, observed: &'a Observed) -> Self {
        let workload = |kind: WorkloadKind| {
            let name = kind.deployment(&service.name);
            let named = observed.deployments.iter().find(|found| found.metadata.name.as_deref() == Some(&name));
            let deployment = named.map(Arc::as_ref).filter(|found| is_owned(&found.metadata, &service.uid));
            Workload { kind, deployment, pods: pods(kind, deployment, observed) }
        };
        Fleet { workloads: WorkloadKind::ALL.map(workload).into() }
    }

    /// Holds pods to these templates, where an edit of the spec has given their workload another one just now.
    pub fn hold_to(&mut self, templates: &[(WorkloadKind, String)]) {
        for workload in &mut self.workloads {
            let template = templates.iter().find(|(kind, _)| *kind == workload.kind).map(|(_, hash)| hash.as_str());
            for pod in &mut workload.pods {
                pod.updated = template.is_some() && pod.pod.annotation(TEMPLATE_HASH) == template;
            }
        }
    }

    /// Replicas asked of all workloads; `None` before there is any.
    pub fn asked(&self) -> Option<i32> {
        let asked: Vec<i32> = self.workloads.iter().filter_map(Workload::asked).collect();
        (!asked.is_empty()).then(|| asked.iter().sum())
    }

    /// Every pod of every workload.
    pub fn pods(&self) -> impl Iterator<Item = &FleetPod<'a>> {
        self.workloads.iter().flat_map(|workload| &workload.pods)
    }

    /// Pods that serve.
    pub fn ready(&self) -> impl Iterator<Item = &FleetPod<'a>> {
        self.pods().filter(|pod| pod.is_ready())
    }

    /// Whether any workload is replacing pods by those of another template.
    pub fn is_rolling(&self) -> bool {
        self.workloads.iter().any(Workload::is_rolling)
    }
}

impl<'a> Workload<'a> {
    /// Replicas asked of the Deployment.
    pub fn asked(&self) -> Option<i32> {
        self.deployment.map(|deployment| deployment.spec.as_ref().and_then(|spec| spec.replicas).unwrap_or(1))
    }

    /// Pods that exist and do not leave.
    pub fn live(&self) -> impl Iterator<Item = &FleetPod<'a>> {
        self.pods.iter().filter(|pod| pod.stage != Stage::Leaving)
    }

    /// How many pods serve.
    pub fn ready(&self) -> i32 {
        count(self.pods.iter().filter(|pod| pod.is_ready()))
    }

    /// Whether pods of another template are still being replaced, as the Deployment's controller sees it.
    pub fn is_rolling(&self) -> bool {
        let Some(deployment) = self.deployment else { return false };
        let Some(status) = &deployment.status else { return true };
        if self.is_given_up() && !self.live().any(|pod| pod.updated) {
            return false;
        }
        let replicas = status.replicas.unwrap_or(0);
        !self.is_observed() || status.updated_replicas.unwrap_or(0) < replicas || self.live().any(|pod| !pod.updated)
    }

    /// Whether the Deployment's status speaks of it as it is.
    pub fn is_observed(&self) -> bool {
        self.deployment.is_some_and(|deployment| {
            let status = deployment.status.as_ref();
            status.is_some_and(|status| status.observed_generation >= deployment.metadata.generation)
        })
    }

    /// Whether its rollout has made no progress within the progress deadline.
    pub fn is_overdue(&self) -> bool {
        self.condition("Progressing").is_some_and(|found| found.reason.as_deref() == Some("ProgressDeadlineExceeded"))
    }

    /// Whether its template is known not to start.
    pub fn is_given_up(&self) -> bool {
        self.annotation(GIVEN_UP).is_some()
    }

    /// A condition of the Deployment.
    pub fn condition(&self, kind: &str) -> Option<&'a DeploymentCondition> {
        let conditions = self.deployment?.status.as_ref()?.conditions.as_ref()?;
        conditions.iter().find(|condition| condition.type_ == kind)
    }

    /// Pods asked for that the API server has not let be made since `limit` or longer.
    pub fn refused(&self, limit: Timestamp) -> i32 {
        let refusal = self.condition("ReplicaFailure").filter(|found| found.status == "True");
        let since = refusal.and_then(|found| found.last_transition_time.as_ref());
        let is_late = since.is_some_and(|since| since.0 <= limit);
        if is_late { (self.asked().unwrap_or(0) - count(self.live())).max(0) } else { 0 }
    }

    /// An annotation of the Deployment.
    pub fn annotation(&self, key: &str) -> Option<&'a str> {
        annotation(&self.deployment?.metadata, key)
    }
}

impl<'a> FleetPod<'a> {
    /// A pod that is no replica, but a part of one.
    pub fn worker(pod: &'a Pod) -> FleetPod<'a> {
        FleetPod { name: pod.metadata.name.as_deref().unwrap_or_default(), pod, stage: stage(pod), updated: true }
    }

    /// Whether it has a node.
    pub fn is_placed(&self) -> bool {
        self.is_ready() || self.pod.spec.node_name.is_some()
    }

    /// Since when it serves, and how long it took to do so; `None` unless it does for the first time since its container
    /// started.
    pub fn cold_start(&self) -> Option<(Timestamp, Duration)> {
        let Stage::Ready { since } = self.stage else { return None };
        let took = Duration::try_from(since.duration_since(self.pod.created()?)).ok()?;
        let containers = &self.pod.status.containers;
        let is_first = !containers.is_empty() && containers.iter().all(|container| container.restart_count == 0);
        (is_first && took <= LONGEST_COLD_START).then_some((since, took))
    }

    /// Since when it does not serve: since it was ready last, or placed, or found no node, or was made. `None` while it
    /// does, or leaves.
    pub fn waiting_since(&self) -> Option<Timestamp> {
        let Status { ready, scheduled, .. } = &self.pod.status;
        let lacks = |condition: &Option<Condition>| condition.as_ref().filter(|found| found.fails())?.since;
        let since = lacks(ready).or_else(|| lacks(scheduled)).or(self.pod.created());
        since.filter(|_| self.stage == Stage::Waiting)
    }

    /// When it was placed on its node, and when its first container ran; whole seconds, as Kubernetes tells them.
    pub fn placed_and_running(&self) -> (Option<Timestamp>, Option<Timestamp>) {
        let placed = self.pod.status.scheduled.as_ref().filter(|found| found.holds == Some(true));
        let ran = self.pod.status.containers.iter().find_map(|container| {
            let ended = || container.state.terminated.as_ref()?.started_at;
            container.state.running.and_then(|running| running.started_at).or_else(ended)
        });
        (placed.and_then(|found| found.since), ran)
    }

    /// Since when the scheduler has found no node for it.
    pub fn unschedulable_since(&self) -> Option<Timestamp> {
        let found = self.pod.status.scheduled.as_ref().filter(|found| found.fails())?;
        let is_it = found.reason.as_deref() == Some("Unschedulable") && !self.is_placed();
        found.since.filter(|_| is_it)
    }

    /// Whether it has served since its engine was started, and does not now: streams may still be with it.
    pub fn has_faltered(&self) -> bool {
        let engine = self.pod.status.containers.iter().find(|container| &*container.name == ENGINE_CONTAINER);
        self.stage == Stage::Waiting && engine.is_some_and(|engine| engine.started)
    }

    /// Whether it serves.
    pub fn is_ready(&self) -> bool {
        matches!(self.stage, Stage::Ready { .. })
    }

    /// Whether it is marked as one on standby.
    pub fn is_spare(&self) -> bool {
        self.pod.label(ROUTED) == Some(standby::OFF)
    }

    /// Whether a deletion cost was set on it.
    pub fn has_deletion_cost(&self) -> bool {
        self.pod.annotation(DELETION_COST).is_some()
    }
}

/// Whether the object's controller is the service with this UID.
pub fn is_owned(metadata: &ObjectMeta, uid: &str) -> bool {
    let owners = metadata.owner_references.iter().flatten();
    owners.into_iter().any(|owner| owner.controller == Some(true) && owner.uid == uid)
}

/// How many there are, as Kubernetes counts.
pub fn count<T>(items: impl Iterator<Item = T>) -> i32 {
    i32::try_from(items.count()).unwrap_or(i32::MAX)
}

fn annotation<'a>(metadata: &'a ObjectMeta, key: &str) -> Option<&'a str> {
    metadata.annotations.as_ref()?.get(key).map(String::as_str)
}

fn pods<'a>(kind: WorkloadKind, deployment: Option<&Deployment>, observed: &'a Observed) -> Vec<FleetPod<'a>> {
    let template = deployment.and_then(|deployment| {
        let template = deployment.spec.as_ref()?.template.metadata.as_ref()?;
        annotation(template, TEMPLATE_HASH)
    });
    let mut pods: Vec<_> = observed.pods.iter().filter_map(|pod| fleet_pod(pod, kind, template)).collect();
    pods.sort_by_key(|pod| pod.name);
    pods
}

fn fleet_pod<'a>(pod: &'a Pod, kind: WorkloadKind, template: Option<&str>) -> Option<FleetPod<'a>> {
    let workload = pod.label(WORKLOAD_LABEL)?;
    let ended = matches!(pod.status.phase.as_deref(), Some("Failed" | "Succeeded"));
    (workload == kind.label() && !ended).then(|| FleetPod {
        name: pod.metadata.name.as_deref().unwrap_or_default(),
        pod,
        stage: stage(pod),
        updated: template.is_some() && pod.annotation(TEMPLATE_HASH) == template,
    })
}

fn stage(pod: &Pod) -> Stage {
    match &pod.status.ready {
        _ if pod.is_leaving() => Stage::Leaving,
        Some(ready) if ready.holds == Some(true) => {
            Stage::Ready { since: ready.since.unwrap_or(Timestamp::UNIX_EPOCH) }
        }
        _ => Stage::Waiting,
    }
}

#[cfg(test)]
mod tests;
