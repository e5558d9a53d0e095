//! YaRN (Peng et al. 2023, arXiv 2309.00071): extends the context by scaling low rotary frequencies.

use std::f64::consts::TAU;
use std::ops::RangeInclusive;

use super::MAX_CONTEXT_TOKENS;

/// Allowed factors by which a context grows.
pub(super) const FACTORS: RangeInclusive<f32> = 1.0..=MAX_CONTEXT_TOKENS as f32;
/// Default ends of the ramp, in turns over the original context: pairs with more turns than the first keep their
/// frequency, those with fewer than the second are scaled in full.
pub(super) const BETA_FAST: f32 = 32.0;
pub(super) const BETA_SLOW: f32 = 1.0;
/// Least distance between the ends of the ramp, by which is divided. Bases and contexts of no known model make the ends
/// cross; then llama.cpp uses this distance, and transformers a negative number.
const LEAST_RAMP: f64 = 0.001;

/// The parameters of a checkpoint, checked.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Yarn {
    /// Factor by which the context grows.
    pub factor: f32,
    /// Tokens of the original context.
    pub original_tokens: u32,
    pub beta_fast: f32,
    pub beta_slow: f32,
    /// Whether the ramp starts and ends at whole pairs.
    pub truncate: bool,
    /// Factor of the length of rotated vectors.
    pub magnitude: f32,
}

impl Yarn {
    /// Tokens of the extended context.
    pub fn tokens(&self) -> u32 {
        (f64::from(self.original_tokens) * f64::from(self.factor)).min(MAX_CONTEXT_TOKENS.into()) as u32
    }

    /// The divisors of each pair's frequency. The base is above 1.
    pub fn factors(&self, pairs: usize, theta: f32) -> Vec<f32> {
        let [first, last] = self.ramp(2 * pairs, theta);
        let stretched = |pair: usize| ((pair as f64 - first) / (last - first).max(LEAST_RAMP)).clamp(0.0, 1.0);
        let factor = f64::from(self.factor);
        (0..pairs).map(|pair| (1.0 / (1.0 - stretched(pair) + stretched(pair) / factor)) as f32).collect()
    }

    /// The ends of the ramp, as indices of pairs: where scaling starts, and where it is full.
    fn ramp(&self, dims: usize, theta: f32) -> [f64; 2] {
        let place = |turns: f32| {
            let wavelength = f64::from(self.original_tokens) / (f64::from(turns) * TAU);
            dims as f64 * wavelength.ln() / (2.0 * f64::from(theta).ln())
        };
        let (first, last) = (place(self.beta_fast), place(self.beta_slow));
        let (first, last) = if self.truncate { (first.floor(), last.ceil()) } else { (first, last) };
        [first.max(0.0), last.min(dims as f64 - 1.0)]
    }
}

/// Factor of the length of rotated vectors, by the fit of the paper's section 3.4 if `scale` is 1.
pub(super) fn magnitude(factor: f32, scale: f32) -> f32 {
    1.0 + 0.1 * scale * factor.ln()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_context_grows_by_the_factor_and_no_further_than_any_may() {
        let yarn = Yarn {
            factor: 4.0,
            original_tokens: 32_768,
            beta_fast: BETA_FAST,
            beta_slow: BETA_SLOW,
            truncate: true,
            magnitude: 1.0,
        };
        assert_eq!(yarn.tokens(), 131_072);
        assert_eq!(Yarn { factor: *FACTORS.end(), ..yarn }.tokens(), MAX_CONTEXT_TOKENS);
    }
}
