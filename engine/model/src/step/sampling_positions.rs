//! The positions at which a row samples: after its last token, and after each draft token.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

use windlass_engine_core::constraint::{MaskUnavailable, TokenSet};
use windlass_engine_core::plan::{PlanRow, SequenceFailure};
use windlass_engine_core::request::TokenId;

use crate::panic::message;
use crate::sampler::Draw;

/// The tokens that a constraint allows at a position; `None` without a constraint.
pub(crate) type Mask = Result<Option<TokenSet>, MaskUnavailable>;

/// A position at which a token is sampled.
#[derive(Debug)]
pub(crate) struct SamplingPosition {
    /// Index of the draft token before it; `None` after the row's last token.
    after: Option<u32>,
    /// The tokens before it, if sampling depends on them; else empty.
    history: Vec<TokenId>,
    /// Its position in the sequence.
    position: u32,
}

/// The sampling positions of a row, in the order of its logits. `history` has the tokens before the first one.
pub(crate) fn positions(row: &PlanRow, history: Vec<TokenId>) -> Vec<SamplingPosition> {
    let Some(sample) = &row.sample else { return Vec::new() };
    let position = row.first_position + row.tokens.len() as u32;
    let behind = |after: u32| {
        let path = sample.draft.path(after);
        let tokens = path.iter().map(|node| sample.draft.nodes()[*node as usize].token);
        let read = sample.history.is_some();
        let history = if read { history.iter().copied().chain(tokens).collect() } else { Vec::new() };
        SamplingPosition { after: Some(after), history, position: position + path.len() as u32 }
    };
    let mut positions: Vec<SamplingPosition> = (0..sample.draft.len() as u32).map(behind).collect();
    positions.insert(0, SamplingPosition { after: None, history, position });
    positions
}

/// The token masks of all rows at each sampling position, as far as they are ready at the time `by`. A constraint that
/// panics fails its own row.
pub(crate) fn masks(rows: &[PlanRow], positions: &[Vec<SamplingPosition>], by: Instant) -> Vec<Vec<Mask>> {
    let of_all =
        |by: Option<Instant>| rows.iter().zip(positions).map(move |(row, positions)| guarded(row, positions, by));
    // All constraints are asked before any is waited for.
    of_all(None).for_each(drop);
    of_all(Some(by)).collect()
}

/// The token masks of one row. Without a time it does not wait.
fn guarded(row: &PlanRow, positions: &[SamplingPosition], by: Option<Instant>) -> Vec<Mask> {
    let masks =
        || row_masks(row, positions, || by.map_or(Duration::ZERO, |by| by.saturating_duration_since(Instant::now())));
    catch_unwind(AssertUnwindSafe(masks)).unwrap_or_else(|panic| {
        let why = format!("the constraint panicked: {}", message(panic.as_ref()));
        positions.iter().map(|_| Err(SequenceFailure::Uncomputable(why.clone()).into())).collect()
    })
}

/// The row's token mask at each position. After a draft token that is not allowed nothing is allowed, and verification
/// does not get there.
fn row_masks(row: &PlanRow, positions: &[SamplingPosition], patience: impl Fn() -> Duration) -> Vec<Mask> {
    let mut masks: Vec<Mask> = Vec::with_capacity(positions.len());
    for position in positions {
        let mask = match position.is_reached(row, &masks) {
            true => position.mask(row, patience()),
            false => Ok(Some(TokenSet::default())),
        };
        masks.push(mask);
    }
    masks
}

impl SamplingPosition {
    /// The draw at this position.
    pub fn draw<'a>(&'a self, row: &'a PlanRow, mask: &'a Mask) -> Option<Draw<'a>> {
        let sample = row.sample.as_ref()?;
        let (prompt, generated) = self.history.split_at(prompt_tokens(row));
        let (sampling, banned, logprobs) = (sample.sampling.as_ref(), sample.banned.as_slice(), sample.logprobs);
        let allowed = mask.as_ref().ok().and_then(Option::as_ref);
        Some(Draw { sampling, banned, prompt, generated, allowed, position: self.position, logprobs })
    }

    fn mask(&self, row: &PlanRow, patience: Duration) -> Mask {
        let constraint = row.sample.as_ref().and_then(|sample| sample.constraint.as_ref());
        constraint.map(|constraint| constraint.allowed(&self.history[prompt_tokens(row)..], patience)).transpose()
    }

    /// Whether the draft token before this position is allowed, by the masks of earlier positions.
    fn is_reached(&self, row: &PlanRow, masks: &[Mask]) -> bool {
        let (Some(after), Some(sample)) = (self.after, &row.sample) else { return true };
        let node = sample.draft.nodes()[after as usize];
        let before = node.parent.map_or(0, |parent| parent as usize + 1);
        matches!(&masks[before], Ok(mask) if mask.as_ref().is_none_or(|mask| mask.contains(node.token)))
    }
}

/// Number of leading tokens of a row's history that are its prompt.
fn prompt_tokens(row: &PlanRow) -> usize {
    let history = row.sample.as_ref().and_then(|sample| sample.history.as_ref());
    history.map_or(0, |history| history.prompt_tokens)
}
