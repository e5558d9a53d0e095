//! From what is known of the model and the nodes to the choices that templates are made with, and whether they are made.

use std::sync::Arc;
use std::time::Duration;

use windlass_engine_contract::revision::is_commit;
use windlass_operator_api::rollout::EngineUpgrade;

use crate::choice::{Choice, Picked};
use crate::fit::{self, Fit};
use crate::fleet::Fleet;
use crate::inspection::{Stage, is_template_due};
use crate::inventory::Inventory;
use crate::observed::{Defaults, Observed};
use crate::source::{ModelSource, Server};
use crate::validate::ValidatedService;

/// While nodes may come that a model fits on, or an upgrade waits for its turn.
const LOOK_AGAIN: Duration = Duration::from_secs(30);
/// While a header is read: its Job tells when it is, and this is for one that is not told.
const LOOK_SOON: Duration = Duration::from_secs(5);

/// What templates are made with, and whether.
#[derive(Clone, Debug)]
pub struct Made {
    /// The choices.
    pub choice: Choice,
    /// No template is made or changed now.
    pub is_held: bool,
    /// Condition Fits.
    pub finding: FitFinding,
    /// When to plan again although nothing has changed.
    pub look_again: Option<Duration>,
}

/// Condition Fits before it is dated.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FitFinding {
    /// `True`, `False` or `Unknown`.
    pub status: &'static str,
    /// A stable CamelCase word.
    pub reason: String,
    /// In words, with numbers.
    pub message: String,
}

impl Made {
    /// For `service`; `pinned`: the choices of the revision that is gone back to.
    pub fn of(
        service: &ValidatedService,
        stage: &Stage,
        pinned: Option<Choice>,
        fleet: &Fleet<'_>,
        observed: &Observed,
        defaults: &Defaults,
    ) -> Made {
        let fit = judged(service, stage, fleet, observed);
        // Pods of an earlier spec prove nothing of this one.
        let serves = !is_template_due(service, fleet) && fleet.ready().any(|pod| pod.updated);
        let finding = finding(stage, fit.as_ref(), serves);
        // What was chosen for this very spec stands, whatever fits now.
        let picked = picked(service, stage, fit.as_ref());
        let made =
            pinned.or_else(|| Choice::of_spec(service, fleet).filter(|choice| !is_blind(choice, &picked, fleet)));
        let is_fresh = made.is_none();
        let image = || service.engine.image.clone().unwrap_or_else(|| defaults.engine_image.clone());
        let mut choice = made.unwrap_or_else(|| Choice { image: image(), picked });
        let waits = upgrade(service, observed, defaults, &mut choice);
        let is_due = is_fresh && is_template_due(service, fleet);
        let is_unknown = *stage == Stage::Reading;
        let is_too_large = matches!(fit, Some(Fit::TooLarge { .. }));
        let reading = (is_due && is_unknown).then_some(LOOK_SOON);
        let unfit = (is_due && is_too_large).then_some(LOOK_AGAIN);
        Made { choice, is_held: reading.or(unfit).is_some(), finding, look_again: reading.or(unfit).or(waits) }
    }
}

/// Whether a template was made while nothing was known to choose by, never served, and something is known now.
fn is_blind(choice: &Choice, picked: &Picked, fleet: &Fleet<'_>) -> bool {
    choice.picked == Picked::default() && *picked != choice.picked && fleet.ready().next().is_none()
}

fn judged(service: &ValidatedService, stage: &Stage, fleet: &Fleet<'_>, observed: &Observed) -> Option<Fit> {
    let Stage::Known(found) = stage else { return None };
    let inventory = observed.nodes.as_deref().map(|nodes: &[Arc<_>]| Inventory::of(service, nodes));
    let held = Choice::last(fleet).map(|choice| choice.picked).unwrap_or_default();
    Some(fit::judge(service, found, inventory.as_ref(), &held))
}

fn picked(service: &ValidatedService, stage: &Stage, fit: Option<&Fit>) -> Picked {
    let by_fit = match fit {
        Some(Fit::Fits { picked, .. }) => picked.clone(),
        _ => Picked::default(),
    };
    Picked { commit: commit(service, stage), ..by_fit }
}

/// The commit whose header was read, unless the spec names it: what a branch means may be another one with every pod.
fn commit(service: &ValidatedService, stage: &Stage) -> Option<String> {
    let (Stage::Known(found), ModelSource::Fetched(source)) = (stage, &service.source) else { return None };
    let Server::Hub { revision } = &source.server else { return None };
    found.revision.clone().filter(|commit| is_commit(commit) && revision.as_ref() != Some(commit))
}

/// Takes the operator's image where that is wanted and it is this service's turn; when to ask for the turn again.
fn upgrade(
    service: &ValidatedService,
    observed: &Observed,
    defaults: &Defaults,
    choice: &mut Choice,
) -> Option<Duration> {
    let is_automatic = service.rollout.engine_upgrade == EngineUpgrade::Automatic && service.engine.image.is_none();
    let is_free = is_automatic && !service.rollout.is_pinned && !service.rollout.is_paused;
    if !is_free || choice.image == defaults.engine_image {
        return None;
    }
    if !observed.is_upgrade_turn {
        return Some(LOOK_AGAIN);
    }
    choice.image.clone_from(&defaults.engine_image);
    None
}

fn finding(stage: &Stage, fit: Option<&Fit>, serves: bool) -> FitFinding {
    let say = |status, reason: &str, message: &str| FitFinding {
        status,
        reason: reason.to_owned(),
        message: message.to_owned(),
    };
    match (stage, fit) {
        (_, Some(Fit::Fits { message, .. })) => say("True", "Fits", message),
        (_, Some(Fit::TooLarge { message } | Fit::NoInventory { message })) if serves => {
            say("True", "Serving", &format!("replicas serve, so it fits where they are; {message}"))
        }
        (_, Some(Fit::TooLarge { message })) => say("False", "TooLarge", message),
        (_, Some(Fit::NoInventory { message })) => say("Unknown", "NoInventory", message),
        (_, None) if serves => say("True", "Serving", "replicas serve, so it fits where they are"),
        (Stage::Reading, None) => say("Unknown", "Inspecting", "the model's header is being read"),
        (Stage::Failed { reason, message }, None) => say("Unknown", reason, message),
        (Stage::NotAsked { because }, None) => say("Unknown", "NotInspected", because),
        (Stage::Known(_), None) => say("Unknown", "NotInspected", "the model was not judged"),
    }
}
