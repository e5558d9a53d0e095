//! Buffers for the activations of a step on the device, one row for each token, allocated once for the largest step.

use half::bf16;
use windlass_kernels::cuda::ops::DecodeRoom;
use windlass_kernels::cuda::{Device, DriverError, Memory};

use super::experts::ExpertRoom;
use super::inputs::{InputRoom, ProductChoices};
use super::metadata::StepSizes;
use super::weights::CudaWeights;
use crate::config::DecoderConfig;

/// The buffers of a step.
#[derive(Debug)]
pub(super) struct Workspace {
    pub residual: Memory<f32>,
    pub normed: Memory<bf16>,
    /// Queries, keys and values before biases, norms and rotation.
    pub projected: Memory<bf16>,
    pub query: Memory<bf16>,
    pub attended: Memory<bf16>,
    pub gate_up: Memory<bf16>,
    pub gated: Memory<bf16>,
    /// Partial results of attention of rows of one token.
    pub splits: DecodeRoom,
    /// The residual stream of the tokens that get logits, and its norm.
    pub picked: Memory<f32>,
    pub picked_normed: Memory<bf16>,
    pub logits: Memory<f32>,
    pub inputs: InputRoom,
    /// `None` in a decoder without experts.
    pub experts: Option<ExpertRoom>,
}

impl Workspace {
    pub fn new(
        device: &Device,
        config: &DecoderConfig,
        (weights, choices): (&CudaWeights, &ProductChoices),
        sizes: &StepSizes,
    ) -> Result<Workspace, DriverError> {
        let lengths = Lengths::of(config, sizes);
        Ok(Workspace {
            residual: device.allocate(lengths.hidden)?,
            normed: device.allocate(lengths.hidden)?,
            projected: device.allocate(lengths.projected)?,
            query: device.allocate(lengths.query)?,
            attended: device.allocate(lengths.query)?,
            gate_up: device.allocate(2 * lengths.gated)?,
            gated: device.allocate(lengths.gated)?,
            splits: DecodeRoom::new(device, sizes.rows, sizes.heads, sizes.splits())?,
            picked: device.allocate(lengths.picked)?,
            picked_normed: device.allocate(lengths.picked)?,
            logits: device.allocate(lengths.logits)?,
            inputs: InputRoom::new(device, config, (weights, choices), sizes.tokens)?,
            experts: ExpertRoom::new(device, config, sizes)?,
        })
    }

    /// Bytes of these buffers, `inputs` of them for [`InputRoom`].
    pub fn bytes(config: &DecoderConfig, inputs: u64, sizes: &StepSizes) -> u64 {
        let Lengths { hidden, projected, query, gated, picked, logits } = Lengths::of(config, sizes);
        let halves = hidden + projected + 2 * query + 3 * gated + picked;
        let floats = hidden + picked + logits;
        let splits = DecodeRoom::bytes(sizes.rows, sizes.heads, sizes.splits());
        (2 * halves + 4 * floats) as u64 + splits + inputs + ExpertRoom::bytes(config, sizes)
    }
}

/// Lengths of the buffers, in values.
struct Lengths {
    hidden: usize,
    projected: usize,
    query: usize,
    gated: usize,
    picked: usize,
    logits: usize,
}

impl Lengths {
    fn of(config: &DecoderConfig, sizes: &StepSizes) -> Lengths {
        Lengths {
            hidden: sizes.tokens * config.hidden,
            projected: sizes.tokens * sizes.heads.projected_width(),
            query: sizes.tokens * config.query_width(),
            gated: sizes.tokens * config.feed_forward,
            picked: sizes.logits * config.hidden,
            logits: sizes.logits * config.vocabulary,
        }
    }
}
