//! How many replicas each workload gets, which pods go, and the writes that bring that about.

use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::core::v1::PodTemplateSpec;
use windlass_engine_contract::stats::Stats;

use crate::build::deployment;
use crate::choice::Choice;
use crate::diff;
use crate::fleet::{Fleet, FleetPod, Stage, Workload};
use crate::names::{DELETION_COST, SPEC_HASH, TEMPLATE_HASH, WorkloadKind};
use crate::observed::{Defaults, Observed};
use crate::placement::Placement;
use crate::plan::{Kind, Mark, Object, Step};
use crate::rollout::{self, Room};
use crate::validate::ValidatedService;

/// A victim's deletion cost: less than the 0 of all others.
const VICTIM_COST: &str = "-1";

/// What is to be done about the workloads.
#[derive(Debug, Default)]
pub struct Planned {
    /// Writes, in order.
    pub steps: Vec<Step>,
    /// Fingerprint of the template that each workload's pods are to have.
    pub templates: Vec<(WorkloadKind, String)>,
}

/// What templates are made with.
#[derive(Clone, Copy, Debug)]
pub struct Making<'a> {
    /// The choices.
    pub choice: &'a Choice,
    /// No template is made or changed now: it is not known, or known not to fit.
    pub is_held: bool,
}

/// Brings the workloads to the replicas of `placement`, of the current spec.
pub fn plan(
    service: &ValidatedService,
    fleet: &Fleet<'_>,
    placement: &Placement,
    making: Making<'_>,
    observed: &Observed,
    defaults: &Defaults,
) -> Planned {
    let mut planned = Planned::default();
    let mut is_rolling = false;
    for workload in &fleet.workloads {
        let kind = workload.kind;
        let replicas = shrunk(service, workload, make_before_break(fleet, workload, placement));
        if is_wanted(service, kind) {
            let change = Change::of(service, fleet, workload, replicas, making.choice, defaults);
            // One after the other: the second workload keeps its template until the first has rolled.
            let may_roll = !is_rolling && !making.is_held;
            if making.is_held && matches!(change, Change::Create(_)) {
                continue;
            }
            // Nor does it follow one that was given up.
            let is_first = workload.deployment.is_none();
            is_rolling |= !is_first && (workload.is_rolling() || workload.is_given_up() || change.rolls());
            planned.templates.extend(change.template(workload).map(|hash| (kind, hash.to_owned())));
            planned.steps.extend(change.steps(workload, replicas, observed, may_roll));
        } else {
            planned.steps.extend(retire(workload, replicas, observed));
        }
    }
    planned
}

/// Whether the service has this workload at all.
pub fn is_wanted(service: &ValidatedService, kind: WorkloadKind) -> bool {
    kind == WorkloadKind::OnDemand || service.spot.has_workload()
}

/// A workload shrinks only as far as the others serve what they are to serve, so that moving replicas between
/// workloads loses none.
fn make_before_break(fleet: &Fleet<'_>, workload: &Workload<'_>, placement: &Placement) -> i32 {
    let (target, total) = (placement.replicas(workload.kind), placement.on_demand + placement.spot);
    let Some(asked) = workload.asked().filter(|asked| *asked > target) else { return target };
    let others = fleet.workloads.iter().filter(|other| other.kind != workload.kind);
    let serving: i32 = others.map(|other| other.ready().min(total - target)).sum();
    target.max(total - serving).min(asked)
}

/// While pods are replaced, which of them go is not ours to say. So a smaller number waits for a new pod that is starting,
/// unless as many serve as were asked for: else it might take one of those that are left.
fn shrunk(service: &ValidatedService, workload: &Workload<'_>, replicas: i32) -> i32 {
    let Some(asked) = workload.asked().filter(|asked| *asked > replicas) else { return replicas };
    let is_starting = |pod: &FleetPod<'_>| pod.updated && !pod.is_ready() && pod.unschedulable_since().is_none();
    let is_moving = workload.is_rolling() && !workload.is_overdue() && !service.rollout.is_paused;
    let waits = is_moving && workload.ready() < asked && workload.live().any(is_starting);
    if waits { asked } else { replicas }
}

