//! Mixtures of experts on the device: their buffers, and their kernels in order.

use half::bf16;
use windlass_kernels::cuda::ops::{self, ExpertInput, ExpertSum, Mixture, Output, Routes};
use windlass_kernels::cuda::{Device, DriverError, Memory};

use super::compute::{CudaStep, Exchange, add_product, gate, gate_product};
use super::input::Input;
use super::inputs::ExpertKernel;
use super::metadata::StepSizes;
use super::weights::ExpertWeights;
use super::workspace::Workspace;
use crate::config::{DecoderConfig, ExpertsConfig};

/// The buffers of a mixture of experts. A row is of one token and one of its experts.
#[derive(Debug)]
pub(super) struct ExpertRoom {
    routes: Routes,
    scores: Memory<f32>,
    gated: Memory<bf16>,
    given: Memory<bf16>,
    /// The sum over the experts for each token, in families that norm it.
    summed: Option<Memory<bf16>>,
}

pub(super) fn mixture(experts: &ExpertsConfig) -> Mixture {
    let ExpertsConfig { count, used, sum_to_one, .. } = *experts;
    let (first, held) = (experts.held.start, experts.held.len());
    Mixture { count, first, held, used, shared: experts.shared_feed_forward.is_some(), sum_to_one }
}

impl ExpertRoom {
    /// Allocates the buffers for the largest step; `None` for a decoder without experts.
    pub fn new(device: &Device, config: &DecoderConfig, sizes: &StepSizes) -> Result<Option<ExpertRoom>, DriverError> {
        let Some(experts) = &config.experts else { return Ok(None) };
        let (mixture, rows) = (mixture(experts), sizes.tokens * experts.used);
        Ok(Some(ExpertRoom {
            routes: Routes::new(device, mixture, sizes.tokens)?,
            scores: device.allocate(sizes.tokens * mixture.scores())?,
            gated: device.allocate(rows * experts.feed_forward)?,
            given: device.allocate(rows * config.hidden)?,
            summed: config.post_norms.then(|| device.allocate(sizes.tokens * config.hidden)).transpose()?,
        }))
    }

    /// Bytes of the buffers.
    pub fn bytes(config: &DecoderConfig, sizes: &StepSizes) -> u64 {
        let Some(experts) = &config.experts else { return 0 };
        let (mixture, rows) = (mixture(experts), sizes.tokens * experts.used);
        let summed = if config.post_norms { sizes.tokens * config.hidden } else { 0 };
        let halves = rows * (experts.feed_forward + config.hidden) + summed;
        Routes::bytes(&mixture, sizes.tokens) + (4 * sizes.tokens * mixture.scores() + 2 * halves) as u64
    }
}

/// Computes `residual += norm(Σ weight · expert(normed))` of a step's tokens over the experts that this rank has,
/// summed over the ranks. The norm exists only in some families.
///
/// # Panics
/// If the workspace has no buffers for experts.
pub(super) fn mix(
    step: &CudaStep<'_>,
    config: &DecoderConfig,
    weights: &ExpertWeights,
    post_norm: Option<&Memory<f32>>,
    work: &mut Workspace,
    exchange: &mut Option<Exchange>,
) -> Result<(), DriverError> {
    let (stream, gate, tokens) = (step.stream, gate(config), step.counts.tokens);
    let Workspace { residual, normed, gate_up, gated, inputs, experts, .. } = work;
    let Some(room) = experts else { panic!("a layer of experts in a decoder that has none") };
    let (hidden, used) = (weights.gated.gate_up.cols(), room.routes.mixture().used);
    let (values, rows, wide) = (tokens * hidden, tokens * used, weights.gated.down.cols());
    let scores = tokens * weights.router.rows();
    let input = normed.slice(0..values);
    ops::linear(stream, &weights.router, input, Output::F32(room.scores.slice_mut(0..scores)))?;
    let (scores, facts) = (room.scores.slice(0..scores), stream.device().facts());
    let kernel = inputs.choices().expert_kernel(facts, &weights.gated, room.routes.mixture(), tokens);
    let given = 0..rows * hidden;
    match kernel {
        ExpertKernel::InOrder => room.routes.choose(stream, scores)?,
        ExpertKernel::Reordered | ExpertKernel::RoundedByToken(_) => room.routes.choose_wide(stream, scores)?,
    }
    if let ExpertKernel::RoundedByToken(code) = kernel {
        let out = room.given.slice_mut(given.clone());
        inputs.multiply_experts_rounded(stream, code, (&weights.gated, gate), &room.routes, input, out)?;
    } else {
        let out = Output::Gated(room.gated.slice_mut(0..rows * wide), gate);
        inputs.multiply_experts(stream, &weights.gated.gate_up, &room.routes, ExpertInput::Tokens(input), out)?;
        let (own, out) = (room.gated.slice(0..rows * wide), Output::Bf16(room.given.slice_mut(given.clone())));
        inputs.multiply_experts(stream, &weights.gated.down, &room.routes, ExpertInput::Given(own), out)?;
    }
    if let Some(shared) = &weights.shared {
        let input = Input::Values(normed.slice(0..values));
        let own = gate_product(stream, gate, shared, input, inputs, gate_up, gated)?;
        // The norm is not read any more, so its buffer is free.
        inputs.multiply(stream, &shared.down, own, Output::Bf16(normed.slice_mut(0..values)))?;
    }
    let shared = weights.shared.is_some().then(|| normed.slice(0..values));
    let ExpertRoom { routes, given: each, summed, .. } = room;
    let sum = |out: Output<'_>| routes.mix(stream, each.slice(given), shared, hidden, sum_into(out));
    add_product(stream, config, exchange, sum, post_norm.zip(summed.as_mut()), residual.slice_mut(0..values))
}

/// The output of a sum over experts, in place of a product.
fn sum_into(out: Output<'_>) -> ExpertSum<'_> {
    match out {
        Output::AddTo(residual) => ExpertSum::AddTo(residual),
        Output::Bf16(part) => ExpertSum::Bf16(part),
        _ => unreachable!("what is added to the residual stream is neither gated nor in f32"),
    }
}
