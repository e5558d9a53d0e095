//! The six conditions. Every reason here is in the operator's documentation with its remedy.

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use windlass_operator_api::status::{condition, time};
use windlass_operator_api::{InferenceService, InferenceServiceStatus};

use super::{Outcome, of_type};
use crate::assess::{Assessment, Findings, ScalingFinding};
use crate::autoscale::{Decision, Reason};

/// Longest message, bytes: metav1.Condition takes 32 KiB, but status is read by people.
const MAX_MESSAGE_BYTES: usize = 4096;

/// Reasons for which nothing is planned until somebody mends them.
const INVALID_SPEC: &str = "InvalidSpec";
const NAME_TAKEN: &str = "NameTaken";
/// The reason, and the text, where nothing can be made any more.
const NAMESPACE_ENDS: &str = "NamespaceTerminating";
const NAMESPACE_ENDS_TEXT: &str =
    "the namespace is being deleted: nothing can be made in it, and the service goes with it";

/// A condition before it is dated.
struct Verdict {
    kind: &'static str,
    status: &'static str,
    reason: String,
    message: String,
}

/// The conditions, in a fixed order.
pub(super) fn all(
    service: &InferenceService,
    previous: &InferenceServiceStatus,
    assessment: &Assessment,
    outcome: &Outcome,
    now: Timestamp,
) -> Vec<Condition> {
    let verdicts = match assessment {
        Assessment::Leaving => Vec::new(),
        Assessment::Refused(refusals) => {
            let texts: Vec<String> = refusals.iter().map(ToString::to_string).collect();
            stopped(INVALID_SPEC, &texts.join("\n"))
        }
        Assessment::Strangers(names) => {
            let message = format!("{} belongs to somebody else: rename this service or that object", names.join(", "));
            stopped(NAME_TAKEN, &message)
        }
        Assessment::Planned(findings) => {
            let view = View { findings, outcome, was_ready: was_ready(service, previous) };
            vec![view.ready(), view.fits(), view.scaling(), view.progressing(), view.reconciling(), view.stalled()]
        }
    };
    verdicts.into_iter().map(|verdict| verdict.dated(service, previous, now)).collect()
}

/// Conditions of a service that the operator cannot work on. Its pods, if it has any, go on as they are.
fn stopped(reason: &str, message: &str) -> Vec<Verdict> {
    [
        (condition::READY, "False"),
        (condition::FITS, "Unknown"),
        (condition::SCALING_ACTIVE, "False"),
        (condition::PROGRESSING, "False"),
        (condition::RECONCILING, "False"),
        (condition::STALLED, "True"),
    ]
    .map(|(kind, status)| verdict(kind, status, reason, message))
    .into()
}

/// Whether nothing was planned for the service when it was looked at last.
pub(crate) fn is_unplannable(status: &InferenceServiceStatus) -> bool {
    let stalled = of_type(status, condition::STALLED).filter(|found| found.status == "True");
    stalled.is_some_and(|found| [INVALID_SPEC, NAME_TAKEN].contains(&found.reason.as_str()))
}

/// Whether this generation of the spec was found to be served before.
pub(super) fn was_ready(service: &InferenceService, previous: &InferenceServiceStatus) -> bool {
    of_type(previous, condition::READY)
        .is_some_and(|ready| ready.status == "True" && ready.observed_generation == service.metadata.generation)
}

struct View<'a> {
    findings: &'a Findings,
    outcome: &'a Outcome,
    was_ready: bool,
}

