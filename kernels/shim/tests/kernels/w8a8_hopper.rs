//! Products of many tokens in 8 bits by Hopper's warpgroups: integers as everywhere, e4m3 against its own operands in f64.

use std::ops::Range;

use half::bf16;
use windlass_kernels::cuda::ops::{self, Output, Quantized};
use windlass_kernels::cuda::weights::EightBits;
use windlass_kernels::cuda::{Device, Stream};

use crate::common::{
    Random, SEEDS, ampere, blackwell, hopper, in_all_forms, poisoned, relative_error, same_in_any_batch,
};
use crate::w8a8::{CODES, Scene, quantized};

/// What published figures of the products' precision allow, against which 3e-3 of a rounded result is little.
const E4M3_TOLERANCE: f64 = 5e-3;

/// The products of some of a scene's tokens.
fn product((device, stream): &(Device, Stream), scene: &Scene, tokens: Range<usize>) -> Vec<f32> {
    let [_, rows, cols] = scene.shape;
    let input = &scene.input[tokens.start * cols..tokens.end * cols];
    let (codes, scales) = quantized(device, stream, scene.code, input, tokens.len());
    let (codes, scales) = (device.upload(&codes).unwrap(), device.upload(&scales).unwrap());
    let input = Quantized { codes: codes.view(), scales: scales.view() };
    let mut out = poisoned::<f32>(device, tokens.len() * rows);
    ops::linear_w8a8_wide(stream, &scene.matrix(device), &input, Output::F32(out.view_mut())).unwrap();
    out.read(stream).unwrap()
}

/// Rows, tokens and columns of no whole tile, and one more than a tile's; more stages than are held; a scale of a whole row that
/// ends within a stage.
const SHAPES: [(usize, [usize; 3]); 6] = [
    (usize::MAX, [65, 1, 32]),
    (128, [129, 37, 160]),
    (usize::MAX, [66, 129, 416]),
    (256, [130, 127, 1184]),
    (128, [200, 17, 1056]),
    (usize::MAX, [128, 130, 128]),
];

#[test]
fn integers_are_multiplied_as_on_chips_without_warpgroups() {
    let mut random = Random::new(50);
    for (seed, (group, shape)) in SEEDS.into_iter().cycle().zip(SHAPES) {
        let Some(own) = hopper(seed) else { return };
        let scene = Scene::new(&mut random, EightBits::Int8, group, shape);
        let tokens = 0..shape[0];
        let found = product(&own, &scene, tokens.clone());
        for other in [ampere(seed), blackwell(seed)] {
            assert_eq!(found, product(&other, &scene, tokens.clone()), "{shape:?}");
        }
    }
}

#[test]
fn products_of_e4m3_match_the_reference_over_their_own_operands() {
    let mut random = Random::new(51);
    for (seed, (group, shape)) in SEEDS.into_iter().cycle().zip(SHAPES) {
        let Some((device, stream)) = hopper(seed) else { return };
        let scene = Scene::new(&mut random, EightBits::E4m3, group, shape);
        let matrix = scene.matrix(&device);
        let (codes, scales) = quantized(&device, &stream, scene.code, &scene.input, shape[0]);
        let exact = scene.exact(&codes, &scales);
        let (codes, scales) = (device.upload(&codes).unwrap(), device.upload(&scales).unwrap());
        let input = Quantized { codes: codes.view(), scales: scales.view() };
        let product = |out: Output<'_>| ops::linear_w8a8_wide(&stream, &matrix, &input, out);
        let (halves, floats) = in_all_forms(&device, &stream, exact.len(), product);
        let errors = [relative_error(&halves, &exact), relative_error(&floats, &exact)];
        assert!(errors.iter().all(|&error| error <= E4M3_TOLERANCE), "{shape:?}: {errors:?}");
    }
}

/// Sums that only grow: what warpgroups' products would lose of them is taken away after 128 columns.
#[test]
fn long_sums_of_e4m3_are_not_left_to_the_products() {
    let mut random = Random::new(52);
    let Some((device, stream)) = hopper(4) else { return };
    let mut scene = Scene::new(&mut random, EightBits::E4m3, usize::MAX, [65, 9, 4096]);
    scene.weights.iter_mut().for_each(|code| *code = 0x30 + *code % 8);
    scene.weight_scales.fill(0.125);
    scene.input.iter_mut().for_each(|value| *value = bf16::from_f32(1.0 + value.to_f32().abs()));
    let (codes, scales) = quantized(&device, &stream, scene.code, &scene.input, 65);
    let exact = scene.exact(&codes, &scales);
    let error = relative_error(&product(&(device, stream), &scene, 0..65), &exact);
    assert!(error <= E4M3_TOLERANCE, "{error}");
}

/// Among tokens that are many; integers among few, too.
#[test]
fn a_token_gives_the_same_whatever_tokens_come_with_it() {
    let mut random = Random::new(53);
    for code in CODES {
        let scene = Scene::new(&mut random, code, 128, [150, 37, 288]);
        let Some(own) = hopper(2) else { return };
        let few = (code == EightBits::Int8).then_some(140..141);
        let batches = [70..140, 85..150].into_iter().chain(few);
        same_in_any_batch(150, 37, |tokens| product(&own, &scene, tokens), batches);
    }
}
