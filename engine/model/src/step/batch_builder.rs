//! Builds batches from the rows of plans: checks bounds, and looks up tokens that other steps sampled.

use std::collections::VecDeque;

use windlass_engine_core::draft::DraftTree;
use windlass_engine_core::executor::{Geometry, MAX_IN_FLIGHT};
use windlass_engine_core::plan::{InputToken, PlanRow, RowOutput, Ticket};
use windlass_engine_core::request::TokenId;

use crate::batch::bounds;
use crate::batch::{Batch, Logits};
use crate::step::uncomputable;

/// Builds batches; knows the bounds of rows and the outputs of recent steps.
pub(crate) struct BatchBuilder {
    geometry: Geometry,
    /// Outputs of the last steps, oldest first. A plan names steps that were in flight when it was made, and may be
    /// submitted after they were collected.
    recent: VecDeque<(Ticket, Vec<RowOutput>)>,
}

impl BatchBuilder {
    pub fn new(geometry: Geometry) -> BatchBuilder {
        BatchBuilder { geometry, recent: VecDeque::new() }
    }

    /// The bounds of steps.
    pub fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    /// Whether a row is within the bounds, as far as that does not depend on its tokens.
    pub fn check(&self, row: &PlanRow) -> Result<(), String> {
        bounds::check(&self.geometry, row.first_position, row.token_count(), &row.blocks)
    }

    /// Appends a checked row to a batch. Fails if one of its tokens is not known or not in the vocabulary.
    pub fn fill(&self, row: &PlanRow, batch: &mut Batch) -> Result<(), RowOutput> {
        for &token in &row.tokens {
            self.resolve(token)?;
        }
        let draft_tokens = row.draft().map_or(&[][..], DraftTree::nodes);
        let checked = draft_tokens.iter().try_for_each(|node| bounds::check_token(&self.geometry, node.token));
        checked.map_err(uncomputable)?;
        let tokens = row.tokens.iter().filter_map(|&token| self.drawn(token).ok());
        let leading = row.score.as_ref().map_or(0, |score| score.targets.len());
        let logits = Logits { leading, trailing: usize::from(row.sample.is_some()) };
        let none = DraftTree::default();
        batch.push_drafted(tokens, row.draft().unwrap_or(&none), row.first_position, &row.blocks, logits);
        Ok(())
    }

    /// The id of an input token, or the output of a row that needs a token that was not sampled.
    pub fn resolve(&self, token: InputToken) -> Result<TokenId, RowOutput> {
        let token = self.drawn(token)?;
        bounds::check_token(&self.geometry, token).map(|()| token).map_err(uncomputable)
    }

    /// The tokens before the first one that a row samples, if sampling depends on them; else empty.
    pub fn history(&self, row: &PlanRow) -> Vec<TokenId> {
        let Some(history) = row.sample.as_ref().and_then(|sample| sample.history.as_ref()) else { return Vec::new() };
        let sampled = row.tokens.last().filter(|token| matches!(token, InputToken::SampledBy { .. }));
        let sampled = sampled.and_then(|&token| self.drawn(token).ok());
        history.tokens.iter().copied().chain(sampled).collect()
    }

    /// Keeps the output of a step, for later steps that name its tokens.
    pub fn keep(&mut self, ticket: Ticket, rows: &[RowOutput]) {
        if self.recent.len() == MAX_IN_FLIGHT {
            self.recent.pop_front();
        }
        self.recent.push_back((ticket, rows.to_vec()));
    }

    fn drawn(&self, token: InputToken) -> Result<TokenId, RowOutput> {
        let (ticket, row) = match token {
            InputToken::Known(id) => return Ok(id),
            InputToken::SampledBy { ticket, row } => (ticket, row),
        };
        let step = self.recent.iter().find(|(kept, _)| *kept == ticket);
        match step.and_then(|(_, rows)| rows.get(row as usize)) {
            Some(RowOutput::Sampled(id)) => Ok(*id),
            Some(RowOutput::Deferred) => Err(RowOutput::Deferred),
            Some(RowOutput::Failed(reason)) => {
                Err(uncomputable(format!("its last token could not be sampled: {reason}")))
            }
            _ => {
                let why = "which sampled none";
                Err(uncomputable(format!("its input token was to be sampled in row {row} of step {}, {why}", ticket.0)))
            }
        }
    }
}
