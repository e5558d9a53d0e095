use windlass_kernels::cuda::Stream;
use windlass_kernels::cuda::ops::{
    self, ALL_BANNED, Asked, Edits, MOST_TOLD, Masks, NONE, NOT_FINITE, Samplers, TOLD, Told,
};

use crate::common::{Random, SEEDS, device, poisoned};

#[derive(Clone, Copy, Debug)]
struct Sampler {
    temperature: f32,
    top_k: u32,
    top_p: f32,
    min_p: f32,
}

const PLAIN: Sampler = Sampler { temperature: 1.0, top_k: 0, top_p: 1.0, min_p: 0.0 };

fn draw(seed: u64, logits: &[f32], vocabulary: usize, sampler: Sampler, seeds: &[u64]) -> Vec<u32> {
    let (device, stream) = device(seed);
    let rows = seeds.len();
    let all = |value: f32| device.upload(&vec![value; rows]).unwrap();
    let floor = if sampler.min_p > 0.0 { sampler.min_p.ln() } else { f32::NEG_INFINITY };
    let (temperatures, top_ps, floors) = (all(sampler.temperature), all(sampler.top_p), all(floor));
    let top_ks = device.upload(&vec![sampler.top_k; rows]).unwrap();
    let (seed_memory, positions) = (device.upload(seeds).unwrap(), device.upload(&vec![5u32; rows]).unwrap());
    let mut out = poisoned::<u32>(&device, rows);
    let samplers = Samplers {
        temperatures: temperatures.view(),
        top_ks: top_ks.view(),
        top_ps: top_ps.view(),
        floors: floors.view(),
        seeds: seed_memory.view(),
        positions: positions.view(),
    };
    ops::sample(&stream, samplers, device.upload(logits).unwrap().view(), vocabulary, out.view_mut()).unwrap();
    out.read(&stream).unwrap()
}

/// Philox4x32-10, as its authors' known answers have it.
fn uniform(seed: u64, position: u32) -> f64 {
    let (mut c, mut k) = ([position, 0, 0, 0], [seed as u32, (seed >> 32) as u32]);
    for _ in 0..10 {
        let (a, b) = (u64::from(c[0]) * 0xd251_1f53, u64::from(c[2]) * 0xcd9e_8d57);
        c = [(b >> 32) as u32 ^ c[1] ^ k[0], b as u32, (a >> 32) as u32 ^ c[3] ^ k[1], a as u32];
        k = [k[0].wrapping_add(0x9e37_79b9), k[1].wrapping_add(0xbb67_ae85)];
    }
    ((u64::from(c[0]) << 32 | u64::from(c[1])) >> 11) as f64 / (1u64 << 53) as f64
}

/// The kept tokens with their shares, in the order in which they are drawn from.
fn kept(logits: &[f32], sampler: Sampler) -> Vec<(u32, f64)> {
    let most = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let share = |&(_, logit): &(u32, f32)| f64::from(((logit - most) / sampler.temperature).exp());
    let mut tokens: Vec<(u32, f32)> = (0..).zip(logits.iter().copied()).collect();
    let truncates = (sampler.top_k > 0 && (sampler.top_k as usize) < logits.len()) || sampler.top_p < 1.0;
    if truncates {
        tokens.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
    }
    tokens.retain(|token| share(token) >= f64::from(sampler.min_p));
    if truncates && sampler.top_k > 0 {
        tokens.truncate(sampler.top_k as usize);
    }
    let mut shares: Vec<(u32, f64)> = tokens.iter().map(|token| (token.0, share(token))).collect();
    if sampler.top_p < 1.0 {
        let whole: f64 = shares.iter().map(|(_, share)| share).sum();
        let mut sum = 0.0;
        let last = shares.iter().position(|(_, share)| {
            sum += share;
            sum >= f64::from(sampler.top_p) * whole
        });
        shares.truncate(last.map_or(shares.len(), |last| last + 1));
    }
    shares
}

fn expected(logits: &[f32], sampler: Sampler, seed: u64) -> u32 {
    let shares = kept(logits, sampler);
    let target = uniform(seed, 5) * shares.iter().map(|(_, share)| share).sum::<f64>();
    let mut sum = 0.0;
    let drawn = shares.iter().find(|(_, share)| {
        sum += share;
        sum > target
    });
    drawn.or(shares.last()).unwrap().0
}

