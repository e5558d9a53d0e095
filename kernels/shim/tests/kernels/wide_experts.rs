//! Products of many tokens with the matrices of experts by Hopper's warpgroups.

use half::{bf16, f16};
use windlass_cuda_shim::{HostMachine, Kernels};
use windlass_kernels::WeightType;
use windlass_kernels::cuda::ops::{
    self, ExpertInput, ExpertSum, Gate, GateLayout, Mixture, Output, Quantized, QuantizedMut, Routes,
};
use windlass_kernels::cuda::weights::{EightBits, Group, Grouped, Int8, Matrix};
use windlass_kernels::cuda::{Device, Stream};

use crate::common::{Random, SEEDS, ampere, hopper, poisoned, relative_error};
use crate::experts::{Layout, Scene, mixture, part};
use crate::w8a8::{CODES, quantized};

/// What a rounded result may be off, of weights in bf16 and of codes that become bf16.
const TOLERANCE: f64 = 3e-3;

/// A value of the matrix of all experts that are held.
type Value = Box<dyn Fn(usize, usize) -> f64>;

/// A matrix in bf16, or of 4 bits in groups.
fn weights(device: &Device, random: &mut Random, rows: usize, cols: usize, group: Option<Group>) -> (Matrix, Value) {
    let Some(group) = group else {
        let values = random.halves(rows * cols, 1.0);
        let matrix = Matrix::bf16(device, rows, cols, &values).unwrap();
        return (matrix, Box::new(move |row, col| values[row * cols + col].into()));
    };
    let codes = (0..rows * cols).map(|_| random.below(16) as u8).collect();
    let mut half = || f16::from_f32(random.value(0.2));
    let scales = (0..rows * cols.div_ceil(group.cols())).map(|_| (half(), half())).collect();
    let int4 = Grouped::new(rows, cols, group, codes, scales);
    (Matrix::grouped(device, &int4).unwrap(), Box::new(move |row, col| int4.value(row, col)))
}

/// Routes by which each token goes through the one expert that is said.
fn routes(device: &Device, stream: &Stream, mixture: Mixture, experts: &[usize]) -> Routes {
    let score = |i: usize| if i % mixture.count == experts[i / mixture.count] { 1.0 } else { 0.0 };
    let scores: Vec<f32> = (0..experts.len() * mixture.count).map(score).collect();
    let mut routes = Routes::new(device, mixture, experts.len()).unwrap();
    routes.choose_wide(stream, device.upload(&scores).unwrap().view()).unwrap();
    routes
}

/// `counts[e]` tokens for expert `e`, in a mixed order.
fn mixed(random: &mut Random, counts: &[usize]) -> Vec<usize> {
    let mut experts: Vec<usize> = counts.iter().enumerate().flat_map(|(expert, &count)| vec![expert; count]).collect();
    (1..experts.len()).rev().for_each(|last| experts.swap(last, random.below(last + 1)));
    experts
}

