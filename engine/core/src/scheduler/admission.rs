//! Admission: whether the engine could ever serve a request.

use crate::executor::Geometry;
use crate::request::{RejectReason, Request};

/// Rejects requests that could not be served even alone.
pub(super) fn fits_engine(request: &Request, geometry: &Geometry) -> Result<(), RejectReason> {
    if request.prompt.is_empty() {
        return Err(RejectReason::EmptyPrompt);
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
    // Nothing follows the last generated token, so its K and V are never computed.
    let computed = tokens - u64::from(request.max_tokens.min(1));
    let needed_blocks = geometry.groups.sequence_blocks(computed, geometry.block_tokens);
    let needed_blocks = u32::try_from(needed_blocks).unwrap_or(u32::MAX);
    if needed_blocks > geometry.blocks {
        return Err(RejectReason::NeverFits { needed_blocks, total_blocks: geometry.blocks });
    }
    Ok(())
}
