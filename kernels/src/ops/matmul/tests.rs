use half::bf16;

use super::*;
use crate::activations::blocks::Block;
use crate::testing::{Random, bits, file_bytes, file_values, packed, relative_error};
use crate::{ActivationType, Kernels, WeightType};

const KINDS: [ActivationType; 2] = [ActivationType::Int8, ActivationType::Int16];

fn product(pool: &Pool, kind: ActivationType, matrix: &PackedMatrix, input: &[f32]) -> Vec<f32> {
    let mut activations = Activations::new(kind);
    activations.load(pool, input, &[matrix]);
    let mut out = vec![f32::NAN; activations.tokens() * matrix.rows()];
    matmul(pool, &activations, matrix, &mut out);
    out
}

/// In f64, from the file's bytes and the activations as the kernel sees them.
fn reference(weight_type: WeightType, bytes: &[u8], rows: usize, activations: &Activations) -> Vec<f64> {
    sums(weight_type, bytes, rows, activations, |product| product)
}

/// The same of the products' magnitudes.
fn magnitudes(weight_type: WeightType, bytes: &[u8], rows: usize, activations: &Activations) -> Vec<f64> {
    sums(weight_type, bytes, rows, activations, f64::abs)
}

fn sums(
    weight_type: WeightType,
    bytes: &[u8],
    rows: usize,
    activations: &Activations,
    term: fn(f64) -> f64,
) -> Vec<f64> {
    let cols = activations.cols();
    let weights = file_values(weight_type, bytes);
    let mut out = Vec::new();
    for token in 0..activations.tokens() {
        let values = seen_by(weight_type, activations, token);
        let row = |row: usize| weights[row * cols..][..cols].iter().zip(&values).map(|(w, v)| term(w * v)).sum::<f64>();
        out.extend((0..rows).map(row));
    }
    out
}

fn norm(values: &[f64]) -> f64 {
    values.iter().map(|value| value * value).sum::<f64>().sqrt()
}

fn distance(found: &[f32], exact: &[f64]) -> f64 {
    norm(&found.iter().zip(exact).map(|(&found, exact)| f64::from(found) - exact).collect::<Vec<_>>())
}

/// A token's values as weights of this type multiply them.
fn seen_by(weight_type: WeightType, activations: &Activations, token: usize) -> Vec<f64> {
    let planes = (0..activations.planes()).map(|plane| token * activations.planes() + plane);
    let planes: Vec<Vec<f64>> = match weight_type {
        WeightType::F32 | WeightType::F16 => vec![activations.values(token).iter().copied().map(f64::from).collect()],
        WeightType::BF16 => planes.map(|plane| paired(activations.pairs(plane), activations.cols())).collect(),
        _ => planes.map(|plane| activations.blocks().of_input(plane).flat_map(decoded).collect()).collect(),
    };
    (0..activations.cols()).map(|col| planes.iter().map(|plane| plane[col]).sum()).collect()
}

fn paired(pairs: &[[bf16; 2]], cols: usize) -> Vec<f64> {
    pairs.as_flattened()[..cols].iter().map(|value| value.to_f64()).collect()
}

fn decoded(block: &Block) -> impl Iterator<Item = f64> + '_ {
    block.codes.as_flattened().iter().map(|&code| f64::from(code) * f64::from(block.scale))
}

/// Shapes whose rows fill tiles and panels or not, with one and several cells.
fn shapes(weight_type: WeightType) -> Vec<(usize, usize)> {
    let block = weight_type.block_elements();
    let cols = if block == 1 { 37 } else { 3 * block };
    vec![(1, block), (16, cols), (17, cols), (45, cols), (80, 2 * block)]
}

