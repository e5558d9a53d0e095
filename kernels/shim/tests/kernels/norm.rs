use half::bf16;
use windlass_kernels::cuda::ops;

use crate::common::{Random, SEEDS, device, poisoned, worst_ulps};

fn reference(input: &[f32], weight: &[f32], epsilon: f32) -> Vec<f64> {
    let token = |x: &[f32]| {
        let mean = x.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>() / x.len() as f64;
        let root = (mean + f64::from(epsilon)).sqrt();
        x.iter().zip(weight).map(|(&x, &w)| f64::from(x) / root * f64::from(w)).collect::<Vec<_>>()
    };
    input.chunks(weight.len()).flat_map(token).collect()
}

#[test]
fn norms_match_the_reference() {
    let mut random = Random::new(1);
    for seed in SEEDS {
        let (device, stream) = device(seed);
        for (tokens, cols) in [(1, 8), (3, 576), (2, 2048), (5, 4104)] {
            let (residual, weight) = (random.values(tokens * cols, 3.0), random.values(cols, 2.0));
            let addend = random.halves(tokens * cols, 3.0);
            let sums: Vec<f32> = residual.iter().zip(&addend).map(|(a, b)| a + b.to_f32()).collect();
            let mut summed = device.upload(&residual).unwrap();
            let (addend, weights) = (device.upload(&addend).unwrap(), device.upload(&weight).unwrap());
            let mut plain = poisoned::<bf16>(&device, tokens * cols);
            let mut added = poisoned::<bf16>(&device, tokens * cols);
            ops::rms_norm(&stream, summed.view(), weights.view(), 1e-5, plain.view_mut()).unwrap();
            ops::add_rms_norm(&stream, summed.view_mut(), addend.view(), weights.view(), 1e-5, added.view_mut())
                .unwrap();
            assert_eq!(summed.read(&stream).unwrap(), sums);
            let (plain, added) = (plain.read(&stream).unwrap(), added.read(&stream).unwrap());
            assert!(worst_ulps(&plain, &reference(&residual, &weight, 1e-5)) <= 0.51, "{tokens} x {cols}");
            assert!(worst_ulps(&added, &reference(&sums, &weight, 1e-5)) <= 0.51, "{tokens} x {cols}");
            let mut with_normed = device.upload(&residual).unwrap();
            ops::add_normed(&stream, with_normed.view_mut(), addend.view(), weights.view(), 1e-5).unwrap();
            let wide: Vec<f32> = addend.read(&stream).unwrap().iter().map(|value| value.to_f32()).collect();
            let normed = reference(&wide, &weight, 1e-5);
            let near = |((found, before), normed): ((f32, &f32), &f64)| {
                (f64::from(found) - f64::from(*before) - normed).abs() <= 2e-6 * (1.0 + normed.abs())
            };
            let found = with_normed.read(&stream).unwrap();
            assert!(found.into_iter().zip(&residual).zip(&normed).all(near), "{tokens} x {cols}");
        }
    }
}
