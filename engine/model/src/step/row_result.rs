//! The result of a row: its tokens by verification of its draft tokens, and log probabilities.

use windlass_engine_core::constraint::MaskUnavailable;
use windlass_engine_core::draft::Verification;
use windlass_engine_core::executor::Geometry;
use windlass_engine_core::plan::{BlockId, PlanRow, RowOutput, SequenceFailure};
use windlass_engine_core::sampling::TokenLogprobs;

use crate::decoder::TokenMove;
use crate::sampler::Drawn;
use crate::step::sampling_positions::Mask;

/// The result of a row.
pub(crate) struct RowResult {
    pub output: RowOutput,
    /// Log probabilities of prompt tokens, if the row scores any.
    pub prompt: Vec<TokenLogprobs>,
    /// Log probabilities of the sampled tokens, if the row asks for them.
    pub sampled: Vec<TokenLogprobs>,
    /// Indices of the accepted draft tokens.
    pub accepted: Vec<u32>,
}

/// Makes the result of a row from `results`, one for each of its rows of logits.
pub(crate) fn row_result(
    row: &PlanRow,
    mut results: Vec<Result<Drawn, SequenceFailure>>,
    masks: &[Mask],
) -> Result<RowResult, SequenceFailure> {
    let scored = row.score.as_ref().map_or(0, |score| score.targets.len());
    let draws = results.split_off(scored);
    let scored: Vec<Drawn> = results.into_iter().collect::<Result<_, _>>()?;
    let prompt = scored.into_iter().filter_map(|scored| scored.logprobs).collect();
    let Some(sample) = &row.sample else {
        return Ok(RowResult { output: RowOutput::Computed, prompt, sampled: Vec::new(), accepted: Vec::new() });
    };
    let mut sampled = Vec::new();
    let verification = sample.draft.verify(|after| {
        let index = after.map_or(0, |node| node as usize + 1);
        let drawn = drawn(&draws[index], &masks[index])?;
        sampled.extend(drawn.logprobs.clone());
        Ok(drawn.token)
    });
    let Verification { tokens, accepted } = match verification {
        Ok(verification) => verification,
        // The prompt's log probabilities are returned now; the row does not ask for them again.
        Err(MaskUnavailable::NotReady) => {
            return Ok(RowResult { output: RowOutput::Deferred, prompt, sampled: Vec::new(), accepted: Vec::new() });
        }
        Err(MaskUnavailable::Failed(failure)) => return Err(failure),
    };
    let output = match tokens[..] {
        [token] if sample.draft.is_empty() => RowOutput::Sampled(token),
        _ => RowOutput::Verified(tokens),
    };
    Ok(RowResult { output, prompt, sampled, accepted })
}

fn drawn<'a>(result: &'a Result<Drawn, SequenceFailure>, mask: &Mask) -> Result<&'a Drawn, MaskUnavailable> {
    mask.as_ref().map_err(Clone::clone)?;
    result.as_ref().map_err(|failure| failure.clone().into())
}

/// Moves of K and V of accepted draft tokens to the positions after the row's tokens, in order. Empty unless the draft
/// tokens branch: those of a chain are in place already.
pub(crate) fn token_moves(row: &PlanRow, accepted: &[u32], geometry: &Geometry) -> Vec<TokenMove> {
    let (first, block_tokens) = (row.first_position as usize + row.tokens.len(), geometry.block_tokens as usize);
    let location = |table: &[BlockId], index: usize| -> (BlockId, usize) {
        let position = first + index;
        (table[position / block_tokens], position % block_tokens)
    };
    let misplaced = accepted.iter().enumerate().filter(|(index, node)| *index != **node as usize);
    let of_group = |table| {
        let moved = misplaced.clone();
        moved.map(move |(index, &node)| TokenMove { from: location(table, node as usize), to: location(table, index) })
    };
    row.tables(&geometry.groups).flat_map(of_group).collect()
}
