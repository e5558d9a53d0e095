//! Matrices that other tools quantized, which are converted to kernel formats as they are packed.
//!
//! Integer codes keep their values ([`codes`]), and so do those of bitsandbytes ([`floats`]). Eight-bit floats become
//! integers of eight bits, except on devices that multiply them as they are ([`float8`]). Floats are rounded to
//! eight-bit floats first if that is asked for ([`rounded`]).

mod codes;
mod float8;
mod floats;
mod order;
mod parts;
mod rounded;

use std::borrow::Cow;
use std::ops::Range;

use windlass_checkpoint::{Data, Tensor};
use windlass_kernels::WeightType;

use super::loader::FileRows;
use super::part::Part;
use crate::config::quantization_config::{Layout, Scheme};
use codes::Codes;
pub use float8::Float8;
use floats::Floats;
use parts::Parts;
use rounded::Rounded;

/// A matrix `[rows = outputs, cols = inputs]`, or a part of one, whose tensors are found and whose sizes are checked.
#[derive(Clone, Debug)]
pub(crate) struct PackedTensor<'a> {
    pub name: &'a str,
    /// The columns of the part, in the order of the packed row.
    cols: Range<usize>,
    /// The rows of the part.
    rows: Range<usize>,
    /// The packed format.
    kind: WeightType,
    content: Content<'a>,
    /// The codes.
    source: Data<'a>,
}

#[derive(Clone, Debug)]
enum Content<'a> {
    Codes(Codes<'a>),
    Floats(Floats<'a>),
    Rounded(Rounded<'a>),
}

impl<'a> PackedTensor<'a> {
    /// Finds the matrix that is called `name` in checkpoints that are not quantized; `find` finds tensors by name.
    pub fn find(
        scheme: Scheme,
        name: &str,
        [cols, rows]: [usize; 2],
        find: impl Fn(&str) -> Option<Tensor<'a>>,
    ) -> Result<PackedTensor<'a>, String> {
        let codes_name = scheme.codes_name(name);
        let tensor = find(&codes_name).ok_or_else(|| format!("{codes_name:?} is missing"))?;
        let parts = Parts { scheme, name, find };
        let (kind, content) = match scheme.layout {
            Layout::Float8 { .. } | Layout::Bnb4 | Layout::Bnb8 => {
                let floats = Floats::find(&parts, [cols, rows])?;
                (floats.kind, Content::Floats(floats))
            }
            _ => {
                let codes = Codes::find(&parts, [cols, rows])?;
                (codes.kind(), Content::Codes(codes))
            }
        };
        Ok(PackedTensor { name: tensor.name, cols: 0..cols, rows: 0..rows, kind, content, source: tensor.bytes })
    }

    /// Floats of this `kind` that are to be rounded to eight-bit floats.
    pub fn rounded(tensor: Tensor<'a>, kind: WeightType, [cols, rows]: [usize; 2]) -> Result<PackedTensor<'a>, String> {
        let rounded = Rounded::new(kind, tensor.bytes, cols)?;
        let (kind, content) = (rounded.kind(), Content::Rounded(rounded));
        Ok(PackedTensor { name: tensor.name, cols: 0..cols, rows: 0..rows, kind, content, source: tensor.bytes })
    }

    /// Whether it is, or is rounded to, eight-bit floats.
    pub fn is_float8(&self) -> bool {
        match &self.content {
            Content::Codes(_) => false,
            Content::Floats(floats) => floats.is_float8(),
            Content::Rounded(_) => true,
        }
    }

    /// Some rows of the part.
    pub fn rows(&self, range: Range<usize>) -> PackedTensor<'a> {
        let first = self.rows.start;
        PackedTensor { rows: first + range.start..first + range.end, ..self.clone() }
    }

    /// A part of the matrix. Its columns are whole blocks, unless columns have an order of their own.
    pub fn part(&self, part: &Part) -> PackedTensor<'a> {
        match part {
            Part::Whole => self.clone(),
            Part::Rows(rows) => self.rows(rows.clone()),
            Part::Cols(cols) => self.some_inputs(cols),
        }
    }

    fn some_inputs(&self, inputs: &Range<usize>) -> PackedTensor<'a> {
        let sorted = match &self.content {
            Content::Codes(codes) => codes.of_inputs(inputs),
            Content::Floats(_) | Content::Rounded(_) => None,
        };
        match sorted {
            None => PackedTensor { cols: inputs.clone(), kind: holding(self.kind, inputs), ..self.clone() },
            Some((codes, kind)) => {
                let places = codes.order.as_ref().map_or(0, |order| order.inputs.len());
                PackedTensor { cols: 0..places, kind, content: Content::Codes(codes), ..self.clone() }
            }
        }
    }

    /// The codes of all rows.
    pub fn source(&self) -> Data<'a> {
        self.source
    }

    /// Fails if the kernel formats cannot represent the codes.
    pub fn check(&self) -> Result<(), String> {
        match &self.content {
            Content::Codes(codes) => codes.check_scales(),
            Content::Floats(floats) => floats.check_scales(self.rows.end),
            Content::Rounded(_) => Ok(()),
        }
    }

    /// Columns and rows of the part.
    pub fn shape(&self) -> [usize; 2] {
        [self.cols.len(), self.rows.len()]
    }

    /// The packed format.
    pub fn kind(&self) -> WeightType {
        self.kind
    }

    /// Columns per block: a part has a multiple.
    pub fn block(&self) -> usize {
        let narrowest = narrower(self.kind).and_then(<[WeightType]>::last);
        narrowest.unwrap_or(&self.kind).block_elements()
    }

    /// The input of every column (`desc_act`); `None` if columns are in the order of inputs.
    pub fn order(&self) -> Option<&[u32]> {
        match &self.content {
            Content::Codes(codes) => codes.order.as_ref().map(|order| &order.inputs[..]),
            Content::Floats(_) | Content::Rounded(_) => None,
        }
    }

    /// The values as eight-bit floats; `None` if they are none, or a scale covers no whole group of a row.
    pub fn float8(&self) -> Option<Float8> {
        let some = |rows| match &self.content {
            Content::Codes(_) => None,
            Content::Floats(floats) => floats.float8(rows, &self.cols),
            Content::Rounded(rounded) => Some(rounded.float8(rows, &self.cols)),
        };
        by_all_processors(&self.rows, some).into_iter().collect::<Option<Vec<_>>>()?.into_iter().reduce(Float8::then)
    }

    fn some_rows(&self, rows: Range<usize>) -> Vec<u8> {
        let cols = &self.cols;
        let mut out = Vec::with_capacity(self.kind().row_bytes(cols.len()).unwrap_or(0) * rows.len());
        for row in rows {
            match &self.content {
                Content::Codes(codes) => codes.append_row(row, cols.clone(), self.kind, &mut out),
                Content::Floats(floats) => floats.append_row(row, cols.clone(), self.kind, &mut out),
                Content::Rounded(rounded) => rounded.append_row(row, cols.clone(), self.kind, &mut out),
            }
        }
        out
    }
}

