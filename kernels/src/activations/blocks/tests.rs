use super::*;
use crate::testing::{Random, packed};
use crate::{ActivationType, Activations, Kernels, WeightType};

/// One of each number of blocks that share a scale.
const TYPES: [(WeightType, usize); 2] = [(WeightType::I8G128, 1), (WeightType::Q4K, 8)];

/// Inputs of 512 values in blocks for weights of this type: every set gives the same.
fn converted(kind: ActivationType, (weight_type, run): (WeightType, usize), values: &[f32]) -> Vec<Vec<Block>> {
    let of = |kernels: Kernels| {
        let pool = Pool::with_kernels(2, kernels).unwrap();
        let mut activations = Activations::new(kind);
        activations.load(&pool, values, &[&packed(&pool, weight_type, 16, 512, 1)]);
        let blocks = |input| activations.blocks(run).of_input(input).copied().collect();
        (0..activations.inputs()).map(blocks).collect()
    };
    let reference = of(Kernels::named("scalar").unwrap());
    for kernels in Kernels::available() {
        assert_eq!(reference, of(kernels), "{}", kernels.name());
    }
    reference
}

fn largest(values: &[f32]) -> f64 {
    values.iter().fold(0.0, |largest, &value| f64::from(value.abs()).max(largest))
}

fn decoded(block: &Block) -> impl Iterator<Item = f64> + '_ {
    block.codes.as_flattened().iter().map(|&code| f64::from(code) * f64::from(block.scale))
}

#[test]
fn codes_are_nearest_with_one_scale_for_a_run_in_every_set() {
    let mut values = Random::new(3).values(512 * 19, 5.0);
    values[..256].fill(0.0);
    values[256] = -1e30;
    values[512..768].fill(1e-38);
    for of_type in TYPES {
        let blocks = converted(ActivationType::Int8, of_type, &values).concat();
        for (blocks, values) in blocks.chunks(of_type.1).zip(values.chunks(of_type.1 * BLOCK)) {
            let half_step = largest(values) / 254.0;
            for (decoded, &value) in blocks.iter().flat_map(decoded).zip(values) {
                let error = (decoded - f64::from(value)).abs();
                assert!(error <= 1e-36f64.max(1.0002 * half_step), "{value} missed by {error}: {half_step}");
            }
            assert!(blocks.iter().all(|block| block.scale == blocks[0].scale));
        }
    }
}

#[test]
fn blocks_hold_the_sums_of_their_codes() {
    let values = Random::new(5).values(512, 5.0);
    for block in converted(ActivationType::Int8, (WeightType::Q6K, 8), &values).concat() {
        let codes = block.codes.as_flattened();
        assert_eq!(-block.negated_sum, codes.iter().map(|&code| i32::from(code)).sum::<i32>());
        assert_eq!(-block.negated_high_sum, codes[16..].iter().map(|&code| i32::from(code)).sum::<i32>());
        assert_eq!(block.sum, -block.negated_sum as f32);
    }
}

#[test]
fn two_planes_leave_an_error_below_two_to_the_minus_15_in_every_set() {
    let values = Random::new(4).values(512 * 19, 5.0);
    for of_type in TYPES {
        let inputs = converted(ActivationType::Int16, of_type, &values);
        for (planes, values) in inputs.chunks(2).zip(values.chunks(512)) {
            let [coarse, fine] = [0, 1].map(|plane: usize| planes[plane].iter().flat_map(decoded));
            let bounds = values.chunks(of_type.1 * BLOCK).flat_map(|run| vec![largest(run) / 32768.0; run.len()]);
            for ((coarse, fine), (bound, &value)) in coarse.zip(fine).zip(bounds.zip(values)) {
                let error = (coarse + fine - f64::from(value)).abs();
                assert!(error <= bound, "{value} missed by {error}");
            }
        }
    }
}
