//! Decides what an InferenceService becomes: plan, autoscaler, status. Pure: no client, no clock.
//!
//! [`plan`] goes from spec, observed objects, load window and time to an ordered list of writes; [`status::compute`]
//! folds the outcome of those writes into `status` and events. Whoever calls them decides nothing.
//!
//! | file | noun |
//! |---|---|
//! | [`observed`], [`pod`] | everything that was read |
//! | [`validate`], [`source`] | the spec, parsed once |
//! | [`fleet`] | workloads and pods as they are |
//! | [`autoscale`], [`window`] | how many replicas, from readings of the engines |
//! | [`capacity`] | what the autoscaler learned, kept over restarts |
//! | [`standby`] | replicas that wait, loaded |
//! | [`placement`] | which of them on spot nodes |
//! | [`inspection`], [`inventory`], [`fit`] | the model's header, the nodes, and whether one fits the other |
//! | [`choice`] | what a template is made with where the spec leaves a choice |
//! | [`revision`], [`upgrade`] | what can be gone back to; whose turn it is to take a new engine |
//! | [`rollout`] | whether there is room for it |
//! | [`workers`] | the other nodes of replicas that one node does not hold |
//! | [`evacuation`] | which pods leave nodes that are taken back |
//! | [`hpa`], [`custom_metrics`] | HorizontalPodAutoscalers, and the metrics they scale by |
//! | [`build`] | children, one kind per file |
//! | [`children`], [`workloads`], [`diff`] | writes that are needed, and no others |
//! | [`verify`], [`served`], [`cause`], [`assess`] | what is to be told |
//! | [`status`] | conditions, numbers and events |
//!
//! A template is made once per change of the spec. What was chosen then (image, format, split) stays with the child, so a
//! new version of the operator, with other defaults or another way to build a pod, rolls nothing by itself.

pub mod assess;
pub mod autoscale;
pub mod build;
pub mod capacity;
pub mod cause;
pub mod children;
pub mod choice;
pub mod custom_metrics;
pub mod diff;
pub mod digest;
pub mod evacuation;
pub mod fit;
pub mod fitting;
pub mod fleet;
pub mod hpa;
pub mod inspection;
pub mod inventory;
pub mod mig;
pub mod names;
pub mod observed;
pub mod placement;
pub mod plan;
pub mod pod;
pub mod quantity;
pub mod revision;
pub mod rollout;
pub mod served;
pub mod source;
pub mod standby;
pub mod status;
#[cfg(test)]
mod testing;
pub mod upgrade;
pub mod validate;
pub mod verify;
pub mod window;
pub mod workers;
pub mod workloads;

use std::time::Duration;

use jiff::Timestamp;
use windlass_operator_api::InferenceService;

use assess::{Assessment, ScalingFinding};
use autoscale::policy::Scaling;
use autoscale::{Cadence, Memory, Reason, Supply};
use fleet::{Fleet, Stage};
use names::WorkloadKind;
use observed::{Defaults, Observed};
use placement::Placement;
use plan::{Object, Plan, Step};
use standby::Standby;
use validate::{ValidatedService, validate};
use window::minus;

/// With nothing to wait for, a look now and then mends what no event told.
const RESYNC: Duration = Duration::from_secs(300);
/// While an object of the same name may still be on its way out.
const RETRY: Duration = Duration::from_secs(5);