#[test]
fn products_match_the_reference_in_every_set() {
    for kernels in Kernels::available() {
        let pool = Pool::with_kernels(2, kernels).unwrap();
        for weight_type in WeightType::ALL {
            for (rows, cols) in shapes(weight_type) {
                for (kind, tokens) in
                    KINDS.into_iter().flat_map(|kind| [1, 2, 3, 4, 5, 13].map(|tokens| (kind, tokens)))
                {
                    let bytes = file_bytes(weight_type, rows, cols, 7);
                    let matrix = PackedMatrix::pack(&pool, weight_type, rows, cols, &bytes).unwrap();
                    let input = Random::new(tokens as u64).values(tokens * cols, 3.0);
                    let mut activations = Activations::new(kind);
                    activations.load(&pool, &input, &[&matrix]);
                    let mut out = vec![f32::NAN; tokens * rows];
                    matmul(&pool, &activations, &matrix, &mut out);
                    let exact = reference(weight_type, &bytes, rows, &activations);
                    // Of what is summed, not of the sum, which may be as good as nothing.
                    let error = distance(&out, &exact) / norm(&magnitudes(weight_type, &bytes, rows, &activations));
                    let what = format!("{} {weight_type:?} [{rows}, {cols}] × {tokens} {kind:?}", kernels.name());
                    assert!(error < 1e-7, "{what}: {error:e}");
                }
            }
        }
    }
}

#[test]
fn quantizing_activations_loses_little() {
    let pool = Pool::new(1).unwrap();
    for weight_type in WeightType::ALL {
        let (rows, cols, tokens) = (64, 512, 3);
        let bytes = file_bytes(weight_type, rows, cols, 9);
        let matrix = PackedMatrix::pack(&pool, weight_type, rows, cols, &bytes).unwrap();
        let input = Random::new(1).values(tokens * cols, 2.0);
        let weights = file_values(weight_type, &bytes);
        let exact: Vec<f64> = input
            .chunks(cols)
            .flat_map(|token| {
                weights.chunks(cols).map(move |row| row.iter().zip(token).map(|(w, &x)| w * f64::from(x)).sum())
            })
            .collect();
        for (kind, bound) in KINDS.into_iter().zip([6e-3, 3e-5]) {
            let error = relative_error(&product(&pool, kind, &matrix, &input), &exact);
            assert!(error < bound, "{weight_type:?} {kind:?}: {error:e}");
        }
    }
}

#[test]
fn bits_are_the_same_in_every_set_batch_and_thread_count() {
    let scalar = Pool::with_kernels(1, Kernels::named("scalar").unwrap()).unwrap();
    let kinds = KINDS.into_iter().flat_map(|kind| WeightType::ALL.map(|weight_type| (kind, weight_type)));
    for (kind, weight_type) in kinds {
        for (rows, cols) in shapes(weight_type) {
            let tokens = 23;
            let input = Random::new(5).values(tokens * cols, 1.0);
            let matrix = packed(&scalar, weight_type, rows, cols, 11);
            let one_by_one: Vec<f32> =
                input.chunks(cols).flat_map(|token| product(&scalar, kind, &matrix, token)).collect();
            for kernels in Kernels::available() {
                for threads in [1, 3] {
                    let pool = Pool::with_kernels(threads, kernels).unwrap();
                    for batch in [1, 2, 3, 4, 7, 16, tokens] {
                        let batched: Vec<f32> = input
                            .chunks(batch * cols)
                            .flat_map(|tokens| product(&pool, kind, &matrix, tokens))
                            .collect();
                        let what = format!("{} {weight_type:?} {kind:?} [{rows}, {cols}] by {batch}", kernels.name());
                        assert_eq!(bits(&one_by_one), bits(&batched), "{what} on {threads} threads");
                    }
                }
            }
        }
    }
}

#[test]
fn long_rows_go_on_from_the_sums_of_their_first_columns() {
    // More columns than are unpacked at a time, and those of several formats' cells no whole number of times.
    let (rows, cols, tokens) = (33, 9 * 256, 20);
    for weight_type in WeightType::ALL {
        for kernels in Kernels::available() {
            let pool = Pool::with_kernels(2, kernels).unwrap();
            let matrix = packed(&pool, weight_type, rows, cols, 13);
            let input = Random::new(6).values(tokens * cols, 1.0);
            let one_by_one: Vec<f32> =
                input.chunks(cols).flat_map(|token| product(&pool, ActivationType::Int8, &matrix, token)).collect();
            let together = product(&pool, ActivationType::Int8, &matrix, &input);
            assert_eq!(bits(&one_by_one), bits(&together), "{} {weight_type:?}", kernels.name());
        }
    }
}