/// Experts without tokens, with one, with a tile of the kernel and one more, and with all; those of other ranks. One part of an
/// expert's rows, an even number (blocks in clusters) and an odd one; columns of no whole stage, and of more than are held.
#[test]
fn each_token_gets_what_its_expert_gives() {
    let mut random = Random::new(70);
    let one = |count| mixture(count, 1, false, true);
    for (seed, (mixture, counts, [rows, cols], group)) in SEEDS.into_iter().cycle().zip([
        (one(5), vec![0, 1, 65, 129, 3], [48, 96], None),
        (one(5), vec![0, 1, 65, 129, 3], [144, 64], None),
        (one(3), vec![0, 131, 0], [272, 32], None),
        (part(one(6), 2, 3), vec![30, 10, 2, 0, 128, 20], [160, 320], None),
        (one(4), vec![1, 64, 0, 66], [64, 96], Some(Group::G32)),
        (one(2), vec![0, 140], [176, 320], Some(Group::G64)),
        (part(one(4), 1, 2), vec![20, 65, 1, 30], [144, 448], Some(Group::G128)),
    ]) {
        let Some((device, stream)) = hopper(seed) else { return };
        let experts = mixed(&mut random, &counts);
        let tokens = experts.len();
        let (matrix, value) = weights(&device, &mut random, mixture.held * rows, cols, group);
        let input = random.halves(tokens * cols, 1.0);
        let (routes, inputs) = (routes(&device, &stream, mixture, &experts), device.upload(&input).unwrap());
        let mut room = poisoned::<bf16>(&device, tokens * cols);
        let mut multiply = |out: Output<'_>| {
            let from = ExpertInput::Tokens(inputs.view());
            ops::linear_experts_wide(&stream, &matrix, &routes, from, &mut room, out).unwrap();
        };
        let mut halves = poisoned::<bf16>(&device, tokens * rows);
        let mut floats = poisoned::<f32>(&device, tokens * rows);
        multiply(Output::Bf16(halves.view_mut()));
        multiply(Output::F32(floats.view_mut()));
        let once = floats.read(&stream).unwrap();
        multiply(Output::AddTo(floats.view_mut()));
        let twice = floats.read(&stream).unwrap();
        let given = halves.read(&stream).unwrap();
        let held = mixture.first..mixture.first + mixture.held;
        let taken = experts.iter().filter(|expert| held.contains(expert)).count();
        for (i, ((half, once), twice)) in given.iter().zip(&once).zip(&twice).enumerate() {
            match i < taken * rows {
                true => assert_eq!((*half, *twice), (bf16::from_f32(*once), once + once), "row {}", i / rows),
                false => assert!(half.is_nan() && once.is_nan(), "row {} is nobody's", i / rows),
            }
        }
        // The weight of the only one is 1.
        let mut own = poisoned::<bf16>(&device, tokens * rows);
        routes.mix(&stream, halves.view(), None, rows, ExpertSum::Bf16(own.view_mut())).unwrap();
        let exact: Vec<f64> = (0..tokens * rows)
            .map(|i| {
                let (token, row, expert) = (i / rows, i % rows, experts[i / rows]);
                let product =
                    |col| value((expert - mixture.first) * rows + row, col) * f64::from(input[token * cols + col]);
                if held.contains(&expert) { (0..cols).map(product).sum() } else { 0.0 }
            })
            .collect();
        let error = relative_error(&own.read(&stream).unwrap(), &exact);
        assert!(error <= TOLERANCE, "{counts:?}, {rows} x {cols}, {group:?}: {error}");
    }
}

/// Two products one after the other, of tokens with several experts, a shared one, and some that are elsewhere. A token gives the
/// same whatever tokens come with it.
#[test]
fn mixtures_of_experts_match_the_reference() {
    let mut random = Random::new(71);
    for (seed, (mixture, layout, tokens)) in SEEDS.into_iter().cycle().zip([
        (mixture(3, 2, true, true), Layout::Bf16, 70),
        (mixture(4, 4, false, false), Layout::Int4, 33),
        (part(mixture(8, 2, false, true), 3, 3), Layout::Bf16, 90),
        (part(mixture(6, 3, true, true), 0, 2), Layout::Int4, 45),
    ]) {
        let Some((device, stream)) = hopper(seed) else { return };
        let mut scene = Scene::new(&device, &mut random, mixture, layout, tokens);
        scene.widely = true;
        let found = scene.run(&device, &stream, tokens);
        let error = scene.error(&found);
        assert!(error <= 5e-3, "{mixture:?} in {layout:?}, {tokens} tokens: {error}");
        for fewer in [1, tokens / 2] {
            let some = scene.run(&device, &stream, fewer);
            assert_eq!(some, found[..some.len()], "{mixture:?} in {layout:?}: {fewer} tokens");
        }
    }
}

