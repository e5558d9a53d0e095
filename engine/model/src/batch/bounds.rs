//! Checks positions, blocks and tokens before a backend uses them as indices.

use windlass_engine_core::executor::Geometry;
use windlass_engine_core::plan::BlockId;
use windlass_engine_core::request::TokenId;

/// Checks that `tokens` tokens from `first_position` on fit in the sequence's `blocks`, equally many for each group of
/// layers, and that these are blocks of the pool.
pub(crate) fn check(geometry: &Geometry, first_position: u32, tokens: usize, blocks: &[BlockId]) -> Result<(), String> {
    let Geometry { block_tokens, blocks: pool, max_sequence_tokens, groups, .. } = *geometry;
    let end = u64::from(first_position) + tokens as u64;
    let held = blocks.len() as u64 / u64::from(groups.count()) * u64::from(block_tokens);
    if tokens == 0 {
        return Err("the row has no tokens".into());
    }
    if end > u64::from(max_sequence_tokens) {
        return Err(format!("the sequence reaches {end} tokens; the longest has {max_sequence_tokens}"));
    }
    if end > held {
        return Err(format!("the sequence reaches {end} tokens; its blocks hold {held}"));
    }
    match blocks.iter().find(|block| block.0 >= pool) {
        Some(block) => Err(format!("the sequence names block {}; there are {pool}", block.0)),
        None => Ok(()),
    }
}

/// Checks that a token is in the vocabulary.
pub(crate) fn check_token(geometry: &Geometry, token: TokenId) -> Result<(), String> {
    match token < geometry.vocabulary {
        true => Ok(()),
        false => Err(format!("token {token} is outside the vocabulary of {}", geometry.vocabulary)),
    }
}
