//! Matrices that other tools quantized, turned into the kernels' formats as they are packed.
//!
//! Integer codes keep their values ([`codes`]), and so do bitsandbytes' ([`floats`]); eight-bit floats become integers of eight
//! bits, but for devices that take them as they are ([`float8`]). Plain floats become eight-bit floats first where that is
//! asked for ([`rounded`]).

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

/// A matrix `[rows = outputs, cols = inputs]`, its tensors found and their sizes checked.
#[derive(Clone, Debug)]
pub(crate) struct PackedTensor<'a> {
    pub name: &'a str,
    /// The places of a row that are meant: its columns, where they have no order of their own.
    cols: Range<usize>,
    /// The rows that are meant.
    rows: Range<usize>,
    /// What it is packed as.
    kind: WeightType,
    content: Content<'a>,
    /// Its codes.
    source: Data<'a>,
}

#[derive(Clone, Debug)]
enum Content<'a> {
    Codes(Codes<'a>),
    Floats(Floats<'a>),
    Rounded(Rounded<'a>),
}

impl<'a> PackedTensor<'a> {
    /// Finds the matrix that plain checkpoints call `name`; `find` gives tensors by name.
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

    /// Plain floats of this `kind` that become eight-bit floats.
    pub fn rounded(tensor: Tensor<'a>, kind: WeightType, [cols, rows]: [usize; 2]) -> Result<PackedTensor<'a>, String> {
        let rounded = Rounded::new(kind, tensor.bytes, cols)?;
        let (kind, content) = (rounded.kind(), Content::Rounded(rounded));
        Ok(PackedTensor { name: tensor.name, cols: 0..cols, rows: 0..rows, kind, content, source: tensor.bytes })
    }

    /// Whether it is, or becomes, eight-bit floats.
    pub fn is_float8(&self) -> bool {
        match &self.content {
            Content::Codes(_) => false,
            Content::Floats(floats) => floats.is_float8(),
            Content::Rounded(_) => true,
        }
    }

    /// Some of the rows that are meant.
    pub fn rows(&self, range: Range<usize>) -> PackedTensor<'a> {
        let first = self.rows.start;
        PackedTensor { rows: first + range.start..first + range.end, ..self.clone() }
    }

    /// A part of all columns, which are whole blocks where they have no order of their own.
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

    /// Refuses codes that the kernels' formats cannot hold.
    pub fn check(&self) -> Result<(), String> {
        match &self.content {
            Content::Codes(codes) => codes.check_scales(),
            Content::Floats(floats) => floats.check_scales(self.rows.end),
            Content::Rounded(_) => Ok(()),
        }
    }

    /// Columns and rows that are meant.
    pub fn shape(&self) -> [usize; 2] {
        [self.cols.len(), self.rows.len()]
    }

    /// What it is packed as.
    pub fn kind(&self) -> WeightType {
        self.kind
    }

    /// Columns of which parts have whole numbers.
    pub fn block(&self) -> usize {
        let narrowest = narrower(self.kind).and_then(<[WeightType]>::last);
        narrowest.unwrap_or(&self.kind).block_elements()
    }

    /// The input of every column, where columns are not in the order of inputs.
    pub fn order(&self) -> Option<&[u32]> {
        match &self.content {
            Content::Codes(codes) => codes.order.as_ref().map(|order| &order.inputs[..]),
            Content::Floats(_) | Content::Rounded(_) => None,
        }
    }

    /// Its values as eight-bit floats, where they are such and their scales lie in whole groups of a row.
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
    /// Its values as the kernels' file rows of its [`kind`](Self::kind).
    fn get(&self, rows: Range<usize>) -> Cow<'a, [u8]> {
        by_all_processors(&self.rows(rows).rows, |rows| self.some_rows(rows)).concat().into()
    }

    /// Rows do not lie together in every layout: the layer gives them back.
    fn release(&self, _rows: Range<usize>) {}
}

/// Signed integers of eight bits, the widest groups first.
const SIGNED_BYTES: [WeightType; 3] = [WeightType::I8G128, WeightType::I8G64, WeightType::Q8_0];

/// Integers of two and of three.
const CRUMBS: [WeightType; 4] = [WeightType::I2G256, WeightType::I2G128, WeightType::I2G64, WeightType::I2G32];
const THREE_BITS: [WeightType; 4] = [WeightType::I3G256, WeightType::I3G128, WeightType::I3G64, WeightType::I3G32];

/// The first of these types whose blocks divide all of these lengths; the last one's do.
fn widest(kinds: &[WeightType], lengths: &[usize]) -> WeightType {
    let divides = |kind: &&WeightType| lengths.iter().all(|length| length.is_multiple_of(kind.block_elements()));
    kinds.iter().find(divides).copied().unwrap_or(kinds[kinds.len() - 1])
}

/// What some inputs of such a matrix are packed as: where they cut its groups, some types have narrower ones.
fn holding(kind: WeightType, inputs: &Range<usize>) -> WeightType {
    let cuts = |place: usize| !place.is_multiple_of(kind.block_elements());
    let cut = narrower(kind).filter(|_| cuts(inputs.start) || cuts(inputs.end));
    cut.map_or(kind, |kinds| widest(kinds, &[inputs.start, inputs.end]))
}

/// The types that hold the same values in narrower groups, the last of them in groups of 32.
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

/// What is made of rows, by all processors: parts in the order of rows.
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
