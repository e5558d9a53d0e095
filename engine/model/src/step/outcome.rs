//! What a row gives, from what each of its logits gave: how far its guesses held.

use windlass_engine_core::constraint::MaskUnavailable;
use windlass_engine_core::draft::Verification;
use windlass_engine_core::executor::Geometry;
use windlass_engine_core::plan::{BlockId, PlanRow, RowOutput, SequenceFailure};
use windlass_engine_core::sampling::TokenLogprobs;

use crate::decoder::TokenMove;
use crate::sampler::Drawn;
use crate::step::places::Mask;

/// What became of a row.
pub(crate) struct Outcome {
    pub output: RowOutput,
    /// Log probabilities of the prompt's tokens, if any were asked for.
    pub prompt: Vec<TokenLogprobs>,
    /// The same of the tokens drawn.
    pub sampled: Vec<TokenLogprobs>,
    /// The guesses that held.
    pub held: Vec<u32>,
}

/// Reads a row's results, in the order of its logits.
pub(crate) fn outcome(
    row: &PlanRow,
    mut results: Vec<Result<Drawn, SequenceFailure>>,
    masks: &[Mask],
) -> Result<Outcome, SequenceFailure> {
    let scored = row.score.as_ref().map_or(0, |score| score.targets.len());
    let draws = results.split_off(scored);
    let scored: Vec<Drawn> = results.into_iter().collect::<Result<_, _>>()?;
    let prompt = scored.into_iter().filter_map(|scored| scored.logprobs).collect();
    let Some(sample) = &row.sample else {
        return Ok(Outcome { output: RowOutput::Computed, prompt, sampled: Vec::new(), held: Vec::new() });
    };
    let mut sampled = Vec::new();
    let judged = sample.draft.verify(|after| {
        let place = after.map_or(0, |guess| guess as usize + 1);
        let drawn = drawn(&draws[place], &masks[place])?;
        sampled.extend(drawn.logprobs.clone());
        Ok(drawn.token)
    });
    let Verification { tokens, accepted: held } = match judged {
        Ok(verdict) => verdict,
        // What was asked of the prompt is told, and not asked again.
        Err(MaskUnavailable::NotReady) => {
            return Ok(Outcome { output: RowOutput::Deferred, prompt, sampled: Vec::new(), held: Vec::new() });
        }
        Err(MaskUnavailable::Failed(failure)) => return Err(failure),
    };
    let output = match tokens[..] {
        [token] if sample.draft.is_empty() => RowOutput::Sampled(token),
        _ => RowOutput::Verified(tokens),
    };
    Ok(Outcome { output, prompt, sampled, held })
}

fn drawn<'a>(result: &'a Result<Drawn, SequenceFailure>, mask: &Mask) -> Result<&'a Drawn, MaskUnavailable> {
    mask.as_ref().map_err(Clone::clone)?;
    result.as_ref().map_err(|failure| failure.clone().into())
}

/// Brings K and V of the guesses that held behind the row's tokens, in order. They are there already where the guesses
/// did not branch.
pub(crate) fn moves(row: &PlanRow, held: &[u32], geometry: &Geometry) -> Vec<TokenMove> {
    let (first, block_tokens) = (row.first_position as usize + row.tokens.len(), geometry.block_tokens as usize);
    let place = |table: &[BlockId], index: usize| -> (BlockId, usize) {
        let position = first + index;
        (table[position / block_tokens], position % block_tokens)
    };
    let misplaced = held.iter().enumerate().filter(|(index, guess)| *index != **guess as usize);
    let of_group = |table| {
        let moved = misplaced.clone();
        moved.map(move |(index, &guess)| TokenMove { from: place(table, guess as usize), to: place(table, index) })
    };
    row.tables(&geometry.groups).flat_map(of_group).collect()
}
