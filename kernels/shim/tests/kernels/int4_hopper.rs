//! Products of many tokens with weights of 4 bits by Hopper's warpgroups.

use half::{bf16, f16};
use windlass_kernels::cuda::ops::{self, Output};
use windlass_kernels::cuda::weights::{Group, Grouped, Matrix};
use windlass_kernels::cuda::{Device, Stream};

use crate::common::{Random, SEEDS, ampere, hopper, in_all_forms, poisoned, relative_error};
use crate::hopper::same_by_wide_products;
use crate::linear::{near, random_codes, random_int4, reference};

/// A matrix, and its weights as products read them.
struct Scene {
    int4: Grouped,
    rounded: Vec<bf16>,
}

impl Scene {
    fn new(random: &mut Random, rows: usize, cols: usize, group: Group, symmetric: bool) -> Scene {
        let (codes, scales) = random_codes(random, rows, cols, group, symmetric);
        let groups = cols.div_ceil(group.cols());
        let weight = |row: usize, col: usize| {
            let (scale, minimum) = scales[row * groups + col / group.cols()];
            let (scale, minimum) = (scale.to_f32(), minimum.to_f32());
            let code = f32::from(codes[row * cols + col]);
            bf16::from_f32((128.0 + code).mul_add(scale, (-128f32).mul_add(scale, minimum)))
        };
        let rounded = (0..rows * cols).map(|at| weight(at / cols, at % cols)).collect();
        Scene { int4: Grouped::new(rows, cols, group, codes, scales), rounded }
    }

    fn products(&self, (device, stream): &(Device, Stream), input: &[bf16]) -> (Vec<bf16>, Vec<f32>) {
        let (matrix, tokens) = (Matrix::grouped(device, &self.int4).unwrap(), device.upload(input).unwrap());
        let values = input.len() / matrix.cols() * matrix.rows();
        in_all_forms(device, stream, values, |out| ops::linear_wide(stream, &matrix, tokens.view(), out))
    }
}

/// Rows and tokens of no whole tile, and one more than a tile's; half a stage of columns, and more stages than are held.
#[test]
fn products_match_the_reference_over_their_own_operands() {
    let mut random = Random::new(60);
    let shapes = [
        (Group::G32, (1, 16, 32)),
        (Group::G32, (129, 35, 608)),
        (Group::G32, (5, 130, 160)),
        (Group::G64, (3, 17, 192)),
        (Group::G64, (130, 129, 96)),
        (Group::G128, (9, 40, 1184)),
        (Group::G128, (66, 144, 256)),
    ];
    for (seed, (group, (tokens, rows, cols))) in SEEDS.into_iter().cycle().zip(shapes) {
        for symmetric in [false, true] {
            let Some(own) = hopper(seed) else { return };
            let scene = Scene::new(&mut random, rows, cols, group, symmetric);
            let input = random.halves(tokens * cols, 2.0);
            let exact = reference(rows, cols, |row, col| scene.rounded[row * cols + col].into(), &input);
            near(scene.products(&own, &input), &exact, &format!("{group:?}, {tokens} x {rows} x {cols}"));
        }
    }
}

/// What the weights' own rounding costs is within what a product of 4 bits may be off.
#[test]
fn rounded_weights_are_near_enough() {
    let mut random = Random::new(63);
    let (tokens, rows, cols) = (40, 64, 768);
    for (group, symmetric) in [(Group::G32, false), (Group::G64, true), (Group::G128, false), (Group::G128, true)] {
        let Some(own) = hopper(6) else { return };
        let scene = Scene::new(&mut random, rows, cols, group, symmetric);
        let input = random.halves(tokens * cols, 2.0);
        let exact = reference(rows, cols, |row, col| scene.int4.value(row, col), &input);
        let (halves, floats) = scene.products(&own, &input);
        let errors = [relative_error(&halves, &exact), relative_error(&floats, &exact)];
        assert!(errors.iter().all(|&error| error <= 3e-3), "{group:?}: {errors:?}");
    }
}

/// Each code at each place of 64 columns, by itself: a scale that is a power of two rounds none.
#[test]
fn codes_stand_for_what_they_are_wherever_they_are() {
    let Some((device, stream)) = hopper(5) else { return };
    let (rows, cols) = (48, 64);
    let codes: Vec<u8> = (0..rows * cols).map(|i| ((i / cols * 7 + i % cols * 5 + i % cols / 16) % 16) as u8).collect();
    let scales = (0..rows * 2).map(|i| (f16::from_f32(0.25), f16::from_f32(if i % 2 == 0 { -2.0 } else { 1.5 })));
    let int4 = Grouped::new(rows, cols, Group::G32, codes, scales.collect());
    let matrix = Matrix::grouped(&device, &int4).unwrap();
    let ones: Vec<bf16> = (0..cols * cols).map(|i| bf16::from_f32(f32::from(i / cols == i % cols))).collect();
    let input = device.upload(&ones).unwrap();
    let mut out = poisoned::<f32>(&device, cols * rows);
    ops::linear_wide(&stream, &matrix, input.view(), Output::F32(out.view_mut())).unwrap();
    let found = out.read(&stream).unwrap();
    for (col, row) in (0..cols).flat_map(|col| (0..rows).map(move |row| (col, row))) {
        assert_eq!(f64::from(found[col * rows + row]), int4.value(row, col), "row {row}, column {col}");
    }
}

#[test]
fn a_token_gives_the_same_whatever_tokens_come_with_it() {
    let mut random = Random::new(61);
    let Some((device, stream)) = hopper(3) else { return };
    let matrix = Matrix::grouped(&device, &random_int4(&mut random, 40, 224, Group::G32, false)).unwrap();
    same_by_wide_products((&device, &stream), &matrix, &mut random);
}

/// For many tokens, on Hopper, and with columns in the order of inputs.
#[test]
fn only_hopper_multiplies_four_bits_widely() {
    let mut random = Random::new(62);
    let int4 = random_int4(&mut random, 16, 64, Group::G32, true);
    let Some((own, _)) = hopper(1) else { return };
    let older = ampere(1).0;
    let widely = |device: &Device, tokens: usize| {
        ops::multiplies_widely(device.facts(), &Matrix::grouped(device, &int4).unwrap(), tokens)
    };
    assert_eq!([widely(&own, 128), widely(&own, 127), widely(&older, 128)], [true, false, false]);
    let order: Vec<u32> = (0..64).rev().collect();
    let ordered = Matrix::grouped(&own, &int4).unwrap().ordered(&own, &order).unwrap();
    assert!(!ops::multiplies_widely(own.facts(), &ordered, 128));
}
