//! Which part of each tensor a rank holds, and how it is cut out of the file's bytes.
//!
//! The one place that says which matrix is divided which way: q, k, v, gate, up, the embedding and the head by rows
//! (outputs), the attention's output and down by columns (inputs). Each expert is divided like that, too, unless a rank
//! holds some of them whole; the router is on every rank. The GPU's ranks read the same.

use std::borrow::Cow;
use std::ops::Range;

use windlass_engine_contract::sharding::Shard;
use windlass_kernels::WeightType;

use crate::config::DecoderConfig;

/// A part of a matrix `[rows = outputs, cols = inputs]`, or of a vector that belongs to its outputs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Part {
    /// All of it.
    Whole,
    /// These outputs.
    Rows(Range<usize>),
    /// These inputs: the products are a rank's share of a sum.
    Cols(Range<usize>),
}

/// The parts of a gated feed-forward block.
#[derive(Clone, Debug)]
pub(crate) struct GatedParts {
    /// Of gate and up.
    pub gate: Part,
    pub down: Part,
}

impl GatedParts {
    const WHOLE: GatedParts = GatedParts { gate: Part::Whole, down: Part::Whole };

    /// Of gate, up and down.
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
    /// Of keys and values.
    pub key: Part,
    /// Of the attention's output.
    pub out: Part,
    pub feed_forward: GatedParts,
    /// The experts that are held.
    pub experts: Range<usize>,
    /// Of each of them.
    pub expert: GatedParts,
    /// Of the expert that every token goes through.
    pub shared_expert: GatedParts,
    /// Of the embedding and the head.
    pub vocabulary: Part,
}

impl Parts {
    /// What a rank with this shard holds of a decoder.
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

    /// This part of a row-major matrix of `cols` columns.
    ///
    /// # Panics
    /// When the columns are no whole blocks of `kind`.
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

    /// The matrix's row that is this part's first.
    pub fn first_row(&self) -> usize {
        match self {
            Part::Whole | Part::Cols(_) => 0,
            Part::Rows(part) => part.start,
        }
    }

    /// The values of a vector that belong to the outputs of this part.
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
        // Two rows of two blocks of Q8_0, whose bytes say where they are.
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
