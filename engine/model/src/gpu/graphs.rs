//! Steps of one token per sequence as captured graphs, one for each of a few numbers of sequences.

use std::collections::BTreeMap;

use windlass_kernels::cuda::Graph;

/// Numbers of sequences that steps are padded to: 1, 2, 4, then multiples of 8, and the most there may be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Buckets(Vec<usize>);

impl Buckets {
    /// Largest step that is captured, if more sequences than that may run: beyond it a launch costs little beside its
    /// work, and every graph costs memory.
    const LARGEST: usize = 256;

    /// The buckets for steps of at most `most` sequences.
    pub fn up_to(most: usize) -> Buckets {
        let small = [1, 2, 4].into_iter().chain((8..=Buckets::LARGEST).step_by(8));
        let mut sizes: Vec<usize> = small.filter(|&size| size < most).collect();
        // A full engine runs at exactly this size, so it must not be the one without a graph.
        sizes.push(most);
        Buckets(sizes)
    }

    /// The smallest one with room for so many sequences.
    pub fn holding(&self, rows: usize) -> Option<usize> {
        self.0.iter().copied().find(|&size| size >= rows)
    }
}

/// The graphs captured so far.
#[derive(Debug, Default)]
pub(super) struct Graphs(BTreeMap<usize, Graph>);

impl Graphs {
    pub fn of(&self, bucket: usize) -> Option<&Graph> {
        self.0.get(&bucket)
    }

    pub fn keep(&mut self, bucket: usize, graph: Graph) {
        self.0.insert(bucket, graph);
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
        for most in [1, 3, 8, 64, 100, 256, 300] {
            let buckets = Buckets::up_to(most);
            assert!((1..=most).all(|rows| buckets.holding(rows).is_some_and(|size| size >= rows)), "{most}");
            assert_eq!(buckets.holding(most), Some(most));
            assert_eq!(buckets.holding(most + 1), None);
        }
        let buckets = Buckets::up_to(100);
        assert_eq!([1, 2, 3, 5, 9, 96, 97].map(|rows| buckets.holding(rows).unwrap_or(0)), [1, 2, 4, 8, 16, 96, 100]);
    }
}
