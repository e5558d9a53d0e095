use half::{bf16, f16};
use windlass_kernels::WeightType;
use windlass_kernels::cuda::ops;
use windlass_kernels::cuda::weights::{EightBits, Group, Grouped, Int8, Matrix, Superblock, Superblocks};

use crate::common::{Random, device, poisoned};

const ROWS: usize = 23;
/// What embeddings are multiplied with.
const FACTOR: f32 = 1.5;
const INDICES: [u32; 6] = [22, 0, 23, 13, u32::MAX, 13];

/// The picked rows of a matrix of values; zeros for those that are not there.
fn picked(cols: usize, value: impl Fn(usize, usize) -> f32) -> Vec<f32> {
    let inside = |row: usize, col: usize| if row < ROWS { value(row, col) } else { 0.0 };
    INDICES.iter().flat_map(|&row| (0..cols).map(move |col| (row as usize, col))).map(|(r, c)| inside(r, c)).collect()
}

#[test]
fn rows_are_picked_and_an_index_outside_gives_zeros() {
    let mut random = Random::new(2);
    for cols in [8, 576, 2056] {
        let (device, stream) = device(1);
        let values = random.values(ROWS * cols, 3.0);
        let (indices, memory) = (device.upload(&INDICES).unwrap(), device.upload(&values).unwrap());
        let mut out = poisoned::<f32>(&device, INDICES.len() * cols);
        ops::gather_rows(&stream, indices.view(), memory.view(), cols, out.view_mut()).unwrap();
        assert_eq!(out.read(&stream).unwrap(), picked(cols, |row, col| values[row * cols + col]));
    }
}

#[test]
fn tokens_are_embedded_from_any_table() {
    let mut random = Random::new(17);
    let (device, stream) = device(1);
    let tokens = device.upload(&INDICES).unwrap();
    let cols = 608;
    let check = |matrix: &Matrix, value: &dyn Fn(usize, usize) -> f32, what: &str| {
        let cols = matrix.cols();
        let mut out = poisoned::<f32>(&device, INDICES.len() * cols);
        ops::embed(&stream, tokens.view(), matrix, 0, FACTOR, out.view_mut()).unwrap();
        let (found, exact) = (out.read(&stream).unwrap(), picked(cols, |row, col| value(row, col) * FACTOR));
        let same = found.iter().zip(&exact).all(|(found, exact)| (found - exact).abs() <= 1e-6 * exact.abs().max(0.1));
        assert!(same, "{what}");
        // The same table as that of the tokens from 5 on: earlier ones are not in it, and later ones lie higher.
        let later: Vec<u32> = INDICES.iter().map(|&index| index.wrapping_add(5)).chain([0, 4]).collect();
        let mut out = poisoned::<f32>(&device, later.len() * cols);
        let tokens = device.upload(&later).unwrap();
        ops::embed(&stream, tokens.view(), matrix, 5, FACTOR, out.view_mut()).unwrap();
        let part = out.read(&stream).unwrap();
        assert!(part[..found.len()] == found && part[found.len()..].iter().all(|value| *value == 0.0), "{what}");
    };
    let halves: Vec<bf16> = random.halves(ROWS * cols, 3.0);
    let matrix = Matrix::bf16(&device, ROWS, cols, &halves).unwrap();
    check(&matrix, &|row, col| halves[row * cols + col].to_f32(), "bf16");
    for group in [Group::G32, Group::G64, Group::G128] {
        let codes = (0..ROWS * cols).map(|_| random.below(16) as u8).collect();
        let mut half = || f16::from_f32(random.value(1.0));
        let scales = (0..ROWS * cols.div_ceil(group.cols())).map(|_| (half(), half())).collect();
        let int4 = Grouped::new(ROWS, cols, group, codes, scales);
        check(&Matrix::grouped(&device, &int4).unwrap(), &|row, col| int4.value(row, col) as f32, "int4");
    }
    for kind in [WeightType::Q5_0, WeightType::Q5_1] {
        let bytes = crate::linear::five_bits(&mut random, kind, ROWS, cols);
        let five = Grouped::read(kind, ROWS, cols, &bytes).unwrap().unwrap();
        check(&Matrix::grouped(&device, &five).unwrap(), &|row, col| five.value(row, col) as f32, kind.name());
    }
    let int8 =
        Int8::read(WeightType::Q8_0, ROWS, cols, &crate::linear::q8_0(&mut random, ROWS, cols)).unwrap().unwrap();
    check(&Matrix::int8(&device, &int8).unwrap(), &|row, col| int8.value(row, col) as f32, "Q8_0");
    for kind in Superblock::ALL {
        let bytes = crate::linear::superblocks(&mut random, kind, ROWS, 768);
        let superblocks = Superblocks::read(kind, ROWS, 768, &bytes).unwrap();
        let matrix = Matrix::superblocks(&device, &superblocks).unwrap();
        check(&matrix, &|row, col| superblocks.value(row, col) as f32, &format!("{kind:?}"));
    }
    let codes: Vec<u8> = (0..ROWS * cols).map(|_| random.below(0x7f) as u8).collect();
    let scales = random.values(ROWS * cols.div_ceil(128), 1.0);
    let scale = |row: usize, col: usize| scales[row * cols.div_ceil(128) + col / 128];
    let matrix = Matrix::eight_bits(&device, EightBits::Int8, [ROWS, cols], 128, &codes, &scales).unwrap();
    check(&matrix, &|row, col| f32::from(codes[row * cols + col]) * scale(row, col), "int8");
    let matrix = Matrix::eight_bits(&device, EightBits::E4m3, [ROWS, cols], 128, &codes, &scales).unwrap();
    let value = |row: usize, col: usize| crate::linear::e4m3(codes[row * cols + col]) as f32 * scale(row, col);
    check(&matrix, &value, "e4m3");
}
