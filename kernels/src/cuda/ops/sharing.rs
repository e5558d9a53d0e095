//! Which sequences of a decoding step begin with the same pages: those are read once for several.
//!
//! A split is shared only where it is whole and of one size for all, so that each sequence's numbers are those that it has alone.

use std::cmp::Ordering;

use super::attention::{DECODE_ROWS, split_keys};
use super::heads::{Heads, PAGE_TOKENS};
use super::word;

/// A sequence as others are compared with it: its keys, and the pages that hold them.
pub type Held<'a> = (usize, &'a [u32]);

/// An order in which sequences that begin with the same pages are neighbours.
pub fn sharing_order((one, its_pages): Held<'_>, (other, others_pages): Held<'_>) -> Ordering {
    (split_keys(one), its_pages).cmp(&(split_keys(other), others_pages))
}

/// How many leading splits each row has in common with the row before, given the keys of each and its pages, `[rows, max_pages]`:
/// none where a block has no room for the queries of another row.
///
/// # Panics
/// When there are no whole tables.
pub fn shared_splits(heads: Heads, lengths: &[u32], tables: &[u32]) -> Vec<u32> {
    let max_pages = tables.len() / lengths.len().max(1);
    assert_eq!(tables.len(), lengths.len() * max_pages, "a table for each row");
    let row = |index: usize| (lengths[index] as usize, &tables[index * max_pages..][..max_pages]);
    let room = DECODE_ROWS / (heads.heads / heads.kv_heads);
    let mut together = room;
    let share = |index: usize| {
        let common = if together < room { common_splits(row(index - 1), row(index)) } else { 0 };
        together = if common > 0 { together + 1 } else { 1 };
        word(common)
    };
    (0..lengths.len()).map(share).collect()
}

/// Leading splits of the same pages, whole in both.
fn common_splits((one, its_pages): Held<'_>, (other, others_pages): Held<'_>) -> usize {
    let size = split_keys(one);
    if size != split_keys(other) {
        return 0;
    }
    let pages = its_pages.iter().zip(others_pages).take_while(|(one, other)| one == other).count();
    (pages * PAGE_TOKENS).min(one).min(other) / size
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Sixteen rows of a product hold so many sequences' heads: four.
    const HEADS: Heads = Heads { heads: 8, kv_heads: 2, dim: 64 };
    const MAX_PAGES: usize = 40;

    /// The pages of a sequence that has the first `shared` in common with all of its family.
    fn pages(family: u32, shared: usize, own: u32) -> Vec<u32> {
        let page = |at: usize| if at < shared { 1000 * family } else { 100_000 + 1000 * own } + at as u32;
        (0..MAX_PAGES).map(page).collect()
    }

    fn shared(rows: &[(u32, Vec<u32>)]) -> Vec<u32> {
        let lengths: Vec<u32> = rows.iter().map(|(length, _)| *length).collect();
        shared_splits(HEADS, &lengths, &rows.iter().flat_map(|(_, pages)| pages.clone()).collect::<Vec<_>>())
    }

    #[test]
    fn whole_splits_of_the_same_size_are_shared() {
        for (lengths, common_pages, expected) in [
            ([300, 300], 0, 0),
            ([300, 300], 1, 0),
            ([300, 300], 2, 1),
            ([300, 300], 3, 1),
            ([300, 270], 4, 2),
            // The same pages to the end: two beams of one text.
            ([300, 300], 40, 2),
            ([300, 255], 40, 1),
            ([300, 127], 40, 0),
            ([2048, 2048], 33, 16),
            // Splits of 128 keys here, and of 256 there.
            ([2048, 2049], 32, 0),
            ([2049, 2300], 33, 8),
            ([1, 1], 40, 0),
        ] {
            let rows = [(lengths[0], pages(0, common_pages, 1)), (lengths[1], pages(0, common_pages, 2))];
            assert_eq!(shared(&rows), [0, expected], "{lengths:?} with {common_pages} pages in common");
        }
        assert_eq!(shared(&[]), [0; 0]);
    }

    #[test]
    fn a_block_has_room_for_few_sequences() {
        let rows: Vec<_> = (0..10).map(|own| (200, pages(0, 2, own))).collect();
        assert_eq!(shared(&rows), [0, 1, 1, 1, 0, 1, 1, 1, 0, 1]);
    }

    #[test]
    fn with_many_heads_to_a_key_head_nothing_is_shared() {
        for heads in [9, 16, 40] {
            let heads = Heads { heads, kv_heads: 1, dim: 64 };
            assert_eq!(shared_splits(heads, &[200; 3], &[7; 3 * MAX_PAGES]), [0; 3]);
        }
    }

    proptest! {
        /// What sequences are said to have in common they have, all that a block takes together; and their order puts no other
        /// between two that have more in common.
        #[test]
        fn sorted_sequences_share_what_they_have(
            rows in prop::collection::vec((1u32..2560, 0u32..3, 0usize..8), 1..30),
        ) {
            let of = |(own, (length, family, common)): (usize, (u32, u32, usize))| {
                (length, pages(family, common.min(length as usize / PAGE_TOKENS), own as u32))
            };
            let mut rows: Vec<_> = rows.into_iter().enumerate().map(of).collect();
            rows.sort_by(|(one, its), (other, others)| sharing_order((*one as usize, its), (*other as usize, others)));
            let (found, held) = (shared(&rows), |index: usize| (rows[index].0 as usize, &rows[index].1[..]));
            for (one, other) in (0..rows.len()).flat_map(|one| (one + 1..rows.len()).map(move |other| (one, other))) {
                let said = *found[one + 1..=other].iter().min().unwrap() as usize;
                let between = (one..other).map(|row| common_splits(held(row), held(row + 1))).min().unwrap();
                let all = common_splits(held(one), held(other));
                prop_assert!(said <= all && all <= between, "{said} of {all}, {between} from one to the next");
                prop_assert!(said == 0 || other - one < 4);
            }
        }
    }
}
