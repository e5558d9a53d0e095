//! The metadata of a step, which kernels read beside activations: tokens, positions and slots. One copy brings it to
//! the device, to addresses that are the same for all steps of the same counts, so that captured graphs read it too.
//!
//! Rows of one token come before rows of several; the attention of a row depends on its own tokens alone. A token and
//! its draft tokens become a row each if they do not branch and there is room for those of all sequences: then they are
//! computed as they would be one after the other, and by the same graphs.

use std::iter;
use std::ops::Range;

use windlass_kernels::cuda::ops::{
    Chunks, DecodeRows, Heads, PAGE_TOKENS, PREFILL_TILE_ROWS, prefill_tiles, shared_splits, sharing_order, splits,
};
use windlass_kernels::cuda::{Device, DriverError, Memory, Pinned, Stream, View};

use super::graphs::GraphSize;
use super::words::Words;
use crate::batch::{Batch, BatchRow};

/// Bounds of the arrays.
#[derive(Clone, Copy, Debug)]
pub(super) struct StepSizes {
    /// Most tokens of a step.
    pub tokens: usize,
    /// Most rows of a step: sequences, and draft tokens that are rows of one token.
    pub rows: usize,
    /// Most tokens that get logits.
    pub logits: usize,
    /// Longest sequence, in tokens.
    pub longest: usize,
    /// The page that padding rows write to.
    pub trash_page: u32,
    /// Number of groups of layers, each with its own slots and block tables.
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

    /// Number of keys for which the tables and splits of a step have room, if no sequence has more than `keys`. There
    /// are few such numbers, so that few graphs are captured; and it is at most four times `keys`, because the thread
    /// blocks of splits beyond a sequence's end start for nothing, and every page of a table is copied.
    pub fn reach(&self, keys: usize) -> usize {
        self.reaches().find(|&reach| reach >= keys).unwrap_or(self.longest)
    }

    /// All values of [`StepSizes::reach`], ascending.
    pub fn reaches(&self) -> impl Iterator<Item = usize> {
        let longest = self.longest;
        let shorter = iter::successors(Some(SHORTEST_REACH), |reach| reach.checked_mul(4));
        shorter.take_while(move |&reach| reach < longest).chain([longest])
    }

    /// Most tiles of rows of one kind.
    fn tiles(&self) -> usize {
        // The last tile of every row may be partly filled.
        let queries = self.tokens * (self.heads.heads / self.heads.kv_heads);
        queries.div_ceil(PREFILL_TILE_ROWS) + self.rows
    }

    /// Words of the largest step.
    fn words(&self) -> usize {
        let of_tokens = iter::repeat_n(self.tokens, 3 + self.groups);
        let of_tables = iter::repeat_n(self.rows * self.pages(), 2 * self.groups);
        let of_rows = iter::repeat_n(self.rows, 5 + self.groups);
        let of_tiles = iter::repeat_n(self.tiles(), 4);
        Words::room(of_tokens.chain(of_tables).chain(of_rows).chain(of_tiles).chain([self.logits]))
    }

    /// Bytes on the device.
    pub fn bytes(&self) -> u64 {
        4 * self.words() as u64
    }
}

/// The smallest [`StepSizes::reach`]: up to this length splits have the same size.
const SHORTEST_REACH: usize = 2048;

/// Lengths of a step's arrays.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct StepCounts {
    /// Number of keys for which tables and splits have room.
    pub reach: usize,
    /// Tokens, padding included.
    pub tokens: usize,
    /// Tokens that get logits.
    pub logits: usize,
    /// Rows of one token, padding included.
    pub decodes: usize,
    /// Tiles of rows of several tokens that do not branch.
    pub tiles: usize,
    /// Tiles of rows whose draft tokens branch.
    pub branching_tiles: usize,
}

