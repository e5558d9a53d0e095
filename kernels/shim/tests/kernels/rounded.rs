//! Products of inputs in bytes, against their own operands in f64.

use half::bf16;
use windlass_cuda_shim::{HostMachine, Issued, Kernels};
use windlass_kernels::Pool;
use windlass_kernels::WeightType;
use windlass_kernels::cuda::ops::{self, Gate, GateLayout, Output, Rounded};
use windlass_kernels::cuda::weights::{Group, Grouped, Int8, Matrix, Superblock, Superblocks};
use windlass_kernels::cuda::{Device, DriverError, Kernel, Memory, Stream, View};

use crate::common::{Random, SEEDS, device, in_all_forms, poisoned, same_in_any_batch};
use crate::linear::{five_bits, near, q8_0, random_int4, superblocks};

type Product = fn(&Stream, &Matrix, View<'_, bf16>, &Rounded<'_>, Output<'_>) -> Result<(), DriverError>;

/// Inputs and what they were rounded to, on the device.
struct Inputs {
    values: Memory<bf16>,
    codes: Memory<u8>,
    scales: Memory<f32>,
}

impl Inputs {
    fn new(device: &Device, stream: &Stream, input: &[bf16], cols: usize) -> Inputs {
        let values = device.upload(input).unwrap();
        let [codes, scales] = Rounded::lengths(input.len() / cols, cols);
        let (mut codes, mut scales) = (poisoned::<u8>(device, codes), poisoned::<f32>(device, scales));
        ops::round_inputs(stream, cols, values.view(), codes.view_mut(), scales.view_mut()).unwrap();
        Inputs { values, codes, scales }
    }

    fn multiply(&self, stream: &Stream, product: Product, matrix: &Matrix, out: Output<'_>) -> Result<(), DriverError> {
        let rounded = Rounded { codes: self.codes.view(), scales: self.scales.view() };
        product(stream, matrix, self.values.view(), &rounded, out)
    }
}

/// The scale of each 32 values, and their codes.
fn rounded(values: &[bf16]) -> (f64, Vec<f64>) {
    let most = values.iter().map(|value| value.to_f32().abs()).fold(0.0, f32::max);
    let factor = if most > 1e-36 { 127.0 / most } else { 0.0 };
    let code = |value: &bf16| f64::from((value.to_f32() * factor).round_ties_even());
    (f64::from(most / 127.0), values.iter().map(code).collect())
}

/// `[tokens, rows]` of a matrix of values and inputs that were rounded.
fn reference(rows: usize, cols: usize, value: impl Fn(usize, usize) -> f64, input: &[bf16]) -> Vec<f64> {
    let token = |token: &[bf16]| {
        let blocks: Vec<_> = token.chunks(32).map(rounded).collect();
        let dot = |row: usize, block: usize| -> f64 {
            let (scale, codes) = &blocks[block];
            codes.iter().enumerate().map(|(i, code)| value(row, 32 * block + i) * code).sum::<f64>() * scale
        };
        (0..rows).map(|row| (0..cols / 32).map(|block| dot(row, block)).sum()).collect::<Vec<f64>>()
    };
    input.chunks(cols).flat_map(token).collect()
}

/// Where the rounding leaves the code of a column: every four as 0, 2, 1, 3.
fn place_of(col: usize) -> usize {
    col / 4 * 4 + [0, 2, 1, 3][col % 4]
}

/// A matrix, what it is, and its values.
struct Weights {
    name: String,
    matrix: Matrix,
    value: Box<dyn Fn(usize, usize) -> f64>,
}

/// One for each layout that so many columns may have.
fn weights(device: &Device, random: &mut Random, rows: usize, cols: usize) -> Vec<Weights> {
    let mut all = Vec::new();
    for symmetric in [true, false] {
        let four = random_int4(random, rows, cols, Group::G32, symmetric);
        let (name, matrix) = (format!("4 bits, symmetric: {symmetric}"), Matrix::grouped(device, &four).unwrap());
        all.push(Weights { name, matrix, value: Box::new(move |row, col| four.value(row, col)) });
    }
    for kind in [WeightType::Q5_0, WeightType::Q5_1] {
        let five = Grouped::read(kind, rows, cols, &five_bits(random, kind, rows, cols)).unwrap().unwrap();
        let matrix = Matrix::grouped(device, &five).unwrap();
        all.push(Weights { name: kind.name().into(), matrix, value: Box::new(move |row, col| five.value(row, col)) });
    }
    let int8 = Int8::read(WeightType::Q8_0, rows, cols, &q8_0(random, rows, cols)).unwrap().unwrap();
    let matrix = Matrix::int8(device, &int8).unwrap();
    all.push(Weights { name: "Q8_0".into(), matrix, value: Box::new(move |row, col| int8.value(row, col)) });
    for kind in Superblock::ALL.into_iter().filter(|_| cols.is_multiple_of(256)) {
        let read = Superblocks::read(kind, rows, cols, &superblocks(random, kind, rows, cols)).unwrap();
        let (name, matrix) = (format!("{kind:?}"), Matrix::superblocks(device, &read).unwrap());
        all.push(Weights { name, matrix, value: Box::new(move |row, col| read.value(row, col)) });
    }
    all
}

#[test]
fn each_32_values_are_rounded_to_bytes_of_their_own_scale() {
    let mut random = Random::new(80);
    for (seed, (tokens, cols)) in SEEDS.into_iter().zip([(1, 32), (11, 416), (9, 2080)]) {
        let (device, stream) = device(seed);
        let bound = |i: usize| 10f32.powi((i / 32 % 5) as i32 - 2);
        let mut input: Vec<bf16> = (0..tokens * cols).map(|i| bf16::from_f32(random.value(bound(i)))).collect();
        input[..32].fill(bf16::from_f32(1e-37));
        let inputs = Inputs::new(&device, &stream, &input, cols);
        let (codes, scales) = (inputs.codes.read(&stream).unwrap(), inputs.scales.read(&stream).unwrap());
        let (spans, pairs) = (cols.div_ceil(128), tokens.next_multiple_of(8) / 2);
        for (token, values) in input.chunks(cols).enumerate() {
            let own = &codes[token * spans * 128..][..spans * 128];
            for (block, values) in values.chunks(32).enumerate() {
                let (scale, exact) = rounded(values);
                let found: Vec<f64> = (0..32).map(|i| f64::from(own[32 * block + place_of(i)] as i8)).collect();
                assert_eq!(found, exact, "token {token}, block {block}");
                let sum = |codes: &[f64]| scale * codes.iter().sum::<f64>();
                let said = [scale, sum(&exact), sum(&exact[..16]), sum(&exact[16..])];
                for (plane, expected) in said.into_iter().enumerate() {
                    let pair = block / 4 * pairs + token / 2;
                    let found = f64::from(scales[32 * pair + 8 * plane + 2 * (block % 4) + token % 2]);
                    assert!((found - expected).abs() <= 1e-6 * scale * 4064.0, "{plane}: {found} and {expected}");
                }
            }
            assert!(own[cols..].iter().all(|&code| code == 0), "columns behind the last");
        }
        assert!(scales.iter().all(|scale| scale.is_finite()), "what is nobody's is zero");
    }
}

#[test]
fn products_gate_as_a_kernel_behind_them_does() {
    let mut random = Random::new(82);
    for (seed, (tokens, rows, cols)) in SEEDS.into_iter().zip([(9, 48, 256), (70, 272, 256)]) {
        let (device, stream) = device(seed);
        let inputs = Inputs::new(&device, &stream, &random.halves(tokens * cols, 1.0), cols);
        for Weights { name, matrix, .. } in weights(&device, &mut random, rows, cols) {
            let mut both = poisoned::<bf16>(&device, tokens * rows);
            let mut apart = poisoned::<bf16>(&device, tokens * rows / 2);
            inputs.multiply(&stream, ops::linear_rounded, &matrix, Output::Bf16(both.view_mut())).unwrap();
            let layout = GateLayout::Eights;
            ops::gate_mul(&stream, Gate::Silu, layout, both.view(), rows / 2, apart.view_mut()).unwrap();
            let apart = apart.read(&stream).unwrap();
            for (how, product) in [("few", ops::linear_rounded as Product), ("many", ops::linear_rounded_many)] {
                let mut gated = poisoned::<bf16>(&device, tokens * rows / 2);
                inputs.multiply(&stream, product, &matrix, Output::Gated(gated.view_mut(), Gate::Silu)).unwrap();
                assert_eq!(gated.read(&stream).unwrap(), apart, "{name}, {tokens} x {rows} x {cols}, {how}");
            }
        }
    }
}

/// A token with what is no number says so, and its neighbours are as they were.
#[test]
fn an_input_that_is_not_finite_is_told() {
    let (device, stream) = device(2);
    let mut random = Random::new(81);
    let (rows, cols) = (16, 256);
    for wrong in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let mut input = random.halves(3 * cols, 1.0);
        input[cols + 70] = bf16::from_f32(wrong);
        let inputs = Inputs::new(&device, &stream, &input, cols);
        for Weights { name, matrix, .. } in weights(&device, &mut random, rows, cols) {
            let mut out = poisoned::<f32>(&device, 3 * rows);
            inputs.multiply(&stream, ops::linear_rounded, &matrix, Output::F32(out.view_mut())).unwrap();
            let out = out.read(&stream).unwrap();
            let told: Vec<bool> = out.chunks(rows).map(|row| row.iter().all(|value| value.is_nan())).collect();
            assert_eq!(told, [false, true, false], "{name}");
            assert!(out[..rows].iter().chain(&out[2 * rows..]).all(|value| value.is_finite()), "{name}");
        }
    }
}

