//! Pipeline parallelism: the layers of a model are divided among processes, which send activations over TCP.
//!
//! The process that serves is the leader. It has the last layers, so logits and sampling stay there. It sends the
//! tokens and slots of every step to each earlier stage in turn, with the activations of the stage before. While one
//! stage computes a step, the other stages compute earlier and later steps, which have other sequences, or other chunks
//! of a prompt.

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

/// Errors of a pipeline.
#[derive(Debug, thiserror::Error)]
pub enum PipelineError {
    /// The leader cannot listen.
    #[error("cannot listen for the pipeline's other stages: {source}")]
    Listen {
        /// The error of the system.
        source: io::Error,
    },
    /// Something connected that is not a stage.
    #[error("something connected that is no stage of a pipeline")]
    Stranger,
    /// Some stages did not join in time.
    #[error("the pipeline has {stages} nodes and after {seconds} s only these have joined: 0 {}", list(joined))]
    Missing {
        /// Node ranks that have joined.
        joined: Vec<u32>,
        /// Number of nodes of the pipeline.
        stages: u32,
        /// How long they were waited for, in seconds.
        seconds: u64,
    },
    /// The leader was not reached.
    #[error("the leader of the pipeline at {leader} was not reached within {seconds} s: {source}")]
    NoLeader {
        /// Host and port.
        leader: String,
        /// How long it was tried, in seconds.
        seconds: u64,
        /// The error of the last attempt.
        source: io::Error,
    },
    /// An earlier stage failed, as reported by the leader.
    #[error("node {node_rank} of the pipeline, at {address}, failed: {why}")]
    Stage {
        /// Its node rank.
        node_rank: u32,
        /// Its address.
        address: SocketAddr,
        /// The reason.
        why: String,
    },
    /// The leader failed, as reported by another stage.
    #[error("the leader of the pipeline, at {address}, failed: {why}")]
    Leader {
        /// Its address.
        address: SocketAddr,
        /// The reason.
        why: String,
    },
    /// A step could not be computed here.
    #[error("a step of the pipeline failed here: {0}")]
    Step(String),
}

fn list(ranks: &[u32]) -> String {
    ranks.iter().map(u32::to_string).collect::<Vec<_>>().join(" ")
}

/// Most bytes of a frame between stages of these sizes.
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
    // A scheduler may give a sequence one block more than its tokens fill.
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

    /// All rows are as long as a sequence may be, and the step has all tokens that it may have.
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
