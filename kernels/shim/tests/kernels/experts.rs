use half::{bf16, f16};
use windlass_cuda_shim::{HostMachine, Issued, Kernels};
use windlass_kernels::WeightType;
use windlass_kernels::cuda::ops::{self, ExpertInput, ExpertSum, Gate, GateLayout, Mixture, Output, Routes};
use windlass_kernels::cuda::weights::{EightBits, Group, Grouped, Int8, Matrix, Superblock, Superblocks};
use windlass_kernels::cuda::{Device, Stream};

use crate::common::{Random, SEEDS, device, poisoned, relative_error};

/// A matrix of all experts, and its values.
type Weights = (Matrix, Box<dyn Fn(usize, usize) -> f64>);

/// The layouts that experts' weights have.
#[derive(Clone, Copy, Debug)]
pub enum Layout {
    Bf16,
    Int4,
    FiveBits,
    Int8Groups,
    Superblocks(Superblock),
    Eight(EightBits),
}

const LAYOUTS: [Layout; 9] = [
    Layout::Bf16,
    Layout::Int4,
    Layout::FiveBits,
    Layout::Int8Groups,
    Layout::Superblocks(Superblock::Q2K),
    Layout::Superblocks(Superblock::Q6K),
    Layout::Superblocks(Superblock::IQ4XS),
    Layout::Eight(EightBits::E4m3),
    Layout::Eight(EightBits::Int8),
];

impl Layout {
    /// Values of a token, and of an expert's inner layer.
    fn widths(self) -> (usize, usize) {
        if matches!(self, Layout::Superblocks(_)) { (256, 512) } else { (64, 96) }
    }

    fn weights(self, device: &Device, random: &mut Random, rows: usize, cols: usize) -> Weights {
        match self {
            Layout::Bf16 => {
                let values = random.halves(rows * cols, 1.0);
                let matrix = Matrix::bf16(device, rows, cols, &values).unwrap();
                (matrix, Box::new(move |row, col| values[row * cols + col].into()))
            }
            Layout::Int4 => {
                let codes = (0..rows * cols).map(|_| random.below(16) as u8).collect();
                let mut half = || f16::from_f32(random.value(0.2));
                let scales = (0..rows * cols.div_ceil(64)).map(|_| (half(), half())).collect();
                let int4 = Grouped::new(rows, cols, Group::G64, codes, scales);
                (Matrix::grouped(device, &int4).unwrap(), Box::new(move |row, col| int4.value(row, col)))
            }
            Layout::Int8Groups => {
                let int8 = Int8::read(WeightType::Q8_0, rows, cols, &crate::linear::q8_0(random, rows, cols))
                    .unwrap()
                    .unwrap();
                (Matrix::int8(device, &int8).unwrap(), Box::new(move |row, col| int8.value(row, col)))
            }
            Layout::FiveBits => {
                let bytes = crate::linear::five_bits(random, WeightType::Q5_1, rows, cols);
                let five = Grouped::read(WeightType::Q5_1, rows, cols, &bytes).unwrap().unwrap();
                (Matrix::grouped(device, &five).unwrap(), Box::new(move |row, col| five.value(row, col)))
            }
            Layout::Superblocks(kind) => {
                let bytes = crate::linear::superblocks(random, kind, rows, cols);
                let read = Superblocks::read(kind, rows, cols, &bytes).unwrap();
                (Matrix::superblocks(device, &read).unwrap(), Box::new(move |row, col| read.value(row, col)))
            }
            Layout::Eight(code) => {
                let codes: Vec<u8> = (0..rows * cols).map(|_| random.below(0x7f) as u8).collect();
                let scales = random.values(rows, 0.01);
                let matrix = Matrix::eight_bits(device, code, [rows, cols], usize::MAX, &codes, &scales).unwrap();
                let value = move |row: usize, col: usize| {
                    let bits = codes[row * cols + col];
                    let value = if code == EightBits::E4m3 { crate::linear::e4m3(bits) } else { bits.into() };
                    value * f64::from(scales[row])
                };
                (matrix, Box::new(value))
            }
        }
    }
}

/// Two products of experts, one after the other, with nothing between.
pub struct Scene {
    mixture: Mixture,
    /// By blocks of many tokens, whose sums have another order.
    pub widely: bool,
    hidden: usize,
    wide: usize,
    up: Weights,
    down: Weights,
    scores: Vec<f32>,
    input: Vec<bf16>,
    shared: Vec<bf16>,
    residual: Vec<f32>,
}