impl View<'_> {
    fn ready(&self) -> Verdict {
        let findings = self.findings;
        let (counts, floor) = (findings.counts, findings.floor);
        let say = |status, reason: &str, message: String| verdict(condition::READY, status, reason, &message);
        if !findings.mismatches.is_empty() {
            return say("False", "EffectiveConfigMismatch", findings.mismatches.join("\n"));
        }
        if floor == 0 {
            return say("False", "ScaledToZero", "spec.replicas is 0".into());
        }
        // An engine that was found right once for this spec is not doubted because one reading is missing.
        let trusted = if self.was_ready { findings.unverified } else { 0 };
        if counts.verified + trusted >= floor {
            return say("True", "Serving", self.serving());
        }
        if counts.current >= floor {
            let unread = findings.unread.as_ref().map(|unread| format!(" ({unread})")).unwrap_or_default();
            let message = format!("{} replicas serve, but what they built is not known yet{unread}", counts.current);
            return say("False", "VerifyingConfiguration", message);
        }
        let (reason, message) = self.hindrance();
        say("False", &reason, message)
    }

    fn serving(&self) -> String {
        let counts = self.findings.counts;
        let simulated = if self.findings.is_simulated { ", by a simulated engine: no real tokens" } else { "" };
        format!("{} of {} replicas serve as the spec asks{simulated}", counts.current, counts.desired)
    }

    /// Why too few replicas serve.
    fn hindrance(&self) -> (String, String) {
        let findings = self.findings;
        let (counts, floor) = (findings.counts, findings.floor);
        let progress = format!("{} of {floor} replicas serve", counts.current);
        match self.outcome {
            Outcome::Applied => {}
            Outcome::Failed { attempt, message } => {
                return ("ApplyFailed".into(), format!("{progress}: {attempt}: {message}"));
            }
            Outcome::NamespaceEnds => return (NAMESPACE_ENDS.into(), format!("{progress}: {NAMESPACE_ENDS_TEXT}")),
        }
        if !findings.absent.is_empty() {
            let missing = findings
                .absent
                .iter()
                .map(|absent| format!("{}: {} {} does not exist", absent.field, absent.kind.name(), absent.name));
            return ("ReferenceNotFound".into(), missing.collect::<Vec<_>>().join("\n"));
        }
        if let Some(cause) = &findings.cause {
            return (cause.reason.clone(), format!("{progress}: {}", cause.message));
        }
        if findings.is_held {
            return (findings.fit.reason.clone(), format!("{progress}: {}", findings.fit.message));
        }
        let old = counts.ready - counts.current;
        if old > 0 {
            return ("RollingOut".into(), format!("{progress}; {old} of an earlier configuration serve meanwhile"));
        }
        ("Starting".into(), progress)
    }

    fn fits(&self) -> Verdict {
        let found = &self.findings.fit;
        verdict(condition::FITS, found.status, &found.reason, &found.message)
    }

    fn scaling(&self) -> Verdict {
        let own = self.own_scaling();
        let foreign = &self.findings.foreign_autoscalers;
        if foreign.is_empty() {
            return own;
        }
        let remedy = match self.findings.scaling {
            ScalingFinding::External => "let its target be the InferenceService",
            _ => "use mode External and the InferenceService as its target",
        };
        let message = format!(
            "{} sets replicas of this service too: delete it, or {remedy}; meanwhile: {}",
            foreign.join(", "),
            own.message
        );
        verdict(own.kind, own.status, super::events::FOREIGN_AUTOSCALER, &message)
    }

    fn own_scaling(&self) -> Verdict {
        let kind = condition::SCALING_ACTIVE;
        match &self.findings.scaling {
            ScalingFinding::Manual => verdict(kind, "False", "Manual", "spec.autoscaling.mode is Manual"),
            ScalingFinding::External => {
                verdict(kind, "False", "External", "spec.replicas is left to another autoscaler, through /scale")
            }
            ScalingFinding::Hpa(found) => {
                verdict(kind, if found.is_active { "True" } else { "False" }, &found.reason, &found.message)
            }
            ScalingFinding::Builtin { decision, shadow } => {
                let blind = matches!(decision.reason, Reason::NoReadyReplicas | Reason::StaleMetrics);
                let status = if blind { "False" } else { "True" };
                verdict(kind, status, &decision.reason.to_string(), &self.explained(decision, *shadow))
            }
        }
    }

    fn explained(&self, decision: &Decision, shadow: bool) -> String {
        let note = if shadow {
            format!("shadow: {} replicas would be set, spec.replicas is obeyed", decision.replicas)
        } else {
            "spec.replicas is not used in mode Builtin".to_owned()
        };
        let forgets = decision.memory.kept.is_some_and(|kept| kept.is_taken);
        let taken = if forgets {
            "; what it learns is lost with a restart: the ConfigMap for it is somebody else's"
        } else {
            ""
        };
        format!("{} ({note}{taken})", decision.message)
    }

    fn progressing(&self) -> Verdict {
        let (kind, counts) = (condition::PROGRESSING, self.findings.counts);
        if self.findings.is_rolling && self.findings.is_paused {
            let message = "spec.rollout.paused holds pods of an earlier spec";
            return verdict(kind, "False", "Paused", message);
        }
        if self.findings.is_held && self.findings.fit.status == "False" {
            return verdict(kind, "False", &self.findings.fit.reason, &self.findings.fit.message);
        }
        if self.findings.lacks_capacity {
            let message = "no node has room for a new pod beside the old ones, and none may go first: add capacity, or \
                           let spec.rollout.strategy be Drain";
            return verdict(kind, "False", "NoCapacity", message);
        }
        if let Some(message) = self.overdue() {
            return verdict(kind, "False", "ProgressDeadlineExceeded", &message);
        }
        if self.findings.is_rolling {
            return self.rolling();
        }
        if counts.current < counts.desired {
            return verdict(kind, "True", "ReplicasStarting", &self.on_the_way());
        }
        verdict(kind, "True", "Complete", "every replica is of the current spec and serves")
    }

    /// That nothing has moved for too long, and what hinders it.
    fn overdue(&self) -> Option<String> {
        let message = self.findings.deadline_exceeded.as_ref()?;
        let cause = self.findings.cause.as_ref().map(|cause| format!(": {}: {}", cause.reason, cause.message));
        Some(format!("{message}{}", cause.unwrap_or_default()))
    }

    /// A rollout, and why its new pods do not serve.
    fn rolling(&self) -> Verdict {
        let (findings, counts) = (self.findings, self.findings.counts);
        let progress =
            format!("{} of {} replicas are of revision {}", counts.updated, counts.desired, findings.revision);
        match findings.cause.as_ref() {
            Some(cause) if cause.is_terminal => {
                let message = format!("{progress}, which cannot serve: {}", cause.message);
                verdict(condition::PROGRESSING, "False", &cause.reason, &message)
            }
            Some(cause) => {
                let message = format!("{progress}: {}: {}", cause.reason, cause.message);
                verdict(condition::PROGRESSING, "True", "RollingOut", &message)
            }
            None => verdict(condition::PROGRESSING, "True", "RollingOut", &progress),
        }
    }

    /// How far it is, and what hinders replicas beyond those that Ready is about.
    fn on_the_way(&self) -> String {
        let counts = self.findings.counts;
        let cause = self.findings.cause.as_ref().map(|cause| format!(": {}: {}", cause.reason, cause.message));
        format!("{} of {} replicas serve{}", counts.current, counts.desired, cause.unwrap_or_default())
    }

    fn reconciling(&self) -> Verdict {
        let (kind, counts) = (condition::RECONCILING, self.findings.counts);
        if let Some((reason, message)) = self.stuck() {
            return verdict(kind, "False", &reason, &message);
        }
        match self.outcome {
            Outcome::Applied => {}
            Outcome::Failed { attempt, message } => {
                return verdict(kind, "True", "ApplyFailed", &format!("{attempt}: {message}"));
            }
            Outcome::NamespaceEnds => return verdict(kind, "True", NAMESPACE_ENDS, NAMESPACE_ENDS_TEXT),
        }
        if self.findings.is_rolling || counts.current < counts.desired || counts.replicas > counts.desired {
            return verdict(kind, "True", "Converging", &self.on_the_way());
        }
        verdict(kind, "False", "Settled", "the cluster is as the spec asks")
    }

    fn stalled(&self) -> Verdict {
        let kind = condition::STALLED;
        match self.stuck() {
            Some((reason, message)) => verdict(kind, "True", &reason, &message),
            None => verdict(kind, "False", "Proceeding", "nothing has to be changed by hand"),
        }
    }

    /// What somebody has to change before anything goes on.
    fn stuck(&self) -> Option<(String, String)> {
        let findings = self.findings;
        let is_short = findings.counts.current < findings.floor;
        let terminal = findings.cause.as_ref().filter(|cause| cause.is_terminal && is_short);
        let terminal = terminal.map(|cause| (cause.reason.clone(), cause.message.clone()));
        let unfit = (findings.is_held && findings.fit.status == "False")
            .then(|| (findings.fit.reason.clone(), findings.fit.message.clone()));
        let deadline = self.overdue().map(|text| ("ProgressDeadlineExceeded".to_owned(), text));
        terminal.or(unfit).or(deadline)
    }
}

fn verdict(kind: &'static str, status: &'static str, reason: &str, message: &str) -> Verdict {
    let message = message[..message.floor_char_boundary(MAX_MESSAGE_BYTES)].to_owned();
    Verdict { kind, status, reason: reason.to_owned(), message }
}

impl Verdict {
    /// The condition, with the time of the transition to its status.
    fn dated(self, service: &InferenceService, previous: &InferenceServiceStatus, now: Timestamp) -> Condition {
        let before = of_type(previous, self.kind).filter(|before| before.status == self.status);
        Condition {
            type_: self.kind.to_owned(),
            status: self.status.to_owned(),
            reason: self.reason,
            message: self.message,
            observed_generation: service.metadata.generation,
            last_transition_time: before.map_or_else(|| time(now), |before| before.last_transition_time.clone()),
        }
    }
}
