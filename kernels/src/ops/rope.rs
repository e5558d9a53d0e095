//! Rotary position embedding (Su et al. 2021).

use crate::Pool;
use crate::simd::{Kernel, LANES, Simd};

/// Tokens that one worker takes at a time.
const CHUNK_TOKENS: usize = 16;

/// Which two values of a head turn together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RopePairing {
    /// `2i` with `2i + 1`: the order of q and k rows in Llama GGUF files.
    Adjacent,
    /// `i` with `i + dims / 2`: the order in Hugging Face checkpoints, and in Qwen and Gemma GGUF files.
    HalfSplit,
}

/// Cosine and sine of every position's angles.
#[derive(Debug)]
pub struct RopeTable {
    pairs: usize,
    /// `[position, pair]`.
    cosines: Vec<f32>,
    /// `[position, pair]`.
    sines: Vec<f32>,
}

impl RopeTable {
    /// A table for the first `dims` values of a head (an even number) and positions below `positions`.
    ///
    /// Pair `i` turns by `position · theta^(-2i/dims) / factor[i]`; `frequency_factors` has `dims / 2` values
    /// (Llama 3's scaling; the tensor `rope_freqs.weight` of a GGUF file) or is absent for 1. Turned values are `magnitude`
    /// times as long (LongRoPE, YaRN; 1 for others).
    ///
    /// # Panics
    /// When `dims` is odd or the number of factors differs.
    pub fn new(dims: usize, positions: usize, theta: f32, frequency_factors: Option<&[f32]>, magnitude: f32) -> Self {
        assert!(dims.is_multiple_of(2), "rotary dimensions come in pairs, not {dims}");
        let pairs = dims / 2;
        if let Some(factors) = frequency_factors {
            assert_eq!(factors.len(), pairs, "one frequency factor per pair");
        }
        let frequencies: Vec<f64> = (0..pairs)
            .map(|i| {
                let factor = frequency_factors.map_or(1.0, |factors| f64::from(factors[i]));
                f64::from(theta).powf(-2.0 * i as f64 / dims as f64) / factor
            })
            .collect();
        let turns = (0..positions)
            .flat_map(|position| frequencies.iter().map(move |frequency| (position as f64 * frequency).sin_cos()));
        let (sines, cosines) =
            turns.map(|turn| <[f64; 2]>::from(turn).map(|part| (part * f64::from(magnitude)) as f32).into()).unzip();
        RopeTable { pairs, cosines, sines }
    }

    /// Positions in the table.
    pub fn positions(&self) -> usize {
        self.cosines.len() / self.pairs.max(1)
    }

    /// Cosines and sines of a position.
    fn turn(&self, position: u32) -> (&[f32], &[f32]) {
        let position = position as usize;
        assert!(position < self.positions(), "position {position} of a table of {}", self.positions());
        let pairs = position * self.pairs..(position + 1) * self.pairs;
        (&self.cosines[pairs.clone()], &self.sines[pairs])
    }
}

/// Turns every head of `values`, `[tokens, heads, head_dim]`, by its token's position, in place.
///
/// # Panics
/// When the lengths do not match, or a position is outside the table.
pub fn rope(
    pool: &Pool,
    table: &RopeTable,
    pairing: RopePairing,
    positions: &[u32],
    head_dim: usize,
    values: &mut [f32],
) {
    assert!(2 * table.pairs <= head_dim, "{} rotary dimensions in a head of {head_dim}", 2 * table.pairs);
    if positions.is_empty() {
        return;
    }
    assert!(values.len().is_multiple_of(positions.len() * head_dim), "values are no whole heads of each position");
    let token_values = values.len() / positions.len();
    let kernels = pool.kernels();
    let count = positions.len().div_ceil(CHUNK_TOKENS);
    let parts = values.chunks_mut(CHUNK_TOKENS * token_values).zip(positions.chunks(CHUNK_TOKENS));
    pool.for_each_of(count, parts, |(values, positions)| {
        kernels.call(Turn { table, pairing, positions, head_dim, values });
    });
}