/// What gates gives what a kernel behind it gives, bit for bit.
#[test]
fn experts_gate_what_they_give() {
    let mut random = Random::new(72);
    let (cols, mixture) = (64, mixture(3, 1, false, true));
    for (seed, (wide, group, gate)) in SEEDS.into_iter().cycle().zip([
        (24, None, Gate::Silu),
        (88, None, Gate::GeluTanh),
        (72, Some(Group::G32), Gate::Silu),
        (136, Some(Group::G64), Gate::GeluTanh),
    ]) {
        let Some((device, stream)) = hopper(seed) else { return };
        let experts = mixed(&mut random, &[67, 0, 9]);
        let tokens = experts.len();
        let (matrix, _) = weights(&device, &mut random, 3 * 2 * wide, cols, group);
        let routes = routes(&device, &stream, mixture, &experts);
        let input = device.upload(&random.halves(tokens * cols, 1.0)).unwrap();
        let mut room = poisoned::<bf16>(&device, tokens * cols);
        let mut give = |out: Output<'_>| {
            let from = ExpertInput::Tokens(input.view());
            ops::linear_experts_wide(&stream, &matrix, &routes, from, &mut room, out).unwrap();
        };
        let mut both = poisoned::<bf16>(&device, tokens * 2 * wide);
        let [mut apart, mut gated] = [(); 2].map(|()| poisoned::<bf16>(&device, tokens * wide));
        give(Output::Bf16(both.view_mut()));
        give(Output::Gated(gated.view_mut(), gate));
        ops::gate_mul(&stream, gate, GateLayout::Eights, both.view(), wide, apart.view_mut()).unwrap();
        assert_eq!(apart.read(&stream).unwrap(), gated.read(&stream).unwrap(), "{wide}, {group:?}");
    }
}

/// Of 8 bits with inputs of 8 bits: what an expert gives a token is, bit for bit, what its matrix gives alone. Scales of groups and of
/// whole rows; experts without tokens and elsewhere; rows of one part, of an odd number and of an even one.
#[test]
fn experts_of_8_bits_give_what_their_matrices_give_alone() {
    let mut random = Random::new(74);
    for (seed, (code, group, counts, [rows, cols])) in SEEDS.into_iter().cycle().zip([
        (EightBits::E4m3, 128, [0, 131, 3, 9], [48, 160]),
        (EightBits::E4m3, usize::MAX, [65, 1, 66, 2], [272, 64]),
        (EightBits::Int8, 256, [30, 40, 129, 0], [144, 1184]),
    ]) {
        let Some((device, stream)) = hopper(seed) else { return };
        let mixture = part(mixture(4, 1, false, true), 1, 2);
        let experts = mixed(&mut random, &counts);
        let tokens = experts.len();
        let scene = crate::w8a8::Scene::new(&mut random, code, group, [tokens, mixture.held * rows, cols]);
        let routes = routes(&device, &stream, mixture, &experts);
        let input = device.upload(&scene.input).unwrap();
        let (mut codes, mut scales) = (poisoned::<u8>(&device, tokens * cols), poisoned::<f32>(&device, tokens));
        let room = QuantizedMut { code, codes: codes.view_mut(), scales: scales.view_mut() };
        ops::quantize_routed(&stream, &routes, input.view(), room).unwrap();
        let mut given = poisoned::<bf16>(&device, tokens * rows);
        let routed = Quantized { codes: codes.view(), scales: scales.view() };
        let out = Output::Bf16(given.view_mut());
        ops::linear_experts_w8a8(&stream, &scene.matrix(&device), &routes, &routed, out).unwrap();
        let taken = counts[1] + counts[2];
        assert!(given.read(&stream).unwrap()[taken * rows..].iter().all(|value| value.is_nan()), "nobody's rows");
        // The weight of the only one is 1.
        let mut own = poisoned::<bf16>(&device, tokens * rows);
        routes.mix(&stream, given.view(), None, rows, ExpertSum::Bf16(own.view_mut())).unwrap();
        let own = own.read(&stream).unwrap();
        let (codes, scales) = quantized(&device, &stream, code, &scene.input, tokens);
        let (codes, scales) = (device.upload(&codes).unwrap(), device.upload(&scales).unwrap());
        let mut all = poisoned::<bf16>(&device, tokens * mixture.held * rows);
        let every = Quantized { codes: codes.view(), scales: scales.view() };
        ops::linear_w8a8_wide(&stream, &scene.matrix(&device), &every, Output::Bf16(all.view_mut())).unwrap();
        let all = all.read(&stream).unwrap();
        for (token, &expert) in experts.iter().enumerate() {
            let own = &own[token * rows..][..rows];
            match expert.checked_sub(1).filter(|&held| held < 2) {
                Some(held) => assert_eq!(own, &all[(2 * token + held) * rows..][..rows], "{code:?}, token {token}"),
                None => assert!(own.iter().all(|value| *value == bf16::ZERO), "{code:?}, token {token} is elsewhere"),
            }
        }
    }
}

