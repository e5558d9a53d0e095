//! Products of tokens with a weight matrix.

use half::bf16;

use super::activation::Gate;
use super::blocks::Block;
use super::experts::{Mixture, Routes, Tiling};
use super::gather::sort_columns;
use super::many_hopper::product_by_warpgroups;
use super::word;
use crate::cuda::driver::DevicePointer;
use crate::cuda::launch::{Argument, Launch};
use crate::cuda::weights::{Matrix, ROW_TILE, Values};
use crate::cuda::{DriverError, Memory, Stream, View, ViewMut};

/// Where a product goes, `[tokens, matrix.rows()]`; gated, half as many values.
#[derive(Debug)]
pub enum Output<'a> {
    /// Rounded.
    Bf16(ViewMut<'a, bf16>),
    /// As summed.
    F32(ViewMut<'a, f32>),
    /// Added to what is there: the residual stream.
    AddTo(ViewMut<'a, f32>),
    /// `activation(gate) · up`, of a matrix whose rows are gates and ups by eights ([`GateLayout::Eights`](super::GateLayout)),
    /// as [`gate_mul`](super::gate_mul) has it of their rounded products, bit for bit.
    Gated(ViewMut<'a, bf16>, Gate),
}

impl Output<'_> {
    /// Values of the product.
    pub(super) fn len(&self) -> usize {
        match self {
            Output::Bf16(out) => out.len(),
            Output::F32(out) | Output::AddTo(out) => out.len(),
            Output::Gated(out, _) => 2 * out.len(),
        }
    }

    /// How far a token's values lie behind those of the one before, of a matrix of so many rows.
    pub(super) fn stride(&self, rows: usize) -> usize {
        match self {
            Output::Gated(..) => rows / 2,
            _ => rows,
        }
    }

    /// Its first byte.
    pub(super) fn pointer(&self) -> DevicePointer {
        match self {
            Output::Bf16(out) | Output::Gated(out, _) => out.as_view().pointer(),
            Output::F32(out) | Output::AddTo(out) => out.as_view().pointer(),
        }
    }

    /// The same, for a while.
    pub(super) fn reborrow(&mut self) -> Output<'_> {
        match self {
            Output::Bf16(out) => Output::Bf16(out.reborrow()),
            Output::F32(out) => Output::F32(out.reborrow()),
            Output::AddTo(out) => Output::AddTo(out.reborrow()),
            Output::Gated(out, gate) => Output::Gated(out.reborrow(), *gate),
        }
    }

    /// The same memory from value `first` on.
    fn behind(&mut self, first: usize) -> Output<'_> {
        let rest = first..self.len();
        match self {
            Output::Bf16(out) => Output::Bf16(out.reborrow().slice(rest)),
            Output::F32(out) => Output::F32(out.reborrow().slice(rest)),
            Output::AddTo(out) => Output::AddTo(out.reborrow().slice(rest)),
            Output::Gated(..) if first > 0 => panic!("gates of a matrix whose parts are of different types"),
            Output::Gated(out, gate) => Output::Gated(out.reborrow(), *gate),
        }
    }

    /// The kernel's three arguments: bf16 or null, f32 or null, and what is done (`output.cuh`, `Action`).
    pub(super) fn arguments(self) -> [Argument; 3] {
        match self {
            Output::Bf16(out) => [out.into(), Argument::none::<f32>(), 0u32.into()],
            Output::F32(out) => [Argument::none::<bf16>(), out.into(), 0u32.into()],
            Output::AddTo(out) => [Argument::none::<bf16>(), out.into(), 1u32.into()],
            Output::Gated(out, Gate::Silu) => [out.into(), Argument::none::<f32>(), 2u32.into()],
            Output::Gated(out, Gate::GeluTanh) => [out.into(), Argument::none::<f32>(), 3u32.into()],
        }
    }

    /// The same of a kernel that gates nothing.
    pub(super) fn ungated_arguments(self) -> [Argument; 3] {
        assert!(!matches!(self, Output::Gated(..)), "the kernel does not gate what it multiplies");
        self.arguments()
    }
}

/// `out[t] = matrix · input[t]` for each token of `matrix.cols()` values. A token's result is the same whatever tokens
/// come with it.
///
/// # Panics
/// When the lengths do not match, or the matrix's columns have an order of their own ([`linear_ordered`]).
pub fn linear(stream: &Stream, matrix: &Matrix, input: View<'_, bf16>, out: Output<'_>) -> Result<(), DriverError> {
    assert!(matrix.order().is_none(), "the columns of a matrix have an order of their own");
    linear_in_order(stream, matrix, input, out)
}