/// The ranges of a step's arrays in the buffer. They are the same for steps of the same counts, so that a graph finds
/// them.
#[derive(Debug, Default)]
struct ArrayRanges {
    tokens: Range<usize>,
    positions: Range<usize>,
    /// The slot of each token, by group.
    slots: Vec<Range<usize>>,
    decodes: DecodeRanges,
    chunks: ChunkRanges,
    tiles: TileRanges,
    /// Tiles of rows whose draft tokens branch.
    branching: TileRanges,
    /// Which of the last keys each token sees, as bits; empty if no draft tokens branch.
    seen: Range<usize>,
    logit_tokens: Range<usize>,
}

/// The arrays of rows of one token.
#[derive(Debug, Default)]
struct DecodeRanges {
    /// Block table of each row, padded, by group.
    tables: Vec<Range<usize>>,
    /// Number of leading splits that each row shares with the row before, by group.
    common: Vec<Range<usize>>,
    /// Number of keys of each row after the step.
    lengths: Range<usize>,
    tokens: Range<usize>,
}

/// The arrays of rows of several tokens.
#[derive(Debug, Default)]
struct ChunkRanges {
    /// Block table of each row, padded, by group.
    tables: Vec<Range<usize>>,
    first_tokens: Range<usize>,
    token_counts: Range<usize>,
    first_positions: Range<usize>,
}

/// The row of each tile, and the index of its first token in the row.
#[derive(Debug, Default)]
struct TileRanges {
    rows: Range<usize>,
    firsts: Range<usize>,
}

/// The metadata on the device, of the step that was uploaded last.
#[derive(Debug)]
pub(super) struct Metadata {
    sizes: StepSizes,
    /// One staging buffer for each step in flight: a copy may still read the other.
    staging: [Pinned<u32>; 2],
    buffer: usize,
    memory: Memory<u32>,
    ranges: ArrayRanges,
    /// The reach of the last step.
    reach: usize,
}

impl Metadata {
    pub fn new(device: &Device, sizes: StepSizes) -> Result<Metadata, DriverError> {
        let words = sizes.words();
        let staging = [device.pinned(words)?, device.pinned(words)?];
        Ok(Metadata {
            sizes,
            staging,
            buffer: 0,
            memory: device.allocate(words)?,
            ranges: ArrayRanges::default(),
            reach: 0,
        })
    }

    /// Copies the metadata of a batch to the device. A step of rows of one token is padded to `decodes` rows, if given:
    /// padding rows compute a token of no sequence.
    pub fn upload(
        &mut self,
        batch: &Batch,
        decodes: Option<usize>,
        stream: &Stream,
    ) -> Result<StepCounts, DriverError> {
        self.buffer = 1 - self.buffer;
        let mut rows = Rows::of(batch, &self.sizes);
        if let Some(decodes) = decodes {
            rows.pad(decodes, !batch.logit_tokens().is_empty(), &self.sizes);
        }
        let (counts, words) = self.arrange(&rows);
        words.send(&self.staging[self.buffer], &mut self.memory, stream)?;
        Ok(counts)
    }

    /// Assigns a range to each array of a step, and returns the words of all.
    fn arrange(&mut self, rows: &Rows) -> (StepCounts, Words) {
        let tiles = rows.tiles(self.sizes.heads);
        let (counts, mut words) = (rows.counts(&tiles), Words::default());
        self.reach = counts.reach;
        self.ranges = ArrayRanges::of(rows, &tiles, self.sizes.heads, &mut words);
        (counts, words)
    }

    /// Whether all tokens of a batch become rows of one token, as in every step with a graph.
    pub fn decodes_alone(&self, batch: &Batch) -> bool {
        let decodes = decoding(batch, &self.sizes);
        batch.rows().all(|row| decodes(&row))
    }

    /// Assigns the ranges of a padded step of rows of one token, as [`Metadata::upload`] does, without uploading.
    pub fn lay_out(&mut self, size: GraphSize) -> StepCounts {
        let mut rows = Rows { reach: size.reach, ..Rows::empty(&self.sizes) };
        rows.pad(size.bucket, self.sizes.logits > 0, &self.sizes);
        self.arrange(&rows).0
    }