#[test]
fn greedy_takes_the_first_of_the_largest() {
    let vocabulary = 5000;
    let mut logits = Random::new(13).values(vocabulary, 1.0);
    logits[4321] = 2.0;
    logits[4322] = 2.0;
    logits[1234] = 2.0;
    let greedy = Sampler { temperature: 0.0, ..PLAIN };
    assert_eq!(draw(1, &logits, vocabulary, greedy, &[0]), [1234]);
}

#[test]
fn bad_rows_are_told() {
    let finite = [0.0, 1.0, 2.0];
    for bad in [f32::NAN, f32::INFINITY] {
        let logits = [finite, [0.0, bad, 0.0]].concat();
        assert_eq!(draw(1, &logits, 3, PLAIN, &[1, 2])[1], NOT_FINITE);
    }
    assert_eq!(draw(1, &[f32::NEG_INFINITY; 3], 3, PLAIN, &[1]), [ALL_BANNED]);
}

#[test]
fn tokens_are_drawn_as_by_sorting() {
    let mut random = Random::new(14);
    for vocabulary in [3usize, 1000, 4999] {
        for sampler in [
            PLAIN,
            Sampler { temperature: 0.3, ..PLAIN },
            Sampler { top_k: 1, ..PLAIN },
            Sampler { top_k: 40, ..PLAIN },
            Sampler { top_p: 0.9, ..PLAIN },
            Sampler { top_p: 0.01, temperature: 2.0, ..PLAIN },
            Sampler { top_k: 50, top_p: 0.8, min_p: 0.01, temperature: 0.7 },
            Sampler { min_p: 0.2, ..PLAIN },
        ] {
            // Rounded, so that many logits are equal.
            let logits: Vec<f32> = (0..vocabulary).map(|_| (random.value(8.0) * 16.0).round() / 16.0).collect();
            let seeds: Vec<u64> = (0..6).map(|_| random.next()).collect();
            let rows: Vec<f32> = seeds.iter().flat_map(|_| logits.clone()).collect();
            let expected: Vec<u32> = seeds.iter().map(|&seed| expected(&logits, sampler, seed)).collect();
            assert_eq!(draw(2, &rows, vocabulary, sampler, &seeds), expected, "{sampler:?} of {vocabulary}");
        }
    }
}

/// More tokens than are put in order alone: all as likely, nearly so, and beside many that are not to come.
#[test]
fn tokens_are_drawn_as_by_sorting_where_very_many_are_about_as_likely() {
    const VOCABULARY: usize = 4999;
    let mut random = Random::new(20);
    let near: Vec<f32> = (0..VOCABULARY).map(|_| 1.0 + (random.value(4.0).round() / 4096.0)).collect();
    let few = |token| if token % 1000 == 7 { 0.5 } else { f32::NEG_INFINITY };
    for logits in [vec![1.5; VOCABULARY], near, (0..VOCABULARY).map(few).collect()] {
        for sampler in [
            PLAIN,
            Sampler { top_k: 2, ..PLAIN },
            Sampler { top_k: 3000, ..PLAIN },
            Sampler { top_p: 0.6, ..PLAIN },
            Sampler { top_k: 3000, top_p: 0.6, min_p: 0.1, temperature: 0.9 },
        ] {
            let seeds: Vec<u64> = (0..2).map(|_| random.next()).collect();
            let expected: Vec<u32> = seeds.iter().map(|&seed| expected(&logits, sampler, seed)).collect();
            let rows = [&logits[..], &logits[..]].concat();
            assert_eq!(draw(3, &rows, VOCABULARY, sampler, &seeds), expected, "{sampler:?} of {:?}", &logits[..8]);
        }
    }
}

#[test]
fn draws_follow_the_distribution() {
    // Chi-squared with 7 degrees of freedom is above 24.3 once in a thousand.
    let logits: Vec<f32> = [1.0, 0.5, 0.0, -0.5, -1.0, 2.0, 1.5, 0.25].to_vec();
    let seeds: Vec<u64> = (0..500).map(|i: u64| i.wrapping_mul(0x9e37_79b9_7f4a_7c15)).collect();
    let rows: Vec<f32> = seeds.iter().flat_map(|_| logits.clone()).collect();
    let drawn = draw(3, &rows, 8, PLAIN, &seeds);
    let whole: f64 = logits.iter().map(|&logit| f64::from(logit).exp()).sum();
    let distance = |token: usize| {
        let expected = f64::from(logits[token]).exp() / whole * seeds.len() as f64;
        let found = drawn.iter().filter(|&&id| id as usize == token).count() as f64;
        (found - expected).powi(2) / expected
    };
    let chi_squared: f64 = (0..8).map(distance).sum();
    assert!(chi_squared < 24.3, "{chi_squared}");
}

