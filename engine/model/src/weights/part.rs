//! The part of each tensor that a rank has, and how it is cut out of the file.
//!
//! This module alone decides how matrices are divided: q, k, v, gate, up, the embedding and the head by rows (outputs),
//! the output projection of attention and down by columns (inputs), as in Megatron-LM (Shoeybi et al. 2019). Experts
//! are divided the same way, unless each rank has some whole experts; every rank has the router. Ranks on GPUs use the
//! same parts.

use std::borrow::Cow;
use std::ops::Range;

use windlass_engine_contract::sharding::Shard;
use windlass_kernels::WeightType;

use crate::config::DecoderConfig;

/// A part of a matrix `[rows = outputs, cols = inputs]`, or of a vector that belongs to its outputs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Part {
    /// The whole matrix.
    Whole,
    /// These rows.
    Rows(Range<usize>),
    /// These columns: the products are a rank's share of a sum.
    Cols(Range<usize>),
}

/// The parts of a gated feed-forward block.
#[derive(Clone, Debug)]
pub(crate) struct GatedParts {
    /// The part of gate and up.
    pub gate: Part,
    pub down: Part,
}

impl GatedParts {
    const WHOLE: GatedParts = GatedParts { gate: Part::Whole, down: Part::Whole };

    /// The parts of gate, up and down.
    pub fn each(&self) -> [&Part; 3] {
        [&self.gate, &self.gate, &self.down]
    }

    fn of(columns: Range<u32>) -> GatedParts {
        let columns = columns.start as usize..columns.end as usize;
        GatedParts { gate: Part::Rows(columns.clone()), down: Part::Cols(columns) }
    }
}

/// The parts of one rank.
#[derive(Clone, Debug)]
pub(crate) struct Parts {
    pub query: Part,
    /// The part of keys and values.
    pub key: Part,
    /// The part of the output projection of attention.
    pub out: Part,
    pub feed_forward: GatedParts,
    /// The experts that the rank has.
    pub experts: Range<usize>,
    /// The parts of each of these experts.
    pub expert: GatedParts,
    /// The parts of the shared expert.
    pub shared_expert: GatedParts,
    /// The part of the embedding and of the head.
    pub vocabulary: Part,
}

impl Parts {
    /// The parts of a rank with this shard.
    pub fn of(shard: &Shard, config: &DecoderConfig) -> Parts {
        let experts = config.experts_of(shard);
        if shard.ranks == 1 {
            let whole = || Part::Whole;
            let [query, key, out, vocabulary] = [(); 4].map(|()| whole());
            let [feed_forward, expert, shared_expert] = [GatedParts::WHOLE; 3];
            return Parts { query, key, out, feed_forward, experts, expert, shared_expert, vocabulary };
        }
        let heads = |heads: &Range<u32>| heads.start as usize * config.head_dim..heads.end as usize * config.head_dim;
        let [expert, shared_expert] = config.expert_widths().map(|width| GatedParts::of(shard.columns(width)));
        let expert = if shard.experts.is_some() { GatedParts::WHOLE } else { expert };
        Parts {
            query: Part::Rows(heads(&shard.heads)),
            key: Part::Rows(heads(&shard.kv_heads)),
            out: Part::Cols(heads(&shard.heads)),
            feed_forward: GatedParts::of(shard.feed_forward.clone()),
            experts,
            expert,
            shared_expert,
            vocabulary: Part::Rows(shard.vocabulary.start as usize..shard.vocabulary.end as usize),
        }
    }
}

impl Part {
    /// Rows and columns of this part of a matrix.
    pub fn shape(&self, rows: usize, cols: usize) -> [usize; 2] {
        match self {
            Part::Whole => [rows, cols],
            Part::Rows(part) => [part.len(), cols],
            Part::Cols(part) => [rows, part.len()],
        }
    }

    /// Whether its columns are whole blocks of `block` values.
    pub fn keeps_blocks(&self, block: usize) -> bool {
        match self {
            Part::Whole | Part::Rows(_) => true,
            Part::Cols(part) => part.start.is_multiple_of(block) && part.end.is_multiple_of(block),
        }
    }

    /// Cuts this part out of a row-major matrix of `cols` columns.
    ///
    /// # Panics
    /// If the columns are not whole blocks of `kind`.
    pub fn cut<'a>(&self, kind: WeightType, cols: usize, bytes: &'a [u8]) -> Cow<'a, [u8]> {
        let offset = |values: usize| kind.row_bytes(values).unwrap_or_else(|| panic!("column {values} is in a block"));
        match self {
            Part::Whole => bytes.into(),
            Part::Rows(part) => bytes[part.start * offset(cols)..part.end * offset(cols)].into(),
            Part::Cols(part) => {
                let (first, end) = (offset(part.start), offset(part.end));
                bytes.chunks_exact(offset(cols)).flat_map(|row| &row[first..end]).copied().collect()
            }
        }
    }

    /// Index of the part's first row in the matrix.
    pub fn first_row(&self) -> usize {
        match self {
            Part::Whole | Part::Cols(_) => 0,
            Part::Rows(part) => part.start,
        }
    }

    /// The values of a vector of outputs that belong to this part.
    pub fn of_outputs(&self, mut values: Vec<f32>) -> Vec<f32> {
        if let Part::Rows(part) = self {
            values.truncate(part.end);
            values.drain(..part.start);
        }
        values
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_of_a_matrix_are_its_rows_and_its_blocks() {
        // Two rows of two blocks of Q8_0, whose bytes are the index of the block.
        let bytes: Vec<u8> = (0..4).flat_map(|block| [block; 34]).collect();
        let blocks = |part: Part| -> Vec<u8> {
            let cut = part.cut(WeightType::Q8_0, 64, &bytes);
            cut.chunks_exact(34).map(|block| block[0]).collect()
        };
        assert_eq!(blocks(Part::Whole), [0, 1, 2, 3]);
        assert_eq!(blocks(Part::Rows(1..2)), [2, 3]);
        assert_eq!(blocks(Part::Cols(32..64)), [1, 3]);
        assert!(!Part::Cols(16..64).keeps_blocks(32));
        assert_eq!(Part::Rows(1..3).of_outputs(vec![0.0, 1.0, 2.0, 3.0]), [1.0, 2.0]);
    }
}
