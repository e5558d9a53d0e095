//! Small random models in every weight type against candle on the same weights widened to f32.

use crate::common::oracle::{candle_logits, compare, our_logits, our_logits_with, widen};
use crate::common::tiny::{Random, Tiny};
use windlass_checkpoint::testing::GgufBuilder;
use windlass_checkpoint::{Checkpoint, ElementType};
use windlass_engine_model::{ActivationType, LoadOptions};
use windlass_kernels::WeightType;

/// Enough for several blocks of 16 and chunks that straddle them.
const POSITIONS: usize = 75;
const CHUNK: usize = 25;

fn tokens() -> Vec<u32> {
    let mut random = Random(7);
    (0..POSITIONS).map(|_| (random.bits() % 320) as u32).collect()
}

fn logits(file: &GgufBuilder) -> Vec<Vec<f32>> {
    our_logits(&Checkpoint::from_bytes(file.build()).unwrap(), &tokens(), CHUNK)
}

/// Largest relative error of logits: of bf16 in the KV cache alone, of activations in bf16 too, or of those in int8, with a
/// scale for each 32 values or for a K-quant's 256, whose largest is about 1.35 times as large where values are normal.
fn bound(kind: WeightType) -> f64 {
    match kind {
        WeightType::F32 | WeightType::F16 => EXACT,
        WeightType::BF16 => 0.012,
        _ if kind.block_elements() == 256 => 0.047,
        _ => 0.035,
    }
}

const EXACT: f64 = 0.006;

#[test]
fn every_weight_type_computes_its_values() {
    let in_gguf = |kind: &WeightType| ElementType::named(kind.name()).is_some();
    for kind in WeightType::ALL.into_iter().filter(in_gguf) {
        let file = Tiny::of(kind).build();
        let agreement = compare(&candle_logits(&widen(&file.build()), &tokens()), &logits(&file));
        println!("{:5} {agreement}", kind.name());
        assert!(agreement.relative_error() <= bound(kind), "{}: {agreement}", kind.name());
    }
}

#[test]
fn bf16_multiplies_finer_activations_as_well_as_floats_do() {
    let file = Tiny::of(WeightType::BF16).build();
    let options = LoadOptions { activations: ActivationType::Int16, ..LoadOptions::default() };
    let found = our_logits_with(&Checkpoint::from_bytes(file.build()).unwrap(), &tokens(), CHUNK, &options);
    let agreement = compare(&candle_logits(&widen(&file.build()), &tokens()), &found);
    assert!(agreement.relative_error() <= EXACT, "{agreement}");
}

#[test]
fn an_untied_head_and_many_heads_compute_too() {
    let plain = Tiny::of(WeightType::Q8_0);
    let shapes = [
        Tiny { tied: false, ..plain },
        Tiny { heads: 8, kv_heads: 8, rope_dims: 32, ..plain },
        Tiny { heads: 8, kv_heads: 1, rope_dims: 32, ..plain },
        Tiny { layers: 1, hidden: 192, feed_forward: 96, heads: 6, kv_heads: 3, rope_dims: 32, ..plain },
    ];
    for (index, shape) in shapes.iter().enumerate() {
        let file = shape.build();
        let agreement = compare(&candle_logits(&widen(&file.build()), &tokens()), &logits(&file));
        assert!(agreement.relative_error() <= bound(shape.kind), "shape {index}: {agreement}");
    }
}

/// candle knows neither, so they are held against each other: a tensor that divides every frequency by 4 is linear
/// scaling by 4, and at a quarter of the frequencies position 4p turns as p did.
#[test]
fn rope_factors_and_linear_scaling_divide_the_frequencies() {
    let plain = Tiny::of(WeightType::F32).build();
    let factors = plain.clone().tensor_f32("rope_freqs.weight", &[32], &[4.0; 32]);
    let linear = plain.clone().str("llama.rope.scaling.type", "linear").f32("llama.rope.scaling.factor", 4.0);
    assert_eq!(logits(&factors), logits(&linear));
    assert_ne!(logits(&factors), logits(&plain));
    let both = linear.clone().tensor_f32("rope_freqs.weight", &[32], &[0.25; 32]);
    assert_eq!(logits(&both), logits(&plain));
    let uneven = Tiny { rope_factors: true, ..Tiny::of(WeightType::F32) }.build();
    assert_ne!(logits(&uneven), logits(&plain));
}