/// Log probabilities by what is told are those of the softmax, and the most likely tokens those of sorting, whose equals come in
/// their order. Rows that do not ask, and those that drew nothing, are left alone.
#[test]
fn the_model_tells_what_it_thinks_of_the_tokens_drawn() {
    let mut random = Random::new(18);
    for (seed, vocabulary) in SEEDS.into_iter().zip([21usize, 1000, 4999]) {
        let (device, stream) = device(seed);
        let drawn = [0, 7, vocabulary as u32 - 1, 13, 5, NOT_FINITE];
        let asked = [0, 20, 1, 5, NONE, 3];
        let rows = drawn.len();
        // Rounded, so that many logits are equal.
        let mut logits: Vec<f32> =
            (0..rows * vocabulary).map(|_| (random.value(9.0) * 4.0).round() / 4.0 + 0.0).collect();
        logits[vocabulary + 3] = f32::NEG_INFINITY;
        // The fourth row's tokens are too many alike to be put in order alone, but for one, and most may not come.
        logits[3 * vocabulary..4 * vocabulary].fill(if vocabulary > 1000 { 0.25 } else { f32::NEG_INFINITY });
        logits[3 * vocabulary + 17] = 0.5;
        // The second row's token is known, whatever was drawn.
        let (tokens, counts) =
            (device.upload(&[0, 2, drawn[2], 13, 5, NOT_FINITE]).unwrap(), device.upload(&asked).unwrap());
        let targets = device.upload(&[NONE, drawn[1], NONE, NONE, NONE, NONE]).unwrap();
        let mut wholes = poisoned::<u64>(&device, rows);
        let mut told_logits = poisoned::<f32>(&device, rows * TOLD);
        let mut told_tokens = poisoned::<u32>(&device, rows * TOLD);
        let untold = told_tokens.read(&stream).unwrap()[0];
        let told = Told { wholes: wholes.view_mut(), logits: told_logits.view_mut(), tokens: told_tokens.view_mut() };
        let memory = device.upload(&logits).unwrap();
        let asks = Asked { drawn: tokens.view(), targets: targets.view(), counts: counts.view() };
        ops::tell(&stream, asks, memory.view(), vocabulary, told).unwrap();
        let (wholes, told_logits) = (wholes.read(&stream).unwrap(), told_logits.read(&stream).unwrap());
        let told_tokens = told_tokens.read(&stream).unwrap();
        for (row, own) in logits.chunks(vocabulary).enumerate() {
            let (found, values) = (&told_tokens[row * TOLD..][..TOLD], &told_logits[row * TOLD..][..TOLD]);
            let count = if drawn[row] == NOT_FINITE { NONE } else { asked[row] } as usize;
            if count > MOST_TOLD {
                assert!(found.iter().all(|&token| token == untold) && values.iter().all(|value| value.is_nan()));
                continue;
            }
            let mut order: Vec<u32> = (0..vocabulary as u32).collect();
            order.sort_by(|&a, &b| own[b as usize].total_cmp(&own[a as usize]).then(a.cmp(&b)));
            assert_eq!(found[0] as usize, order.iter().position(|&token| token == drawn[row]).unwrap(), "{row}");
            assert_eq!(found[2..2 + count], order[..count], "row {row} of {vocabulary}");
            let expected = [order[0], drawn[row]].into_iter().chain(order[..count].iter().copied());
            assert!(values.iter().zip(expected).all(|(&value, token)| value == own[token as usize]), "{row}");
            let largest = f64::from(own[order[0] as usize]);
            let whole: f64 = own.iter().map(|&logit| (f64::from(logit) - largest).exp()).sum();
            let error = (wholes[row] as f64 / Told::ONE).ln() - whole.ln();
            assert!(error.abs() < 1e-6, "row {row} of {vocabulary}: {error}");
            assert!(found[2 + count..].iter().all(|&token| token == untold), "no more than was asked for");
        }
    }
}

