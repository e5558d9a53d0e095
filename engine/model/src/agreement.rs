//! Compares logits with those of a reference, and measures the perplexity of a text.

use std::fmt;

/// Comparison of logits with a reference's over many positions.
#[derive(Clone, Debug, Default)]
pub struct Agreement {
    positions: usize,
    kl_sum: f64,
    kl_max: f64,
    same_top: usize,
    squared_error: f64,
    squared_reference: f64,
}

impl Agreement {
    /// Compares one position's logits.
    ///
    /// # Panics
    /// If the vocabularies differ.
    pub fn add(&mut self, reference: &[f32], found: &[f32]) {
        assert_eq!(reference.len(), found.len(), "vocabularies");
        let kl = kl_divergence(reference, found);
        self.positions += 1;
        self.kl_sum += kl;
        self.kl_max = self.kl_max.max(kl);
        self.same_top += usize::from(top(reference) == top(found));
        for (reference, found) in reference.iter().zip(found) {
            self.squared_error += f64::from(reference - found).powi(2);
            self.squared_reference += f64::from(*reference).powi(2);
        }
    }

    /// Mean Kullback-Leibler divergence from the reference, in nats.
    pub fn mean_kl(&self) -> f64 {
        self.kl_sum / self.positions as f64
    }

    /// Share of positions with the same most likely token.
    pub fn top_1(&self) -> f64 {
        self.same_top as f64 / self.positions as f64
    }

    /// Root-mean-square error of logits, relative to the reference's root mean square.
    pub fn relative_error(&self) -> f64 {
        (self.squared_error / self.squared_reference).sqrt()
    }
}

impl fmt::Display for Agreement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (kl, top, error) = (self.mean_kl(), 100.0 * self.top_1(), 100.0 * self.relative_error());
        write!(f, "{} positions: KL mean {kl:.2e}, max {:.2e}, ", self.positions, self.kl_max)?;
        write!(f, "top-1 {top:.1} %, relative error {error:.2} %")
    }
}

/// Negative log-likelihoods of a text's tokens.
#[derive(Clone, Debug, Default)]
pub struct Perplexity {
    tokens: usize,
    sum: f64,
    sum_of_squares: f64,
}

impl Perplexity {
    /// Adds a token, given the logits before it.
    ///
    /// # Panics
    /// If the vocabulary has no such token.
    pub fn add(&mut self, logits: &[f32], token: u32) {
        let loss = log_sum_exp(logits) - f64::from(logits[token as usize]);
        self.tokens += 1;
        self.sum += loss;
        self.sum_of_squares += loss * loss;
    }

    /// Number of added tokens.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// The perplexity: e to the mean loss.
    pub fn value(&self) -> f64 {
        (self.sum / self.tokens as f64).exp()
    }

    /// The standard error of [`value`](Self::value).
    pub fn standard_error(&self) -> f64 {
        let (count, mean) = (self.tokens as f64, self.sum / self.tokens as f64);
        let variance = (self.sum_of_squares / count - mean * mean).max(0.0);
        self.value() * (variance / (count - 1.0).max(1.0)).sqrt()
    }
}

/// The index of the largest logit, the first of equals.
fn top(logits: &[f32]) -> usize {
    (0..logits.len()).rev().max_by(|&a, &b| logits[a].total_cmp(&logits[b])).unwrap_or(0)
}

fn log_sum_exp(logits: &[f32]) -> f64 {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    f64::from(max) + logits.iter().map(|&logit| f64::from(logit - max).exp()).sum::<f64>().ln()
}

fn kl_divergence(reference: &[f32], found: &[f32]) -> f64 {
    let (of_reference, of_found) = (log_sum_exp(reference), log_sum_exp(found));
    let term = |(&p, &q): (&f32, &f32)| {
        let (p, q) = (f64::from(p) - of_reference, f64::from(q) - of_found);
        p.exp() * (p - q)
    };
    reference.iter().zip(found).map(term).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_logits_agree_and_a_shift_changes_nothing() {
        let mut agreement = Agreement::default();
        agreement.add(&[1.0, 2.0, 3.0], &[11.0, 12.0, 13.0]);
        assert!(agreement.mean_kl().abs() < 1e-12, "{agreement}");
        assert_eq!(agreement.top_1(), 1.0);
    }

    #[test]
    fn divergence_and_choices_are_those_of_the_definition() {
        // Distributions (3/4, 1/4) and (1/2, 1/2).
        let mut agreement = Agreement::default();
        agreement.add(&[3f32.ln(), 0.0], &[0.0, 0.0]);
        agreement.add(&[0.0, 3f32.ln()], &[0.0, 0.0]);
        let expected = 0.75 * 1.5f64.ln() + 0.25 * 0.5f64.ln();
        assert!((agreement.mean_kl() - expected).abs() < 1e-7, "{agreement}");
        assert_eq!(agreement.top_1(), 0.5);
    }

    #[test]
    fn perplexity_is_the_vocabulary_for_one_that_knows_nothing() {
        let mut perplexity = Perplexity::default();
        (0..8).for_each(|token| perplexity.add(&[5.0; 8], token));
        assert!((perplexity.value() - 8.0).abs() < 1e-9);
        assert!(perplexity.standard_error() < 1e-6);
        perplexity.add(&[0.0, f32::MIN, f32::MIN, f32::MIN, 0.0, 0.0, 0.0, 0.0], 0);
        assert!(perplexity.standard_error() > 0.0 && perplexity.tokens() == 9);
    }
}
