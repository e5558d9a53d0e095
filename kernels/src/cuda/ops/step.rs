//! From one decoding step to the next, without the host.

use super::word;
use crate::cuda::launch::Launch;
use crate::cuda::{DriverError, Kernel, Stream, View, ViewMut};

/// Rows that a block takes.
const BLOCK_ROWS: usize = 128;

/// A decoding step's input, one of each for every row.
#[derive(Debug)]
pub struct NextStep<'a> {
    /// Its token.
    pub tokens: ViewMut<'a, u32>,
    /// The token's position.
    pub positions: ViewMut<'a, u32>,
    /// Keys of the sequence, the token's own among them.
    pub lengths: ViewMut<'a, u32>,
    /// Where its key goes: `page · 64 + place in the page`.
    pub slots: ViewMut<'a, u32>,
}

/// Makes the tokens just drawn the next step's input: each one position further, in the page that `tables`
/// (`[rows, max_pages]`) have there. A row from which no token could be drawn goes on with token 0.
///
/// # Panics
/// When the lengths do not match.
pub fn advance(
    stream: &Stream,
    drawn: View<'_, u32>,
    tables: View<'_, u32>,
    vocabulary: usize,
    next: NextStep<'_>,
) -> Result<(), DriverError> {
    let rows = drawn.len();
    let lengths = [next.tokens.len(), next.positions.len(), next.lengths.len(), next.slots.len()];
    assert!(rows > 0 && lengths.iter().all(|&len| len == rows), "one of each for {rows} rows");
    assert!(!tables.is_empty() && tables.len().is_multiple_of(rows), "a table for each row");
    let launch = Launch::new(Kernel::Advance, [word(rows.div_ceil(BLOCK_ROWS)), 1, 1]).with(drawn).with(tables);
    let launch = launch.with(next.tokens).with(next.positions).with(next.lengths).with(next.slots);
    let launch = launch.with(word(rows)).with(word(tables.len() / rows)).with(word(vocabulary));
    // SAFETY: each thread changes one of `rows` rows.
    unsafe { stream.launch(&launch) }
}