impl Scene {
    pub fn new(device: &Device, random: &mut Random, mixture: Mixture, layout: Layout, tokens: usize) -> Scene {
        let (hidden, wide) = layout.widths();
        // Few different scores: the first of equals is chosen.
        let scores = (0..tokens * mixture.scores()).map(|_| random.below(9) as f32 / 2.0 - 2.0).collect();
        Scene {
            mixture,
            widely: false,
            hidden,
            wide,
            up: layout.weights(device, random, mixture.held * wide, hidden),
            down: layout.weights(device, random, mixture.held * hidden, wide),
            scores,
            input: random.halves(tokens * hidden, 1.0),
            shared: random.halves(tokens * hidden, 20.0),
            residual: random.values(tokens * hidden, 20.0),
        }
    }

    /// What becomes of the first `tokens` tokens' residual.
    pub fn run(&self, device: &Device, stream: &Stream, tokens: usize) -> Vec<f32> {
        let (mixture, values, rows) = (self.mixture, tokens * self.hidden, tokens * self.mixture.used);
        let mut routes = Routes::new(device, mixture, tokens + 3).unwrap();
        let scores = device.upload(&self.scores[..tokens * mixture.scores()]).unwrap();
        let input = device.upload(&self.input[..values]).unwrap();
        let shared = device.upload(&self.shared[..values]).unwrap();
        let mut residual = device.upload(&self.residual[..values]).unwrap();
        let mut wide = poisoned::<bf16>(device, rows * self.wide);
        let mut given = poisoned::<bf16>(device, rows * self.hidden);
        let mut room = poisoned::<bf16>(device, rows * self.hidden);
        let choose = if self.widely { Routes::choose_wide } else { Routes::choose };
        choose(&mut routes, stream, scores.view()).unwrap();
        let mut multiply = |matrix: &Matrix, from: ExpertInput<'_>, out: Output<'_>| match self.widely {
            true => ops::linear_experts_wide(stream, matrix, &routes, from, &mut room, out).unwrap(),
            false => ops::linear_experts(stream, matrix, &routes, from, out).unwrap(),
        };
        multiply(&self.up.0, ExpertInput::Tokens(input.view()), Output::Bf16(wide.view_mut()));
        multiply(&self.down.0, ExpertInput::Given(wide.view()), Output::Bf16(given.view_mut()));
        let shared = mixture.shared.then(|| shared.view());
        routes.mix(stream, given.view(), shared, self.hidden, ExpertSum::AddTo(residual.view_mut())).unwrap();
        let mut rounded = poisoned::<bf16>(device, residual.len());
        routes.mix(stream, given.view(), shared, self.hidden, ExpertSum::Bf16(rounded.view_mut())).unwrap();
        let (found, rounded) = (residual.read(stream).unwrap(), rounded.read(stream).unwrap());
        for ((found, before), rounded) in found.iter().zip(&self.residual).zip(rounded) {
            let (sum, bound) = (found - before, found.abs().max(before.abs()) * 1e-6);
            let apart = (sum - rounded.to_f32()).abs();
            let same = apart <= bound + sum.abs() / 256.0 || sum.is_nan() && rounded.is_nan();
            assert!(same, "{sum}, and {rounded} as a part of a sum");
        }
        found
    }

    /// How far what was added to it is from what should be.
    pub fn error(&self, found: &[f32]) -> f64 {
        let added = found.iter().zip(&self.residual).map(|(found, before)| f64::from(*found) - f64::from(*before));
        relative_error(&added.collect::<Vec<_>>(), &self.reference())
    }

    /// What is added to it.
    fn reference(&self) -> Vec<f64> {
        let tokens = self.scores.chunks(self.mixture.scores()).zip(self.input.chunks(self.hidden));
        tokens.zip(self.shared.chunks(self.hidden)).flat_map(|((s, x), shared)| self.token(s, x, shared)).collect()
    }

