//! A draft model beside the model on a GPU: what is left to it, and how it is loaded.

use super::cpu;
use crate::config::{Config, CpuConfig};
use crate::failure::Failure;
use crate::speculation::{Drafts, Speculation, of_draft};
use crate::start::{load_failure, open};
use windlass_engine_contract::memory::{Ledger, StepDefaults};
use windlass_engine_model::cuda::{CudaError, Device};
use windlass_engine_model::{DecoderConfig, DraftModel, KvBudget, LoadOptions};

/// A draft model's keys and values take one of so many parts of what is free before the large model comes, at most.
const KV_PART: u64 = 8;

/// Who proposes draft tokens, and with what.
#[derive(Clone)]
pub(super) struct Drafting {
    speculation: Option<Speculation>,
    options: LoadOptions,
    device: Device,
    /// What a draft model takes of the device; nothing without one.
    pub ledger: Ledger,
}

/// Decides it by the draft model's header, before the large one takes memory.
pub(super) fn plan(config: &Config, cpu: &CpuConfig, device: &Device) -> Result<Drafting, Failure> {
    let asked = cpu::asked(config, cpu, StepDefaults::CUDA);
    let speculation = config.speculation.clone();
    let (options, ledger) = match speculation.as_ref().and_then(Speculation::draft_model) {
        None => (asked, Ledger::default()),
        Some(path) => {
            let refused = |error| of_draft(path, load_failure(error));
            let file = open(path)?;
            let shape = DecoderConfig::read(&file).map_err(|error| refused(error.into()))?.shape(0);
            let free = device.driver().memory().map_err(|error| refused(CudaError::from(error).into()))?.free_bytes;
            let useful = config.batching.useful_kv_bytes(&shape, StepDefaults::CUDA);
            let options = LoadOptions { kv: KvBudget::Bytes(useful.min(free as u64 / KV_PART)), ..asked };
            let ledger = DraftModel::ledger_on(&file, &options).map_err(refused)?;
            (options, ledger)
        }
    };
    Ok(Drafting { speculation, options, device: device.clone(), ledger })
}

impl Drafting {
    /// Makes the proposer for a model with so many tokens in its vocabulary, and says the most draft tokens of a step.
    pub fn proposer(&self, vocabulary: u32) -> Result<Option<Drafts>, Failure> {
        let make = |speculation: &Speculation| speculation.proposer_on(vocabulary, &self.options, &self.device);
        self.speculation.as_ref().map(make).transpose()
    }
}
