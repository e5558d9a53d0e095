//! Products of many tokens, which have the bits of those of a few.

use half::bf16;
use windlass_cuda_shim::{HostMachine, Issued, Kernels};
use windlass_kernels::WeightType;
use windlass_kernels::cuda::ops::{self, Gate, GateLayout, Output};
use windlass_kernels::cuda::weights::{EightBits, Group, Grouped, Int8, Matrix, Superblock, Superblocks};
use windlass_kernels::cuda::{Device, DriverError, Kernel, Stream, View};

use crate::common::{Random, SEEDS, device, in_all_forms, poisoned};
use crate::linear::{e4m3, five_bits, near, q8_0, random_int4, reference, superblocks};

type Product = fn(&Stream, &Matrix, View<'_, bf16>, Output<'_>) -> Result<(), DriverError>;

/// A matrix, what it is, and its values.
struct Weights {
    name: String,
    matrix: Matrix,
    value: Box<dyn Fn(usize, usize) -> f64>,
}

/// One for each layout that so many columns may have.
fn weights(device: &Device, random: &mut Random, rows: usize, cols: usize) -> Vec<Weights> {
    let halves = random.halves(rows * cols, 1.0);
    let matrix = Matrix::bf16(device, rows, cols, &halves).unwrap();
    let mut all =
        vec![Weights { name: "bf16".into(), matrix, value: Box::new(move |row, col| halves[row * cols + col].into()) }];
    for (group, symmetric) in [Group::G32, Group::G64, Group::G128].into_iter().flat_map(|g| [(g, false), (g, true)]) {
        let int4 = random_int4(random, rows, cols, group, symmetric);
        let (name, matrix) = (format!("{group:?}, symmetric: {symmetric}"), Matrix::grouped(device, &int4).unwrap());
        all.push(Weights { name, matrix, value: Box::new(move |row, col| int4.value(row, col)) });
    }
    for kind in [WeightType::Q5_0, WeightType::Q5_1] {
        let five = Grouped::read(kind, rows, cols, &five_bits(random, kind, rows, cols)).unwrap().unwrap();
        let matrix = Matrix::grouped(device, &five).unwrap();
        let value = Box::new(move |row, col| five.value(row, col));
        all.push(Weights { name: kind.name().into(), matrix, value });
    }
    for (code, group) in [EightBits::E4m3, EightBits::Int8].into_iter().flat_map(|c| [(c, usize::MAX), (c, 128)]) {
        all.push(eight_bits(device, random, code, [rows, cols], group));
    }
    let int8 = Int8::read(WeightType::Q8_0, rows, cols, &q8_0(random, rows, cols)).unwrap().unwrap();
    let matrix = Matrix::int8(device, &int8).unwrap();
    all.push(Weights { name: "Q8_0".into(), matrix, value: Box::new(move |row, col| int8.value(row, col)) });
    if cols.is_multiple_of(256) {
        for kind in Superblock::ALL {
            let read = Superblocks::read(kind, rows, cols, &superblocks(random, kind, rows, cols)).unwrap();
            let matrix = Matrix::superblocks(device, &read).unwrap();
            all.push(Weights {
                name: format!("{kind:?}"),
                matrix,
                value: Box::new(move |row, col| read.value(row, col)),
            });
        }
    }
    all
}

fn eight_bits(device: &Device, random: &mut Random, code: EightBits, shape: [usize; 2], group: usize) -> Weights {
    let [rows, cols] = shape;
    let codes: Vec<u8> = (0..rows * cols).map(|_| random.below(0x7f) as u8 | (random.next() as u8 & 0x80)).collect();
    let groups = cols.div_ceil(group);
    let scales = random.values(rows * groups, 0.1);
    let matrix = Matrix::eight_bits(device, code, shape, group, &codes, &scales).unwrap();
    let value = move |row: usize, col: usize| {
        let bits = codes[row * cols + col];
        let code = if code == EightBits::E4m3 { e4m3(bits) } else { f64::from(bits as i8) };
        code * f64::from(scales[row * groups + col / group])
    };
    Weights { name: format!("{code:?} in groups of {group}"), matrix, value: Box::new(value) }
}

/// Tokens and rows of no whole block, fewer columns than a span and more spans than warps; what is left over of a span is less
/// than one, and of the spans' turns some have more than others.
#[test]
fn products_of_many_tokens_match_the_reference_and_are_those_of_few() {
    let mut random = Random::new(70);
    let shapes =
        [(1, 16, 32), (129, 145, 96), (66, 28, 64), (33, 130, 608), (70, 20, 1312), (66, 17, 2304), (64, 128, 256)];
    for (seed, (tokens, rows, cols)) in SEEDS.into_iter().cycle().zip(shapes) {
        let (device, stream) = device(seed);
        let input = random.halves(tokens * cols, 2.0);
        let memory = device.upload(&input).unwrap();
        for Weights { name, matrix, value } in weights(&device, &mut random, rows, cols) {
            let what = format!("{name}, {tokens} x {rows} x {cols}");
            let exact = reference(rows, cols, value, &input);
            let products = [ops::linear as Product, ops::linear_many].map(|product| {
                in_all_forms(&device, &stream, exact.len(), |out| product(&stream, &matrix, memory.view(), out))
            });
            assert_eq!(products[1], products[0], "{what}");
            let alone =
                in_all_forms(&device, &stream, rows, |out| ops::linear(&stream, &matrix, memory.slice(0..cols), out));
            let [_, many] = products;
            assert_eq!((&alone.0[..], &alone.1[..]), (&many.0[..rows], &many.1[..rows]), "the first token of {what}");
            near(many, &exact, &what);
        }
    }
}

