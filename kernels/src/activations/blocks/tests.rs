use super::*;
use crate::testing::{Random, packed};
use crate::{ActivationType, Activations, Kernels, WeightType};

/// Inputs of 512 values in blocks: every set gives the same.
fn converted(kind: ActivationType, values: &[f32]) -> Vec<Vec<Block>> {
    let of = |kernels: Kernels| {
        let pool = Pool::with_kernels(2, kernels).unwrap();
        let mut activations = Activations::new(kind);
        activations.load(&pool, values, &[&packed(&pool, WeightType::Q4K, 16, 512, 1)]);
        let blocks = |input| activations.blocks().of_input(input).copied().collect();
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
fn codes_are_nearest_with_a_scale_for_each_block_in_every_set() {
    let mut values = Random::new(3).values(512 * 19, 5.0);
    values[..256].fill(0.0);
    values[256] = -1e30;
    values[512..768].fill(1e-38);
    let blocks = converted(ActivationType::Int8, &values).concat();
    for (block, values) in blocks.iter().zip(values.chunks(BLOCK)) {
        let half_step = largest(values) / 254.0;
        for (decoded, &value) in decoded(block).zip(values) {
            let error = (decoded - f64::from(value)).abs();
            assert!(error <= 1e-36f64.max(1.0002 * half_step), "{value} missed by {error}: {half_step}");
        }
    }
}

#[test]
fn spans_share_the_scale_of_their_largest_value_and_hold_the_sum_of_their_codes() {
    let (cols, tokens) = (512, 19);
    let values = Random::new(3).values(cols * tokens, 5.0);
    let merging = |kernels: &Kernels| kernels.call(crate::activations::grouping::MergesColumns);
    for kernels in Kernels::available().into_iter().filter(merging) {
        let pool = Pool::with_kernels(2, kernels).unwrap();
        let mut activations = Activations::new(ActivationType::Int8).varying();
        activations.load(&pool, &values, &[&packed(&pool, WeightType::Q4K, 16, cols, 1)]);
        for group in activations.blocks().groups() {
            for (at, negated_sum) in group.negated_sums.iter().enumerate() {
                let (span, input) = (at / group.size, at % group.size);
                let blocks: Vec<&Block> = group.blocks.iter().skip(input).step_by(group.size).collect();
                let blocks = blocks.chunks(SPAN_BLOCKS).nth(span).unwrap();
                let values = &values[(group.first + input) * cols..][..cols];
                let values = values.chunks(SPAN_BLOCKS * BLOCK).nth(span).unwrap();
                assert_eq!(blocks.iter().map(|block| block.negated_sum).sum::<i32>(), *negated_sum);
                for (decoded, &value) in blocks.iter().copied().flat_map(decoded).zip(values) {
                    let (error, half_step) = ((decoded - f64::from(value)).abs(), largest(values) / 254.0);
                    assert!(error <= 1.0002 * half_step, "{}: {value} missed by {error}", kernels.name());
                }
            }
            assert_eq!(group.negated_sums.len(), 2 * group.size);
        }
    }
}

#[test]
fn blocks_hold_the_sums_of_their_codes() {
    let values = Random::new(5).values(512, 5.0);
    for block in converted(ActivationType::Int8, &values).concat() {
        let codes = block.codes.as_flattened();
        assert_eq!(-block.negated_sum, codes.iter().map(|&code| i32::from(code)).sum::<i32>());
        assert_eq!(-block.negated_high_sum, codes[16..].iter().map(|&code| i32::from(code)).sum::<i32>());
        assert_eq!(block.sum, -block.negated_sum as f32);
    }
}

#[test]
fn two_planes_leave_an_error_below_two_to_the_minus_15_in_every_set() {
    let values = Random::new(4).values(512 * 19, 5.0);
    let inputs = converted(ActivationType::Int16, &values);
    for (planes, values) in inputs.chunks(2).zip(values.chunks(512)) {
        let [coarse, fine] = [0, 1].map(|plane: usize| planes[plane].iter().flat_map(decoded));
        let bounds = values.chunks(BLOCK).flat_map(|block| vec![largest(block) / 32768.0; block.len()]);
        for ((coarse, fine), (bound, &value)) in coarse.zip(fine).zip(bounds.zip(values)) {
            let error = (coarse + fine - f64::from(value)).abs();
            assert!(error <= bound, "{value} missed by {error}");
        }
    }
}
