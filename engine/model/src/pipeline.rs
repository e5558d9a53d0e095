//! A model whose layers are divided among processes, which hand activations on over TCP.
//!
//! The process that serves leads: it has the last layers, so logits and sampling never leave it. It sends every step's
//! tokens and places to each earlier stage in turn, with the activations of the one before. While one stage computes a step
//! the others compute those before and behind it, which are of other sequences, or of earlier and later tokens of a prompt.

mod greeting;
mod peer;
mod wire;
mod worker;

use std::io;
use std::net::SocketAddr;

use windlass_engine_core::executor::Geometry;

pub(crate) use greeting::Join;
pub use peer::Gathering;
pub(crate) use peer::Peer;
pub(crate) use wire::VERSION;
pub(crate) use worker::Worker;

/// Why a pipeline cannot be built, or goes on no longer.
#[derive(Debug, thiserror::Error)]
pub enum PipelineError {
    /// Nobody can join.
    #[error("cannot listen for the pipeline's other stages: {source}")]
    Listen {
        /// What the system said.
        source: io::Error,
    },
    /// Something connected that is no stage.
    #[error("something connected that is no stage of a pipeline")]
    Stranger,
    /// Stages did not come.
    #[error("the pipeline has {stages} nodes and after {seconds} s only these have joined: 0 {}", list(joined))]
    Missing {
        /// Node ranks that have joined.
        joined: Vec<u32>,
        /// Nodes there should be.
        stages: u32,
        /// How long they were waited for.
        seconds: u64,
    },
    /// There was no leader to join.
    #[error("the leader of the pipeline at {leader} was not reached within {seconds} s: {source}")]
    NoLeader {
        /// Host and port.
        leader: String,
        /// How long it was tried.
        seconds: u64,
        /// Of the last attempt.
        source: io::Error,
    },
    /// An earlier stage failed, as the leader sees it.
    #[error("node {node_rank} of the pipeline, at {address}, failed: {why}")]
    Stage {
        /// Which one.
        node_rank: u32,
        /// Where it is.
        address: SocketAddr,
        /// In words.
        why: String,
    },
    /// The leader failed, as another stage sees it.
    #[error("the leader of the pipeline, at {address}, failed: {why}")]
    Leader {
        /// Where it is.
        address: SocketAddr,
        /// In words.
        why: String,
    },
    /// A step could not be computed here.
    #[error("a step of the pipeline failed here: {0}")]
    Step(String),
}

fn list(ranks: &[u32]) -> String {
    ranks.iter().map(u32::to_string).collect::<Vec<_>>().join(" ")
}

/// The most bytes of a frame between stages of these sizes.
fn frame_bound(geometry: &Geometry, hidden: usize) -> usize {
    let [block_tokens, blocks, longest, rows, tokens] = [
        geometry.block_tokens,
        geometry.blocks,
        geometry.max_sequence_tokens,
        geometry.max_step_rows,
        geometry.max_step_tokens,
    ]
    .map(|size| size as usize);
    let copies = 4 + 8 * blocks;
    // A scheduler may hold a block more than a sequence's tokens fill.
    let step =
        4 + rows * (4 * wire::ROW_NUMBERS + 4 * (longest.div_ceil(block_tokens) + 1)) + 4 * tokens * (1 + hidden);
    copies.max(step).max(wire::MAX_GREETING_BYTES)
}

#[cfg(test)]
mod tests {
    use windlass_engine_core::draft::DraftTree;
    use windlass_engine_core::executor::KvGroups;
    use windlass_engine_core::plan::BlockId;

    use super::*;
    use crate::batch::{Batch, Logits};

    /// Every row as long as a sequence may be, and all tokens that a step may have.
    #[test]
    fn the_largest_step_fits_into_a_frame() {
        let geometry = Geometry {
            block_tokens: 16,
            blocks: 64,
            swap_slots: 0,
            max_sequence_tokens: 4000,
            max_step_rows: 300,
            max_step_tokens: 600,
            max_step_logits: 300,
            vocabulary: 10,
            groups: KvGroups::ONE,
        };
        let (mut batch, hidden) = (Batch::default(), 32);
        let blocks = vec![BlockId(0); 4000usize.div_ceil(16) + 1];
        (0..300).for_each(|_| batch.push_drafted([1], &DraftTree::chain([2]), 3998, &blocks, Logits::LAST));
        let payload = peer::step_payload(&batch, &vec![0.0; 600 * hidden]);
        assert!(payload.len() > wire::MAX_GREETING_BYTES);
        assert_eq!(payload.len(), frame_bound(&geometry, hidden));
    }
}