/// For many tokens to an expert, on Hopper, with weights that have a kernel.
#[test]
fn only_hopper_multiplies_experts_widely() {
    let mut random = Random::new(73);
    let Some((own, _)) = hopper(1) else { return };
    let older = ampere(1).0;
    let mixture = mixture(4, 2, false, true);
    let widely = |device: &Device, tokens: usize, group: Option<Group>| {
        let (matrix, _) = weights(device, &mut Random::new(1), 4 * 32, 64, group);
        ops::multiplies_experts_widely(device.facts(), &matrix, &mixture, tokens)
    };
    for group in [None, Some(Group::G64)] {
        assert_eq!(
            [widely(&own, 256, group), widely(&own, 254, group), widely(&older, 256, group)],
            [true, false, false]
        );
    }
    let bytes = crate::linear::q8_0(&mut random, 64, 64);
    for code in CODES {
        let scene = crate::w8a8::Scene::new(&mut random, code, 128, [1, 4 * 32, 64]);
        let rounded = |device: &Device, tokens| {
            ops::multiplies_experts_rounded(device.facts(), &scene.matrix(device), &mixture, tokens)
        };
        assert_eq!([rounded(&own, 130), rounded(&own, 128), rounded(&older, 130)], [true, false, false]);
    }
    let int8 = Int8::read(WeightType::Q8_0, 64, 64, &bytes);
    let int8 = Matrix::int8(&own, &int8.unwrap().unwrap()).unwrap();
    assert!(!ops::multiplies_experts_widely(own.facts(), &int8, &mixture, 256));
}

/// Tiles are those of the products that follow.
#[test]
#[should_panic(expected = "routes that are chosen for narrow products")]
fn routes_for_narrow_products_are_refused() {
    multiply_by_other_routes(false);
}

#[test]
#[should_panic(expected = "routes that are chosen for wide products")]
fn routes_for_wide_products_are_refused_elsewhere() {
    multiply_by_other_routes(true);
}

fn multiply_by_other_routes(wide_routes: bool) {
    let device = HostMachine::new(Kernels::Record, 1).device(0, 1 << 24);
    let (stream, mixture) = (device.stream().unwrap(), mixture(2, 1, false, true));
    let (matrix, _) = weights(&device, &mut Random::new(1), 2 * 16, 32, None);
    let scores = device.upload(&[0f32; 8]).unwrap();
    let mut routes = Routes::new(&device, mixture, 4).unwrap();
    let choose = if wide_routes { Routes::choose_wide } else { Routes::choose };
    choose(&mut routes, &stream, scores.view()).unwrap();
    let input = device.upload(&[bf16::ZERO; 4 * 32]).unwrap();
    let (mut room, mut out) = (poisoned::<bf16>(&device, 4 * 32), poisoned::<bf16>(&device, 4 * 16));
    let (from, out) = (ExpertInput::Tokens(input.view()), Output::Bf16(out.view_mut()));
    match wide_routes {
        true => ops::linear_experts(&stream, &matrix, &routes, from, out).unwrap(),
        false => ops::linear_experts_wide(&stream, &matrix, &routes, from, &mut room, out).unwrap(),
    }
}
