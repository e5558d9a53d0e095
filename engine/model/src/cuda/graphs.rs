//! Steps of one token per sequence as captured graphs, one for each of a few numbers of sequences and lengths of theirs.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;

use windlass_kernels::cuda::{DriverError, Graph};

/// Numbers of sequences that steps are padded to: 1, 2, 4, then multiples of 8, of 16 from 256 and of 64 from 512 on, and
/// the most there may be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Buckets(Vec<usize>);

impl Buckets {
    /// The buckets for steps of at most `most` sequences.
    pub fn up_to(most: usize) -> Buckets {
        let steps = [1, 2, 4].into_iter().chain((8..256).step_by(8)).chain((256..512).step_by(16));
        let mut sizes: Vec<usize> = steps.chain((512..most).step_by(64)).filter(|&size| size < most).collect();
        // A full engine runs at exactly this size, so it must not be the one without a graph.
        sizes.push(most);
        Buckets(sizes)
    }

    /// The smallest one with room for so many sequences.
    pub fn holding(&self, rows: usize) -> Option<usize> {
        self.0.iter().copied().find(|&size| size >= rows)
    }
}

/// What a graph was captured for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct GraphSize {
    /// Sequences.
    pub bucket: usize,
    /// Keys of a sequence that there is room for.
    pub reach: usize,
}

/// The graphs captured so far.
#[derive(Debug, Default)]
pub(super) struct Graphs(BTreeMap<GraphSize, Graph>);

impl Graphs {
    /// The graph of a size, captured if there is none.
    pub fn get_or_capture(
        &mut self,
        size: GraphSize,
        capture: impl FnOnce() -> Result<Graph, DriverError>,
    ) -> Result<&Graph, DriverError> {
        match self.0.entry(size) {
            Entry::Occupied(graph) => Ok(graph.into_mut()),
            Entry::Vacant(place) => Ok(place.insert(capture()?)),
        }
    }

    pub fn count(&self) -> usize {
        self.0.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_number_of_sequences_has_a_bucket_and_the_largest_one_its_own() {
        for most in [1, 3, 8, 64, 100, 256, 300, 1000] {
            let buckets = Buckets::up_to(most);
            let padded = |rows: usize| buckets.holding(rows).map_or(usize::MAX, |size| size - rows);
            assert!((1..=most).all(|rows| padded(rows) < 8.max(rows / 7)), "{most}");
            assert_eq!(buckets.holding(most), Some(most));
            assert_eq!(buckets.holding(most + 1), None);
        }
        let buckets = Buckets::up_to(100);
        assert_eq!([1, 2, 3, 5, 9, 96, 97].map(|rows| buckets.holding(rows).unwrap_or(0)), [1, 2, 4, 8, 16, 96, 100]);
    }
}