struct Turn<'a> {
    table: &'a RopeTable,
    pairing: RopePairing,
    positions: &'a [u32],
    head_dim: usize,
    values: &'a mut [f32],
}

impl Kernel for Turn<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let token_values = self.values.len() / self.positions.len();
        for (token, &position) in self.values.chunks_exact_mut(token_values).zip(self.positions) {
            let (cosines, sines) = self.table.turn(position);
            for head in token.chunks_exact_mut(self.head_dim) {
                match self.pairing {
                    RopePairing::Adjacent => turn_adjacent(cosines, sines, head),
                    RopePairing::HalfSplit => turn_halves(simd, cosines, sines, head),
                }
            }
        }
    }
}

/// Left to the compiler's vectors, which know how to take pairs apart.
#[inline(always)]
fn turn_adjacent(cosines: &[f32], sines: &[f32], head: &mut [f32]) {
    for ((pair, &cosine), &sine) in head.as_chunks_mut::<2>().0.iter_mut().zip(cosines).zip(sines) {
        let [x, y] = *pair;
        *pair = [x * cosine - y * sine, y * cosine + x * sine];
    }
}

#[inline(always)]
fn turn_halves<S: Simd>(simd: S, cosines: &[f32], sines: &[f32], head: &mut [f32]) {
    let (low, high) = head.split_at_mut(cosines.len());
    let turns = cosines.chunks(LANES).zip(sines.chunks(LANES));
    let halves = low.chunks_mut(LANES).zip(high[..cosines.len()].chunks_mut(LANES));
    for ((low, high), (cosines, sines)) in halves.zip(turns) {
        let (x, y) = (simd.load_partial(low), simd.load_partial(high));
        let (cosine, sine) = (simd.load_partial(cosines), simd.load_partial(sines));
        simd.store_partial(simd.sub(simd.mul(x, cosine), simd.mul(y, sine)), low);
        simd.store_partial(simd.add(simd.mul(y, cosine), simd.mul(x, sine)), high);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Kernels;
    use crate::testing::{Random, bits, relative_error};

    #[test]
    fn matches_the_reference_in_every_set() {
        let mut random = Random::new(4);
        for (head_dim, dims, heads) in [(64, 64, 3), (80, 40, 2), (6, 4, 1), (128, 128, 1)] {
            for pairing in [RopePairing::Adjacent, RopePairing::HalfSplit] {
                let factors: Vec<f32> = (0..dims / 2).map(|i| 1.0 + i as f32).collect();
                let table = RopeTable::new(dims, 3000, 10_000.0, Some(&factors), 1.25);
                assert_eq!(table.positions(), 3000);
                let positions: Vec<u32> = (0..37).map(|_| random.below(3000) as u32).collect();
                let input = random.values(positions.len() * heads * head_dim, 1.0);
                let mut exact: Vec<f64> = input.iter().map(|&x| f64::from(x)).collect();
                for (head, out) in exact.chunks_mut(head_dim).enumerate() {
                    for i in 0..dims / 2 {
                        let (a, b) =
                            if pairing == RopePairing::Adjacent { (2 * i, 2 * i + 1) } else { (i, i + dims / 2) };
                        let frequency = 10_000f64.powf(-2.0 * i as f64 / dims as f64) / f64::from(factors[i]);
                        let (sine, cosine) = (f64::from(positions[head / heads]) * frequency).sin_cos();
                        let (sine, cosine) = (1.25 * sine, 1.25 * cosine);
                        (out[a], out[b]) = (out[a] * cosine - out[b] * sine, out[a] * sine + out[b] * cosine);
                    }
                }
                let mut first: Option<Vec<u32>> = None;
                for kernels in Kernels::available() {
                    let pool = Pool::with_kernels(2, kernels).unwrap();
                    let mut values = input.clone();
                    rope(&pool, &table, pairing, &positions, head_dim, &mut values);
                    assert!(relative_error(&values, &exact) < 2e-7, "{pairing:?} {head_dim}");
                    assert_eq!(*first.get_or_insert(bits(&values)), bits(&values), "{}", kernels.name());
                }
            }
        }
    }
}
