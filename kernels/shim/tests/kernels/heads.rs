use half::bf16;
use windlass_kernels::cuda::ops::{self, Heads, PagesMut, Placement, Places, Rotation};
use windlass_kernels::cuda::weights::EightBits;
use windlass_kernels::ops::RopePairing;

use crate::common::{Random, device, poisoned, worst_ulps};

/// Length of what was turned.
const MAGNITUDE: f32 = 1.25;

struct Case {
    heads: Heads,
    bias: bool,
    norms: bool,
    turning: Option<(usize, RopePairing)>,
}

/// What becomes of one head.
fn reference(
    case: &Case,
    head: usize,
    values: &[bf16],
    bias: &[f32],
    norms: &[Vec<f32>; 2],
    angle: impl Fn(usize) -> f64,
) -> Vec<f64> {
    let Heads { heads, kv_heads, dim } = case.heads;
    let mut x: Vec<f64> = values.iter().map(|&value| value.into()).collect();
    if case.bias {
        x.iter_mut().zip(&bias[head * dim..]).for_each(|(x, &bias)| *x += f64::from(bias));
    }
    let kind = if head < heads { 0 } else { 1 };
    if head >= heads + kv_heads {
        return x;
    }
    if case.norms {
        let root = (x.iter().map(|x| x * x).sum::<f64>() / dim as f64 + 1e-6).sqrt();
        x.iter_mut().zip(&norms[kind]).for_each(|(x, &weight)| *x *= f64::from(weight) / root);
    }
    if let Some((pairs, pairing)) = case.turning {
        for i in 0..pairs {
            let (a, b) = if pairing == RopePairing::Adjacent { (2 * i, 2 * i + 1) } else { (i, i + pairs) };
            let (sine, cosine) = angle(i).sin_cos();
            let magnitude = f64::from(MAGNITUDE);
            let (sine, cosine) = (sine * magnitude, cosine * magnitude);
            (x[a], x[b]) = (x[a] * cosine - x[b] * sine, x[b] * cosine + x[a] * sine);
        }
    }
    x
}

#[test]
fn heads_are_biased_normed_turned_and_placed() {
    let mut random = Random::new(9);
    let heads = |heads, kv_heads, dim| Heads { heads, kv_heads, dim };
    for case in [
        Case { heads: heads(9, 3, 64), bias: false, norms: false, turning: Some((32, RopePairing::Adjacent)) },
        Case { heads: heads(14, 2, 64), bias: true, norms: false, turning: Some((32, RopePairing::HalfSplit)) },
        Case { heads: heads(2, 1, 128), bias: false, norms: true, turning: Some((64, RopePairing::HalfSplit)) },
        Case { heads: heads(3, 3, 80), bias: true, norms: true, turning: Some((10, RopePairing::HalfSplit)) },
        Case { heads: heads(1, 1, 256), bias: false, norms: true, turning: None },
    ] {
        let (device, stream) = device(1);
        let Heads { heads, kv_heads, dim } = case.heads;
        let (tokens, pages, positions) = (5usize, 4usize, 3000usize);
        let all = heads + 2 * kv_heads;
        let projected = random.halves(tokens * all * dim, 3.0);
        let bias = random.values(all * dim, 1.0);
        let norms = [random.values(dim, 2.0), random.values(dim, 2.0)];
        let places: Vec<u32> = (0..tokens).map(|_| random.below(positions) as u32).collect();
        let slots = [70u32, 255, 64, 1, 130];
        let factors: Option<Vec<f32>> =
            case.turning.map(|(pairs, _)| (0..pairs).map(|i| 1.0 + i as f32 / 7.0).collect());
        let table = case.turning.map(|(pairs, _)| {
            device.upload(&ops::rope_table(pairs, positions, 10_000.0, factors.as_deref(), MAGNITUDE)).unwrap()
        });
        let (bias_memory, slot_memory) = (device.upload(&bias).unwrap(), device.upload(&slots).unwrap());
        let norm_memory = norms.each_ref().map(|norm| device.upload(norm).unwrap());
        let placement = Placement {
            bias: case.bias.then(|| bias_memory.view()),
            norms: case.norms.then(|| norm_memory.each_ref().map(|norm| norm.view())),
            epsilon: 1e-6,
            rotation: case.turning.zip(table.as_ref()).map(|((pairs, pairing), table)| Rotation {
                table: table.view(),
                pairs,
                pairing,
            }),
        };
        let mut query = poisoned::<bf16>(&device, tokens * heads * dim);
        let mut cache = poisoned::<bf16>(&device, pages * case.heads.page_values());
        let untouched = cache.read(&stream).unwrap();
        let (projected_memory, place_memory) = (device.upload(&projected).unwrap(), device.upload(&places).unwrap());
        ops::place_heads(
            &stream,
            case.heads,
            placement,
            projected_memory.view(),
            Places { positions: place_memory.view(), slots: slot_memory.view() },
            query.view_mut(),
            PagesMut::Bf16(cache.view_mut()),
        )
        .unwrap();
        let (query, cache) = (query.read(&stream).unwrap(), cache.read(&stream).unwrap());
        let mut expected = untouched;
        for token in 0..tokens {
            let angle = |pair: usize| {
                let (pairs, _) = case.turning.unwrap();
                let factor = factors.as_ref().map_or(1.0, |factors| f64::from(factors[pair]));
                f64::from(places[token]) * 10_000f64.powf(-(pair as f64) / pairs as f64) / factor
            };
            for head in 0..all {
                let values = &projected[(token * all + head) * dim..][..dim];
                let exact = reference(&case, head, values, &bias, &norms, angle);
                let found = if head < heads {
                    &query[(token * heads + head) * dim..][..dim]
                } else {
                    let (page, place) = (slots[token] as usize / 64, slots[token] as usize % 64);
                    let row = (page * 2 * kv_heads + head - heads) * 64 + place;
                    expected[row * dim..][..dim].copy_from_slice(&cache[row * dim..][..dim]);
                    &cache[row * dim..][..dim]
                };
                let scale = exact.iter().fold(0f64, |most, x| most.max(x.abs()));
                let error = found.iter().zip(&exact).fold(0f64, |most, (&x, y)| most.max((f64::from(x) - y).abs()));
                assert!(error <= scale / 256.0, "token {token}, head {head} of {:?}: {error}", case.heads);
                assert!(head < heads + kv_heads || case.bias || worst_ulps(found, &exact) == 0.0, "values are copied");
            }
        }
        let bits = |values: &[bf16]| values.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
        assert_eq!(bits(&cache), bits(&expected), "nothing else was written");
    }
}