    fn token(&self, scores: &[f32], input: &[bf16], shared: &[bf16]) -> Vec<f64> {
        let Mixture { count, used, sum_to_one, .. } = self.mixture;
        let mut order: Vec<usize> = (0..count).collect();
        order.sort_by(|&a, &b| scores[b].total_cmp(&scores[a]).then(a.cmp(&b)));
        let weight = |expert: usize| f64::from(scores[expert]).exp();
        let chosen = &order[..used];
        let total: f64 = if sum_to_one { chosen } else { &order[..] }.iter().map(|&expert| weight(expert)).sum();
        let mut out = vec![0.0; self.hidden];
        let Mixture { first, held, .. } = self.mixture;
        let is_held = |expert: &&usize| (first..first + held).contains(*expert);
        for (expert, weight) in chosen.iter().filter(is_held).map(|&expert| (expert - first, weight(expert))) {
            let row = |row: usize| (0..self.hidden).map(|col| self.up.1(row, col) * f64::from(input[col])).sum();
            let wide: Vec<f64> = (0..self.wide).map(|r| row(expert * self.wide + r)).collect();
            for (r, out) in out.iter_mut().enumerate() {
                let dot: f64 = (0..self.wide).map(|col| self.down.1(expert * self.hidden + r, col) * wide[col]).sum();
                *out += weight / total * dot;
            }
        }
        if self.mixture.shared {
            let weight = 1.0 / (1.0 + (-f64::from(scores[count])).exp());
            out.iter_mut().zip(shared).for_each(|(out, &value)| *out += weight * f64::from(value));
        }
        out
    }
}

pub fn mixture(count: usize, used: usize, shared: bool, sum_to_one: bool) -> Mixture {
    Mixture { count, first: 0, held: count, used, shared, sum_to_one }
}

/// A rank's part of a mixture whose experts stay whole.
pub fn part(mixture: Mixture, first: usize, held: usize) -> Mixture {
    Mixture { first, held, ..mixture }
}

#[test]
fn mixtures_of_experts_match_the_reference() {
    let mut random = Random::new(31);
    for (seed, (mixture, layout, tokens)) in SEEDS.into_iter().cycle().zip([
        (mixture(8, 2, false, true), Layout::Bf16, 1),
        (mixture(8, 2, false, true), Layout::Int4, 45),
        (mixture(60, 4, true, false), Layout::Bf16, 7),
        (mixture(4, 4, true, true), Layout::Int8Groups, 19),
        (mixture(3, 1, false, false), Layout::Eight(EightBits::E4m3), 70),
        (mixture(130, 8, false, true), Layout::Int8Groups, 5),
        (mixture(4, 2, false, true), Layout::Superblocks(Superblock::Q6K), 11),
        (mixture(4, 2, false, true), Layout::Superblocks(Superblock::Q2K), 9),
        (mixture(4, 2, false, true), Layout::Superblocks(Superblock::IQ4XS), 6),
        (part(mixture(8, 2, false, true), 1, 4), Layout::FiveBits, 20),
        (mixture(3, 2, true, true), Layout::Eight(EightBits::Int8), 12),
        (part(mixture(8, 2, false, true), 3, 3), Layout::Bf16, 45),
        (part(mixture(60, 4, true, false), 53, 7), Layout::Int4, 7),
        (part(mixture(5, 5, true, true), 0, 1), Layout::Eight(EightBits::E4m3), 70),
    ]) {
        let (device, stream) = device(seed);
        let scene = Scene::new(&device, &mut random, mixture, layout, tokens);
        let found = scene.run(&device, &stream, tokens);
        let error = scene.error(&found);
        assert!(error <= 5e-3, "{mixture:?} in {layout:?}, {tokens} tokens: {error}");
        // Alone it goes through narrower tiles, in another order.
        let alone = scene.run(&device, &stream, 1);
        assert_eq!(alone, found[..scene.hidden], "{mixture:?} in {layout:?}: a token alone");
    }
}

/// Tiles of as many tokens go through blocks for many where enough multiprocessors have one: with the same bits.
#[test]
fn experts_of_many_tokens_give_what_those_of_few_give() {
    let tokens = 90;
    for layout in LAYOUTS {
        let run = |multiprocessors: u32| {
            let machine = HostMachine::new(Kernels::Run, 5).with_multiprocessors(multiprocessors);
            let driver = machine.driver(0, 1 << 30);
            let (device, mut random) = (driver.device(), Random::new(34));
            let scene = Scene::new(&device, &mut random, mixture(2, 1, false, true), layout, tokens);
            let found = scene.run(&device, &device.stream().unwrap(), tokens);
            let is_many =
                |work: &&Issued| matches!(work, Issued::Launch(kernel) if kernel.spec().file.starts_with("many"));
            (driver.issued().iter().filter(is_many).count(), found)
        };
        let (many, found) = run(1);
        let (none, expected) = run(132);
        assert_eq!((many, none), (2, 0), "{layout:?}");
        assert_eq!(found, expected, "{layout:?}");
    }
}

