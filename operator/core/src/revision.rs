//! The history of what pods were made from: one ControllerRevision for each distinct template input, that is, the part
//! of the spec that templates are made of and the choices that were made for it.
//!
//! `spec.rollout.pinnedRevision` puts such a part in the place of the spec's own; planning then goes on as for any spec.

use std::borrow::Cow;
use std::sync::Arc;

use k8s_openapi::api::apps::v1::ControllerRevision;
use k8s_openapi::apimachinery::pkg::runtime::RawExtension;
use serde::{Deserialize, Serialize};
use windlass_operator_api::status::RevisionStatus;
use windlass_operator_api::{InferenceService, InferenceServiceSpec};

use crate::build::metadata;
use crate::choice::Choice;
use crate::digest::fingerprint;
use crate::fleet::is_owned;
use crate::observed::Observed;
use crate::plan::{Kind, Object, Step};
use crate::validate::{Refusal, ValidatedService, of_pods};

/// Digits of the fingerprint in a revision's name.
const DIGITS: usize = 8;

/// What a template is made from.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Recipe {
    /// The part of the spec.
    pub spec: InferenceServiceSpec,
    /// The choices.
    pub choice: Choice,
}

impl Recipe {
    /// Of the spec as it is now.
    pub fn of(service: &InferenceService, choice: &Choice) -> Recipe {
        // A restart makes the same pods again.
        Recipe { spec: InferenceServiceSpec { rollout: None, ..of_pods(&service.spec) }, choice: choice.clone() }
    }

    /// Name of its revision. Why something was chosen does not change what is made of it.
    pub fn name(&self, service: &str) -> String {
        let choice = Choice { picked: self.choice.picked.without_reason(), ..self.choice.clone() };
        let digits = fingerprint(&(&self.spec, choice));
        format!("{service}-{}", &digits[..DIGITS])
    }

    fn read(revision: &ControllerRevision) -> Option<Recipe> {
        serde_json::from_value(revision.data.as_ref()?.0.clone()).ok()
    }
}

/// The service as it is to be planned: with the pinned revision's part in place of its own, and the choices of that.
///
/// # Errors
/// There is no revision of that name that this version of the operator can read.
pub fn pinned<'a>(
    service: &'a InferenceService,
    observed: &Observed,
) -> Result<(Cow<'a, InferenceService>, Option<Choice>), Refusal> {
    let name = service.spec.rollout.as_ref().and_then(|rollout| rollout.pinned_revision.as_deref());
    let Some(name) = name else { return Ok((Cow::Borrowed(service), None)) };
    let known = owned(service, observed);
    let found = known.iter().find(|revision| revision.metadata.name.as_deref() == Some(name));
    let Some(recipe) = found.and_then(|revision| Recipe::read(revision)) else {
        let known = known.iter().filter_map(|revision| revision.metadata.name.clone()).collect();
        return Err(Refusal::NoSuchRevision { name: name.to_owned(), known });
    };
    let mut pinned = service.clone();
    pinned.spec = restored(&service.spec, recipe.spec);
    Ok((Cow::Owned(pinned), Some(recipe.choice)))
}

/// `stored` with everything that no template is made of as `live` has it.
fn restored(live: &InferenceServiceSpec, stored: InferenceServiceSpec) -> InferenceServiceSpec {
    let mut spot = stored.spot.clone();
    if let (Some(spot), Some(live)) = (spot.as_mut(), live.spot.as_ref()) {
        spot.on_demand_base = live.on_demand_base;
        spot.max_percent_above_base = live.max_percent_above_base;
        // That there is a fallback belongs to the template; how long it waits does not.
        spot.fallback_after_seconds = spot.fallback_after_seconds.and(live.fallback_after_seconds.or(Some(1)));
    }
    InferenceServiceSpec {
        replicas: live.replicas,
        autoscaling: live.autoscaling.clone(),
        network: live.network.clone(),
        rollout: live.rollout.clone(),
        spot,
        ..stored
    }
}

/// Adds the revision that pods are to be of, and forgets the oldest beyond the limit. `current`: its name.
pub fn steps(service: &ValidatedService, recipe: &Recipe, current: &str, observed: &Observed) -> Vec<Step> {
    let mut known: Vec<_> = observed.revisions.iter().filter(|one| is_owned(&one.metadata, &service.uid)).collect();
    known.sort_by_key(|revision| std::cmp::Reverse(revision.revision));
    let is_named = |revision: &&&Arc<ControllerRevision>| revision.metadata.name.as_deref() == Some(current);
    let make = known.iter().find(is_named).is_none().then(|| {
        let number = known.first().map_or(0, |newest| newest.revision) + 1;
        Step::Apply(Object::ControllerRevision(build(service, recipe, current, number)))
    });
    let earlier = known.iter().filter(|revision| !is_named(revision));
    let forgotten = earlier.skip(service.rollout.revision_history_limit).map(|revision| Step::Delete {
        kind: Kind::ControllerRevision,
        name: revision.metadata.name.clone().unwrap_or_default(),
        uid: revision.metadata.uid.clone().unwrap_or_default(),
    });
    make.into_iter().chain(forgotten).collect()
}

fn build(service: &ValidatedService, recipe: &Recipe, name: &str, revision: i64) -> ControllerRevision {
    // A spec always serializes.
    let data = serde_json::to_value(recipe).unwrap_or_default();
    ControllerRevision { metadata: metadata(service, name.to_owned()), data: Some(RawExtension(data)), revision }
}

/// Revisions as status tells them, newest first.
pub fn told(service: &ValidatedService, observed: &Observed) -> Vec<RevisionStatus> {
    let ours = observed.revisions.iter().filter(|one| is_owned(&one.metadata, &service.uid));
    let mut told: Vec<_> = ours
        .filter_map(|revision| {
            Some(RevisionStatus {
                name: revision.metadata.name.clone()?,
                number: revision.revision,
                engine_image: Recipe::read(revision).map(|recipe| recipe.choice.image),
                created_time: revision.metadata.creation_timestamp.clone(),
            })
        })
        .collect();
    told.sort_by_key(|revision| std::cmp::Reverse(revision.number));
    told
}

fn owned<'a>(service: &InferenceService, observed: &'a Observed) -> Vec<&'a Arc<ControllerRevision>> {
    let uid = service.metadata.uid.as_deref().unwrap_or_default();
    observed.revisions.iter().filter(|revision| is_owned(&revision.metadata, uid)).collect()
}
