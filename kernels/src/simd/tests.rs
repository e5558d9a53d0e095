use super::*;
use crate::testing::bits;

struct Exp<'a>(&'a mut [[f32; LANES]]);

impl Kernel for Exp<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        for lanes in self.0 {
            simd.store(simd.exp(simd.load(lanes)), lanes);
        }
    }
}

fn exp(kernels: Kernels, values: &[f32]) -> Vec<f32> {
    let mut lanes = values.as_chunks().0.to_vec();
    kernels.call(Exp(&mut lanes));
    lanes.as_flattened().to_vec()
}

#[test]
fn exp_is_close_over_its_range_and_clamped_beyond() {
    let values: Vec<f32> = (0..16 * 11_000).map(|i| -87.3 + i as f32 * 0.000_99).collect();
    let beyond = [-88.0, -1e4, f32::MIN, f32::NEG_INFINITY, 88.4, 1e4, f32::MAX, f32::INFINITY].repeat(2);
    let reference = exp(Kernels::named("scalar").unwrap(), &values);
    for kernels in Kernels::available() {
        let results = exp(kernels, &values);
        for (value, result) in values.iter().zip(&results) {
            let exact = f64::from(*value).exp();
            assert!((f64::from(*result) / exact - 1.0).abs() < 3e-7, "{}: exp({value}) = {result}", kernels.name());
        }
        assert_eq!(bits(&reference), bits(&results), "{}", kernels.name());
        for (value, result) in beyond.iter().zip(exp(kernels, &beyond)) {
            let clamped = f64::from(value.clamp(-87.3, 88.3)).exp();
            assert!((f64::from(result) / clamped - 1.0).abs() < 3e-7, "{}: exp({value}) = {result}", kernels.name());
        }
    }
}

#[test]
fn sets_are_found_by_name_and_unknown_ones_refused_with_the_known() {
    let available = Kernels::available();
    assert_eq!(Kernels::detect().name(), available[0].name());
    assert_eq!(available.last().map(|kernels| kernels.name()), Some("scalar"));
    for kernels in &available {
        assert_eq!(Kernels::named(kernels.name()).unwrap().name(), kernels.name());
    }
    let refusal = Kernels::named("mmx").unwrap_err().to_string();
    assert!(refusal.starts_with("kernels \"mmx\" are not available on this processor; available: "), "{refusal}");
    assert!(refusal.ends_with("scalar"), "{refusal}");
}
