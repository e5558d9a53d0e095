use half::bf16;
use windlass_kernels::cuda::ops::{self, Gate, GateLayout};

use crate::common::{Random, device, poisoned, worst_ulps};

fn reference(gate: Gate, x: f64) -> f64 {
    match gate {
        Gate::Silu => x / (1.0 + (-x).exp()),
        Gate::GeluTanh => {
            let z = std::f64::consts::FRAC_2_PI.sqrt() * (x + 0.044715 * x.powi(3));
            0.5 * x * (1.0 + z.tanh())
        }
    }
}

#[test]
fn gated_activations_match_the_reference() {
    let mut random = Random::new(3);
    for gate in [Gate::Silu, Gate::GeluTanh] {
        for (tokens, cols) in [(1, 8), (3, 1536), (2, 4104)] {
            let (device, stream) = device(1);
            let input = random.halves(tokens * 2 * cols, 4.0);
            let gated = |layout: GateLayout, input: &[bf16]| {
                let (input, mut out) = (device.upload(input).unwrap(), poisoned::<bf16>(&device, tokens * cols));
                ops::gate_mul(&stream, gate, layout, input.view(), cols, out.view_mut()).unwrap();
                out.read(&stream).unwrap()
            };
            let out = gated(GateLayout::Halves, &input);
            let product = |(x, up): (&bf16, &bf16)| reference(gate, f64::from(*x)) * f64::from(*up);
            let exact: Vec<f64> = input
                .chunks(2 * cols)
                .flat_map(|token| token[..cols].iter().zip(&token[cols..]).map(product))
                .collect();
            let worst = worst_ulps(&out, &exact);
            assert!(worst <= 0.51, "{gate:?} of {tokens} x {cols}: {worst}");
            let eights = |token: &[bf16]| {
                let (gates, ups) = token.split_at(cols);
                gates.chunks(8).zip(ups.chunks(8)).flat_map(|(gates, ups)| [gates, ups].concat()).collect::<Vec<_>>()
            };
            let by_eights: Vec<bf16> = input.chunks(2 * cols).flat_map(eights).collect();
            assert_eq!(gated(GateLayout::Eights, &by_eights), out, "{gate:?} of {tokens} x {cols}");
        }
    }
}

#[test]
fn a_soft_cap_bends_every_value_and_no_other() {
    let mut random = Random::new(4);
    for (count, cap) in [(1, 3.0), (255, 30.0), (1000, 0.5)] {
        let (device, stream) = device(1);
        let values = random.values(count, 4.0 * cap);
        let mut memory = poisoned::<f32>(&device, count.next_multiple_of(4) + 4);
        stream.copy(memory.slice_mut(0..count), device.upload(&values).unwrap().view()).unwrap();
        ops::soft_cap(&stream, cap, memory.slice_mut(0..count)).unwrap();
        let found = memory.read(&stream).unwrap();
        let exact = |value: f32| f64::from(cap) * (f64::from(value) / f64::from(cap)).tanh();
        let near = |(found, value): (&f32, &f32)| (f64::from(*found) - exact(*value)).abs() <= 1e-6 * f64::from(cap);
        assert!(found.iter().zip(&values).all(near), "{count} values, a cap of {cap}");
        assert!(found[count..].iter().all(|value| value.is_nan()), "nothing behind them was written");
    }
}
