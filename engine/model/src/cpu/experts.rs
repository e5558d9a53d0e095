//! Mixtures of experts on the CPU. Tokens are grouped by expert, so that the weights of an expert are read once for all
//! its tokens; experts of other ranks are skipped. A token's sum over experts is computed in the order of experts, so
//! it has the same bits in every batch.

use windlass_kernels::PackedMatrix;

use super::workspace::Workspace;
use super::{CpuExperts, CpuGated, CpuOps};
use crate::config::ExpertsConfig;

/// A token routed to an expert.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Routed {
    token: usize,
    weight: f32,
}

impl CpuOps {
    /// `projected = Σ weight · expert(normed)` of the first `tokens` tokens, over the experts that this rank has.
    pub(super) fn mix(&mut self, tokens: usize, experts: &CpuExperts, work: &mut Workspace) {
        let values = tokens * self.config().hidden;
        let shares = self.route(&experts.router, &work.normed[..values]);
        work.projected[..values].fill(0.0);
        for (expert, shares) in experts.experts.iter().zip(shares) {
            self.add_expert(expert, &shares, work);
        }
        if let Some((gated, gate)) = &experts.shared {
            let shares: Vec<Routed> = weigh_shared(&work.normed[..values], gate).collect();
            self.add_expert(gated, &shares, work);
        }
    }

    /// The tokens of each expert that this rank has.
    fn route(&mut self, router: &PackedMatrix, input: &[f32]) -> Vec<Vec<Routed>> {
        let mut scores = vec![0.0; input.len() / self.config().hidden * router.rows()];
        self.multiply(input.len() / router.inputs(), input, [(router, &mut scores)]);
        let mut shares = vec![Vec::new(); router.rows()];
        let Some(experts) = &self.config().experts else { return shares };
        for (token, scores) in scores.chunks_exact(router.rows()).enumerate() {
            for (expert, weight) in choose(scores, experts) {
                shares[expert].push(Routed { token, weight });
            }
        }
        shares.drain(experts.held.clone()).collect()
    }

    fn add_expert(&mut self, expert: &CpuGated, shares: &[Routed], work: &mut Workspace) {
        if shares.is_empty() {
            return;
        }
        let hidden = self.config().hidden;
        let mut rows = std::mem::take(&mut self.scratch);
        rows.clear();
        shares.iter().for_each(|share| rows.extend_from_slice(&work.normed[share.token * hidden..][..hidden]));
        let wide = shares.len() * expert.gate.rows();
        let (gate, up, gated) = (&mut work.gate[..wide], &mut work.up[..wide], &mut work.gated[..wide]);
        self.multiply(shares.len(), &rows, [(&expert.gate, &mut *gate), (&expert.up, &mut *up)]);
        self.gate(gate, up, gated);
        self.multiply(shares.len(), gated, [(&expert.down, &mut rows)]);
        for (Routed { token, weight }, row) in shares.iter().zip(rows.chunks_exact(hidden)) {
            let out = &mut work.projected[token * hidden..][..hidden];
            out.iter_mut().zip(row).for_each(|(out, value)| *out += weight * value);
        }
        self.scratch = rows;
    }
}

/// The experts with the highest scores in ascending order of index, each with its weight by softmax. Of equal scores
/// the lower index is chosen.
fn choose(scores: &[f32], experts: &ExpertsConfig) -> Vec<(usize, f32)> {
    let largest = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let weights: Vec<f32> = scores.iter().map(|score| (score - largest).exp()).collect();
    let mut order: Vec<usize> = (0..weights.len()).collect();
    order.sort_by(|&a, &b| weights[b].total_cmp(&weights[a]));
    order.truncate(experts.used);
    order.sort_unstable();
    let total: f32 = match experts.sum_to_one {
        true => order.iter().map(|&expert| weights[expert]).sum(),
        false => weights.iter().sum(),
    };
    order.into_iter().map(|expert| (expert, weights[expert] / total)).collect()
}

fn weigh_shared(input: &[f32], gate: &[f32]) -> impl Iterator<Item = Routed> {
    input.chunks_exact(gate.len()).enumerate().map(move |(token, row)| {
        let score: f32 = row.iter().zip(gate).map(|(value, gate)| value * gate).sum();
        Routed { token, weight: 1.0 / (1.0 + (-score).exp()) }
    })
}