    /// Writes tokens that are on the device over the step's tokens from index `at` on.
    pub fn write_tokens(&mut self, at: usize, tokens: View<'_, u32>, stream: &Stream) -> Result<(), DriverError> {
        let first = self.ranges.tokens.start + at;
        stream.copy(self.memory.slice_mut(first..first + tokens.len()), tokens)
    }

    pub fn tokens(&self) -> View<'_, u32> {
        self.array(&self.ranges.tokens)
    }

    pub fn positions(&self) -> View<'_, u32> {
        self.array(&self.ranges.positions)
    }

    pub fn slots(&self, group: usize) -> View<'_, u32> {
        self.array(&self.ranges.slots[group])
    }

    pub fn logit_tokens(&self) -> View<'_, u32> {
        self.array(&self.ranges.logit_tokens)
    }

    pub fn decode_rows(&self, group: usize) -> DecodeRows<'_> {
        let DecodeRanges { tables, common, lengths, tokens } = &self.ranges.decodes;
        DecodeRows {
            tables: self.array(&tables[group]),
            common: self.array(&common[group]),
            lengths: self.array(lengths),
            tokens: self.array(tokens),
            splits: splits(self.reach),
        }
    }

    /// Rows of several tokens that do not branch.
    pub fn chunks(&self, group: usize) -> Chunks<'_> {
        self.chunks_of(group, &self.ranges.tiles, None)
    }

    /// Rows whose draft tokens branch.
    pub fn branching(&self, group: usize) -> Chunks<'_> {
        self.chunks_of(group, &self.ranges.branching, Some(self.array(&self.ranges.seen)))
    }

    fn chunks_of<'a>(&'a self, group: usize, tiles: &TileRanges, seen: Option<View<'a, u32>>) -> Chunks<'a> {
        let ChunkRanges { tables, first_tokens, token_counts, first_positions } = &self.ranges.chunks;
        Chunks {
            tables: self.array(&tables[group]),
            tile_sequences: self.array(&tiles.rows),
            tile_firsts: self.array(&tiles.firsts),
            first_tokens: self.array(first_tokens),
            token_counts: self.array(token_counts),
            first_positions: self.array(first_positions),
            seen,
        }
    }

    fn array(&self, range: &Range<usize>) -> View<'_, u32> {
        self.memory.slice(range.clone())
    }
}

impl ArrayRanges {
    fn of(rows: &Rows, [tiles, branching]: &[Tiles; 2], heads: Heads, words: &mut Words) -> ArrayRanges {
        let copied = |array: &[u32], words: &mut Words| words.push(array.iter().copied());
        let by_group = |arrays: &[Vec<u32>], words: &mut Words| {
            arrays.iter().map(|array| copied(array, words)).collect::<Vec<_>>()
        };
        ArrayRanges {
            tokens: copied(&rows.tokens, words),
            positions: copied(&rows.positions, words),
            slots: by_group(&rows.slots, words),
            decodes: DecodeRanges {
                tables: by_group(&rows.decodes.tables, words),
                common: by_group(&rows.decodes.common(heads), words),
                lengths: copied(&rows.decodes.lengths, words),
                tokens: copied(&rows.decodes.first_tokens, words),
            },
            chunks: ChunkRanges {
                tables: by_group(&rows.chunks.tables, words),
                first_tokens: copied(&rows.chunks.first_tokens, words),
                token_counts: copied(&rows.chunks.token_counts, words),
                first_positions: copied(&rows.chunks.first_positions, words),
            },
            tiles: TileRanges::of(tiles, words),
            branching: TileRanges::of(branching, words),
            seen: if branching.is_empty() { Range::default() } else { copied(&rows.seen, words) },
            logit_tokens: copied(&rows.logit_tokens, words),
        }
    }
}

