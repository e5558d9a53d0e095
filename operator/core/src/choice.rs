//! What a pod template is made with where the spec leaves a choice. It is held by the workload's annotations: whatever
//! the nodes, the model's header or the operator's defaults say later, a template stays as it was made until the spec
//! changes.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use windlass_operator_api::engine::Quantization;

use crate::fleet::{Fleet, Workload};
use crate::names::{CHOICE_REASON, CHOSEN_COMMIT, CHOSEN_QUANTIZATION, CHOSEN_TENSOR, ENGINE_IMAGE, SPEC_HASH};
use crate::source::ModelSource;
use crate::validate::{Device, ValidatedService};

/// Everything chosen.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Choice {
    /// Image of the engine.
    pub image: String,
    /// By what fits.
    #[serde(flatten)]
    pub picked: Picked,
}

/// What was chosen by what fits; nothing where the spec leaves no choice, or nothing was known to choose by.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Picked {
    /// GPUs over which a replica is split.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tensor: Option<u32>,
    /// What floats become.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub quantization: Option<Quantization>,
    /// The commit that is fetched, where the spec names what moves on, or nothing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub commit: Option<String>,
    /// Why.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
}

impl Picked {
    /// The choice itself.
    pub fn without_reason(&self) -> Picked {
        Picked { reason: None, ..self.clone() }
    }
}

impl Choice {
    /// Whether both make the same pods, for whatever reasons.
    pub fn is_same(&self, other: &Choice) -> bool {
        self.image == other.image && self.picked.without_reason() == other.picked.without_reason()
    }

    /// What a workload's template was made with.
    pub fn held(workload: &Workload<'_>) -> Option<Choice> {
        let image = workload.annotation(ENGINE_IMAGE)?.to_owned();
        Some(Choice { image, picked: Choice::picked(workload) })
    }

    fn picked(workload: &Workload<'_>) -> Picked {
        Picked {
            tensor: workload.annotation(CHOSEN_TENSOR).and_then(|text| text.parse().ok()),
            quantization: workload.annotation(CHOSEN_QUANTIZATION).and_then(Quantization::of_flag),
            commit: workload.annotation(CHOSEN_COMMIT).map(str::to_owned),
            reason: workload.annotation(CHOICE_REASON).map(str::to_owned),
        }
    }

    /// What the current spec's template was made with, in whichever workload; `None` before there is one.
    pub fn of_spec(service: &ValidatedService, fleet: &Fleet<'_>) -> Option<Choice> {
        let is_current = |workload: &&Workload<'_>| workload.annotation(SPEC_HASH) == Some(service.spec_hash.as_str());
        fleet.workloads.iter().filter(is_current).find_map(Choice::held)
    }

    /// What the last template was made with, of whichever spec.
    pub fn last(fleet: &Fleet<'_>) -> Option<Choice> {
        fleet.workloads.iter().find_map(Choice::held)
    }

    /// The annotations that hold it.
    pub fn annotations(&self) -> BTreeMap<String, String> {
        let Picked { tensor, quantization, commit, reason } = &self.picked;
        let quantization = quantization.and_then(Quantization::flag).map(str::to_owned);
        let entries = [
            (ENGINE_IMAGE, Some(self.image.clone())),
            (CHOSEN_TENSOR, tensor.map(|tensor| tensor.to_string())),
            (CHOSEN_QUANTIZATION, quantization),
            (CHOSEN_COMMIT, commit.clone()),
            (CHOICE_REASON, reason.clone()),
        ];
        entries.into_iter().filter_map(|(key, value)| Some((key.to_owned(), value?))).collect()
    }
}

impl ValidatedService {
    /// The service with every choice made.
    pub fn decided(&self, picked: &Picked) -> ValidatedService {
        let mut decided = self.clone();
        if let (Device::NvidiaGpu { count, .. }, Some(tensor)) = (&mut decided.device, picked.tensor) {
            *count = tensor;
        }
        if let (Quantization::Auto, Some(quantization)) = (self.engine.quantization, picked.quantization) {
            decided.engine.quantization = quantization;
        }
        if let (ModelSource::Fetched(source), Some(commit)) = (&mut decided.source, &picked.commit) {
            source.pin(commit);
        }
        decided
    }
}