/// Gates and ups by eights, in products of few tokens and of many.
#[test]
fn products_gate_as_a_kernel_behind_them_does() {
    let mut random = Random::new(72);
    let cases = [(1, 16, 96), (9, 48, 256), (20, 144, 256), (70, 272, 256)];
    for ((seed, (tokens, rows, cols)), gate) in
        SEEDS.into_iter().cycle().zip(cases).zip([Gate::Silu, Gate::GeluTanh].into_iter().cycle())
    {
        let (device, stream) = device(seed);
        let input = device.upload(&random.halves(tokens * cols, 1.0)).unwrap();
        for Weights { name, matrix, .. } in weights(&device, &mut random, rows, cols) {
            let mut both = poisoned::<bf16>(&device, tokens * rows);
            let mut apart = poisoned::<bf16>(&device, tokens * rows / 2);
            ops::linear(&stream, &matrix, input.view(), Output::Bf16(both.view_mut())).unwrap();
            ops::gate_mul(&stream, gate, GateLayout::Eights, both.view(), rows / 2, apart.view_mut()).unwrap();
            let apart = apart.read(&stream).unwrap();
            for (how, multiply) in [("few", ops::linear as Product), ("many", ops::linear_many)] {
                let mut gated = poisoned::<bf16>(&device, tokens * rows / 2);
                multiply(&stream, &matrix, input.view(), Output::Gated(gated.view_mut(), gate)).unwrap();
                assert_eq!(gated.read(&stream).unwrap(), apart, "{name}, {tokens} x {rows} x {cols}, {how}");
            }
        }
    }
}

/// By blocks of every size, and by warpgroups: whichever a chip has.
#[test]
fn warpgroups_give_the_bits_of_chips_without_them() {
    let mut random = Random::new(74);
    let (rows, cols) = (145, 1312);
    let weights = random.halves(rows * cols, 1.0);
    for (seed, tokens) in SEEDS.into_iter().cycle().zip([8, 9, 16, 20, 40, 64, 65, 130]) {
        let input = random.halves(tokens * cols, 2.0);
        let given = [(8, 0), (9, 0)].map(|capability| {
            let device = HostMachine::new(Kernels::Run, seed).with_capability(capability).device(0, 1 << 26);
            let (stream, input) = (device.stream().unwrap(), device.upload(&input).unwrap());
            let matrix = Matrix::bf16(&device, rows, cols, &weights).unwrap();
            in_all_forms(&device, &stream, tokens * rows, |out| ops::linear(&stream, &matrix, input.view(), out))
        });
        assert_eq!(given[1], given[0], "{tokens} tokens");
    }
}

/// From more tokens on than other blocks have, where half of the multiprocessors (of 132) have one; Hopper's warpgroups from as many
/// on in any case.
#[test]
fn blocks_for_many_tokens_are_taken_where_there_are_enough_of_them() {
    let (ampere, hopper) = ((8, 0), (9, 0));
    for (capability, tokens, rows, expected) in [
        (ampere, 33, 66 * 128, Kernel::ManyBf16),
        (ampere, 33, 65 * 128, Kernel::LinearBf16T64),
        (ampere, 32, 66 * 128, Kernel::LinearBf16T32),
        (ampere, 65, 33 * 128, Kernel::ManyBf16),
        (ampere, 64, 33 * 128, Kernel::LinearBf16T64),
        (hopper, 65, 128, Kernel::ManyHopperBf16),
        (hopper, 64, 128, Kernel::ManyHopperBf16T64),
        (hopper, 9, 128, Kernel::ManyHopperBf16T64),
        (hopper, 8, 66 * 128, Kernel::LinearBf16T8),
    ] {
        let driver = HostMachine::new(Kernels::Record, 1).with_capability(capability).driver(0, 1 << 30);
        let (device, cols) = (driver.device(), 32);
        let stream = device.stream().unwrap();
        let matrix = Matrix::bf16(&device, rows, cols, &vec![bf16::ONE; rows * cols]).unwrap();
        let input = device.upload(&vec![bf16::ONE; tokens * cols]).unwrap();
        let mut out = device.allocate::<bf16>(tokens * rows).unwrap();
        ops::linear(&stream, &matrix, input.view(), Output::Bf16(out.view_mut())).unwrap();
        let last = driver.issued().into_iter().rfind(|work| matches!(work, Issued::Launch(_)));
        assert_eq!(last, Some(Issued::Launch(expected)), "{tokens} tokens, {rows} rows");
    }
}