/// The same by blocks for many tokens, however few there are: the same bits.
///
/// # Panics
/// As [`linear`].
pub fn linear_many(
    stream: &Stream,
    matrix: &Matrix,
    input: View<'_, bf16>,
    out: Output<'_>,
) -> Result<(), DriverError> {
    assert!(matrix.order().is_none(), "the columns of a matrix have an order of their own");
    let tokens = tokens_of(matrix, &input);
    each_part(stream, matrix, tokens, out, |part, out| part_product(part, Block::Many, input, out, tokens))
}

/// The same with a matrix whose columns have an order of their own, for each token of `matrix.inputs()` values; `room` is for
/// the input in that order.
///
/// # Panics
/// When the lengths do not match, or the columns have no such order.
pub fn linear_ordered(
    stream: &Stream,
    matrix: &Matrix,
    input: View<'_, bf16>,
    room: &mut Memory<bf16>,
    out: Output<'_>,
) -> Result<(), DriverError> {
    let Some(order) = matrix.order() else { panic!("the columns of a matrix have no order of their own") };
    let sorted = 0..input.len() / matrix.inputs() * matrix.cols();
    sort_columns(stream, order, input, matrix.inputs(), room.slice_mut(sorted.clone()))?;
    linear_in_order(stream, matrix, room.slice(sorted), out)
}

/// A product with an input in the order of the matrix's columns.
fn linear_in_order(
    stream: &Stream,
    matrix: &Matrix,
    input: View<'_, bf16>,
    out: Output<'_>,
) -> Result<(), DriverError> {
    let (tokens, facts) = (tokens_of(matrix, &input), stream.device().facts());
    each_part(stream, matrix, tokens, out, |part, (mut out, stride)| {
        let by_warpgroups = product_by_warpgroups(facts, part, input, (&mut out, stride), tokens);
        let block = || Block::new(facts, part.rows(), tokens);
        by_warpgroups.unwrap_or_else(|| part_product(part, block(), input, (out, stride), tokens))
    })
}

/// How many tokens an input in the order of the matrix's columns has.
pub(super) fn tokens_of(matrix: &Matrix, input: &View<'_, bf16>) -> usize {
    let cols = matrix.cols();
    assert!(!input.is_empty() && input.len().is_multiple_of(cols), "{} values are no tokens of {cols}", input.len());
    input.len() / cols
}