/// What is to be done for `service`, given what was read at `now`.
///
/// A spec that cannot be served is no error: its refusal is in [`Plan::assessment`], and children stay as they are.
pub fn plan(service: &InferenceService, observed: &Observed, defaults: &Defaults, now: Timestamp) -> Plan {
    if service.metadata.deletion_timestamp.is_some() {
        return nothing(Assessment::Leaving, observed, RESYNC);
    }
    let (service, pinned) = match revision::pinned(service, observed) {
        Ok(found) => found,
        Err(refusal) => return nothing(Assessment::Refused(vec![refusal]), observed, RESYNC),
    };
    let service = service.as_ref();
    let valid = match validate(service) {
        Ok(valid) => valid,
        Err(refusals) => return nothing(Assessment::Refused(refusals), observed, RESYNC),
    };
    let strangers = children::strangers(&valid, observed);
    if !strangers.is_empty() {
        return nothing(Assessment::Strangers(strangers), observed, RETRY);
    }
    let mut fleet = Fleet::of(&valid, observed);
    let model = service.status.as_ref().and_then(|status| status.model.as_ref());
    let stage = inspection::Stage::of(&valid, model, &fleet, observed, defaults, now);
    let made = fitting::Made::of(&valid, &stage, pinned, &fleet, observed, defaults);
    let valid = valid.decided(&made.choice.picked);
    let before = service.status.as_ref().map_or(0, |status| status.desired_replicas);
    let standby = Standby::of(&valid, &fleet);
    let mut scaled = scale(&valid, &fleet, &standby, observed, defaults, before, now);
    let mut steps = children::steps(&valid, &standby, observed, defaults);
    steps.extend(standby.steps(&fleet, scaled.replicas));
    steps.extend(inspection::steps(&valid, model, &stage, observed, defaults));
    let recipe = revision::Recipe::of(service, &made.choice);
    let revision = recipe.name(&valid.name);
    if !made.is_held {
        steps.extend(revision::steps(&valid, &recipe, &revision, observed));
    }
    let was_given_up = service.status.as_ref().is_some_and(|status| status.spot_fallback_replicas.is_some());
    let total = scaled.replicas + standby.replicas;
    let placement = Placement::of(&valid.spot, placement::Standing::of(&fleet), total, was_given_up, now);
    let evacuation = evacuation::Evacuation::of(&valid, &fleet, &placement, observed, now);
    steps.splice(0..0, evacuation.steps);
    let making = workloads::Making { choice: &made.choice, is_held: made.is_held };
    let workloads = workloads::plan(&valid, &fleet, &placement, making, observed, defaults);
    let is_changing = workloads.steps.iter().any(|step| matches!(step, Step::Apply(Object::Deployment(_))));
    steps.extend(workloads.steps);
    steps.extend(workers::steps(&valid, &fleet, observed));
    steps.extend(served::steps(&fleet, observed));
    steps.extend(children::leftovers(&valid, &fleet, observed));
    // Last: it is known to be written when no step has failed, and keeps no other from being done.
    if matches!(valid.scaling, Scaling::Builtin(_)) {
        steps.extend(capacity::keep(&valid, observed, &mut scaled.memory, now));
    }
    fleet.hold_to(&workloads.templates);
    let facts = assess::Facts {
        service: &valid,
        fleet: &fleet,
        standby: &standby,
        observed,
        defaults,
        made: &made,
        revision: &revision,
        interrupted_nodes: evacuation.nodes,
        model: inspection::status(&valid, &stage),
        now,
    };
    let findings = facts.findings(scaled.finding, scaled.replicas, &placement, is_changing);
    Plan {
        steps,
        memory: scaled.memory,
        assessment: Assessment::Planned(Box::new(findings)),
        requeue_after: [placement.look_again, made.look_again]
            .into_iter()
            .flatten()
            .fold(scaled.look_again, Duration::min),
    }
}

fn nothing(assessment: Assessment, observed: &Observed, requeue_after: Duration) -> Plan {
    Plan { steps: Vec::new(), memory: observed.memory.clone(), assessment, requeue_after }
}

/// How many replicas, who said so, and when to ask again.
struct Scaled {
    replicas: i32,
    finding: ScalingFinding,
    memory: Memory,
    look_again: Duration,
}

impl Scaled {
    fn fixed(replicas: i32, finding: ScalingFinding) -> Self {
        Scaled { replicas, finding, memory: Memory::default(), look_again: RESYNC }
    }
}

