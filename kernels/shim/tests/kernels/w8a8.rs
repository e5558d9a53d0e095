//! Products of 8-bit activations with 8-bit weights, against their own operands in f64.

use half::bf16;
use windlass_kernels::cuda::ops::{self, Gate, GateLayout, Output, Quantized, QuantizedMut};
use windlass_kernels::cuda::weights::{EightBits, Matrix};
use windlass_kernels::cuda::{Device, Stream};

use crate::common::{Random, SEEDS, ampere, device, in_all_forms, poisoned, same_in_any_batch};
use crate::linear::{e4m3, near};

pub const CODES: [EightBits; 2] = [EightBits::Int8, EightBits::E4m3];

fn value(code: EightBits, bits: u8) -> f64 {
    match code {
        EightBits::Int8 => f64::from(bits as i8),
        EightBits::E4m3 => e4m3(bits),
    }
}

pub fn quantized(
    device: &Device,
    stream: &Stream,
    code: EightBits,
    input: &[bf16],
    tokens: usize,
) -> (Vec<u8>, Vec<f32>) {
    let memory = device.upload(input).unwrap();
    let (mut codes, mut scales) = (poisoned::<u8>(device, input.len()), poisoned::<f32>(device, tokens));
    let room = QuantizedMut { code, codes: codes.view_mut(), scales: scales.view_mut() };
    ops::quantize_tokens(stream, memory.view(), room).unwrap();
    (codes.read(stream).unwrap(), scales.read(stream).unwrap())
}

/// The largest value of a token is the largest code, and every other one's code is the nearest.
#[test]
fn tokens_are_rounded_to_the_nearest_codes_of_their_own_scale() {
    let mut random = Random::new(30);
    for (seed, (tokens, cols)) in SEEDS.into_iter().zip([(1, 32), (3, 576), (5, 1056)]) {
        let (device, stream) = device(seed);
        let input: Vec<bf16> =
            (0..tokens * cols).map(|i| bf16::from_f32(random.value(10f32.powi((i / cols) as i32 - 2)))).collect();
        for code in CODES {
            let (codes, scales) = quantized(&device, &stream, code, &input, tokens);
            let all: Vec<f64> = (0..=255).map(|bits| value(code, bits)).filter(|value| value.abs() <= 448.0).collect();
            let largest = if code == EightBits::Int8 { 127.0 } else { 448.0 };
            for (token, values) in input.chunks(cols).enumerate() {
                let most = values.iter().map(|x| x.to_f32().abs()).fold(0.0, f32::max);
                let scale = f64::from(scales[token]);
                assert!((scale * largest / f64::from(most) - 1.0).abs() < 1e-6, "{scale} for {most}");
                for (x, &bits) in values.iter().zip(&codes[token * cols..]) {
                    let (exact, found) = (f64::from(*x) / scale, value(code, bits));
                    let nearest = all.iter().map(|value| (value - exact).abs()).fold(f64::INFINITY, f64::min);
                    assert!((found - exact).abs() <= nearest + 1e-4, "{code:?}: {exact} became {found}");
                }
            }
        }
    }
}

/// A token of zeros has a scale of zero; one with what is no number says so, and its neighbours are as they were.
#[test]
fn a_token_of_zeros_and_one_that_is_not_finite_are_told() {
    let (device, stream) = device(2);
    for code in CODES {
        for wrong in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut input = vec![bf16::from_f32(0.5); 3 * 64];
            input[..64].fill(bf16::ZERO);
            input[70] = bf16::from_f32(wrong);
            let (codes, scales) = quantized(&device, &stream, code, &input, 3);
            assert!(scales[0] == 0.0 && codes[..64].iter().all(|&bits| bits & 0x7f == 0), "{scales:?}");
            assert!(scales[1].is_nan() && scales[2] > 0.0, "{scales:?}");
        }
    }
}

/// What takes the place of two kernels has their codes: of values that spread, a token of zeros, and one that is not finite.
#[test]
fn norms_and_gates_are_rounded_as_they_are_where_bf16_lies_between() {
    let mut random = Random::new(34);
    for (seed, (tokens, cols)) in SEEDS.into_iter().zip([(1, 32), (4, 576), (3, 4104)]) {
        let (device, stream) = device(seed);
        let spread = |i: usize| 10f32.powi((i % 7) as i32 - 3);
        let mut residual: Vec<f32> = (0..tokens * cols).map(|i| random.value(spread(i))).collect();
        let mut gate_up: Vec<bf16> = (0..2 * tokens * cols).map(|i| bf16::from_f32(random.value(spread(i)))).collect();
        if tokens > 1 {
            residual[..cols].fill(0.0);
            gate_up[..2 * cols].fill(bf16::ZERO);
            residual[2 * cols - 1] = f32::INFINITY;
            gate_up[4 * cols - 1] = bf16::NAN;
        }
        let weight = device.upload(&random.values(cols, 2.0)).unwrap();
        let (residual, gate_up) = (device.upload(&residual).unwrap(), device.upload(&gate_up).unwrap());
        let mut plain = poisoned::<bf16>(&device, tokens * cols);
        for code in CODES {
            let codes_of = |quantize: &dyn Fn(QuantizedMut<'_>)| {
                let (mut codes, mut scales) =
                    (poisoned::<u8>(&device, tokens * cols), poisoned::<f32>(&device, tokens));
                quantize(QuantizedMut { code, codes: codes.view_mut(), scales: scales.view_mut() });
                let scales = scales.read(&stream).unwrap();
                assert!(tokens == 1 || (scales[0] == 0.0 && scales[1].is_nan()), "{scales:?}");
                (
                    codes.read(&stream).unwrap(),
                    scales.into_iter().map(|scale| Some(scale).filter(|scale| !scale.is_nan())).collect::<Vec<_>>(),
                )
            };
            ops::rms_norm(&stream, residual.view(), weight.view(), 1e-5, plain.view_mut()).unwrap();
            let expected = codes_of(&|out| ops::quantize_tokens(&stream, plain.view(), out).unwrap());
            let (from, by) = (residual.view(), weight.view());
            let found = codes_of(&|out| ops::rms_norm_quantized(&stream, from, by, 1e-5, out).unwrap());
            assert!(found == expected, "{code:?}: norms of {tokens} x {cols}");
            for (gate, layout) in [(Gate::Silu, GateLayout::Halves), (Gate::GeluTanh, GateLayout::Eights)] {
                ops::gate_mul(&stream, gate, layout, gate_up.view(), cols, plain.view_mut()).unwrap();
                let expected = codes_of(&|out| ops::quantize_tokens(&stream, plain.view(), out).unwrap());
                let gates = gate_up.view();
                let found = codes_of(&|out| ops::gate_mul_quantized(&stream, gate, layout, gates, out).unwrap());
                assert!(found == expected, "{code:?}: {gate:?} of {tokens} x {cols}");
            }
        }
    }
}