impl TileRanges {
    fn of(tiles: &Tiles, words: &mut Words) -> TileRanges {
        TileRanges {
            rows: words.push(tiles.iter().map(|(row, _)| *row)),
            firsts: words.push(tiles.iter().map(|(_, first)| *first)),
        }
    }
}

/// A token that sees all of the last keys.
const ALL_SEEN: u32 = u32::MAX;

/// Which of the last 32 keys draft token `index` of a row sees, as bits; the lowest bit is its own key. It sees all
/// keys before the draft tokens, and those draft tokens that `seen` has as bits, the lowest bit for the first one.
fn last_seen(index: usize, seen: u64) -> u32 {
    let of_draft = seen.reverse_bits() >> (u64::BITS as usize - 1 - index);
    (of_draft | u64::MAX << (index + 1)) as u32
}

/// Returns a function that says whether the tokens of a row become rows of one token: if it has one token, or consists
/// of a token and draft tokens that do not branch and there is room for those of all rows.
fn decoding(batch: &Batch, sizes: &StepSizes) -> impl Fn(&BatchRow<'_>) -> bool + use<> {
    let may = |row: &BatchRow<'_>| row.tokens == 1 + row.draft_tokens && row.seen.is_empty();
    let has_room = batch.rows().filter(may).map(|row| row.tokens).sum::<usize>() <= sizes.rows;
    move |row| may(row) && (row.draft_tokens == 0 || has_room)
}

/// The arrays of a batch, in order.
#[derive(Debug, Default)]
struct Rows {
    /// Number of keys for which tables have room.
    reach: usize,
    tokens: Vec<u32>,
    positions: Vec<u32>,
    seen: Vec<u32>,
    /// One array for each group.
    slots: Vec<Vec<u32>>,
    logit_tokens: Vec<u32>,
    decodes: RowNumbers,
    chunks: RowNumbers,
    /// For each row of `chunks`, whether its draft tokens branch.
    branches: Vec<bool>,
}

/// For each tile its row, and the index of its first token in the row.
type Tiles = Vec<(u32, u32)>;

#[derive(Debug, Default)]
struct RowNumbers {
    /// One array for each group.
    tables: Vec<Vec<u32>>,
    lengths: Vec<u32>,
    first_tokens: Vec<u32>,
    token_counts: Vec<u32>,
    first_positions: Vec<u32>,
}

impl Rows {
    fn empty(sizes: &StepSizes) -> Rows {
        let numbers = || RowNumbers::of_groups(sizes.groups);
        Rows { slots: vec![Vec::new(); sizes.groups], decodes: numbers(), chunks: numbers(), ..Rows::default() }
    }