/// Tokens and rows of no whole block, fewer columns than a span and more spans than warps; both blocks have the same bits.
#[test]
fn products_match_the_reference_over_their_own_operands_by_blocks_for_few_tokens_and_for_many() {
    let mut random = Random::new(82);
    let shapes =
        [(1, 16, 32), (3, 40, 256), (9, 17, 608), (33, 130, 96), (70, 20, 1312), (66, 17, 2304), (64, 128, 256)];
    for (seed, (tokens, rows, cols)) in SEEDS.into_iter().cycle().zip(shapes) {
        let (device, stream) = device(seed);
        let input = random.halves(tokens * cols, 2.0);
        let inputs = Inputs::new(&device, &stream, &input, cols);
        for Weights { name, matrix, value } in weights(&device, &mut random, rows, cols) {
            let what = format!("{name}, {tokens} x {rows} x {cols}");
            let exact = reference(rows, cols, value, &input);
            let products = [ops::linear_rounded as Product, ops::linear_rounded_many].map(|product| {
                in_all_forms(&device, &stream, exact.len(), |out| inputs.multiply(&stream, product, &matrix, out))
            });
            assert_eq!(products[1], products[0], "{what}");
            let [few, _] = products;
            near(few, &exact, &what);
        }
    }
}

#[test]
fn a_token_gives_the_same_in_any_batch_and_order_of_threads() {
    let mut random = Random::new(83);
    let (tokens, rows, cols) = (67, 24, 2560);
    let input = random.halves(tokens * cols, 2.0);
    let (first, _) = device(1);
    let count = weights(&first, &mut Random::new(84), rows, cols).len();
    for index in 0..count {
        let product = |seed: u64, tokens: std::ops::Range<usize>| {
            let (device, stream) = device(seed);
            let Weights { matrix, .. } = weights(&device, &mut Random::new(84), rows, cols).swap_remove(index);
            let inputs = Inputs::new(&device, &stream, &input[tokens.start * cols..tokens.end * cols], cols);
            let mut out = poisoned::<f32>(&device, tokens.len() * rows);
            inputs.multiply(&stream, ops::linear_rounded, &matrix, Output::F32(out.view_mut())).unwrap();
            out.read(&stream).unwrap()
        };
        assert_eq!(product(1, 0..tokens), product(2, 0..tokens));
        same_in_any_batch(tokens, rows, |tokens| product(3, tokens), [0..1, 33..34, 66..67, 10..30, 20..60]);
    }
}

