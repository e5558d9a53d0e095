//! A mixture of experts, from the router's scores to the residual stream.

use std::collections::BTreeSet;

use half::bf16;
use windlass_engine_model::cuda::DriverError;
use windlass_kernels::cuda::ops::{self, ExpertInput, ExpertSum, Gate, Mixture, Output, Routes};
use windlass_kernels::cuda::{Matrix, Memory, Stream};

use crate::finding::{Ceiling, Figure};
use crate::model::Model;
use crate::parts::Tell;
use crate::rig::Rig;
use crate::{Outcome, noise};

/// Fewer tokens to an expert than this are bounded by memory.
const MANY_TO_AN_EXPERT: usize = 64;

pub fn measure(model: &Model, tell: &mut Tell<'_>) -> Outcome<()> {
    let rig = Rig::open(model)?;
    let layer = Layer::new(&rig)?;
    for &tokens in rig.scale.routed {
        let first = Step::new(&rig, tokens, 0)?;
        let sets = rig.sets(layer.bytes() * first.touched / rig.scale.mixture.count);
        let others = (1..sets).map(|set| Step::new(&rig, tokens, set));
        let mut steps = [Ok(first)].into_iter().chain(others).collect::<Outcome<Vec<_>>>()?;
        let seconds = rig.seconds(sets, |stream, set| steps[set].issue(&layer, stream))?;
        tell(figure(&rig, &layer, &steps, seconds).into());
    }
    Ok(())
}

fn figure(rig: &Rig, layer: &Layer, steps: &[Step], seconds: f64) -> Figure {
    let (mixture, [hidden, wide], tokens) = (rig.scale.mixture, rig.scale.expert, steps[0].tokens);
    let figure = Figure::new(format!("bf16, {tokens} tokens"), seconds * 1e6, "µs");
    let pairs = tokens * mixture.used;
    match pairs >= MANY_TO_AN_EXPERT * mixture.count {
        true => figure.reaching(Ceiling::Bf16, (6 * pairs * hidden * wide) as f64 / seconds).wanted("70 to 80 %"),
        false => {
            let touched: usize = steps.iter().map(|step| step.touched).sum();
            let bytes = layer.bytes() as f64 * touched as f64 / (steps.len() * mixture.count) as f64;
            figure.reaching(Ceiling::Copy, bytes / seconds)
        }
    }
}

/// The experts' weights.
struct Layer {
    gate_up: Matrix,
    down: Matrix,
}

impl Layer {
    fn new(rig: &Rig) -> Outcome<Layer> {
        let (count, [hidden, wide]) = (rig.scale.mixture.count, rig.scale.expert);
        let matrix = |rows: usize, cols: usize| Matrix::bf16(&rig.device, rows, cols, &noise::halves(rows * cols));
        Ok(Layer { gate_up: matrix(count * 2 * wide, hidden)?, down: matrix(count * hidden, wide)? })
    }

    fn bytes(&self) -> usize {
        self.gate_up.bytes() + self.down.bytes()
    }
}

/// Tokens that go through them.
struct Step {
    tokens: usize,
    /// Experts that any of them goes through.
    touched: usize,
    hidden: usize,
    scores: Memory<f32>,
    input: Memory<bf16>,
    routes: Routes,
    gated: Memory<bf16>,
    given: Memory<bf16>,
    residual: Memory<f32>,
}

impl Step {
    /// Tokens of a set have other experts than those of another.
    fn new(rig: &Rig, tokens: usize, set: usize) -> Outcome<Step> {
        let (mixture, [hidden, wide], device) = (rig.scale.mixture, rig.scale.expert, &rig.device);
        let (values, rows) = (tokens * mixture.scores(), tokens * mixture.used);
        let scores = noise::floats((set + 1) * values).split_off(set * values);
        Ok(Step {
            tokens,
            touched: touched(&mixture, &scores),
            hidden,
            scores: device.upload(&scores)?,
            input: device.upload(&noise::halves(tokens * hidden))?,
            routes: Routes::new(device, mixture, tokens)?,
            gated: device.allocate(rows * wide)?,
            given: device.allocate(rows * hidden)?,
            residual: device.upload(&vec![0.0; tokens * hidden])?,
        })
    }

    fn issue(&mut self, layer: &Layer, stream: &Stream) -> Result<(), DriverError> {
        let (hidden, routes) = (self.hidden, &mut self.routes);
        routes.choose(stream, self.scores.view())?;
        let input = ExpertInput::Tokens(self.input.view());
        let out = Output::Gated(self.gated.view_mut(), Gate::Silu);
        ops::linear_experts(stream, &layer.gate_up, routes, input, out)?;
        let input = ExpertInput::Given(self.gated.view());
        ops::linear_experts(stream, &layer.down, routes, input, Output::Bf16(self.given.view_mut()))?;
        routes.mix(stream, self.given.view(), None, hidden, ExpertSum::AddTo(self.residual.view_mut()))
    }
}

/// Experts with one of the highest scores of any token.
fn touched(mixture: &Mixture, scores: &[f32]) -> usize {
    let highest = |token: &[f32]| {
        let mut experts: Vec<usize> = (0..mixture.count).collect();
        experts.sort_by(|&one, &other| token[other].total_cmp(&token[one]));
        experts.truncate(mixture.used);
        experts
    };
    scores.chunks_exact(mixture.scores()).flat_map(highest).collect::<BTreeSet<_>>().len()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_expert_is_touched_that_any_token_goes_through() {
        let mixture = Mixture { count: 4, first: 0, held: 4, used: 2, shared: false, sum_to_one: true };
        assert_eq!(touched(&mixture, &[4.0, 3.0, 2.0, 1.0]), 2);
        assert_eq!(touched(&mixture, &[4.0, 3.0, 2.0, 1.0, 4.0, 1.0, 3.0, 2.0]), 3);
    }
}
