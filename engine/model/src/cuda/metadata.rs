//! What kernels read of a step besides activations: tokens, positions and places. They lie at addresses that never
//! change, so that captured graphs read them too.
//!
//! Rows of one token come first, then those of several: a row's attention depends on its own tokens alone.

use std::iter;
use std::ops::Range;

use windlass_kernels::cuda::ops::{
    Chunks, DecodeRows, Heads, PAGE_TOKENS, PREFILL_TILE_ROWS, prefill_tiles, shared_splits, sharing_order, splits,
};
use windlass_kernels::cuda::{Device, DriverError, Memory, Pinned, Stream, View};

use crate::batch::{Batch, BatchRow};

/// Sizes of the arrays.
#[derive(Clone, Copy, Debug)]
pub(super) struct StepSizes {
    /// Most tokens of a step.
    pub tokens: usize,
    /// Most rows of a step.
    pub rows: usize,
    /// Most tokens that get logits.
    pub logits: usize,
    /// Longest sequence, tokens.
    pub longest: usize,
    /// The page that padded rows write to.
    pub trash_page: u32,
    /// Groups of layers, each with slots and tables of its own.
    pub groups: usize,
    /// The decoder's heads.
    pub heads: Heads,
}

impl StepSizes {
    /// Pages of the longest sequence.
    pub fn pages(&self) -> usize {
        self.longest.div_ceil(PAGE_TOKENS)
    }

    /// Splits of the longest sequence.
    pub fn splits(&self) -> usize {
        splits(self.longest)
    }

    /// Places for rows of one kind: views of them begin at multiples of 16 bytes.
    fn row_places(&self) -> usize {
        self.rows.next_multiple_of(4)
    }

    /// Places for a group's slots.
    fn slot_places(&self) -> usize {
        self.tokens.next_multiple_of(4)
    }

    /// Places for a group's tables of both kinds of rows.
    fn table_places(&self) -> usize {
        2 * self.row_places() * self.pages()
    }

    fn tiles(&self) -> usize {
        // Every row's last tile may be shorter.
        let queries = self.tokens * (self.heads.heads / self.heads.kv_heads);
        let tiles = queries.div_ceil(PREFILL_TILE_ROWS) + self.rows;
        // Those of rows whose guesses branch begin at a place of their own.
        tiles.next_multiple_of(4) + 4
    }

    /// Bytes on the device.
    pub fn bytes(&self) -> u64 {
        4 * offset(self, Array::ALL.len()) as u64
    }
}

/// One array within the arena.
#[derive(Clone, Copy, Debug)]
enum Array {
    Tokens,
    Positions,
    /// Where guesses branch: which of the last keys each token sees, as bits.
    Seen,
    /// Where each token's key goes, by group.
    Slots,
    LogitTokens,
    /// Pages of each row, padded, by group.
    Tables,
    /// Leading splits that each row of one token shares with the row before, by group.
    Common,
    /// Keys of each row after the step.
    Lengths,
    /// The first token of each row in this step.
    FirstTokens,
    /// How many it has.
    TokenCounts,
    /// The position of the first.
    FirstPositions,
    TileRows,
    TileFirsts,
}

impl Array {
    const ALL: [Array; 13] = [
        Array::Tokens,
        Array::Positions,
        Array::Seen,
        Array::Slots,
        Array::LogitTokens,
        Array::Tables,
        Array::Common,
        Array::Lengths,
        Array::FirstTokens,
        Array::TokenCounts,
        Array::FirstPositions,
        Array::TileRows,
        Array::TileFirsts,
    ];

    fn len(self, sizes: &StepSizes) -> usize {
        match self {
            Array::Tokens | Array::Positions | Array::Seen => sizes.tokens,
            Array::Slots => sizes.groups * sizes.slot_places(),
            Array::LogitTokens => sizes.logits,
            Array::Tables => sizes.groups * sizes.table_places(),
            Array::Common => sizes.groups * sizes.row_places(),
            // Rows of one token, then those of several, which begin at a place of their own.
            Array::Lengths | Array::FirstTokens | Array::TokenCounts | Array::FirstPositions => 2 * sizes.row_places(),
            Array::TileRows | Array::TileFirsts => sizes.tiles(),
        }
    }
}

