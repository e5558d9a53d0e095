//! What planning found out about a service: the facts that status is made from.

use jiff::Timestamp;
use windlass_engine_contract::stats::StartPhases;
use windlass_operator_api::autoscaling::LatencyMetric;
use windlass_operator_api::status::{Choices, ColdStart, Load, ModelStatus, RevisionStatus, time};

use crate::autoscale::Decision;
use crate::autoscale::policy::Scaling;
use crate::autoscale::signals::MIN_SAMPLES;
use crate::build::service;
use crate::cause::{self, Cause};
use crate::fitting::{FitFinding, Made};
use crate::fleet::{Fleet, FleetPod, count};
use crate::hpa::{self, HpaFinding};
use crate::names::{ENGINE_IMAGE, Reference, WorkloadKind, selector};
use crate::observed::{Defaults, Observed};
use crate::placement::Placement;
use crate::revision;
use crate::rollout;
use crate::served;
use crate::standby::Standby;
use crate::validate::{Refusal, ValidatedService};
use crate::verify;
use crate::window::{Activity, WINDOW, minus};

/// What planning found out.
#[derive(Clone, Debug)]
pub enum Assessment {
    /// The service is being deleted: its children follow by themselves.
    Leaving,
    /// The spec cannot be served.
    Refused(Vec<Refusal>),
    /// Objects with the names of children belong to somebody else: `Kind name`.
    Strangers(Vec<String>),
    /// Facts.
    Planned(Box<Findings>),
}

/// Facts about a service.
#[derive(Clone, Debug)]
pub struct Findings {
    /// Replicas in numbers.
    pub counts: Counts,
    /// Replicas without which the service is not ready: what the user asks for at least.
    pub floor: i32,
    /// Differences between what an engine built and the spec, by pod.
    pub mismatches: Vec<String>,
    /// Serving pods of which it is not known what they built.
    pub unverified: i32,
    /// Why the last of them could not be read.
    pub unread: Option<String>,
    /// Why replicas do not serve.
    pub cause: Option<Cause>,
    /// Objects that the spec names and that do not exist.
    pub absent: Vec<Reference>,
    /// Pods are being replaced, or are about to be.
    pub is_rolling: bool,
    /// A rollout waits for room that it may not make.
    pub lacks_capacity: bool,
    /// A rollout is held by `spec.rollout.paused`.
    pub is_paused: bool,
    /// A rollout makes no progress.
    pub deadline_exceeded: Option<String>,
    /// An engine is the simulator.
    pub is_simulated: bool,
    /// How the number of replicas came about.
    pub scaling: ScalingFinding,
    /// The load.
    pub load: Load,
    /// Choices held by the workload.
    pub choices: Choices,
    /// Whether a replica fits.
    pub fit: FitFinding,
    /// No template is made or changed: it is not known yet whether a replica fits, or none does.
    pub is_held: bool,
    /// The model, where its header was read.
    pub model: Option<ModelStatus>,
    /// Name of the revision that pods are to be of.
    pub revision: String,
    /// Revisions that can be gone back to, newest first.
    pub revisions: Vec<RevisionStatus>,
    /// What serves, in a word of each kind of engine.
    pub fingerprints: Vec<String>,
    /// Nodes that are taken back and have pods of the service.
    pub interrupted_nodes: Vec<String>,
    /// Autoscalers of others that set the same replicas.
    pub foreign_autoscalers: Vec<String>,
    /// The slowest cold start of pods that serve.
    pub cold_start: Option<ColdStart>,
    /// Selector of the pods.
    pub selector: String,
    /// Base URL of the API.
    pub url: String,
    /// First served name.
    pub served_name: String,
}

/// Replicas in numbers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Wanted.
    pub desired: i32,
    /// Existing, those that leave left out.
    pub replicas: i32,
    /// Serving.
    pub ready: i32,
    /// Of the current template.
    pub updated: i32,
    /// Serving, of the current template.
    pub current: i32,
    /// Serving, of the current template, and known to have built what the spec asks for.
    pub verified: i32,
    /// On standby, in none of the numbers above; `None` where none are asked for.
    pub standby: Option<i32>,
    /// In the spot workload; `None` without one.
    pub spot: Option<i32>,
    /// On demand because no spot node came.
    pub fallback: i32,
    /// For spot, and on no spot node.
    pub off_spot: i32,
}

