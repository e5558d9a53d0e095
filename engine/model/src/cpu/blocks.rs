//! The blocks of a decoder on a CPU.

use std::convert::Infallible;

use windlass_kernels::PackedMatrix;

use super::ops::{CpuStep, add_bias};
use super::workspace::Workspace;
use super::{CpuBackend, CpuExperts, CpuGated, CpuOps, CpuQkv};
use crate::decoder::{Attention, Backend, Layer, Layout};

impl Layout for CpuBackend {
    type Matrix = PackedMatrix;
    type Vector = Vec<f32>;
    type Qkv = CpuQkv;
    type Gated = CpuGated;
    type Experts = CpuExperts;
}

/// Calls compute before they return. They panic if another rank of the group has failed, since nothing can be computed
/// any more.
impl Backend for CpuBackend {
    type Step<'a> = CpuStep<'a>;
    type Error = Infallible;

    fn has_logits(step: &CpuStep<'_>) -> bool {
        !step.logit_tokens().is_empty()
    }

    fn embed(&mut self, step: &CpuStep<'_>, table: &PackedMatrix) -> Result<(), Infallible> {
        self.ops.embed(step, table, &mut self.work.residual);
        self.ops.all_reduce(step.tokens(), &mut self.work.residual);
        Ok(())
    }

    fn project_qkv(
        &mut self,
        step: &CpuStep<'_>,
        index: usize,
        layer: &Layer<CpuBackend>,
        attention: &Attention<CpuBackend>,
    ) -> Result<(), Infallible> {
        let (tokens, CpuBackend { ops, work }) = (step.tokens(), self);
        let CpuQkv { query, key, value } = &attention.qkv;
        let widths = [query, key, value].map(PackedMatrix::rows);
        ops.rms_norm(tokens, &work.residual, &layer.mixer_norm, &mut work.normed);
        let products = [(query, &mut work.query[..]), (key, &mut work.key), (value, &mut work.value)];
        ops.multiply(tokens, &work.normed, products);
        if let Some(bias) = &attention.bias {
            let (query, rest) = bias.split_at(widths[0]);
            let (key, value) = rest.split_at(widths[1]);
            add_bias(tokens, &mut work.query, query);
            add_bias(tokens, &mut work.key, key);
            add_bias(tokens, &mut work.value, value);
        }
        if let Some([query, key]) = &attention.head_norms {
            ops.norm_heads(tokens, widths[0], &mut work.query, query);
            ops.norm_heads(tokens, widths[1], &mut work.key, key);
        }
        if attention.is_rotary {
            ops.rope(step, index, &mut work.query, &mut work.key);
        }
        ops.append_kv(step, index, &work.key, &work.value);
        Ok(())
    }

    fn attend(&mut self, step: &CpuStep<'_>, index: usize) -> Result<(), Infallible> {
        self.ops.attention(step, index, &self.work.query, &mut self.work.attended);
        Ok(())
    }

    /// Computes the norm before the feed-forward block too, while the residual stream is in the cache.
    fn project_out(
        &mut self,
        step: &CpuStep<'_>,
        layer: &Layer<CpuBackend>,
        attention: &Attention<CpuBackend>,
    ) -> Result<(), Infallible> {
        let (tokens, CpuBackend { ops, work }) = (step.tokens(), self);
        ops.multiply(tokens, &work.attended, [(&attention.out, &mut work.projected)]);
        ops.all_reduce(tokens, &mut work.projected);
        norm_projected(tokens, layer.post_mixer_norm.as_ref(), ops, work);
        let Workspace { residual, projected, normed, .. } = work;
        ops.add_rms_norm(tokens, residual, projected, &layer.feed_forward_norm, normed);
        Ok(())
    }

    fn feed_forward(
        &mut self,
        step: &CpuStep<'_>,
        layer: &Layer<CpuBackend>,
        CpuGated { gate, up, down }: &CpuGated,
    ) -> Result<(), Infallible> {
        let (tokens, CpuBackend { ops, work }) = (step.tokens(), self);
        let values = tokens * gate.rows();
        ops.multiply(tokens, &work.normed, [(gate, &mut work.gate[..]), (up, &mut work.up)]);
        ops.gate(&work.gate[..values], &work.up[..values], &mut work.gated[..values]);
        ops.multiply(tokens, &work.gated, [(down, &mut work.projected)]);
        add_projected(tokens, layer.post_feed_forward_norm.as_ref(), ops, work);
        Ok(())
    }

    fn mix_experts(
        &mut self,
        step: &CpuStep<'_>,
        layer: &Layer<CpuBackend>,
        experts: &CpuExperts,
    ) -> Result<(), Infallible> {
        let (tokens, CpuBackend { ops, work }) = (step.tokens(), self);
        ops.mix(tokens, experts, work);
        add_projected(tokens, layer.post_feed_forward_norm.as_ref(), ops, work);
        Ok(())
    }

    fn head(&mut self, step: &CpuStep<'_>, norm: &Vec<f32>, output: &PackedMatrix) -> Result<(), Infallible> {
        let (rows, CpuBackend { ops, work }) = (step.logit_tokens().len(), self);
        ops.gather_logit_tokens(step, &work.residual, &mut work.projected);
        ops.rms_norm(rows, &work.projected, norm, &mut work.normed);
        ops.multiply(rows, &work.normed, [(output, &mut work.logits)]);
        ops.cap_logits(rows, &mut work.logits);
        ops.gather_logits(rows, &mut work.logits);
        Ok(())
    }
}

/// Adds the output of a feed-forward block to the residual stream.
fn add_projected(tokens: usize, norm: Option<&Vec<f32>>, ops: &mut CpuOps, work: &mut Workspace) {
    ops.all_reduce(tokens, &mut work.projected);
    norm_projected(tokens, norm, ops, work);
    ops.add(tokens, &mut work.residual, &work.projected);
}

/// Norms the output of a block, in families that do.
fn norm_projected(tokens: usize, norm: Option<&Vec<f32>>, ops: &CpuOps, work: &mut Workspace) {
    if let Some(norm) = norm {
        ops.rms_norm(tokens, &work.projected, norm, &mut work.normed);
        std::mem::swap(&mut work.projected, &mut work.normed);
    }
}