/// `before`: replicas wanted at the last look, 0 at the first.
fn scale(
    service: &ValidatedService,
    fleet: &Fleet<'_>,
    standby: &Standby,
    observed: &Observed,
    defaults: &Defaults,
    before: i32,
    now: Timestamp,
) -> Scaled {
    let policy = match &service.scaling {
        Scaling::Manual { replicas } => return Scaled::fixed(*replicas, ScalingFinding::Manual),
        Scaling::External { replicas } => return Scaled::fixed(*replicas, ScalingFinding::External),
        Scaling::Hpa { replicas, .. } => {
            return Scaled::fixed(*replicas, ScalingFinding::Hpa(hpa::finding(service, observed)));
        }
        Scaling::Builtin(policy) => policy,
    };
    // A workload that somebody deleted comes back as large as it was.
    let wanted = policy.shadow.unwrap_or(before.clamp(policy.min, policy.max));
    // With spares, and while spot is given up or comes back, workloads have more replicas than are wanted.
    let is_plain = service.spot.fallback_after.is_none() && standby.replicas == 0;
    let asked = fleet.asked().filter(|_| is_plain || before == 0).unwrap_or(wanted);
    let supply = supply(service, fleet, standby, &observed.memory, asked, now);
    let cadence = Cadence { active: defaults.scrape_active, idle: defaults.scrape_idle };
    let decision = autoscale::decide(policy, &supply, &observed.load, &observed.memory, cadence, now);
    Scaled {
        replicas: policy.shadow.unwrap_or(decision.replicas),
        memory: decision.memory.clone(),
        // With the fewest there are, nothing is to be done unless a reading or an event says so, and those bring a look.
        look_again: if decision.reason == Reason::AtMinimum { cadence.idle } else { cadence.active },
        finding: ScalingFinding::Builtin { decision: Box::new(decision), shadow: policy.shadow.is_some() },
    }
}

/// How the service stands, with so many replicas wanted.
fn supply<'a>(
    service: &ValidatedService,
    fleet: &Fleet<'a>,
    standby: &Standby,
    memory: &Memory,
    asked: i32,
    now: Timestamp,
) -> Supply<'a> {
    let limit = minus(now, service.rollout.progress_deadline());
    // A spare that was called upon serves since then, whenever it became ready.
    let called = memory.last_up.filter(|_| standby.is_routed).unwrap_or(Timestamp::MIN);
    let since = |pod: &fleet::FleetPod<'a>| match pod.stage {
        Stage::Ready { since } => Some((pod.name, since.max(called))),
        Stage::Waiting | Stage::Leaving => None,
    };
    Supply {
        asked,
        serving: fleet.pods().filter(|pod| !standby.holds(pod)).filter_map(since).collect(),
        leaving: fleet::count(fleet.pods().filter(|pod| pod.stage == Stage::Leaving)),
        faltering: fleet::count(fleet.pods().filter(|pod| pod.has_faltered() && !is_late(pod, limit))),
        is_rolling: fleet.is_rolling(),
        overdue: overdue(service, fleet, now),
        cold_starts: fleet.ready().filter_map(fleet::FleetPod::cold_start).collect(),
    }
}

/// Replicas that did not come in the time that a rollout is given. Those that wait for a spot node are placement's.
fn overdue(service: &ValidatedService, fleet: &Fleet<'_>, now: Timestamp) -> i32 {
    let limit = minus(now, service.rollout.progress_deadline());
    let falls_back = |kind| kind == WorkloadKind::Spot && service.spot.fallback_after.is_some();
    let late = |workload: &fleet::Workload<'_>| {
        let waits_for_spot =
            |pod: &fleet::FleetPod<'_>| falls_back(workload.kind) && pod.unschedulable_since().is_some();
        let pods = workload.live().filter(|pod| is_late(pod, limit) && !waits_for_spot(pod));
        fleet::count(pods) + workload.refused(limit)
    };
    fleet.workloads.iter().map(late).sum()
}

/// Whether the pod has not served since `limit` or longer.
fn is_late(pod: &fleet::FleetPod<'_>, limit: Timestamp) -> bool {
    pod.waiting_since().is_some_and(|since| since <= limit)
}

#[cfg(test)]
mod tests;