/// How the number of replicas came about.
#[derive(Clone, Debug)]
pub enum ScalingFinding {
    /// By `spec.replicas`.
    Manual,
    /// By `spec.replicas`, which another autoscaler sets.
    External,
    /// By `spec.replicas`, which a HorizontalPodAutoscaler of ours sets.
    Hpa(HpaFinding),
    /// By the autoscaler.
    Builtin {
        /// Its decision.
        decision: Box<Decision>,
        /// It is only reported.
        shadow: bool,
    },
}

/// What facts are gathered from.
pub struct Facts<'a> {
    /// The service.
    pub service: &'a ValidatedService,
    /// Its workloads and pods.
    pub fleet: &'a Fleet<'a>,
    /// Its replicas to spare.
    pub standby: &'a Standby,
    /// Everything that was read.
    pub observed: &'a Observed,
    /// The operator's configuration.
    pub defaults: &'a Defaults,
    /// What templates are made with.
    pub made: &'a Made,
    /// Name of the revision that pods are to be of.
    pub revision: &'a str,
    /// The model, where its header was read.
    pub model: Option<ModelStatus>,
    /// Nodes that are taken back and have pods of the service.
    pub interrupted_nodes: Vec<String>,
    /// When it was read.
    pub now: Timestamp,
}

impl Facts<'_> {
    /// Gathers the facts. `is_changing`: the plan makes or replaces a workload.
    pub fn findings(self, scaling: ScalingFinding, desired: i32, placement: &Placement, is_changing: bool) -> Findings {
        let Facts { service, fleet, standby, observed, defaults, made, revision, model, interrupted_nodes, now } = self;
        let serving = fleet.ready().filter(|pod| !standby.holds(pod));
        let checks: Vec<Check> = serving.map(|pod| Check::of(service, pod, observed)).collect();
        let unverified: Vec<&Check> = checks.iter().filter(|check| check.is_current && !check.is_known).collect();
        Findings {
            counts: counts(service, fleet, standby, observed, &checks, desired, placement),
            floor: floor(service),
            mismatches: checks.iter().filter_map(|check| check.mismatch.clone()).collect(),
            unverified: count(unverified.iter()),
            unread: unverified.iter().rev().find_map(|check| check.unread.clone()),
            cause: cause::find(fleet, &observed.workers, &observed.warnings),
            absent: observed.absent.clone(),
            is_rolling: is_changing || fleet.is_rolling(),
            lacks_capacity: rollout::lacks_capacity(service, fleet),
            is_paused: service.rollout.is_paused,
            deadline_exceeded: cause::deadline_exceeded(fleet, placement),
            is_simulated: service.engine.is_simulated || checks.iter().any(|check| check.is_simulated),
            scaling,
            load: load(fleet, observed, now),
            choices: choices(service, fleet, made, observed),
            fit: made.finding.clone(),
            is_held: made.is_held,
            model,
            revision: revision.to_owned(),
            revisions: revision::told(service, observed),
            fingerprints: served::fingerprints(fleet, observed),
            interrupted_nodes,
            foreign_autoscalers: hpa::foreign(service, observed),
            cold_start: cold_start(fleet, observed),
            selector: selector(&service.name),
            url: service::url(service, &defaults.cluster_domain),
            served_name: service.served_names.first().cloned().unwrap_or_default(),
        }
    }
}

/// One serving pod held against the spec.
struct Check {
    is_current: bool,
    is_known: bool,
    is_simulated: bool,
    mismatch: Option<String>,
    unread: Option<String>,
}

impl Check {
    fn of(service: &ValidatedService, pod: &FleetPod<'_>, observed: &Observed) -> Self {
        let effective = observed.load.effective(pod.name).filter(|_| pod.updated);
        let differences = effective.map(|effective| verify::differences(service, effective)).unwrap_or_default();
        let mismatch = (!differences.is_empty()).then(|| format!("pod {}: {}", pod.name, differences.join("; ")));
        Check {
            is_current: pod.updated,
            is_known: effective.is_some(),
            is_simulated: observed.load.latest(pod.name).is_some_and(|reading| reading.stats.simulated),
            mismatch,
            unread: observed.load.failure(pod.name).map(|failure| format!("pod {}: {}", pod.name, failure.message)),
        }
    }

    fn is_verified(&self) -> bool {
        self.is_current && self.is_known && self.mismatch.is_none()
    }
}

