//! What is known of the model before it is scheduled: its header, read by a Job in the service's namespace.
//!
//! What a Job found is kept in `status.model` under a fingerprint of the source, and the Job goes. A Job that fails, that
//! cannot start or that takes too long holds nothing up: pods are made without a choice, and tell their own cause.

use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::batch::v1::Job;
use windlass_engine_contract::inspection::Inspection;
use windlass_engine_contract::termination::Termination;
use windlass_operator_api::status::ModelStatus;

use crate::build::inspect_job;
use crate::cause::ORDINARY_REASONS;
use crate::fleet::{Fleet, is_owned};
use crate::names::{INSPECTION, SPEC_HASH};
use crate::observed::{Defaults, Observed};
use crate::plan::{Kind, Object, Step};
use crate::pod::Pod;
use crate::validate::ValidatedService;
use crate::workloads::is_wanted;

/// How far the model is known.
#[derive(Clone, Debug, PartialEq)]
pub enum Stage {
    /// It need not be.
    NotAsked {
        /// Why, for people.
        because: &'static str,
    },
    /// It is.
    Known(Box<Inspection>),
    /// A Job is to be made, or runs; a template that is to be made waits for it.
    Reading,
    /// It cannot be.
    Failed {
        /// A stable CamelCase word.
        reason: String,
        /// In words.
        message: String,
    },
}

impl Stage {
    /// Of `service`, whose status holds `model`.
    pub fn of(
        service: &ValidatedService,
        model: Option<&ModelStatus>,
        fleet: &Fleet<'_>,
        observed: &Observed,
        defaults: &Defaults,
        now: Timestamp,
    ) -> Stage {
        if service.nodes > 1 {
            return Stage::NotAsked { because: "what each of several nodes takes is not judged beforehand" };
        }
        if let Some(known) = kept(service, model) {
            return Stage::Known(Box::new(known));
        }
        let Some(patience) = defaults.inspect_timeout else {
            return Stage::NotAsked { because: "the operator inspects no models (--inspect-timeout-seconds=0)" };
        };
        if service.engine.is_simulated {
            return Stage::NotAsked { because: "the simulated engine loads no weights" };
        }
        match (job(service, observed), pod(service, observed)) {
            (_, Some(pod)) if said(pod).is_some() => said(pod).map_or(Stage::Reading, Stage::Known),
            (Some(job), pod) => under_way(job, pod, patience, now),
            (None, _) if fleet.ready().next().is_some() && !is_template_due(service, fleet) => {
                Stage::NotAsked { because: "it serves" }
            }
            (None, _) => Stage::Reading,
        }
    }
}

/// Makes the Job while the model is to be read, and removes Jobs that are not needed any more.
pub fn steps(
    service: &ValidatedService,
    model: Option<&ModelStatus>,
    stage: &Stage,
    observed: &Observed,
    defaults: &Defaults,
) -> Vec<Step> {
    let wanted = matches!(stage, Stage::Reading) && job(service, observed).is_none();
    let make = wanted.then(|| Step::Apply(Object::Job(Box::new(inspect_job::build(service, defaults)))));
    // A Job goes once status holds what it found, not before: that may be the only place that does.
    let is_kept = kept(service, model).is_some();
    let is_needed = |job: &Job| !is_kept && job.metadata.name.as_deref() == Some(&inspect_job::name(service));
    let ours = observed.jobs.iter().filter(|job| is_owned(&job.metadata, &service.uid));
    let gone = ours.filter(|job| !is_needed(job) && job.metadata.deletion_timestamp.is_none()).map(|job| {
        let (name, uid) = (job.metadata.name.clone(), job.metadata.uid.clone());
        Step::Delete { kind: Kind::Job, name: name.unwrap_or_default(), uid: uid.unwrap_or_default() }
    });
    make.into_iter().chain(gone).collect()
}

/// What status is to hold of the model.
pub fn status(service: &ValidatedService, stage: &Stage) -> Option<ModelStatus> {
    let Stage::Known(found) = stage else { return None };
    Some(ModelStatus {
        source_hash: service.source_hash.clone(),
        architecture: found.shape.architecture.clone(),
        weight_type: found.weight_type.clone(),
        weight_bytes: i64::try_from(found.shape.weight_bytes).unwrap_or(i64::MAX),
        context_tokens: found.shape.context_tokens.into(),
        revision: found.revision.clone(),
        // A summary always serializes.
        inspection: serde_json::to_string(found).unwrap_or_default(),
    })
}