/// Where tokens may round by their number; with the activations as they were loaded.
fn varying_product(pool: &Pool, kind: ActivationType, matrix: &PackedMatrix, input: &[f32]) -> (Vec<f32>, Activations) {
    let mut activations = Activations::new(kind).varying();
    activations.load(pool, input, &[matrix]);
    let mut out = vec![f32::NAN; activations.tokens() * matrix.rows()];
    matmul(pool, &activations, matrix, &mut out);
    (out, activations)
}

/// The processors' sets that merge columns, the reference first.
fn merging() -> Vec<Kernels> {
    let merging = |kernels: &Kernels| kernels.call(crate::activations::grouping::MergesColumns);
    let mut sets: Vec<Kernels> = Kernels::available().into_iter().filter(merging).collect();
    sets.sort_by_key(|kernels| kernels.name() != "scalar");
    sets
}

/// Products of many tokens see weights that are at most half a 127th of a span's largest one away.
#[test]
fn merged_columns_are_near_their_formats_in_every_set() {
    for weight_type in MERGED {
        for (rows, cols) in [(1, 256), (45, 3 * 256), (33, 9 * 256)] {
            let bytes = file_bytes(weight_type, rows, cols, 17);
            let weights = file_values(weight_type, &bytes);
            let mut reference: Option<Vec<f32>> = None;
            for kernels in merging() {
                let pool = Pool::with_kernels(2, kernels).unwrap();
                let matrix = PackedMatrix::pack(&pool, weight_type, rows, cols, &bytes).unwrap();
                let (tokens, what) = (29, format!("{} {weight_type:?} [{rows}, {cols}]", kernels.name()));
                let mut input = Random::new(8).values(tokens * cols, 1.0);
                // Of these nothing cancels out: not what every code had too much or too little, either.
                input[..tokens / 2 * cols].iter_mut().for_each(|value| *value = value.abs());
                let (out, seen) = varying_product(&pool, ActivationType::Int8, &matrix, &input);
                for (at, &found) in out.iter().enumerate() {
                    let values = seen_by(weight_type, &seen, at / rows);
                    let spans = weights[at % rows * cols..][..cols].chunks(256).zip(values.chunks(256));
                    let (mut exact, mut bound) = (0.0, 0.0);
                    for (weights, values) in spans {
                        let largest = weights.iter().fold(0.0, |most: f64, weight| most.max(weight.abs()));
                        exact += weights.iter().zip(values).map(|(w, v)| w * v).sum::<f64>();
                        bound += values.iter().map(|value| value.abs()).sum::<f64>() * largest / 253.9;
                    }
                    assert!(
                        (f64::from(found) - exact).abs() <= bound + 1e-30,
                        "{what}: {found}, not {exact} ± {bound}"
                    );
                }
                let expected = bits(reference.get_or_insert_with(|| out.clone()));
                assert_eq!(bits(&out), expected, "{what}");
            }
        }
    }
}

/// A few tokens, planes for 16 bits and all but K-quants are multiplied as always.
#[test]
fn only_many_inputs_of_k_quants_are_merged() {
    let (rows, cols) = (20, 512);
    for kernels in merging() {
        let pool = Pool::with_kernels(1, kernels).unwrap();
        for weight_type in WeightType::ALL.into_iter().filter(|weight_type| weight_type.block_elements() > 1) {
            let matrix = packed(&pool, weight_type, rows, cols, 19);
            let input = Random::new(9).values(29 * cols, 1.0);
            let few = &input[..4 * cols];
            let same = |kind, input: &[f32]| {
                let (varying, _) = varying_product(&pool, kind, &matrix, input);
                bits(&varying) == bits(&product(&pool, kind, &matrix, input))
            };
            let what = format!("{weight_type:?} {}", kernels.name());
            assert!(same(ActivationType::Int8, few) && same(ActivationType::Int16, &input), "{what}");
            assert_eq!(same(ActivationType::Int8, &input), !MERGED.contains(&weight_type), "{what}");
        }
    }
}