/// What the current spec means for a workload.
enum Change {
    /// There is none yet.
    Create(Box<Deployment>),
    /// Its template or another part is not as wanted.
    Replace { wanted: Box<Deployment>, rolls: bool },
    /// At most its replicas.
    Keep,
}

impl Change {
    fn of(
        service: &ValidatedService,
        fleet: &Fleet<'_>,
        workload: &Workload<'_>,
        replicas: i32,
        choice: &Choice,
        defaults: &Defaults,
    ) -> Self {
        let is_of_spec = workload.annotation(SPEC_HASH) == Some(service.spec_hash.as_str());
        let is_current = is_of_spec && Choice::held(workload).is_none_or(|held| held.is_same(choice));
        let policy = &service.rollout;
        let room = if is_current { Room::of(policy, fleet, workload, replicas) } else { Room::first(policy) };
        let mut wanted = deployment::build(service, workload.kind, choice, replicas, room, defaults);
        let Some(existing) = workload.deployment else { return Change::Create(Box::new(wanted)) };
        if !is_current {
            let rolls = template_hash(&wanted) != workload.annotation(TEMPLATE_HASH);
            return Change::Replace { wanted: Box::new(wanted), rolls };
        }
        if template_hash(&wanted) != workload.annotation(TEMPLATE_HASH) {
            // Another version of the operator made it, and would not make it the same: of the template, the child wins.
            keep_template(&mut wanted, existing);
        }
        if let Some(spec) = wanted.spec.as_mut() {
            spec.replicas = None;
        }
        let is_paused =
            |deployment: &Deployment| deployment.spec.as_ref().and_then(|spec| spec.paused).unwrap_or(false);
        if diff::covers(existing, &wanted) && is_paused(existing) == is_paused(&wanted) {
            return Change::Keep;
        }
        let rolls = !diff::covers(&pods_of(existing), &pods_of(&wanted));
        if let Some(spec) = wanted.spec.as_mut() {
            spec.replicas = Some(replicas);
        }
        Change::Replace { wanted: Box::new(wanted), rolls }
    }

    /// Fingerprint of the template that pods are to have.
    fn template<'a>(&'a self, workload: &Workload<'a>) -> Option<&'a str> {
        match self {
            Change::Create(wanted) | Change::Replace { wanted, .. } => template_hash(wanted),
            Change::Keep => workload.annotation(TEMPLATE_HASH),
        }
    }

    fn rolls(&self) -> bool {
        matches!(self, Change::Replace { rolls: true, .. })
    }

    fn steps(self, workload: &Workload<'_>, replicas: i32, observed: &Observed, may_roll: bool) -> Vec<Step> {
        match self {
            Change::Create(wanted) => vec![Step::Apply(Object::Deployment(wanted))],
            Change::Replace { wanted, rolls } if may_roll || !rolls => {
                let mut steps = mark(workload, replicas, observed);
                steps.push(Step::Apply(Object::Deployment(wanted)));
                steps
            }
            Change::Keep => [rollout::withdraw(workload), scale(workload, replicas, observed)].concat(),
            Change::Replace { .. } => scale(workload, replicas, observed),
        }
    }
}

/// Pods of `wanted` stay as they are made by `existing`; how they are replaced, and whether, does not.
fn keep_template(wanted: &mut Deployment, existing: &Deployment) {
    let annotations = wanted.metadata.annotations.get_or_insert_default();
    match template_hash(existing) {
        Some(hash) => annotations.insert(TEMPLATE_HASH.to_owned(), hash.to_owned()),
        None => annotations.remove(TEMPLATE_HASH),
    };
    if let (Some(wanted), Some(existing)) = (wanted.spec.as_mut(), existing.spec.as_ref()) {
        wanted.template = existing.template.clone();
    }
}