/// How much of the arrays a step uses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct StepCounts {
    /// Tokens, those of padded rows included.
    pub tokens: usize,
    /// Tokens that get logits.
    pub logits: usize,
    /// Rows of one token, padded ones included.
    pub decodes: usize,
    /// Rows of several.
    pub chunks: usize,
    /// Tiles of those without branches.
    pub tiles: usize,
    /// Tiles of those whose guesses branch.
    pub branching_tiles: usize,
}

/// A step's numbers on the device.
#[derive(Debug)]
pub(super) struct Metadata {
    sizes: StepSizes,
    /// One for each step in flight: a copy may still read the other.
    staging: [Pinned<u32>; 2],
    turn: usize,
    arena: Memory<u32>,
}

impl Metadata {
    pub fn new(device: &Device, sizes: StepSizes) -> Result<Metadata, DriverError> {
        let len = offset(&sizes, Array::ALL.len());
        let staging = [device.pinned(len)?, device.pinned(len)?];
        Ok(Metadata { sizes, staging, turn: 0, arena: device.allocate(len)? })
    }

    /// Copies a batch's numbers to the device. A step of one token a row is padded to `decodes` rows: those that the
    /// batch lacks compute a token that is nobody's.
    pub fn upload(
        &mut self,
        batch: &Batch,
        decodes: Option<usize>,
        stream: &Stream,
    ) -> Result<StepCounts, DriverError> {
        self.turn = 1 - self.turn;
        let mut rows = Rows::of(batch, &self.sizes);
        if let Some(decodes) = decodes {
            rows.pad(decodes, &self.sizes);
        }
        let (decodes, chunks) = (rows.decodes.lengths.len(), rows.chunks.lengths.len());
        let (tiles, branching_tiles) = rows.tiles(self.sizes.heads);
        let counts = StepCounts {
            tokens: rows.tokens.len(),
            logits: rows.logit_tokens.len(),
            decodes,
            chunks,
            tiles: tiles.len(),
            branching_tiles: branching_tiles.len(),
        };
        for (first, tiles) in [(0, tiles), (first_branching_tile(&counts), branching_tiles)] {
            let (tile_rows, tile_firsts): (Vec<u32>, Vec<u32>) = tiles.into_iter().unzip();
            self.copy(Array::TileRows, first, &tile_rows, stream)?;
            self.copy(Array::TileFirsts, first, &tile_firsts, stream)?;
        }
        if counts.branching_tiles > 0 {
            self.copy(Array::Seen, 0, &rows.seen, stream)?;
        }
        let single = [
            (Array::Tokens, &rows.tokens),
            (Array::Positions, &rows.positions),
            (Array::LogitTokens, &rows.logit_tokens),
        ];
        for (array, values) in single {
            self.copy(array, 0, values, stream)?;
        }
        for (group, slots) in rows.slots.iter().enumerate() {
            self.copy(Array::Slots, group * self.sizes.slot_places(), slots, stream)?;
        }
        for (group, common) in rows.decodes.common(self.sizes.heads).iter().enumerate() {
            self.copy(Array::Common, group * self.sizes.row_places(), common, stream)?;
        }
        for (kind, rows) in [(0, &rows.decodes), (1, &rows.chunks)] {
            let at = kind * self.sizes.row_places();
            for (group, table) in rows.tables.iter().enumerate() {
                let first = group * self.sizes.table_places() + at * self.sizes.pages();
                self.copy(Array::Tables, first, table, stream)?;
            }
            self.copy(Array::Lengths, at, &rows.lengths, stream)?;
            self.copy(Array::FirstTokens, at, &rows.first_tokens, stream)?;
            self.copy(Array::TokenCounts, at, &rows.token_counts, stream)?;
            self.copy(Array::FirstPositions, at, &rows.first_positions, stream)?;
        }
        Ok(counts)
    }

    /// Puts tokens that lie on the device in the places of tokens that were not known.
    pub fn feed(&mut self, at: usize, tokens: View<'_, u32>, stream: &Stream) -> Result<(), DriverError> {
        let first = offset(&self.sizes, Array::Tokens as usize) + at;
        stream.copy(self.arena.slice_mut(first..first + tokens.len()), tokens)
    }

