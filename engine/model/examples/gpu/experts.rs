//! A mixture of experts, from the router's scores to the residual stream.

use std::collections::BTreeSet;

use half::bf16;
use windlass_engine_model::cuda::DriverError;
use windlass_kernels::cuda::ops::{self, ExpertInput, ExpertSum, Gate, Mixture, Output, Routes};
use windlass_kernels::cuda::{Matrix, Memory, Stream};

use crate::finding::{Bound, Ceiling, Figure};
use crate::model::Model;
use crate::parts::Tell;
use crate::rig::Rig;
use crate::{Outcome, noise};

/// Fewer tokens to an expert than this are bounded by memory.
const MANY_TO_AN_EXPERT: usize = 64;

/// How the products of experts are computed.
#[derive(Clone, Copy, Debug)]
enum Mode {
    /// The same in any batch.
    Deterministic,
    /// By warpgroups, which take many tokens of an expert at a time.
    Wide,
}

impl Mode {
    fn name(self) -> &'static str {
        match self {
            Mode::Deterministic => "the same in any batch",
            Mode::Wide => "--no-deterministic",
        }
    }

    fn multiply(
        self,
        stream: &Stream,
        matrix: &Matrix,
        routes: &Routes,
        input: ExpertInput<'_>,
        room: &mut Memory<bf16>,
        out: Output<'_>,
    ) -> Result<(), DriverError> {
        match self {
            Mode::Deterministic => ops::linear_experts(stream, matrix, routes, input, out),
            Mode::Wide => ops::linear_experts_wide(stream, matrix, routes, input, room, out),
        }
    }
}

pub fn measure(model: &Model, tell: &mut Tell<'_>) -> Outcome<()> {
    let rig = Rig::open(model)?;
    let layer = Layer::new(&rig)?;
    for &tokens in rig.scale.routed {
        for mode in modes(&rig, &layer, tokens) {
            tell(measure_mode(&rig, &layer, tokens, mode)?.into());
        }
    }
    Ok(())
}

fn modes(rig: &Rig, layer: &Layer, tokens: usize) -> Vec<Mode> {
    let widens = |matrix| ops::multiplies_experts_widely(rig.device.facts(), matrix, &rig.scale.mixture, tokens);
    match widens(&layer.gate_up) && widens(&layer.down) {
        true => vec![Mode::Deterministic, Mode::Wide],
        false => vec![Mode::Deterministic],
    }
}

fn measure_mode(rig: &Rig, layer: &Layer, tokens: usize, mode: Mode) -> Outcome<Figure> {
    let first = Step::new(rig, tokens, 0, mode)?;
    let sets = rig.sets(layer.bytes() * first.touched / rig.scale.mixture.count);
    let others = (1..sets).map(|set| Step::new(rig, tokens, set, mode));
    let mut steps = [Ok(first)].into_iter().chain(others).collect::<Outcome<Vec<_>>>()?;
    let seconds = rig.seconds(sets, |stream, set| steps[set].issue(layer, stream))?;
    Ok(figure(rig, layer, &steps, seconds, mode))
}

fn figure(rig: &Rig, layer: &Layer, steps: &[Step], seconds: f64, mode: Mode) -> Figure {
    let (mixture, [hidden, wide], tokens) = (rig.scale.mixture, rig.scale.expert, steps[0].tokens);
    let figure = Figure::new(format!("bf16, {tokens} tokens, {}", mode.name()), seconds * 1e6, "µs");
    let pairs = tokens * mixture.used;
    match pairs >= MANY_TO_AN_EXPERT * mixture.count {
        true => figure
            .reaching(Ceiling::Bf16, (6 * pairs * hidden * wide) as f64 / seconds)
            .wanted("70 to 80 %", Bound::LeastShare(70.0)),
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
    mode: Mode,
    /// Experts that any of them goes through.
    touched: usize,
    hidden: usize,
    scores: Memory<f32>,
    input: Memory<bf16>,
    routes: Routes,
    /// For tokens side by side that go to the same expert.
    sorted: Memory<bf16>,
    gated: Memory<bf16>,
    given: Memory<bf16>,
    residual: Memory<f32>,
}

impl Step {
    /// Tokens of a set have other experts than those of another.
    fn new(rig: &Rig, tokens: usize, set: usize, mode: Mode) -> Outcome<Step> {
        let (mixture, [hidden, wide], device) = (rig.scale.mixture, rig.scale.expert, &rig.device);
        let (values, rows) = (tokens * mixture.scores(), tokens * mixture.used);
        let scores = noise::floats((set + 1) * values).split_off(set * values);
        Ok(Step {
            tokens,
            mode,
            touched: touched(&mixture, &scores),
            hidden,
            scores: device.upload(&scores)?,
            input: device.upload(&noise::halves(tokens * hidden))?,
            routes: Routes::new(device, mixture, tokens)?,
            sorted: device.allocate(rows * hidden)?,
            gated: device.allocate(rows * wide)?,
            given: device.allocate(rows * hidden)?,
            residual: device.upload(&vec![0.0; tokens * hidden])?,
        })
    }

    fn issue(&mut self, layer: &Layer, stream: &Stream) -> Result<(), DriverError> {
        let (mode, scores, input) = (self.mode, self.scores.view(), ExpertInput::Tokens(self.input.view()));
        match mode {
            Mode::Deterministic => self.routes.choose(stream, scores)?,
            Mode::Wide => self.routes.choose_wide(stream, scores)?,
        }
        let (routes, room) = (&self.routes, &mut self.sorted);
        let gated = Output::Gated(self.gated.view_mut(), Gate::Silu);
        mode.multiply(stream, &layer.gate_up, routes, input, room, gated)?;
        let (input, given) = (ExpertInput::Given(self.gated.view()), Output::Bf16(self.given.view_mut()));
        mode.multiply(stream, &layer.down, routes, input, room, given)?;
        routes.mix(stream, self.given.view(), None, self.hidden, ExpertSum::AddTo(self.residual.view_mut()))
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