fn counts(
    service: &ValidatedService,
    fleet: &Fleet<'_>,
    standby: &Standby,
    observed: &Observed,
    checks: &[Check],
    desired: i32,
    placement: &Placement,
) -> Counts {
    let probes: i32 = fleet.workloads.iter().map(|workload| placement.probes(workload)).sum();
    let spares = count(fleet.ready().filter(|pod| standby.holds(pod)));
    let live = || fleet.workloads.iter().flat_map(|workload| workload.live()).filter(|pod| !standby.holds(pod));
    let spot = fleet.workloads.iter().find(|workload| workload.kind == WorkloadKind::Spot);
    let spot = spot.filter(|spot| service.spot.has_workload() || spot.deployment.is_some());
    Counts {
        desired,
        replicas: count(live()) - probes,
        ready: count(checks.iter()),
        updated: count(live().filter(|pod| pod.updated)),
        current: count(checks.iter().filter(|check| check.is_current)),
        verified: count(checks.iter().filter(|check| check.is_verified())),
        standby: (standby.replicas > 0).then_some(spares),
        spot: spot.map(|spot| count(spot.live()) - placement.probes(spot)),
        fallback: placement.fallback,
        off_spot: spot.map_or(0, |spot| placement.off_spot(&service.spot, spot, observed.nodes.as_deref())),
    }
}

fn floor(service: &ValidatedService) -> i32 {
    match &service.scaling {
        Scaling::Manual { replicas } => *replicas,
        // What load added does not make a service unready.
        Scaling::External { replicas } | Scaling::Hpa { replicas, .. } => (*replicas).min(1),
        Scaling::Builtin(policy) => policy.shadow.unwrap_or(policy.min),
    }
}

fn load(fleet: &Fleet<'_>, observed: &Observed, now: Timestamp) -> Load {
    let start = minus(now, WINDOW);
    let readings: Vec<_> = fleet.ready().filter_map(|pod| observed.load.latest(pod.name)).collect();
    let mut activity = Activity::default();
    fleet.ready().filter_map(|pod| observed.load.activity(pod.name, start)).for_each(|one| activity.add(&one));
    let p95 = |metric| {
        let counts = activity.latency(metric);
        let enough = counts.total() >= MIN_SAMPLES;
        enough.then(|| counts.quantile(0.95)).flatten().map(|value| value.round() as i64)
    };
    let shares: Vec<f64> = readings.iter().filter_map(|reading| reading.stats.utilization).collect();
    let mean = shares.iter().sum::<f64>() / shares.len().max(1) as f64;
    Load {
        measured_time: readings.iter().map(|reading| reading.at).max().map(time),
        running_requests: readings.iter().map(|reading| i64::from(reading.stats.running)).sum(),
        waiting_requests: readings.iter().map(|reading| i64::from(reading.stats.waiting)).sum(),
        utilization_percent: (!shares.is_empty()).then_some((mean * 100.0).clamp(0.0, 100.0).round() as i32),
        time_to_first_token_p95_milliseconds: p95(LatencyMetric::TimeToFirstToken),
        inter_token_p95_milliseconds: p95(LatencyMetric::InterToken),
    }
}

fn choices(service: &ValidatedService, fleet: &Fleet<'_>, made: &Made, observed: &Observed) -> Choices {
    let effective = fleet.ready().filter(|pod| pod.updated).find_map(|pod| observed.load.effective(pod.name));
    Choices {
        engine_image: fleet.workloads.iter().find_map(|workload| workload.annotation(ENGINE_IMAGE)).map(str::to_owned),
        tensor: Some(service.device.tensor().try_into().unwrap_or(i32::MAX)),
        quantization: effective.map(|effective| effective.quantization.clone()),
        reason: made.choice.picked.reason.clone(),
    }
}

/// Of the replica that took longest, by phase.
fn cold_start(fleet: &Fleet<'_>, observed: &Observed) -> Option<ColdStart> {
    let starts = fleet.ready().filter_map(|pod| Some((pod, observed.load.start(pod.name)?)));
    let total = |start: &StartPhases| start.download_seconds + start.load_seconds + start.warm_seconds;
    let (pod, slowest) = starts.max_by(|(_, left), (_, right)| total(left).total_cmp(&total(right)))?;
    let milliseconds = |seconds: f64| (seconds * 1000.0).clamp(0.0, 1e9).round() as i64;
    let created = pod.pod.created();
    let (placed, running) = pod.placed_and_running();
    let between = |from: Option<Timestamp>, to: Option<Timestamp>| {
        from.zip(to).map(|(from, to)| milliseconds(to.duration_since(from).as_secs_f64()))
    };
    Some(ColdStart {
        schedule_milliseconds: between(created, placed),
        pull_milliseconds: between(placed, running),
        download_milliseconds: milliseconds(slowest.download_seconds),
        load_milliseconds: milliseconds(slowest.load_seconds),
        warm_milliseconds: milliseconds(slowest.warm_seconds),
    })
}

#[cfg(test)]
mod tests;
