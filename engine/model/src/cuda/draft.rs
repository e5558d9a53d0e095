//! A draft model on a GPU, beside the large model for which it proposes draft tokens.

use std::slice;

use windlass_checkpoint::Checkpoint;
use windlass_engine_contract::memory::Ledger;
use windlass_engine_contract::sharding::Stage;
use windlass_engine_core::executor::KvGroups;
use windlass_kernels::cuda::Device;

use super::Replay;
use super::fit::ledger_of_last;
use super::group::CudaDecoder;
use super::plan::CudaPlan;
use crate::config::DecoderConfig;
use crate::draft_model::{DraftModel, own};
use crate::error::LoadError;
use crate::sizes::LoadOptions;
use crate::weights::Manifest;

impl DraftModel<CudaDecoder> {
    /// Loads the model on a GPU. `options` are those of the large model, except for the KV budget.
    pub fn load_on(
        checkpoint: &Checkpoint,
        options: &LoadOptions,
        device: &Device,
    ) -> Result<DraftModel<CudaDecoder>, LoadError> {
        let options = own(options);
        let plan = CudaPlan::read(checkpoint, &options, slice::from_ref(device), |_| Ok(Stage::WHOLE))?;
        let model = plan.load()?;
        let geometry = model.geometry_in(KvGroups::ONE, options.kv)?;
        Ok(DraftModel::new(model.decoder(&geometry, Replay::Graphs)?, geometry))
    }

    /// The memory that it would take of the GPU, by the checkpoint's headers.
    pub fn ledger_on(checkpoint: &Checkpoint, options: &LoadOptions) -> Result<Ledger, LoadError> {
        let (options, config) = (own(options), DecoderConfig::read(checkpoint)?);
        let manifest = Manifest::read_headers(checkpoint, &config, options.quantization)?;
        ledger_of_last(&manifest, &config, &options, config.layers as u32)
    }
}