/// What no integer kernel has is multiplied as it is, beside what one has; an order of columns is left alone.
#[test]
fn parts_that_are_no_such_integers_are_multiplied_as_bf16() {
    let mut random = Random::new(85);
    let pool = Pool::new(1).unwrap();
    let driver = HostMachine::new(Kernels::Run, 3).driver(0, 1 << 30);
    let device = driver.device();
    let stream = device.stream().unwrap();
    let (cols, rows) = (256, 16);
    let halves = random.halves(rows * cols, 1.0);
    let bytes: Vec<u8> = halves.iter().flat_map(|value| value.to_le_bytes()).collect();
    let q8_0 = q8_0(&mut random, rows, cols);
    let tensors = [(WeightType::Q8_0, rows, &q8_0[..]), (WeightType::BF16, rows, &bytes[..])];
    let matrix = Matrix::stack_types(&device, &pool, cols, &tensors).unwrap();
    let input = random.halves(5 * cols, 2.0);
    let inputs = Inputs::new(&device, &stream, &input, cols);
    assert!(ops::multiplies_rounded(&matrix));
    let found =
        in_all_forms(&device, &stream, 5 * 2 * rows, |out| inputs.multiply(&stream, ops::linear_rounded, &matrix, out));
    let int8 = Int8::read(WeightType::Q8_0, rows, cols, &q8_0).unwrap().unwrap();
    let of_bytes = reference(rows, cols, |row, col| int8.value(row, col), &input);
    let of_halves = crate::linear::reference(rows, cols, |row, col| halves[row * cols + col].into(), &input);
    let exact: Vec<f64> =
        of_bytes.chunks(rows).zip(of_halves.chunks(rows)).flat_map(|(a, b)| [a, b].concat()).collect();
    near(found, &exact, "bytes beside bf16");
    let issued = driver.issued();
    for kernel in [Kernel::RoundedQ80T8, Kernel::LinearBf16T8] {
        assert!(issued.contains(&Issued::Launch(kernel)), "{kernel:?}");
    }
    let plain = Matrix::bf16(&device, rows, cols, &halves).unwrap();
    let four = Matrix::grouped(&device, &random_int4(&mut random, rows, cols, Group::G32, true)).unwrap();
    assert!(!ops::multiplies_rounded(&plain) && ops::multiplies_rounded(&four));
    let order: Vec<u32> = (0..cols as u32).rev().collect();
    assert!(!ops::multiplies_rounded(&four.ordered(&device, &order).unwrap()));
}
