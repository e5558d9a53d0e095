//! Whether a request may join the queue: never, not now, or yes.

use crate::executor::Geometry;
use crate::request::{RejectReason, Request};

/// How much may wait. What is beyond it is refused at once, while its client can still go elsewhere.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueueLimits {
    /// Most requests that wait beyond the free places in the running batch.
    pub max_waiting_requests: u32,
    /// Most prompt tokens that wait. A single request may exceed it when nothing else waits.
    pub max_queued_prompt_tokens: u64,
}

/// The queue as admission sees it.
pub(super) struct Queue {
    pub(super) waiting: usize,
    pub(super) prompt_tokens: u64,
    pub(super) free_places: usize,
}

impl QueueLimits {
    /// Whether a prompt of so many tokens may wait, too.
    pub(super) fn admit(&self, prompt_tokens: usize, queue: &Queue) -> Result<(), RejectReason> {
        let many = queue.waiting >= self.max_waiting_requests as usize + queue.free_places;
        let long = queue.prompt_tokens + prompt_tokens as u64 > self.max_queued_prompt_tokens;
        if many || (long && queue.waiting > 0) {
            return Err(RejectReason::QueueFull { waiting: queue.waiting as u32, queued_tokens: queue.prompt_tokens });
        }
        Ok(())
    }
}

/// Whether the engine could serve this request if it were alone.
pub(super) fn fits_engine(request: &Request, geometry: &Geometry) -> Result<(), RejectReason> {
    if request.prompt.is_empty() {
        return Err(RejectReason::EmptyPrompt);
    }
    if request.max_tokens == 0 {
        return Err(RejectReason::NothingToGenerate);
    }
    if let Some(&token) = request.prompt.iter().find(|token| **token >= geometry.vocabulary) {
        return Err(RejectReason::UnknownToken { token, vocabulary: geometry.vocabulary });
    }
    let prompt_tokens = u32::try_from(request.prompt.len()).unwrap_or(u32::MAX);
    let tokens = u64::from(prompt_tokens) + u64::from(request.max_tokens);
    if tokens > u64::from(geometry.max_sequence_tokens) {
        return Err(RejectReason::TooLong {
            prompt_tokens,
            max_tokens: request.max_tokens,
            limit_tokens: geometry.max_sequence_tokens,
        });
    }
    // Nothing follows the last token, so its K and V are never computed.
    let needed_blocks = (tokens - 1).div_ceil(u64::from(geometry.block_tokens)) as u32;
    if needed_blocks > geometry.blocks {
        return Err(RejectReason::NeverFits { needed_blocks, total_blocks: geometry.blocks });
    }
    Ok(())
}
