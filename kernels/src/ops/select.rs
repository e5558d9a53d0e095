//! Choosing among logits: what a sampler is built from.

/// The index of the largest value, the lowest of equals; 0 for an empty slice. NaN is never chosen over a number.
pub fn argmax(values: &[f32]) -> usize {
    let mut best = 0;
    for (index, &value) in values.iter().enumerate() {
        if value > values[best] || (values[best].is_nan() && !value.is_nan()) {
            best = index;
        }
    }
    best
}

/// Replaces logits by probabilities.
pub fn softmax(values: &mut [f32]) {
    let max = values.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    values.iter_mut().for_each(|value| *value = (*value - max).exp());
    let sum: f32 = values.iter().sum();
    values.iter_mut().for_each(|value| *value /= sum);
}

/// The `k` largest values with their indices, largest first, the lower index first among equals.
pub fn top_k(values: &[f32], k: usize) -> Vec<(u32, f32)> {
    let order = |a: &(u32, f32), b: &(u32, f32)| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0));
    let mut all: Vec<(u32, f32)> = (0..).zip(values.iter().copied()).collect();
    if k == 0 {
        return Vec::new();
    }
    if k < all.len() {
        all.select_nth_unstable_by(k - 1, order);
        all.truncate(k);
    }
    all.sort_unstable_by(order);
    all
}