    pub fn tokens(&self, counts: &StepCounts) -> View<'_, u32> {
        self.array(Array::Tokens, 0..counts.tokens)
    }

    pub fn positions(&self, counts: &StepCounts) -> View<'_, u32> {
        self.array(Array::Positions, 0..counts.tokens)
    }

    pub fn slots(&self, counts: &StepCounts, group: usize) -> View<'_, u32> {
        let first = group * self.sizes.slot_places();
        self.array(Array::Slots, first..first + counts.tokens)
    }

    pub fn logit_tokens(&self, counts: &StepCounts) -> View<'_, u32> {
        self.array(Array::LogitTokens, 0..counts.logits)
    }

    pub fn decode_rows(&self, counts: &StepCounts, group: usize) -> DecodeRows<'_> {
        let (first, first_common) = (group * self.sizes.table_places(), group * self.sizes.row_places());
        DecodeRows {
            tables: self.array(Array::Tables, first..first + counts.decodes * self.sizes.pages()),
            common: self.array(Array::Common, first_common..first_common + counts.decodes),
            lengths: self.array(Array::Lengths, 0..counts.decodes),
            tokens: self.array(Array::FirstTokens, 0..counts.decodes),
            splits: self.sizes.splits(),
        }
    }

    /// Rows of several tokens that do not branch.
    pub fn chunks(&self, counts: &StepCounts, group: usize) -> Chunks<'_> {
        self.chunks_of(counts, group, 0..counts.tiles, None)
    }

    /// Those whose guesses do.
    pub fn branching(&self, counts: &StepCounts, group: usize) -> Chunks<'_> {
        let first = first_branching_tile(counts);
        let seen = self.array(Array::Seen, 0..counts.tokens);
        self.chunks_of(counts, group, first..first + counts.branching_tiles, Some(seen))
    }

    fn chunks_of<'a>(
        &'a self,
        counts: &StepCounts,
        group: usize,
        tiles: Range<usize>,
        seen: Option<View<'a, u32>>,
    ) -> Chunks<'a> {
        let (rows, pages) = (self.sizes.row_places(), self.sizes.pages());
        let first = group * self.sizes.table_places() + rows * pages;
        let of = |array: Array| self.array(array, rows..rows + counts.chunks);
        Chunks {
            tables: self.array(Array::Tables, first..first + counts.chunks * pages),
            tile_sequences: self.array(Array::TileRows, tiles.clone()),
            tile_firsts: self.array(Array::TileFirsts, tiles),
            first_tokens: of(Array::FirstTokens),
            token_counts: of(Array::TokenCounts),
            first_positions: of(Array::FirstPositions),
            seen,
        }
    }

    fn copy(&mut self, array: Array, at: usize, values: &[u32], stream: &Stream) -> Result<(), DriverError> {
        if values.is_empty() {
            return Ok(());
        }
        assert!(at + values.len() <= array.len(&self.sizes), "{array:?} has room for {}", array.len(&self.sizes));
        let first = offset(&self.sizes, array as usize) + at;
        let staging = &self.staging[self.turn];
        staging.write(first, values);
        stream.copy_to_device(self.arena.slice_mut(first..first + values.len()), staging, first)
    }

    fn array(&self, array: Array, part: Range<usize>) -> View<'_, u32> {
        let first = offset(&self.sizes, array as usize);
        self.arena.slice(first + part.start..first + part.end)
    }
}

/// Where array `index` begins. Each begins at a multiple of 16 bytes, as kernels expect.
fn offset(sizes: &StepSizes, index: usize) -> usize {
    Array::ALL[..index].iter().map(|array| array.len(sizes).next_multiple_of(4)).sum()
}

/// Where the tiles of rows whose guesses branch begin: a multiple of 16 bytes, as kernels expect.
fn first_branching_tile(counts: &StepCounts) -> usize {
    counts.tiles.next_multiple_of(4)
}

/// All of the last keys.
const ALL_SEEN: u32 = u32::MAX;

/// Which of the last keys up to its own guess `index` of a row sees, its own the lowest bit: all that come before the guesses, and
/// of these those that `seen` has as bits from the first guess on.
fn last_seen(index: usize, seen: u64) -> u32 {
    let of_guesses = seen.reverse_bits() >> (u64::BITS as usize - 1 - index);
    (of_guesses | u64::MAX << (index + 1)) as u32
}