fn pods_of(deployment: &Deployment) -> Option<&PodTemplateSpec> {
    deployment.spec.as_ref().map(|spec| &spec.template)
}

fn template_hash(deployment: &Deployment) -> Option<&str> {
    deployment.metadata.annotations.as_ref()?.get(TEMPLATE_HASH).map(String::as_str)
}

/// Brings a workload that the spec no longer has to its end: shrunk as others take over, then deleted.
fn retire(workload: &Workload<'_>, replicas: i32, observed: &Observed) -> Vec<Step> {
    let Some(deployment) = workload.deployment else { return Vec::new() };
    let mut steps = scale(workload, replicas, observed);
    if steps.is_empty() && replicas == 0 && workload.live().next().is_none() {
        let (name, uid) = (deployment.metadata.name.clone(), deployment.metadata.uid.clone());
        let (name, uid) = (name.unwrap_or_default(), uid.unwrap_or_default());
        steps.push(Step::Delete { kind: Kind::Deployment, name, uid });
    }
    steps
}

/// Victims marked before the number falls; the mark taken off pods that stay after all.
fn scale(workload: &Workload<'_>, replicas: i32, observed: &Observed) -> Vec<Step> {
    let mut steps = mark(workload, replicas, observed);
    if let (Some(asked), Some(deployment)) = (workload.asked(), workload.deployment)
        && asked != replicas
    {
        let deployment = deployment.metadata.name.clone().unwrap_or_default();
        steps.push(Step::Scale { deployment, replicas });
    }
    steps
}

fn mark(workload: &Workload<'_>, replicas: i32, observed: &Observed) -> Vec<Step> {
    let live: Vec<&FleetPod<'_>> = workload.live().collect();
    // While pods are replaced there are more of them for a moment, and which go is not ours to say.
    let surplus =
        if workload.is_rolling() { 0 } else { live.len().saturating_sub(replicas.max(0).unsigned_abs() as usize) };
    let victims = victims(&live, surplus, observed);
    let is_victim = |pod: &&&FleetPod<'_>| victims.contains(&pod.name);
    let is_stale = |pod: &&&FleetPod<'_>| pod.has_deletion_cost() && !victims.contains(&pod.name);
    let marked = live.iter().filter(is_victim).filter(|pod| !pod.has_deletion_cost());
    let cost = |pod: &FleetPod<'_>, value: Option<&str>| Step::MarkPod {
        pod: pod.name.to_owned(),
        mark: Mark::Annotation(DELETION_COST),
        value: value.map(str::to_owned),
    };
    let cleared = live.iter().filter(is_stale).map(|pod| cost(pod, None));
    marked.map(|pod| cost(pod, Some(VICTIM_COST))).chain(cleared).collect()
}

/// The pods whose loss costs least. Those that no request reaches go first; of the others, those with the fewest
/// tokens still to generate, then the coldest cache. A pod that is marked already stays the victim.
fn victims<'a>(live: &[&FleetPod<'a>], count: usize, observed: &Observed) -> Vec<&'a str> {
    let mut ranked: Vec<_> = live.iter().map(|pod| (rank(pod, observed), pod.name)).collect();
    ranked.sort();
    ranked.into_iter().take(count).map(|(_, name)| name).collect()
}

/// Not serving, marked already, remaining tokens, cached blocks: in the order in which pods go.
type Rank = (bool, bool, u64, u32);

fn rank(pod: &FleetPod<'_>, observed: &Observed) -> Rank {
    let serves = matches!(pod.stage, Stage::Ready { .. }) && !pod.is_spare();
    let stats: Option<&Stats> = observed.load.latest(pod.name).map(|reading| &reading.stats);
    // A pod that was not read may hold anything: it goes last.
    let (tokens, blocks) = stats.map_or((u64::MAX, u32::MAX), |stats| (stats.remaining_tokens, stats.cached_blocks));
    (serves, !pod.has_deletion_cost(), tokens, blocks)
}
