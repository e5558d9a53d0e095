//! Rows picked by index, and columns in another order.

use half::bf16;

use super::word;
use crate::cuda::launch::Launch;
use crate::cuda::weights::{EightBits, Matrix, Superblock, Values};
use crate::cuda::{DriverError, Kernel, Stream, View, ViewMut};

/// `out[t] = table[tokens[t] - first] · factor`: the table's rows are those of tokens from `first` on. A token outside the
/// table gives zeros.
///
/// # Panics
/// When the lengths do not match, the table's columns have an order of their own, or it is of several types.
pub fn embed(
    stream: &Stream,
    tokens: View<'_, u32>,
    table: &Matrix,
    first: usize,
    factor: f32,
    out: ViewMut<'_, f32>,
) -> Result<(), DriverError> {
    let (rows, cols) = (table.rows(), table.cols());
    assert!(table.order().is_none(), "embeddings whose values lie in another order");
    assert_eq!(out.len(), tokens.len() * cols, "one row for each token");
    let new = |kernel| Launch::new(kernel, [word(tokens.len()), 1, 1]).with(tokens);
    let launch = match table.values() {
        Values::Bf16(values) => new(Kernel::EmbedBf16).with(values.view()),
        Values::Grouped { codes, scales, bits, .. } => {
            let kernel = if *bits == 4 { Kernel::EmbedInt4 } else { Kernel::EmbedInt5 };
            new(kernel).with(codes.view()).with(scales.view())
        }
        Values::Int8 { codes, scales } => new(Kernel::EmbedInt8G32).with(codes.view()).with(scales.view()),
        Values::Superblocks { codes, scales, kind } => {
            let kernel = match kind {
                Superblock::Q2K => Kernel::EmbedQ2K,
                Superblock::Q3K => Kernel::EmbedQ3K,
                Superblock::Q4K => Kernel::EmbedQ4K,
                Superblock::Q5K => Kernel::EmbedQ5K,
                Superblock::Q6K => Kernel::EmbedQ6K,
                Superblock::IQ4XS => Kernel::EmbedIq4Xs,
            };
            new(kernel).with(codes.view()).with(scales.view())
        }
        Values::Eight { codes, scales, .. } => new(Kernel::Embed8Bit).with(codes.view()).with(scales.view()),
        Values::Parts(_) => panic!("a table of parts that are of different types"),
    };
    let launch = launch.with(out).with(word(cols)).with(word(rows)).with(word(first)).with(factor);
    let launch = match table.values() {
        Values::Bf16(_) | Values::Int8 { .. } | Values::Superblocks { .. } | Values::Parts(_) => launch,
        Values::Grouped { group, .. } => launch.with(word(group.cols())),
        Values::Eight { group, code, .. } => {
            launch.with(word((*group).min(cols))).with(u32::from(*code == EightBits::E4m3))
        }
    };
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

/// The same of rows in bf16.
///
/// # Panics
/// As [`gather_rows`].
pub(super) fn gather_halves(
    stream: &Stream,
    indices: View<'_, u32>,
    input: View<'_, bf16>,
    cols: usize,
    out: ViewMut<'_, bf16>,
) -> Result<(), DriverError> {
    assert!(cols.is_multiple_of(16), "rows of {cols} values; kernels read 16 at a time");
    // Bits are copied, whatever they stand for.
    gather_rows(stream, indices, input.cast(), cols / 2, out.cast())
}

/// `out[t][c] = input[t][order[c]]` of tokens of `inputs` values, or 0 where the order names none of them.
///
/// # Panics
/// When the lengths do not match, or the order is no multiple of 8 columns.
pub(super) fn sort_columns(
    stream: &Stream,
    order: View<'_, u32>,
    input: View<'_, bf16>,
    inputs: usize,
    out: ViewMut<'_, bf16>,
) -> Result<(), DriverError> {
    let cols = order.len();
    assert!(cols > 0 && cols.is_multiple_of(8), "tokens of {cols} values; kernels write 8 at a time");
    assert!(input.len().is_multiple_of(inputs), "{} values are no whole tokens of {inputs}", input.len());
    let tokens = input.len() / inputs;
    assert_eq!(out.len(), tokens * cols, "a place for each column");
    let launch = Launch::new(Kernel::SortColumns, [word(tokens), 1, 1]);
    // SAFETY: one block per token, which reads that token's values and writes its columns.
    unsafe { stream.launch(&launch.with(order).with(input).with(out).with(word(cols)).with(word(inputs))) }
}
