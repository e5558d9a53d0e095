//! YaRN (Peng et al. 2023, arXiv 2309.00071): a longer context from frequencies that are stretched where they are low.

use std::f64::consts::TAU;
use std::ops::RangeInclusive;

use super::MAX_CONTEXT_TOKENS;

/// Times by which a context may grow: from one token to all there may be.
pub(super) const FACTORS: RangeInclusive<f32> = 1.0..=MAX_CONTEXT_TOKENS as f32;
/// Turns in the original context of which pairs that turn more keep their frequency, and of which those that turn less are
/// stretched in full, where a file names none.
pub(super) const BETA_FAST: f32 = 32.0;
pub(super) const BETA_SLOW: f32 = 1.0;
/// Least places between the ends of the ramp, which divide: where these have passed each other, as they do with bases and contexts
/// that no model has, llama.cpp takes so many and transformers a negative number.
const LEAST_RAMP: f64 = 0.001;

/// What a checkpoint says of it, its numbers checked.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Yarn {
    /// How much longer the context became.
    pub factor: f32,
    /// Tokens of the context before.
    pub original_tokens: u32,
    pub beta_fast: f32,
    pub beta_slow: f32,
    /// The ramp begins and ends at whole pairs.
    pub truncate: bool,
    /// Length of what was turned.
    pub magnitude: f32,
}

impl Yarn {
    /// Tokens of the longer context.
    pub fn tokens(&self) -> u32 {
        (f64::from(self.original_tokens) * f64::from(self.factor)).min(MAX_CONTEXT_TOKENS.into()) as u32
    }

    /// What divides each pair's frequency. The base is above 1.
    pub fn factors(&self, pairs: usize, theta: f32) -> Vec<f32> {
        let [first, last] = self.ramp(2 * pairs, theta);
        let stretched = |pair: usize| ((pair as f64 - first) / (last - first).max(LEAST_RAMP)).clamp(0.0, 1.0);
        let factor = f64::from(self.factor);
        (0..pairs).map(|pair| (1.0 / (1.0 - stretched(pair) + stretched(pair) / factor)) as f32).collect()
    }

    /// The places, counted in pairs, at which pairs begin to be stretched and from which they are in full.
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

/// Length of what was turned, by the paper's fit (its section 3.4) where `scale` is 1.
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