/// Launches what multiplies each part of a matrix, told where its results go and how far apart those of two tokens lie. A launch must
/// read whole rows of the part and of the tokens, and write rows and tokens that are there.
pub(super) fn each_part(
    stream: &Stream,
    matrix: &Matrix,
    tokens: usize,
    mut out: Output<'_>,
    launch: impl Fn(&Matrix, (Output<'_>, usize)) -> Launch,
) -> Result<(), DriverError> {
    let (rows, mut first) = (matrix.rows(), 0);
    assert_eq!(out.len(), tokens * rows, "{tokens} tokens of {rows} values");
    check_gates(&out, rows);
    let stride = out.stride(rows);
    for part in matrix.parts() {
        let launch = launch(part, (out.behind(first), stride));
        // SAFETY: launches are of products alone, of which that is demanded above.
        unsafe { stream.launch(&launch) }?;
        first += part.rows();
    }
    Ok(())
}

/// The launch of a product with a part of a matrix.
pub(super) fn part_product(
    part: &Matrix,
    block: Block,
    input: View<'_, bf16>,
    out: (Output<'_>, usize),
    tokens: usize,
) -> Launch {
    let grid = block.grid(part.rows(), tokens.div_ceil(block.tokens()));
    product(part, block, grid, input, [Argument::none::<u32>(); 2], out, tokens, part.rows())
}

/// What experts multiply.
#[derive(Clone, Copy, Debug)]
pub enum ExpertInput<'a> {
    /// A row of each token: it goes to all its experts.
    Tokens(View<'a, bf16>),
    /// A row of each token and expert, where an earlier product of experts left it.
    Given(View<'a, bf16>),
}

/// `out[place] = matrix of the place's expert · input`, for each token and each of its experts that are on the device. The
/// matrix holds those of all such experts, rows after rows; rows of `out` that are nobody's stay as they are. Tokens are those that `routes` were chosen for last.
///
/// # Panics
/// When the lengths do not match, an expert's rows are no whole tiles of the kernels, or columns have an order of their own.
pub fn linear_experts(
    stream: &Stream,
    matrix: &Matrix,
    routes: &Routes,
    input: ExpertInput<'_>,
    out: Output<'_>,
) -> Result<(), DriverError> {
    let ExpertShape { rows, inputs } = ExpertShape::of(matrix, routes, input, &out);
    let tokens = inputs / routes.mixture().used;
    let Tiling::Block(block) = routes.tiling() else { panic!("routes that are chosen for wide products") };
    let (tiles, tile_count) = routes.tiles(tokens);
    let block = block.or_many(stream.device().facts(), rows, tile_count);
    let (values, rows_of_input) = match input {
        ExpertInput::Tokens(values) => (values, routes.token_at(tokens).into()),
        ExpertInput::Given(values) => (values, Argument::none::<u32>()),
    };
    let (grid, parts) = (block.grid(rows, tile_count), [tiles.into(), rows_of_input]);
    let stride = out.stride(rows);
    let launch = product(matrix, block, grid, values, parts, (out, stride), inputs, rows);
    // SAFETY: tiles name experts that there are and places of as many inputs, each place once.
    unsafe { stream.launch(&launch) }
}

/// Sizes of a product of experts.
pub(super) struct ExpertShape {
    /// Of an expert's matrix.
    pub rows: usize,
    /// Rows of the input, one for each token and expert.
    pub inputs: usize,
}

impl ExpertShape {
    /// Those of a matrix of all experts that are held, of tokens and of what comes of them.
    ///
    /// # Panics
    /// When the lengths do not match, an expert's rows are no whole tiles of the kernels, or columns have an order of their own.
    pub fn of(matrix: &Matrix, routes: &Routes, input: ExpertInput<'_>, out: &Output<'_>) -> ExpertShape {
        let Mixture { held, used, .. } = *routes.mixture();
        let (rows, cols) = (matrix.rows() / held, matrix.cols());
        assert!(matrix.order().is_none(), "the columns of experts have an order of their own");
        assert!(matrix.rows() == held * rows && rows.is_multiple_of(ROW_TILE), "{} rows of {held}", matrix.rows());
        let inputs = match input {
            ExpertInput::Tokens(values) => values.len() / cols * used,
            ExpertInput::Given(values) => values.len() / cols,
        };
        assert!(inputs > 0 && inputs.is_multiple_of(used), "{inputs} rows of tokens with {used} experts");
        assert_eq!(out.len(), inputs * rows, "{inputs} rows of {rows} values");
        ExpertShape { rows, inputs }
    }
}

/// Gates and ups are whole tiles of the kernels.
fn check_gates(out: &Output<'_>, rows: usize) {
    assert!(!matches!(out, Output::Gated(..)) || rows.is_multiple_of(ROW_TILE), "{rows} rows of gates and ups");
}

/// The launch of a product with `rows` rows of the matrix, whose results for a token lie so far behind those for the one before.
/// `parts` are its tiles and the rows of their input, or nothing.
#[allow(clippy::too_many_arguments)] // a kernel's
fn product(
    matrix: &Matrix,
    block: Block,
    grid: [u32; 3],
    input: View<'_, bf16>,
    parts: [Argument; 2],
    (out, stride): (Output<'_>, usize),
    tokens: usize,
    rows: usize,
) -> Launch {
    let cols = matrix.cols();
    assert!(u32::try_from(input.len()).is_ok(), "{} values; kernels count them in 32 bits", input.len());
    let (launch, last) = match matrix.values() {
        Values::Bf16(weights) => (Launch::new(block.bf16(), grid).with(weights.view()), None),
        Values::Grouped { codes, scales, group, bits, affine } => {
            let kernel = if *bits == 4 { block.int4(*group) } else { block.int5() };
            (Launch::new(kernel, grid).with(codes.view()).with(scales.view()), Some(u32::from(*affine)))
        }
        Values::Int8 { codes, scales } => {
            (Launch::new(block.int8(), grid).with(codes.view()).with(scales.view()), None)
        }
        Values::Superblocks { codes, scales, kind } => {
            (Launch::new(block.superblocks(*kind), grid).with(codes.view()).with(scales.view()), None)
        }
        Values::Parts(_) => panic!("a product of parts that are of different types"),
        Values::Eight { codes, scales, group, code } => {
            let launch = Launch::new(block.eight_bits(*code), grid).with(codes.view()).with(scales.view());
            (launch, Some(word((*group).min(cols))))
        }
    };
    let launch = parts.into_iter().chain(out.arguments()).fold(launch.with(input), Launch::with);
    let launch = launch.with(word(stride)).with(word(tokens)).with(word(rows)).with(word(cols));
    last.into_iter().fold(launch, Launch::with)
}