const MERGED: [WeightType; 5] = [WeightType::Q2K, WeightType::Q3K, WeightType::Q4K, WeightType::Q5K, WeightType::Q6K];

#[test]
fn extreme_codes_do_not_saturate() {
    // The largest codes of both sides in every place: what 16-bit intermediate sums would lose.
    let cols = 256;
    for kernels in Kernels::available() {
        let pool = Pool::with_kernels(1, kernels).unwrap();
        for weight_type in WeightType::ALL.into_iter().filter(|weight_type| weight_type.block_elements() > 1) {
            for byte in [0x80, 0x7f, 0xff, 0x00] {
                let mut bytes = file_bytes(weight_type, 16, cols, 3);
                let block_bytes = weight_type.block_bytes();
                let codes = match weight_type {
                    WeightType::Q2K => 16..80,
                    WeightType::Q3K => 0..96,
                    WeightType::Q4K => 16..144,
                    WeightType::Q5K => 16..176,
                    WeightType::Q6K => 0..192,
                    WeightType::IQ4XS => 8..136,
                    WeightType::Q5_0 | WeightType::Q5_1 => block_bytes - 20..block_bytes,
                    WeightType::Q8_0 | WeightType::NF4 | WeightType::FP4 => 2..block_bytes,
                    WeightType::S4G64 | WeightType::S4G128 => 2..block_bytes,
                    WeightType::I8G64 | WeightType::I8G128 => 2..block_bytes,
                    WeightType::U8G32 | WeightType::U8G64 | WeightType::F8G64 => 3..block_bytes,
                    WeightType::I4G64 | WeightType::I4G128 => 4..block_bytes,
                    WeightType::I2G32 | WeightType::I2G64 | WeightType::I2G128 | WeightType::I2G256 => 3..block_bytes,
                    WeightType::I3G32 | WeightType::I3G64 | WeightType::I3G128 | WeightType::I3G256 => 3..block_bytes,
                    WeightType::I4G32 => 3..block_bytes,
                    _ => block_bytes - 16..block_bytes,
                };
                bytes.chunks_exact_mut(block_bytes).for_each(|block| block[codes.clone()].fill(byte));
                let matrix = PackedMatrix::pack(&pool, weight_type, 16, cols, &bytes).unwrap();
                for value in [1.0, -1.0] {
                    let mut activations = Activations::new(ActivationType::Int8);
                    activations.load(&pool, &vec![value; 5 * cols], &[&matrix]);
                    let mut out = vec![0.0; 5 * 16];
                    matmul(&pool, &activations, &matrix, &mut out);
                    let expected = reference(weight_type, &bytes, 16, &activations);
                    assert!(relative_error(&out, &expected) < 1e-5, "{} {weight_type:?} {byte:#x}", kernels.name());
                }
            }
        }
    }
}

#[test]
fn several_products_share_a_region() {
    let pool = Pool::new(2).unwrap();
    let matrices = [(WeightType::Q4K, 40), (WeightType::Q6K, 20), (WeightType::F16, 33)]
        .map(|(weight_type, rows)| packed(&pool, weight_type, rows, 256, rows as u64));
    let input = Random::new(2).values(3 * 256, 1.0);
    let mut activations = Activations::new(ActivationType::Int8);
    activations.load(&pool, &input, &matrices.each_ref());
    let mut outs = matrices.each_ref().map(|matrix| vec![0.0; 3 * matrix.rows()]);
    let mut products: Vec<_> = matrices.iter().zip(&mut outs).map(|(matrix, out)| Product { matrix, out }).collect();
    matmul_many(&pool, &activations, &mut products);
    for (matrix, out) in matrices.iter().zip(&outs) {
        assert_eq!(
            bits(out),
            bits(&product(&pool, ActivationType::Int8, matrix, &input)),
            "{:?}",
            matrix.weight_type()
        );
    }
}