/// What an expert gives a token is, bit for bit, what a product with its matrix alone gives, whatever the layout.
#[test]
fn an_expert_gives_what_its_matrix_gives_alone() {
    let ((count, tokens), mut random) = ((3, 21), Random::new(35));
    for layout in LAYOUTS {
        let ((device, stream), (cols, rows)) = (device(3), layout.widths());
        let (matrix, _) = layout.weights(&device, &mut random, count * rows, cols);
        let input = device.upload(&random.halves(tokens * cols, 1.0)).unwrap();
        let mut all = poisoned::<bf16>(&device, tokens * count * rows);
        ops::linear(&stream, &matrix, input.view(), Output::Bf16(all.view_mut())).unwrap();
        let chosen = |token: usize| token * token % count;
        let score = |i: usize| if i % count == chosen(i / count) { 1.0 } else { 0.0 };
        let scores: Vec<f32> = (0..tokens * count).map(score).collect();
        let mut routes = Routes::new(&device, mixture(count, 1, false, true), tokens).unwrap();
        routes.choose(&stream, device.upload(&scores).unwrap().view()).unwrap();
        let mut given = poisoned::<bf16>(&device, tokens * rows);
        let (from, out) = (ExpertInput::Tokens(input.view()), Output::Bf16(given.view_mut()));
        ops::linear_experts(&stream, &matrix, &routes, from, out).unwrap();
        // The weight of the only one is 1.
        let mut own = poisoned::<bf16>(&device, tokens * rows);
        routes.mix(&stream, given.view(), None, rows, ExpertSum::Bf16(own.view_mut())).unwrap();
        let (all, own) = (all.read(&stream).unwrap(), own.read(&stream).unwrap());
        for (token, own) in own.chunks(rows).enumerate() {
            let first = (token * count + chosen(token)) * rows;
            assert_eq!(own, &all[first..first + rows], "{layout:?}, token {token}");
        }
    }
}

/// Experts that gate give what a kernel behind them gives; rows that are nobody's stay as they were.
#[test]
fn experts_gate_what_they_give() {
    let (tokens, wide) = (21, 96);
    let mut random = Random::new(33);
    let mixture = part(mixture(6, 2, false, true), 1, 2);
    let scores = random.values(tokens * 6, 3.0);
    let best = |row: &[f32]| {
        let mut order: Vec<usize> = (0..6).collect();
        order.sort_by(|&a, &b| row[b].total_cmp(&row[a]));
        order[..2].iter().filter(|expert| (1..3).contains(*expert)).count()
    };
    let taken: usize = scores.chunks(6).map(best).sum();
    assert!((1..2 * tokens).contains(&taken));
    for (seed, layout) in SEEDS.into_iter().cycle().zip(LAYOUTS) {
        let ((device, stream), cols) = (device(seed), layout.widths().0);
        let (matrix, _) = layout.weights(&device, &mut random, 2 * 2 * wide, cols);
        let mut routes = Routes::new(&device, mixture, tokens).unwrap();
        routes.choose(&stream, device.upload(&scores).unwrap().view()).unwrap();
        let input = device.upload(&random.halves(tokens * cols, 1.0)).unwrap();
        let give = |out: Output<'_>| {
            ops::linear_experts(&stream, &matrix, &routes, ExpertInput::Tokens(input.view()), out).unwrap();
        };
        let mut both = poisoned::<bf16>(&device, 2 * tokens * 2 * wide);
        let [mut apart, mut gated] = [(); 2].map(|()| poisoned::<bf16>(&device, 2 * tokens * wide));
        give(Output::Bf16(both.view_mut()));
        give(Output::Gated(gated.view_mut(), Gate::Silu));
        ops::gate_mul(&stream, Gate::Silu, GateLayout::Eights, both.view(), wide, apart.view_mut()).unwrap();
        let [apart, gated] = [apart, gated].map(|memory| memory.read(&stream).unwrap());
        assert_eq!(apart[..taken * wide], gated[..taken * wide], "{layout:?}");
        assert!(gated[taken * wide..].iter().all(|value| value.is_nan()), "{layout:?}: {taken} of {}", 2 * tokens);
    }
}

/// A score that is no number spoils its own token and touches nothing else.
#[test]
fn a_score_that_is_no_number_leads_nowhere_else() {
    let mut random = Random::new(32);
    let (device, stream) = device(2);
    let mut scene = Scene::new(&device, &mut random, mixture(8, 2, false, true), Layout::Bf16, 3);
    let sound = scene.run(&device, &stream, 3);
    scene.scores[8..16].fill(f32::NAN);
    let found = scene.run(&device, &stream, 3);
    let hidden = scene.hidden;
    assert_eq!((&found[..hidden], &found[2 * hidden..]), (&sound[..hidden], &sound[2 * hidden..]));
}