/// What status holds of this very source.
fn kept(service: &ValidatedService, model: Option<&ModelStatus>) -> Option<Inspection> {
    model
        .filter(|model| model.source_hash == service.source_hash)
        .and_then(|model| Inspection::parse(&model.inspection))
}

fn job<'a>(service: &ValidatedService, observed: &'a Observed) -> Option<&'a Job> {
    let name = inspect_job::name(service);
    observed.jobs.iter().map(AsRef::as_ref).find(|job| job.metadata.name.as_ref() == Some(&name))
}

/// The newest pod of the Job.
fn pod<'a>(service: &ValidatedService, observed: &'a Observed) -> Option<&'a Pod> {
    let mine = observed.inspectors.iter().filter(|pod| pod.label(INSPECTION) == Some(&service.source_hash));
    mine.map(AsRef::as_ref).max_by_key(|pod: &&Pod| pod.created())
}

fn said(pod: &Pod) -> Option<Box<Inspection>> {
    pod.status.containers.iter().find_map(|container| {
        let ended = container.state.terminated.as_ref()?;
        Inspection::parse(ended.message.as_deref()?).map(Box::new)
    })
}

/// What keeps a pod from starting may pass: a processor that another pod gives back, a volume that is bound, a runtime that
/// was slow. A Job this young is believed to start yet.
const STARTS_WITHIN: SignedDuration = SignedDuration::from_secs(15);

/// A Job that has found nothing yet.
fn under_way(job: &Job, pod: Option<&Pod>, patience: Duration, now: Timestamp) -> Stage {
    let failed = |reason: &str, message: &str| Stage::Failed { reason: reason.to_owned(), message: message.to_owned() };
    if let Some(word) = pod.and_then(last_word) {
        return failed(&format!("{:?}", word.reason), &word.message);
    }
    let conditions = job.status.iter().flat_map(|status| status.conditions.iter().flatten());
    let end = conditions.into_iter().find(|found| found.type_ == "Failed" && found.status == "True");
    if let Some(end) = end {
        return failed("InspectionFailed", end.message.as_deref().unwrap_or_default());
    }
    let age = job.metadata.creation_timestamp.as_ref().map_or(SignedDuration::ZERO, |time| now.duration_since(time.0));
    if let Some((reason, message)) = pod.and_then(blocked).filter(|_| age >= STARTS_WITHIN) {
        return failed(reason, message);
    }
    if age >= SignedDuration::try_from(patience).unwrap_or(SignedDuration::MAX) {
        return failed("InspectionTimedOut", &format!("the inspect Job has told nothing in {} s", patience.as_secs()));
    }
    Stage::Reading
}

fn last_word(pod: &Pod) -> Option<Termination> {
    pod.status.containers.iter().find_map(|container| {
        let ended = container.state.terminated.as_ref()?;
        Termination::parse(ended.message.as_deref()?.trim())
    })
}

/// Why the pod does not start.
fn blocked(pod: &Pod) -> Option<(&str, &str)> {
    let waiting = pod.status.containers.iter().find_map(|container| {
        let waiting = container.state.waiting.as_ref()?;
        let reason = waiting.reason.as_deref().filter(|reason| !ORDINARY_REASONS.contains(reason))?;
        Some((reason, waiting.message.as_deref().unwrap_or_default()))
    });
    let scheduled = pod.status.scheduled.as_ref();
    let unplaced = scheduled.filter(|found| found.fails() && found.reason.as_deref() == Some("Unschedulable"));
    waiting.or_else(|| unplaced.map(|found| ("Unschedulable", found.message.as_deref().unwrap_or_default())))
}

/// Whether a workload is to get another template, or its first.
pub fn is_template_due(service: &ValidatedService, fleet: &Fleet<'_>) -> bool {
    let wanted = fleet.workloads.iter().filter(|workload| is_wanted(service, workload.kind));
    wanted.into_iter().any(|workload| workload.annotation(SPEC_HASH) != Some(service.spec_hash.as_str()))
}
