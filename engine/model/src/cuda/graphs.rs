//! CUDA graphs of decode steps: one for each of a few numbers of rows and lengths of their sequences.

use std::collections::BTreeMap;

use windlass_kernels::cuda::{Device, DriverError, Graph, MemoryFacts};

/// The numbers of rows that steps are padded to: 1, 2, 4, then multiples of 8, of 16 from 256 on and of 64 from 512 on,
/// and the largest number.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Buckets(Vec<usize>);

impl Buckets {
    /// The buckets for steps of at most `most` rows.
    pub fn up_to(most: usize) -> Buckets {
        let steps = [1, 2, 4].into_iter().chain((8..256).step_by(8)).chain((256..512).step_by(16));
        let mut sizes: Vec<usize> = steps.chain((512..most).step_by(64)).filter(|&size| size < most).collect();
        // A full engine runs steps of exactly this size, so it must have a graph.
        sizes.push(most);
        Buckets(sizes)
    }

    /// Every size of a step whose sequences have these lengths, the most likely sizes first.
    pub fn sizes(&self, reaches: impl Iterator<Item = usize>) -> Vec<GraphSize> {
        reaches.flat_map(|reach| self.0.iter().map(move |&bucket| GraphSize { bucket, reach })).collect()
    }

    /// The smallest bucket for so many rows; `None` if there are too many.
    pub fn holding(&self, rows: usize) -> Option<usize> {
        self.0.iter().copied().find(|&size| size >= rows)
    }
}

/// The size of the steps of a graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct GraphSize {
    /// Number of rows, of one token each.
    pub bucket: usize,
    /// Number of keys of a sequence that tables and splits have room for.
    pub reach: usize,
}

/// The captured graphs, and the sizes that steps may need.
#[derive(Debug)]
pub(super) struct Graphs {
    captured: BTreeMap<GraphSize, Captured>,
    /// In the order in which they are captured ahead of time.
    sizes: Vec<GraphSize>,
    /// Whether the device had no memory for another graph.
    is_full: bool,
}

/// The graph of one size.
#[derive(Debug)]
struct Captured {
    graph: Graph,
    /// Whether a step has used it.
    is_used: bool,
}

impl Graphs {
    /// No graphs yet, for steps of these sizes.
    pub fn new(sizes: Vec<GraphSize>) -> Graphs {
        Graphs { captured: BTreeMap::new(), sizes, is_full: false }
    }

    /// The first size without a graph; `None` if all have one or there is no memory for another.
    pub fn missing(&self) -> Option<GraphSize> {
        let missing = self.sizes.iter().copied().find(|size| !self.captured.contains_key(size));
        missing.filter(|_| !self.is_full)
    }

    /// The graph of a step, captured if its size has none. `None` if there is no memory for it: then the step runs
    /// without.
    pub fn of_step(
        &mut self,
        size: GraphSize,
        capture: impl FnOnce() -> Result<Graph, DriverError>,
    ) -> Result<Option<&Graph>, DriverError> {
        self.capture(size, capture)?;
        Ok(self.captured.get_mut(&size).map(|captured| {
            captured.is_used = true;
            &captured.graph
        }))
    }

    /// Captures the graph of a size that has none, if there is memory for it.
    pub fn capture(
        &mut self,
        size: GraphSize,
        capture: impl FnOnce() -> Result<Graph, DriverError>,
    ) -> Result<(), DriverError> {
        if self.is_full || self.captured.contains_key(&size) {
            return Ok(());
        }
        match capture() {
            Err(DriverError::NoRoomForGraph { .. }) => self.is_full = true,
            graph => drop(self.captured.insert(size, Captured { graph: graph?, is_used: false })),
        }
        Ok(())
    }

    /// Drops the graphs that no step has used, since their memory is to be used otherwise for a while. After that there
    /// may be memory again.
    pub fn end_unused(&mut self) {
        self.captured.retain(|_, captured| captured.is_used);
        self.is_full = false;
    }

    pub fn count(&self) -> usize {
        self.captured.len()
    }

    /// Number of sizes.
    pub fn most(&self) -> usize {
        self.sizes.len()
    }
}

/// Graphs that are captured ahead of time leave at least this fraction (one over it) of the device's memory free.
const LEAST_SHARE: usize = 256;

/// The memory for graphs that are captured ahead of time: half of what is free after everything else is allocated. The
/// other half is for graphs that steps capture and for the driver, whose memory for graphs no ledger counts.
#[derive(Clone, Debug)]
pub(super) struct GraphRoom {
    device: Device,
    least_free_bytes: usize,
}

impl GraphRoom {
    /// On a device on which everything but graphs is allocated.
    pub fn of(device: &Device) -> Result<GraphRoom, DriverError> {
        let MemoryFacts { free_bytes, total_bytes } = device.driver().memory()?;
        let least_free_bytes = (free_bytes / 2).max(total_bytes / LEAST_SHARE);
        Ok(GraphRoom { device: device.clone(), least_free_bytes })
    }

    /// Whether another graph may be captured ahead of time.
    pub fn is_left(&self) -> Result<bool, DriverError> {
        Ok(self.device.driver().memory()?.free_bytes >= self.least_free_bytes)
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

    #[test]
    fn few_short_sequences_come_first() {
        let sizes = Buckets::up_to(3).sizes([2048, 5000].into_iter());
        let expected = [(1, 2048), (2, 2048), (3, 2048), (1, 5000), (2, 5000), (3, 5000)];
        assert_eq!(sizes, expected.map(|(bucket, reach)| GraphSize { bucket, reach }));
    }
}
