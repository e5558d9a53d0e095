//! What the tests of this crate share: token ids of real text, comparisons of logits, and a driver of executors.

#![allow(dead_code)] // each test binary uses its part

pub mod driver;
pub mod oracle;
pub mod tiny;

use std::fmt;

/// Token ids of `data/harbour.txt` under SmolLM2's tokenizer, 1000 of them.
pub fn harbour_tokens() -> Vec<u32> {
    include_str!("../data/harbour.ids").split_whitespace().map(|id| id.parse().unwrap()).collect()
}

/// How far logits are from a reference's, over many positions.
#[derive(Debug, Default)]
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
    pub fn add(&mut self, reference: &[f32], found: &[f32]) {
        assert_eq!(reference.len(), found.len());
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

    /// Mean Kullback-Leibler divergence from the reference, nats.
    pub fn mean_kl(&self) -> f64 {
        self.kl_sum / self.positions as f64
    }

    /// Share of positions with the same most likely token.
    pub fn top_1(&self) -> f64 {
        self.same_top as f64 / self.positions as f64
    }

    /// Root-mean-square error of logits, relative to theirs.
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

fn top(logits: &[f32]) -> usize {
    (0..logits.len()).max_by(|&a, &b| logits[a].total_cmp(&logits[b])).unwrap()
}

fn log_softmax(logits: &[f32]) -> Vec<f64> {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let shifted = || logits.iter().map(|&logit| f64::from(logit - max));
    let log_sum = shifted().map(f64::exp).sum::<f64>().ln();
    shifted().map(|logit| logit - log_sum).collect()
}

fn kl_divergence(reference: &[f32], found: &[f32]) -> f64 {
    let pairs = log_softmax(reference).into_iter().zip(log_softmax(found));
    pairs.map(|(p, q)| p.exp() * (p - q)).sum()
}