impl<'a> FileRows<'a> for PackedTensor<'a> {
    /// The rows in the file format of the kernels, of its [`kind`](Self::kind).
    fn get(&self, rows: Range<usize>) -> Cow<'a, [u8]> {
        by_all_processors(&self.rows(rows).rows, |rows| self.some_rows(rows)).concat().into()
    }

    /// Some layouts interleave rows, so memory is freed with the whole layer.
    fn release(&self, _rows: Range<usize>) {}
}

/// Formats of signed integers of eight bits, the widest groups first.
const SIGNED_BYTES: [WeightType; 3] = [WeightType::I8G128, WeightType::I8G64, WeightType::Q8_0];

/// Formats of integers of two and three bits.
const CRUMBS: [WeightType; 4] = [WeightType::I2G256, WeightType::I2G128, WeightType::I2G64, WeightType::I2G32];
const THREE_BITS: [WeightType; 4] = [WeightType::I3G256, WeightType::I3G128, WeightType::I3G64, WeightType::I3G32];

/// The first of these formats whose group size divides all of these lengths, or the last one.
fn widest(kinds: &[WeightType], lengths: &[usize]) -> WeightType {
    let divides = |kind: &&WeightType| lengths.iter().all(|length| length.is_multiple_of(kind.block_elements()));
    kinds.iter().find(divides).copied().unwrap_or(kinds[kinds.len() - 1])
}

/// The format of a part with these inputs: if they cut the groups of `kind`, one with narrower groups, if there is one.
fn holding(kind: WeightType, inputs: &Range<usize>) -> WeightType {
    let cuts = |place: usize| !place.is_multiple_of(kind.block_elements());
    let cut = narrower(kind).filter(|_| cuts(inputs.start) || cuts(inputs.end));
    cut.map_or(kind, |kinds| widest(kinds, &[inputs.start, inputs.end]))
}

/// The formats of the same values in narrower groups; the last one has groups of 32.
fn narrower(kind: WeightType) -> Option<&'static [WeightType]> {
    match kind {
        WeightType::I8G64 | WeightType::I8G128 | WeightType::F8G64 => Some(&[WeightType::Q8_0]),
        WeightType::U8G64 => Some(&[WeightType::U8G32]),
        WeightType::S4G64 | WeightType::S4G128 => Some(&[WeightType::Q4_0]),
        WeightType::I2G256 => Some(&CRUMBS[1..]),
        WeightType::I3G256 => Some(&THREE_BITS[1..]),
        _ => None,
    }
}

/// Runs `make` on parts of the rows on all processors; results are in the order of rows.
fn by_all_processors<T: Send>(rows: &Range<usize>, make: impl Fn(Range<usize>) -> T + Sync) -> Vec<T> {
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let share = rows.len().div_ceil(threads).max(1);
    let shares = rows.clone().step_by(share).map(|start| start..rows.end.min(start + share));
    std::thread::scope(|scope| {
        let make = &make;
        let workers: Vec<_> = shares.map(|rows| scope.spawn(move || make(rows))).collect();
        let join = |worker: std::thread::ScopedJoinHandle<'_, T>| match worker.join() {
            Ok(part) => part,
            Err(panic) => std::panic::resume_unwind(panic),
        };
        workers.into_iter().map(join).collect()
    })
}
