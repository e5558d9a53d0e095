use half::bf16;
use windlass_kernels::cuda::ops;

use crate::common::{Random, device, poisoned, worst_ulps};

#[test]
fn silu_mul_matches_the_reference() {
    let mut random = Random::new(3);
    for (tokens, cols) in [(1, 8), (3, 1536), (2, 4104)] {
        let (device, stream) = device(1);
        let input = random.halves(tokens * 2 * cols, 6.0);
        let mut out = poisoned::<bf16>(&device, tokens * cols);
        ops::silu_mul(&stream, device.upload(&input).unwrap().view(), cols, out.view_mut()).unwrap();
        let product = |(gate, up): (&bf16, &bf16)| {
            let gate = f64::from(*gate);
            gate / (1.0 + (-gate).exp()) * f64::from(*up)
        };
        let exact: Vec<f64> =
            input.chunks(2 * cols).flat_map(|token| token[..cols].iter().zip(&token[cols..]).map(product)).collect();
        assert!(worst_ulps(&out.read(&stream).unwrap(), &exact) <= 0.51, "{tokens} x {cols}");
    }
}
