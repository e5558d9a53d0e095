//! Why replicas do not serve: the first cause that the cluster tells, in words that do not change from one look to the
//! next while the cause is the same.

use std::sync::Arc;

use windlass_engine_contract::termination::Termination;

use crate::fleet::{Fleet, FleetPod, Stage, Workload};
use crate::observed::Warning;
use crate::placement::Placement;
use crate::pod::{Container, Pod, Terminated, Waiting};

/// Why replicas do not serve.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cause {
    /// A stable CamelCase word.
    pub reason: String,
    /// In words.
    pub message: String,
    /// Trying again will not help: somebody has to change something.
    pub is_terminal: bool,
}

/// Longest text taken from outside, characters.
const MAX_TEXT_CHARS: usize = 1500;
/// Reasons of waiting containers that all mean that the image did not come; the kubelet alternates between them.
const IMAGE_REASONS: [&str; 5] =
    ["ErrImagePull", "ImagePullBackOff", "ErrImageNeverPull", "InvalidImageName", "RegistryUnavailable"];
/// Reasons of waiting containers that are no cause, but a step on the way or the consequence of an earlier end.
pub(crate) const ORDINARY_REASONS: [&str; 3] = ["ContainerCreating", "PodInitializing", "CrashLoopBackOff"];
/// Warnings that explain why a pod's containers are not created.
const WARNINGS: [&str; 4] = ["FailedMount", "FailedAttachVolume", "FailedCreatePodSandBox", "FailedScheduling"];

/// The cause that keeps replicas from serving, if the cluster tells one. Pods of the current template come first.
/// Of workers, without which their leader waits, it is told where no replica has a cause of its own.
pub fn find(fleet: &Fleet<'_>, workers: &[Arc<Pod>], warnings: &[Warning]) -> Option<Cause> {
    let refused = fleet.workloads.iter().find_map(pods_refused);
    let mut waiting: Vec<&FleetPod<'_>> = fleet.pods().filter(|pod| pod.stage == Stage::Waiting).collect();
    waiting.sort_by_key(|pod| (!pod.updated, pod.name));
    let first = |search: &dyn Fn(&FleetPod<'_>) -> Option<Cause>| waiting.iter().find_map(|pod| search(pod));
    refused
        .or_else(|| first(&ended))
        .or_else(|| first(&not_started))
        .or_else(|| first(&unschedulable))
        .or_else(|| first(&|pod| warned(pod, warnings)))
        .or_else(|| workers.iter().map(|pod| FleetPod::worker(pod)).find_map(|worker| of_worker(&worker)))
}

/// A worker that has not begun to compute.
fn of_worker(worker: &FleetPod<'_>) -> Option<Cause> {
    let cause = ended(worker).or_else(|| not_started(worker)).or_else(|| unschedulable(worker))?;
    Some(Cause { message: format!("worker {}: {}", worker.name, cause.message), ..cause })
}

/// Whether and why a rollout has made no progress for too long.
/// One that was given up is not meant to make any.
pub fn deadline_exceeded(fleet: &Fleet<'_>, placement: &Placement) -> Option<String> {
    let stuck = |workload: &Workload<'_>| {
        let found = workload.condition("Progressing").filter(|_| workload.is_overdue())?;
        let message = found.message.clone().unwrap_or_default();
        let remedy =
            "pods of the earlier revision are back; change the spec, or spec.rollout.restartedAt, to try again";
        Some(if workload.is_given_up() { format!("{message}: {remedy}") } else { message })
    };
    fleet.workloads.iter().filter(|workload| !placement.is_given_up(workload.kind)).find_map(stuck)
}

/// Pods that the API server did not let be created: a quota, an admission policy, a missing ServiceAccount.
fn pods_refused(workload: &Workload<'_>) -> Option<Cause> {
    let found = workload.condition("ReplicaFailure").filter(|found| found.status == "True")?;
    let message = found.message.as_deref().unwrap_or_default();
    let reason = if message.contains("exceeded quota") { "QuotaExceeded" } else { "PodsRefused" };
    Some(cause(reason, &without_pod_name(message)))
}

/// The refused pod's random name is left out: each attempt has another.
fn without_pod_name(message: &str) -> String {
    match (message.split_once("pods \""), message.split_once("\" is forbidden: ")) {
        (Some((before, _)), Some((_, after))) => format!("{before}pods are forbidden: {after}"),
        _ => message.to_owned(),
    }
}

/// A container that ended, now or before its last restart.
fn ended(pod: &FleetPod<'_>) -> Option<Cause> {
    pod.pod.status.containers.iter().find_map(|container| {
        let (now, before) = (container.state.terminated.as_ref(), container.last_state.terminated.as_ref());
        let ended = now.or(before).filter(|ended| ended.exit_code != 0)?;
        Some(of_end(pod, container, ended))
    })
}

fn of_end(pod: &FleetPod<'_>, container: &Container, ended: &Terminated) -> Cause {
    let text = ended.message.as_deref().unwrap_or_default();
    let place = format!("container {} of pod {}", container.name, pod.name);
    if let Some(last_word) = Termination::parse(text.trim()) {
        let reason = format!("{:?}", last_word.reason);
        return Cause { is_terminal: last_word.reason.is_final(), ..cause(&reason, &last_word.message) };
    }
    if ended.reason.as_deref() == Some("OOMKilled") {
        return cause("OutOfMemory", &format!("{place} was killed: it used more memory than resources.limits allows"));
    }
    let told = if text.is_empty() { String::new() } else { format!(": {}", text.trim()) };
    cause("EngineFailed", &format!("{place} ended with code {}{told}", ended.exit_code))
}

/// A container that cannot be started.
fn not_started(pod: &FleetPod<'_>) -> Option<Cause> {
    pod.pod.status.containers.iter().find_map(|container| {
        let waiting = container.state.waiting.as_ref()?;
        let reason = waiting.reason.as_deref().filter(|reason| !ORDINARY_REASONS.contains(reason))?;
        Some(of_waiting(container, waiting, reason))
    })
}

fn of_waiting(container: &Container, waiting: &Waiting, reason: &str) -> Cause {
    let text = waiting.message.as_deref().unwrap_or_default();
    if IMAGE_REASONS.contains(&reason) {
        let detail = text.rsplit("ErrImagePull: ").next().filter(|detail| !detail.starts_with("Back-off"));
        let detail = detail.filter(|detail| !detail.is_empty()).map(|detail| format!(": {detail}"));
        let image = &container.image;
        return cause("ImagePullFailed", &format!("image {image} cannot be pulled{}", detail.unwrap_or_default()));
    }
    cause(reason, text)
}

fn unschedulable(pod: &FleetPod<'_>) -> Option<Cause> {
    let found = pod.pod.status.scheduled.as_ref().filter(|found| found.fails())?;
    Some(cause(found.reason.as_deref()?, found.message.as_deref().unwrap_or_default()))
}

/// A warning about the pod, newest first.
fn warned(pod: &FleetPod<'_>, warnings: &[Warning]) -> Option<Cause> {
    let about = format!("Pod/{}", pod.name);
    let found = warnings.iter().find(|one| one.about == about && WARNINGS.contains(&one.reason.as_str()))?;
    Some(cause(&found.reason, &found.message))
}

fn cause(reason: &str, message: &str) -> Cause {
    Cause { reason: reason.to_owned(), message: message.chars().take(MAX_TEXT_CHARS).collect(), is_terminal: false }
}

#[cfg(test)]
mod tests;