    /// Makes the arrays of a batch. Rows of one token are sorted so that rows that share pages are neighbours.
    fn of<'a>(batch: &'a Batch, sizes: &StepSizes) -> Rows {
        let keys = batch.rows().map(|row| row.first_position as usize + row.tokens).max().unwrap_or(0);
        let mut rows = Rows {
            reach: sizes.reach(keys),
            tokens: batch.tokens().to_vec(),
            positions: batch.positions().to_vec(),
            logit_tokens: batch.logit_tokens().iter().map(|&token| token as u32).collect(),
            ..Rows::empty(sizes)
        };
        let decodes_alone = decoding(batch, sizes);
        let mut decodes = Vec::new();
        for row in batch.rows() {
            let first_token = rows.slots.first().map_or(0, Vec::len) as u32;
            for (group, slots) in rows.slots.iter_mut().enumerate() {
                let (table, page_tokens) = (row.table(group, sizes.groups), PAGE_TOKENS as u32);
                let slot = |at: u32| table[(at / page_tokens) as usize] * page_tokens + at % page_tokens;
                slots.extend((row.first_position..row.first_position + row.tokens as u32).map(slot));
            }
            let draft_tokens = row.seen.iter().enumerate().map(|(index, &seen)| last_seen(index, seen));
            rows.seen.extend(iter::repeat_n(ALL_SEEN, row.tokens - row.seen.len()).chain(draft_tokens));
            match decodes_alone(&row) {
                true => decodes.extend(row.token_rows().zip(first_token..)),
                false => {
                    rows.chunks.push(&row, first_token, rows.reach, sizes);
                    rows.branches.push(!row.seen.is_empty());
                }
            }
        }
        let key = |row: &BatchRow<'a>| (row.first_position as usize + 1, row.table(0, sizes.groups));
        decodes.sort_by(|(one, _), (other, _)| sharing_order(key(one), key(other)));
        decodes.iter().for_each(|(row, first_token)| rows.decodes.push(row, *first_token, rows.reach, sizes));
        rows
    }

    /// Tiles of the rows of several tokens that do not branch, and of those that do.
    fn tiles(&self, heads: Heads) -> [Tiles; 2] {
        match self.branches[..] {
            [] => [Tiles::new(), Tiles::new()],
            _ => prefill_tiles(heads, &self.chunks.token_counts)
                .into_iter()
                .partition::<Tiles, _>(|(row, _)| !self.branches[*row as usize])
                .into(),
        }
    }

    fn counts(&self, [tiles, branching]: &[Tiles; 2]) -> StepCounts {
        StepCounts {
            reach: self.reach,
            tokens: self.tokens.len(),
            logits: self.logit_tokens.len(),
            decodes: self.decodes.lengths.len(),
            tiles: tiles.len(),
            branching_tiles: branching.len(),
        }
    }

    fn pad(&mut self, decodes: usize, with_logits: bool, sizes: &StepSizes) {
        while self.decodes.lengths.len() < decodes {
            let token = self.tokens.len() as u32;
            let blocks = vec![sizes.trash_page; sizes.groups];
            self.tokens.push(0);
            self.positions.push(0);
            self.seen.push(ALL_SEEN);
            self.slots.iter_mut().for_each(|slots| slots.push(sizes.trash_page * PAGE_TOKENS as u32));
            self.logit_tokens.extend(with_logits.then_some(token));
            let row = BatchRow { tokens: 1, draft_tokens: 0, first_position: 0, blocks: &blocks, seen: &[] };
            self.decodes.push(&row, token, self.reach, sizes);
        }
    }
}

impl RowNumbers {
    fn of_groups(groups: usize) -> RowNumbers {
        RowNumbers { tables: vec![Vec::new(); groups], ..RowNumbers::default() }
    }

    fn push(&mut self, row: &BatchRow<'_>, first_token: u32, reach: usize, sizes: &StepSizes) {
        for (group, tables) in self.tables.iter_mut().enumerate() {
            let pages = row.table(group, sizes.groups).iter().copied().chain(iter::repeat(sizes.trash_page));
            tables.extend(pages.take(reach.div_ceil(PAGE_TOKENS)));
        }
        self.lengths.push(row.first_position + row.tokens as u32);
        self.first_tokens.push(first_token);
        self.token_counts.push(row.tokens as u32);
        self.first_positions.push(row.first_position);
    }

    /// Number of leading splits that each row has in common with the row before, by group.
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