/// A batch's numbers, in the order of the arrays.
#[derive(Debug, Default)]
struct Rows {
    tokens: Vec<u32>,
    positions: Vec<u32>,
    seen: Vec<u32>,
    /// By group.
    slots: Vec<Vec<u32>>,
    logit_tokens: Vec<u32>,
    decodes: RowNumbers,
    chunks: RowNumbers,
    /// Of each of the latter whether its guesses branch.
    branches: Vec<bool>,
}

/// The row and the first place of each.
type Tiles = Vec<(u32, u32)>;

#[derive(Debug, Default)]
struct RowNumbers {
    /// By group.
    tables: Vec<Vec<u32>>,
    lengths: Vec<u32>,
    first_tokens: Vec<u32>,
    token_counts: Vec<u32>,
    first_positions: Vec<u32>,
}

impl Rows {
    /// Rows of one token are in an order in which those that share pages follow one another.
    fn of<'a>(batch: &'a Batch, sizes: &StepSizes) -> Rows {
        let mut rows = Rows {
            tokens: batch.tokens().to_vec(),
            positions: batch.positions().to_vec(),
            logit_tokens: batch.logit_tokens().iter().map(|&token| token as u32).collect(),
            slots: vec![Vec::new(); sizes.groups],
            decodes: RowNumbers::of_groups(sizes.groups),
            chunks: RowNumbers::of_groups(sizes.groups),
            ..Rows::default()
        };
        let mut decodes = Vec::new();
        for row in batch.rows() {
            let first_token = rows.slots.first().map_or(0, Vec::len) as u32;
            for (group, slots) in rows.slots.iter_mut().enumerate() {
                let (table, page_tokens) = (row.table(group, sizes.groups), PAGE_TOKENS as u32);
                let slot = |at: u32| table[(at / page_tokens) as usize] * page_tokens + at % page_tokens;
                slots.extend((row.first_position..row.first_position + row.tokens as u32).map(slot));
            }
            let guesses = row.seen.iter().enumerate().map(|(index, &seen)| last_seen(index, seen));
            rows.seen.extend(iter::repeat_n(ALL_SEEN, row.tokens - row.seen.len()).chain(guesses));
            match row.tokens {
                1 => decodes.push((row, first_token)),
                _ => {
                    rows.chunks.push(&row, first_token, sizes);
                    rows.branches.push(!row.seen.is_empty());
                }
            }
        }
        let held = |row: &BatchRow<'a>| (row.first_position as usize + 1, row.table(0, sizes.groups));
        decodes.sort_by(|(one, _), (other, _)| sharing_order(held(one), held(other)));
        decodes.iter().for_each(|(row, first_token)| rows.decodes.push(row, *first_token, sizes));
        rows
    }

    /// Tiles of rows of several tokens: of those that do not branch, and of those whose guesses do.
    fn tiles(&self, heads: Heads) -> (Tiles, Tiles) {
        match self.branches[..] {
            [] => (Tiles::new(), Tiles::new()),
            _ => prefill_tiles(heads, &self.chunks.token_counts)
                .into_iter()
                .partition(|(row, _)| !self.branches[*row as usize]),
        }
    }

    fn pad(&mut self, decodes: usize, sizes: &StepSizes) {
        let with_logits = !self.logit_tokens.is_empty();
        while self.decodes.lengths.len() < decodes {
            let token = self.tokens.len() as u32;
            let blocks = vec![sizes.trash_page; sizes.groups];
            self.tokens.push(0);
            self.positions.push(0);
            self.seen.push(ALL_SEEN);
            self.slots.iter_mut().for_each(|slots| slots.push(sizes.trash_page * PAGE_TOKENS as u32));
            self.logit_tokens.extend(with_logits.then_some(token));
            let row = BatchRow { tokens: 1, first_position: 0, blocks: &blocks, seen: &[] };
            self.decodes.push(&row, token, sizes);
        }
    }
}

impl RowNumbers {
    fn of_groups(groups: usize) -> RowNumbers {
        RowNumbers { tables: vec![Vec::new(); groups], ..RowNumbers::default() }
    }

