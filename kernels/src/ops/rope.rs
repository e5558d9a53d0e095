//! Rotary position embedding (Su et al. 2021).

use crate::Pool;

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
    positions: usize,
    /// `[position][pair]` of (cosine, sine).
    turns: Vec<(f32, f32)>,
}

impl RopeTable {
    /// A table for the first `dims` values of a head (an even number) and positions below `positions`.
    ///
    /// Pair `i` turns by `position · theta^(-2i/dims) / factor[i]`; `frequency_factors` has `dims / 2` values
    /// (Llama 3's scaling; the tensor `rope_freqs.weight` of a GGUF file) or is absent for 1.
    ///
    /// # Panics
    /// When `dims` is odd or the number of factors differs.
    pub fn new(dims: usize, positions: usize, theta: f32, frequency_factors: Option<&[f32]>) -> Self {
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
        let turn = |position: usize, frequency: f64| {
            let (sine, cosine) = (position as f64 * frequency).sin_cos();
            (cosine as f32, sine as f32)
        };
        let turns = (0..positions).flat_map(|p| frequencies.iter().map(move |&f| turn(p, f))).collect();
        RopeTable { pairs, positions, turns }
    }

    /// Positions in the table.
    pub fn positions(&self) -> usize {
        self.positions
    }

    fn row(&self, position: usize) -> &[(f32, f32)] {
        assert!(position < self.positions, "position {position} of a table of {}", self.positions);
        &self.turns[position * self.pairs..][..self.pairs]
    }
}

/// Turns every head of `values`, `[tokens, heads, head_dim]`, by its token's position, in place.
///
/// # Panics
/// When the lengths do not match, or a position is outside the table.
pub fn rope(
    _pool: &Pool,
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
    for (token, &position) in values.chunks_exact_mut(token_values).zip(positions) {
        let turns = table.row(position as usize);
        for head in token.chunks_exact_mut(head_dim) {
            turn_head(turns, pairing, head);
        }
    }
}

fn turn_head(turns: &[(f32, f32)], pairing: RopePairing, head: &mut [f32]) {
    for (i, &(cosine, sine)) in turns.iter().enumerate() {
        let (a, b) = match pairing {
            RopePairing::Adjacent => (2 * i, 2 * i + 1),
            RopePairing::HalfSplit => (i, i + turns.len()),
        };
        let (x, y) = (head[a], head[b]);
        head[a] = x * cosine - y * sine;
        head[b] = x * sine + y * cosine;
    }
}