    /// A batch of rows, each given by its number of tokens, the length of its sequence, and its blocks in two groups of
    /// layers.
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
                // This row shares pages with the first row in the first group of layers only.
                (1, 132, &[5, 6, 8, 25, 26, 28]),
                (1, 133, &[1, 2, 4, 11, 12, 14]),
            ]),
            &SIZES,
        );
        rows.pad(6, true, &SIZES);
        assert_eq!(rows.decodes.lengths, [131, 133, 130, 132, 1, 1]);
        assert_eq!(rows.decodes.first_tokens, [3, 5, 0, 4, 6, 7], "each has its own token");
        let starts = |table: &[u32]| table.chunks(SIZES.pages()).map(|row| row[0]).collect::<Vec<_>>();
        assert_eq!(starts(&rows.decodes.tables[0]), [1, 1, 5, 5, 99, 99]);
        assert_eq!(starts(&rows.decodes.tables[1]), [11, 11, 15, 25, 99, 99]);
        assert_eq!(rows.decodes.common(SIZES.heads), [[0, 1, 0, 1, 0, 0], [0, 1, 0, 0, 0, 0]]);
        assert_eq!(rows.chunks.lengths, [140]);
    }

    #[test]
    fn a_steps_tables_have_room_for_its_longest_sequence() {
        let sizes = StepSizes { longest: 10_000, ..SIZES };
        assert_eq!(
            [0, 1, 2048, 2049, 8192, 8193, 10_000].map(|keys| sizes.reach(keys)),
            [2048, 2048, 2048, 8192, 8192, 10_000, 10_000]
        );
        assert_eq!(SIZES.reach(1), 256);
        let blocks: Vec<u32> = (0..2 * 33).collect();
        for (length, pages) in [(2048, 32), (2049, 128)] {
            let rows = Rows::of(&batch(&[(1, 5, &[1, 2]), (1, length, &blocks)]), &sizes);
            assert_eq!(rows.decodes.tables[1].len(), 2 * pages, "{length}");
            assert_eq!(rows.counts(&Default::default()).reach, 64 * pages);
        }
    }

    #[test]
    fn a_token_and_its_draft_tokens_are_rows_of_their_own_where_there_is_room() {
        let mut batch = batch(&[(1, 64, &[1, 11]), (2, 30, &[4, 14])]);
        batch.push_drafted([3], &DraftTree::chain([4, 5]), 63, &[2, 3, 12, 13].map(BlockId), Logits::LAST);
        let rows = Rows::of(&batch, &SIZES);
        assert_eq!(rows.decodes.lengths, [64, 64, 65, 66]);
        assert_eq!(rows.decodes.first_tokens, [0, 3, 4, 5]);
        assert_eq!(rows.positions, [63, 28, 29, 63, 64, 65]);
        assert_eq!(rows.slots[1][3..], [12 * 64 + 63, 13 * 64, 13 * 64 + 1]);
        assert_eq!((rows.chunks.lengths, rows.branches), (vec![30], vec![false]));
        let rows = Rows::of(&batch, &StepSizes { rows: 3, ..SIZES });
        assert_eq!((rows.decodes.lengths, rows.chunks.lengths), (vec![64], vec![30, 66]));
    }

    /// Two branches, one of which forks again, beside a prompt.
    #[test]
    fn branching_draft_tokens_have_tiles_and_bits_of_their_own() {
        let mut draft = DraftTree::default();
        let [_, two] = [4, 5].map(|token| draft.push(token, None));
        [6, 7].iter().for_each(|&token| _ = draft.push(token, Some(two)));
        let mut batch = batch(&[(2, 64, &[1, 11])]);
        batch.push_drafted([3], &draft, 70, &[2, 3, 12, 13].map(BlockId), Logits::LAST);
        let rows = Rows::of(&batch, &SIZES);
        let before = |draft_tokens: u32| u32::MAX << draft_tokens;
        assert_eq!(rows.seen[..3], [ALL_SEEN; 3]);
        assert_eq!(rows.seen[3..], [before(1) | 1, before(2) | 1, before(3) | 0b11, before(4) | 0b101]);
        assert_eq!(rows.positions[2..], [70, 71, 71, 72, 72]);
        assert_eq!(rows.slots[0][2..], [198, 199, 200, 201, 202]);
        assert_eq!(rows.tiles(SIZES.heads), [vec![(0, 0)], vec![(1, 0)]]);
        assert_eq!(last_seen(31, 1 << 31 | 1), 1 << 31 | 1);
    }
}