    fn push(&mut self, row: &BatchRow<'_>, first_token: u32, sizes: &StepSizes) {
        for (group, tables) in self.tables.iter_mut().enumerate() {
            let pages = row.table(group, sizes.groups).iter().copied().chain(iter::repeat(sizes.trash_page));
            tables.extend(pages.take(sizes.pages()));
        }
        self.lengths.push(row.first_position + row.tokens as u32);
        self.first_tokens.push(first_token);
        self.token_counts.push(row.tokens as u32);
        self.first_positions.push(row.first_position);
    }

    /// Leading splits that each row has in common with the row before, by group.
    fn common(&self, heads: Heads) -> Vec<Vec<u32>> {
        self.tables.iter().map(|table| shared_splits(heads, &self.lengths, table)).collect()
    }
}

#[cfg(test)]
mod tests {
    use windlass_engine_core::draft::DraftTree;
    use windlass_engine_core::plan::BlockId;

    use super::*;
    use crate::batch::Logits;

    const SIZES: StepSizes = StepSizes {
        tokens: 8,
        rows: 8,
        logits: 8,
        longest: 256,
        trash_page: 99,
        groups: 2,
        heads: Heads { heads: 4, kv_heads: 2, dim: 64 },
    };

    /// A batch of rows of so many tokens that end at a length, with their blocks of two groups of layers.
    fn batch(rows: &[(usize, u32, &[u32])]) -> Batch {
        let mut batch = Batch::default();
        for (tokens, length, blocks) in rows {
            let blocks: Vec<BlockId> = blocks.iter().copied().map(BlockId).collect();
            batch.push(vec![0; *tokens], length - *tokens as u32, &blocks, Logits::LAST);
        }
        batch
    }

    #[test]
    fn rows_of_one_token_that_begin_with_the_same_pages_are_neighbours() {
        let mut rows = Rows::of(
            &batch(&[
                (1, 130, &[5, 6, 7, 15, 16, 17]),
                (2, 140, &[5, 6, 9, 15, 16, 19]),
                (1, 131, &[1, 2, 3, 11, 12, 13]),
                // The same pages of the first group of layers alone.
                (1, 132, &[5, 6, 8, 25, 26, 28]),
                (1, 133, &[1, 2, 4, 11, 12, 14]),
            ]),
            &SIZES,
        );
        rows.pad(6, &SIZES);
        assert_eq!(rows.decodes.lengths, [131, 133, 130, 132, 1, 1]);
        assert_eq!(rows.decodes.first_tokens, [3, 5, 0, 4, 6, 7], "each has its own token");
        let starts = |table: &[u32]| table.chunks(SIZES.pages()).map(|row| row[0]).collect::<Vec<_>>();
        assert_eq!(starts(&rows.decodes.tables[0]), [1, 1, 5, 5, 99, 99]);
        assert_eq!(starts(&rows.decodes.tables[1]), [11, 11, 15, 25, 99, 99]);
        assert_eq!(rows.decodes.common(SIZES.heads), [[0, 1, 0, 1, 0, 0], [0, 1, 0, 0, 0, 0]]);
        assert_eq!(rows.chunks.lengths, [140]);
    }

    /// Two branches of which one forks again, beside a prompt.
    #[test]
    fn guesses_that_branch_have_tiles_and_bits_of_their_own() {
        let mut draft = DraftTree::default();
        let [_, two] = [4, 5].map(|token| draft.push(token, None));
        [6, 7].iter().for_each(|&token| _ = draft.push(token, Some(two)));
        let mut batch = batch(&[(2, 64, &[1, 11])]);
        batch.push_drafted([3], &draft, 70, &[2, 3, 12, 13].map(BlockId), Logits::LAST);
        let rows = Rows::of(&batch, &SIZES);
        let before = |guesses: u32| u32::MAX << guesses;
        assert_eq!(rows.seen[..3], [ALL_SEEN; 3]);
        assert_eq!(rows.seen[3..], [before(1) | 1, before(2) | 1, before(3) | 0b11, before(4) | 0b101]);
        assert_eq!(rows.positions[2..], [70, 71, 71, 72, 72]);
        assert_eq!(rows.slots[0][2..], [198, 199, 200, 201, 202]);
        let (tiles, branching) = rows.tiles(SIZES.heads);
        assert_eq!((tiles, branching), (vec![(0, 0)], vec![(1, 0)]));
        assert_eq!(last_seen(31, 1 << 31 | 1), 1 << 31 | 1);
    }
}