/// A row's largest value becomes the largest code; ties, what is below the smallest normal number, and zeros.
#[test]
fn keys_and_values_are_rounded_relative_to_their_largest() {
    let mut random = Random::new(18);
    let heads = Heads { heads: 1, kv_heads: 2, dim: 48 };
    let tokens = 70;
    let mut projected = random.halves(tokens * heads.projected_width(), 4.0);
    // Times a half, a row's scale: of e4m3 448 is the largest and 17 and 19 are ties, of integers 254.
    for (place, value) in
        [448.0, 17.0, 19.0, 0.0146484375, 0.001, 0.0009, -0.0, -448.0, 0.0, 12.4].into_iter().enumerate()
    {
        projected[heads.query_width() + place] = bf16::from_f32(value * 0.5);
    }
    projected[heads.query_width() + 48..][..48].fill(bf16::ZERO);
    for code in [EightBits::E4m3, EightBits::Int8] {
        let (device, stream) = device(1);
        let memory = device.upload(&projected).unwrap();
        let slots: Vec<u32> = (0..tokens as u32).map(|token| token * 5 % 128).collect();
        let (positions, slot_memory) = (device.upload(&slots).unwrap(), device.upload(&slots).unwrap());
        let mut query = poisoned::<bf16>(&device, tokens * heads.query_width());
        let mut codes = poisoned::<u8>(&device, 2 * heads.page_values());
        let mut scales = poisoned::<f32>(&device, 2 * heads.page_rows());
        let placement = Placement { bias: None, norms: None, epsilon: 0.0, rotation: None };
        let pages = PagesMut::Bytes { code, codes: codes.view_mut(), scales: scales.view_mut() };
        let at = Places { positions: positions.view(), slots: slot_memory.view() };
        ops::place_heads(&stream, heads, placement, memory.view(), at, query.view_mut(), pages).unwrap();
        let (codes, scales) = (codes.read(&stream).unwrap(), scales.read(&stream).unwrap());
        for (token, slot) in slots.iter().enumerate() {
            for row in 0..4 {
                let values: Vec<f32> =
                    (0..48).map(|i| f32::from(projected[(token * 5 + 1 + row) * 48 + i]) + 0.0).collect();
                let at = (*slot as usize / 64 * 4 + row) * 64 + *slot as usize % 64;
                let most = values.iter().fold(0.0f32, |most, value| most.max(value.abs()));
                let (largest, round): (f32, fn(f32) -> u8) = match code {
                    EightBits::E4m3 => (448.0, |value| nearest_e4m3(value.into())),
                    EightBits::Int8 => (127.0, |value| (value.round_ties_even() as i8).cast_unsigned()),
                };
                let factor = if most > 0.0 { largest / most } else { 0.0 };
                let exact: Vec<u8> = values.iter().map(|value| round(value * factor)).collect();
                assert_eq!(codes[at * 48..][..48], exact, "{code:?} of token {token}, row {row}: {values:?}");
                assert_eq!(scales[at], most / largest, "{code:?} of token {token}, row {row}");
            }
        }
        let written = scales.iter().filter(|scale| !scale.is_nan()).count();
        assert_eq!(written, 4 * tokens, "no other row was written");
    }
}

/// The code whose value is nearest; of two, the even one.
fn nearest_e4m3(value: f64) -> u8 {
    let distance = |code: &u8| (crate::linear::e4m3(*code) - value.abs()).abs();
    let code = (0..0x7fu8).min_by(|a, b| distance(a).total_cmp(&distance(b)).then((a % 2).cmp(&(b % 2)))).unwrap();
    code | if value.is_sign_negative() { 0x80 } else { 0 }
}