/// A known token is asked of whatever the logits are: where they have no order, nothing may be written by it.
#[test]
fn rows_without_an_order_are_told_nothing() {
    const VOCABULARY: usize = 1000;
    let (device, stream) = device(2);
    let not_numbers = |count: usize| {
        let mut row = Random::new(19).values(VOCABULARY, 1.0);
        (0..count).for_each(|index| row[index * (VOCABULARY / count)] = f32::NAN);
        row
    };
    let mut infinite = not_numbers(0);
    infinite[3] = f32::INFINITY;
    let rows =
        [not_numbers(1), not_numbers(21), not_numbers(VOCABULARY), infinite, vec![f32::NEG_INFINITY; VOCABULARY]];
    let targets = device.upload(&[7; 5]).unwrap();
    let (drawn, counts) = (device.upload(&[NOT_FINITE; 5]).unwrap(), device.upload(&[MOST_TOLD as u32; 5]).unwrap());
    let mut wholes = poisoned::<u64>(&device, 5);
    let (mut logits, mut tokens) = (poisoned::<f32>(&device, 5 * TOLD), poisoned::<u32>(&device, 5 * TOLD));
    let untold = (wholes.read(&stream).unwrap(), tokens.read(&stream).unwrap());
    let told = Told { wholes: wholes.view_mut(), logits: logits.view_mut(), tokens: tokens.view_mut() };
    let memory = device.upload(&rows.concat()).unwrap();
    let asked = Asked { drawn: drawn.view(), targets: targets.view(), counts: counts.view() };
    ops::tell(&stream, asked, memory.view(), VOCABULARY, told).unwrap();
    assert_eq!((wholes.read(&stream).unwrap(), tokens.read(&stream).unwrap()), untold);
    assert!(logits.read(&stream).unwrap().iter().all(|value| value.is_nan()));
}

fn adjusted(
    stream: &Stream,
    logits: &[f32],
    vocabulary: usize,
    masks: (&[u32], &[u32]),
    edits: (&[u32], &[u32], &[f32]),
) -> Vec<f32> {
    let device = stream.device();
    let mut memory = device.upload(logits).unwrap();
    let (rows, bits) = (device.upload(masks.0).unwrap(), device.upload(masks.1).unwrap());
    let (firsts, tokens) = (device.upload(edits.0).unwrap(), device.upload(edits.1).unwrap());
    let values = device.upload(edits.2).unwrap();
    let masks = Masks { rows: rows.view(), bits: bits.view() };
    let edits = Edits { firsts: firsts.view(), tokens: tokens.view(), values: values.view() };
    ops::adjust_logits(stream, masks, edits, vocabulary, memory.view_mut()).unwrap();
    memory.read(stream).unwrap()
}

#[test]
fn masks_and_edits_change_what_they_name() {
    let (_, stream) = device(1);
    let vocabulary = 40;
    let logits: Vec<f32> = (0..2 * vocabulary).map(|i| i as f32 - 20.0).collect();
    // The second row's mask allows tokens 1, 33 and 39; its edits come after it.
    let masks: (&[u32], &[u32]) = (&[u32::MAX, 0], &[1 << 1, 1 << 1 | 1 << 7]);
    let edits: (&[u32], &[u32], &[f32]) = (
        &[0, 3, 6],
        &[0, 25, 26, 1, 2, 33],
        &[
            0.0, 2.0, 0.0, 0.0, // repetition of a negative logit
            1.0, 2.0, 0.5, 0.0, // bias, repetition of a positive one, cost
            0.0, 1.0, 0.0, 1.0, // banned
            3e38, 1.0, -3.4e38, 0.0, // kept finite
            1.0, 1.0, 0.0, 0.0, // masked: stays so
            0.0, 1.0, 0.25, 0.0,
        ],
    );
    let found = adjusted(&stream, &logits, vocabulary, masks, edits);
    let mut expected = logits.clone();
    (expected[0], expected[25], expected[26]) = (-40.0, 2.5, f32::NEG_INFINITY);
    let second = &mut expected[vocabulary..];
    let (one, other, last) = (f32::MAX, second[33] - 0.25, second[39]);
    second.fill(f32::NEG_INFINITY);
    (second[1], second[33], second[39]) = (one, other, last);
    assert_eq!(found, expected);
}

#[test]
fn what_is_no_number_stays_for_the_draw_to_report() {
    let (_, stream) = device(1);
    let logits = [1.0, f32::NAN, f32::INFINITY, 2.0];
    let edits: (&[u32], &[u32], &[f32]) = (&[0, 2], &[1, 2], &[1.0, 1.0, 0.0, 0.0, 0.0, 1.0, 0.0, 1.0]);
    let found = adjusted(&stream, &logits, 4, (&[0], &[0b1000]), edits);
    assert!(found[0] == f32::NEG_INFINITY && found[1].is_nan() && found[2] == f32::INFINITY && found[3] == 2.0);
}
