//! Rows picked by index.

use half::bf16;

use super::word;
use crate::cuda::launch::Launch;
use crate::cuda::{DriverError, Kernel, Stream, View, ViewMut};

/// `out[t] = table[tokens[t]]`, a table of `[rows, cols]`. A token outside the table gives zeros.
///
/// # Panics
/// When the lengths do not match, or a row is no multiple of 8 values.
pub fn embed(
    stream: &Stream,
    tokens: View<'_, u32>,
    table: View<'_, bf16>,
    cols: usize,
    out: ViewMut<'_, f32>,
) -> Result<(), DriverError> {
    assert!(cols > 0 && cols.is_multiple_of(8), "rows of {cols} values; kernels read 8 at a time");
    assert!(table.len().is_multiple_of(cols), "a table of {} values is no whole rows of {cols}", table.len());
    assert_eq!(out.len(), tokens.len() * cols, "one row for each token");
    let launch = Launch::new(Kernel::Embed, [word(tokens.len()), 1, 1]);
    let rows = word(table.len() / cols);
    let launch = launch.with(tokens).with(table).with(out).with(word(cols)).with(rows);
    // SAFETY: one block per token, which reads rows below `rows` alone.
    unsafe { stream.launch(&launch) }
}

/// `out[i] = input[indices[i]]`, rows of `cols` values. An index outside gives zeros.
///
/// # Panics
/// When the lengths do not match, or a row is no multiple of 8 values.
pub fn gather_rows(
    stream: &Stream,
    indices: View<'_, u32>,
    input: View<'_, f32>,
    cols: usize,
    out: ViewMut<'_, f32>,
) -> Result<(), DriverError> {
    assert!(cols > 0 && cols.is_multiple_of(8), "rows of {cols} values; kernels read 8 at a time");
    assert!(input.len().is_multiple_of(cols), "{} values are no whole rows of {cols}", input.len());
    assert_eq!(out.len(), indices.len() * cols, "one row for each index");
    let launch = Launch::new(Kernel::GatherRows, [word(indices.len()), 1, 1]);
    let rows = word(input.len() / cols);
    let launch = launch.with(indices).with(input).with(out).with(word(cols)).with(rows);
    // SAFETY: one block per index, which reads rows below `rows` alone.
    unsafe { stream.launch(&launch) }
}