/// A matrix, its tokens, and `[tokens, rows, cols]`.
pub struct Scene {
    pub code: EightBits,
    pub shape: [usize; 3],
    pub group: usize,
    pub weights: Vec<u8>,
    pub weight_scales: Vec<f32>,
    pub input: Vec<bf16>,
}

impl Scene {
    pub fn new(random: &mut Random, code: EightBits, group: usize, shape: [usize; 3]) -> Scene {
        let [tokens, rows, cols] = shape;
        // Every finite code of e4m3: its two NaNs are 0x7f and 0xff.
        let weights = (0..rows * cols).map(|_| (random.next() % 255) as u8).map(|x| if x == 0x7f { 0 } else { x });
        let weights = weights.collect();
        let weight_scales = random.values(rows * cols.div_ceil(group), 0.1);
        Scene { code, shape, group, weights, weight_scales, input: random.halves(tokens * cols, 2.0) }
    }

    pub fn matrix(&self, device: &Device) -> Matrix {
        let [_, rows, cols] = self.shape;
        Matrix::eight_bits(device, self.code, [rows, cols], self.group, &self.weights, &self.weight_scales).unwrap()
    }

    /// What the operands give, activations as they were rounded.
    pub fn exact(&self, codes: &[u8], scales: &[f32]) -> Vec<f64> {
        let [tokens, rows, cols] = self.shape;
        let groups = cols.div_ceil(self.group);
        let weight = |row: usize, col: usize| {
            value(self.code, self.weights[row * cols + col])
                * f64::from(self.weight_scales[row * groups + col / self.group])
        };
        let one = |token: usize, row: usize| {
            let dot = (0..cols).map(|col| weight(row, col) * value(self.code, codes[token * cols + col])).sum::<f64>();
            dot * f64::from(scales[token])
        };
        (0..tokens).flat_map(|token| (0..rows).map(move |row| one(token, row))).collect()
    }
}

#[test]
fn products_match_the_reference_over_their_own_operands() {
    let mut random = Random::new(31);
    for code in CODES {
        for (seed, (group, shape)) in SEEDS.into_iter().cycle().zip([
            (usize::MAX, [1, 16, 96]),
            (128, [3, 37, 576]),
            (256, [12, 130, 1184]),
            (usize::MAX, [20, 70, 1664]),
            (128, [66, 16, 160]),
            (usize::MAX, [70, 140, 64]),
            (256, [5, 20, 4384]),
        ]) {
            // Hopper has kernels of its own for so many.
            let (device, stream) = if code == EightBits::Int8 && shape[0] > 64 { ampere(seed) } else { device(seed) };
            let scene = Scene::new(&mut random, code, group, shape);
            let matrix = scene.matrix(&device);
            let (codes, scales) = quantized(&device, &stream, code, &scene.input, shape[0]);
            let exact = scene.exact(&codes, &scales);
            let (codes, scales) = (device.upload(&codes).unwrap(), device.upload(&scales).unwrap());
            let input = Quantized { codes: codes.view(), scales: scales.view() };
            let product = |out: Output<'_>| ops::linear_w8a8(&stream, &matrix, &input, out);
            near(in_all_forms(&device, &stream, exact.len(), product), &exact, &format!("{code:?} {shape:?}"));
        }
    }
}

/// Few tokens have a kernel of their own, whose warps take turns along the columns: once and three times here.
#[test]
fn a_token_gives_the_same_in_any_batch_and_order_of_threads() {
    let mut random = Random::new(32);
    for (code, shape) in CODES.into_iter().flat_map(|code| [(code, [67, 37, 288]), (code, [67, 18, 4256])]) {
        let scene = Scene::new(&mut random, code, 128, shape);
        let [tokens, rows, cols] = shape;
        let product = |seed: u64, tokens: std::ops::Range<usize>| {
            let (device, stream) = device(seed);
            let input = &scene.input[tokens.start * cols..tokens.end * cols];
            let (codes, scales) = quantized(&device, &stream, code, input, tokens.len());
            let (codes, scales) = (device.upload(&codes).unwrap(), device.upload(&scales).unwrap());
            let input = Quantized { codes: codes.view(), scales: scales.view() };
            let mut out = poisoned::<f32>(&device, tokens.len() * rows);
            ops::linear_w8a8(&stream, &scene.matrix(&device), &input, Output::F32(out.view_mut())).unwrap();
            out.read(&stream).unwrap()
        };
        assert_eq!(product(1, 0..tokens), product(2, 0..tokens));
        same_in_any_batch(tokens, rows, |tokens| product(3, tokens), [0..1, 33..34, 66..67, 10..30, 20..60]);
    }
}
