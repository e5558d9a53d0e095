//! Eight-bit floats and the codes of bitsandbytes (Dettmers et al. 2022, 2023). The kernels support its codes of 4 and
//! 8 bits; eight-bit floats become integers of eight bits, and so do values of other tables and with scales of other
//! shapes.

use std::ops::Range;

use half::f16;
use serde_json::Value;
use windlass_checkpoint::{Data, Tensor};
use windlass_kernels::{Integer, WeightType};

use super::float8::{self, Float8, e4m3};
use super::parts::{FloatPart, Parts};
use super::{SIGNED_BYTES, widest};
use crate::config::quantization_config::{Float8Scales, Layout};

/// Largest block size of bitsandbytes.
const MAX_BLOCK: u64 = 1 << 16;
/// Devices scale so many columns together: group sizes are multiples of it.
const FLOAT8_GROUP: usize = 128;

/// A matrix whose values are computed from codes, `[rows = outputs, cols = inputs]`.
#[derive(Clone, Debug)]
pub(super) struct Floats<'a> {
    codes: Data<'a>,
    cols: usize,
    /// The value of each code.
    table: Vec<f32>,
    width: Width,
    scales: Scales<'a>,
    place: ScalePlace,
    /// The packed format.
    pub kind: WeightType,
}

/// The contents of a byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Width {
    /// Two codes, the first in the high half.
    Nibbles,
    /// A signed integer; 127 stands for 1.
    Integers,
    /// An eight-bit float.
    Float8,
}

/// The scales of values.
#[derive(Clone, Debug)]
enum Scales<'a> {
    Stored(FloatPart<'a>),
    /// Scales that are quantized themselves: codes of a table of 256, with a scale for each run, plus an offset.
    Nested {
        codes: Tensor<'a>,
        table: Vec<f32>,
        largest: FloatPart<'a>,
        run: usize,
        offset: f32,
    },
}

impl Scales<'_> {
    fn get(&self, index: usize) -> f32 {
        match self {
            Scales::Stored(scales) => scales.get(index),
            Scales::Nested { codes, table, largest, run, offset } => {
                table[usize::from(codes.bytes[index])] * largest.get(index / run) + offset
            }
        }
    }

    /// Where a scale is stored: of a quantized scale its code and the scale of that.
    fn place(&self, index: usize) -> String {
        match self {
            Scales::Stored(scales) => scales.place(index),
            Scales::Nested { codes: Tensor { name, offset, .. }, largest, run, .. } => {
                let (at, largest) = (offset + index as u64, largest.place(index / run));
                format!("code {index} of {name:?}, at offset {at}, by {largest}")
            }
        }
    }
}

/// The scale that belongs to a value.
#[derive(Clone, Copy, Debug)]
enum ScalePlace {
    /// `rows` outputs by `cols` inputs share a scale; there are `across` scales in a row of the matrix.
    Blocks { rows: usize, cols: usize, across: usize },
    /// So many consecutive values in row-major order share a scale.
    Run(usize),
}

impl<'a> Floats<'a> {
    /// Finds the tensors of a matrix `[cols, rows]`.
    pub fn find<F>(parts: &Parts<'_, F>, [cols, rows]: [usize; 2]) -> Result<Floats<'a>, String>
    where
        F: Fn(&str) -> Option<Tensor<'a>>,
    {
        if !cols.is_multiple_of(32) {
            return Err(format!("its {cols} inputs are no multiple of 32"));
        }
        match parts.scheme.layout {
            Layout::Float8 { scales, inverse } => Self::find_float8(parts, [cols, rows], scales, inverse),
            Layout::Bnb8 => {
                let scales = Scales::Stored(parts.floats("SCB", [1, rows])?);
                let table = (0..=255_u8).map(|code| f32::from(code as i8) / 127.0).collect();
                let place = ScalePlace::Blocks { rows: 1, cols, across: 1 };
                let codes = parts.codes("i8", [cols, rows])?.bytes;
                let kind = widest(&SIGNED_BYTES, &[cols]);
                Ok(Floats { codes, cols, table, width: Width::Integers, scales, place, kind })
            }
            _ => Self::find_bnb4(parts, [cols, rows]),
        }
    }

    fn find_float8<F>(
        parts: &Parts<'_, F>,
        [cols, rows]: [usize; 2],
        scales: Float8Scales,
        inverse: bool,
    ) -> Result<Floats<'a>, String>
    where
        F: Fn(&str) -> Option<Tensor<'a>>,
    {
        let [high, wide] = match scales {
            Float8Scales::Matrix => [rows, cols],
            Float8Scales::Outputs => [1, cols],
            Float8Scales::Blocks(size) => size,
        };
        let across = cols.div_ceil(wide);
        // DeepSeek's name of the factor has `inv` in it, though it is multiplied with.
        let name = if inverse { "weight_scale_inv" } else { "weight_scale" };
        let scales = Scales::Stored(parts.floats(name, [across, rows.div_ceil(high)])?);
        let table = (0..=255).map(e4m3).collect();
        let place = ScalePlace::Blocks { rows: high, cols: wide, across };
        let codes = parts.codes("f8_e4m3", [cols, rows])?.bytes;
        let kind = widest(&float8::KINDS, &[cols, wide.min(cols)]);
        Ok(Floats { codes, cols, table, width: Width::Float8, scales, place, kind })
    }

    fn find_bnb4<F>(parts: &Parts<'_, F>, [cols, rows]: [usize; 2]) -> Result<Floats<'a>, String>
    where
        F: Fn(&str) -> Option<Tensor<'a>>,
    {
        let state = ["weight.quant_state.bitsandbytes__nf4", "weight.quant_state.bitsandbytes__fp4"];
        let state = state.iter().find_map(|part| parts.optional(part)).ok_or("its quant_state is missing")?;
        let Tensor { name, offset, .. } = state;
        let problem = |problem: String| format!("{name:?} at offset {offset}: {problem}");
        let state: Value = serde_json::from_slice(&state.bytes).map_err(|error| problem(error.to_string()))?;
        let run = state["blocksize"].as_u64().filter(|size| (1..=MAX_BLOCK).contains(size));
        let run = run.ok_or_else(|| problem(format!("the blocksize is {}", state["blocksize"])))? as usize;
        let count = rows.checked_mul(cols).ok_or_else(|| format!("{rows} rows of {cols} are no matrix"))?;
        let codes = parts.codes("u8", [1, count.div_ceil(2)])?.bytes;
        let table = entries(&parts.floats("weight.quant_map", [1, 16])?)?;
        let scales = match parts.optional("weight.nested_absmax") {
            None => Scales::Stored(parts.floats("weight.absmax", [1, count.div_ceil(run)])?),
            Some(_) => nested_scales(parts, &state, count.div_ceil(run), problem)?,
        };
        let kind = kind_of_table(&table, cols, run);
        Ok(Floats { codes, cols, table, width: Width::Nibbles, scales, place: ScalePlace::Run(run), kind })
    }

    /// Whether they are eight-bit floats.
    pub fn is_float8(&self) -> bool {
        self.width == Width::Float8
    }

    /// Fails if f16 cannot represent the scales of the first `rows` rows; the step of an eight-bit float is up to four
    /// scales.
    pub fn check_scales(&self, rows: usize) -> Result<(), String> {
        let (what, most, count) = match self.place {
            ScalePlace::Run(run) => {
                ("the largest magnitude of a block", f16::MAX.to_f32(), (rows * self.cols).div_ceil(run))
            }
            ScalePlace::Blocks { rows: high, across, .. } => {
                ("a scale", f16::MAX.to_f32() / 8.0, rows.div_ceil(high) * across)
            }
        };
        let mut scales = (0..count).map(|index| (index, self.scales.get(index)));
        match scales.find(|(_, scale)| scale.is_nan() || scale.abs() > most) {
            Some((index, scale)) => {
                Err(format!("{what} is {scale}; they are at most {most} ({})", self.scales.place(index)))
            }
            None => Ok(()),
        }
    }

    /// Appends some columns of a row in the file format of the kernels.
    pub fn append_row(&self, row: usize, cols: Range<usize>, kind: WeightType, out: &mut Vec<u8>) {
        if !self.scales_whole(kind.block_elements()) {
            let values: Vec<f32> = cols.map(|col| self.value(row, col)).collect();
            return Integer::Int8.append_row(&values, out);
        }
        for first in cols.step_by(kind.block_elements()) {
            let codes = first..first + kind.block_elements();
            match self.width {
                Width::Nibbles => self.append_nibbles(row, codes, out),
                Width::Integers => self.append_integers(row, codes, out),
                Width::Float8 => float8::append(self.bytes(row, codes), self.scale(row, first), out),
            }
        }
    }

    /// Appends a block of codes of four bits: of each 32 columns, two that are 16 apart share a byte.
    fn append_nibbles(&self, row: usize, cols: Range<usize>, out: &mut Vec<u8>) {
        out.extend(f16::from_f32(self.scale(row, cols.start)).to_le_bytes());
        for first in cols.step_by(32) {
            out.extend((first..first + 16).map(|col| self.code(row, col) | self.code(row, col + 16) << 4));
        }
    }

    /// Appends a block of integers of eight bits.
    fn append_integers(&self, row: usize, cols: Range<usize>, out: &mut Vec<u8>) {
        out.extend(f16::from_f32(self.scale(row, cols.start) / 127.0).to_le_bytes());
        out.extend(self.bytes(row, cols));
    }

    /// Codes of eight bits.
    fn bytes(&self, row: usize, cols: Range<usize>) -> &[u8] {
        &self.codes[row * self.cols..][cols]
    }

    /// Some rows and columns as eight-bit floats; `None` if they are none, or a scale covers no whole group of a row.
    pub fn float8(&self, rows: Range<usize>, cols: &Range<usize>) -> Option<Float8> {
        let ScalePlace::Blocks { cols: wide, .. } = self.place else { return None };
        let by_row = wide >= self.cols;
        let whole = by_row || wide.is_multiple_of(FLOAT8_GROUP) && cols.start.is_multiple_of(wide);
        if !self.is_float8() || !whole {
            return None;
        }
        let group = if by_row { cols.len() } else { wide };
        let codes: Vec<&[u8]> = rows.clone().map(|row| &self.codes[row * self.cols..][cols.clone()]).collect();
        let mut codes = codes.concat();
        codes.iter_mut().filter(|code| **code & 127 == 127).for_each(|nothing| *nothing = 0);
        let scales = rows.flat_map(|row| cols.clone().step_by(group).map(move |col| self.scale(row, col))).collect();
        Some(Float8 { codes, scales, group })
    }

    /// Whether every block of so many columns has one scale, and the kernels support the codes.
    fn scales_whole(&self, block: usize) -> bool {
        match self.place {
            ScalePlace::Blocks { cols, .. } => cols.is_multiple_of(block) || cols >= self.cols,
            ScalePlace::Run(_) => self.kind != WeightType::Q8_0,
        }
    }

    fn value(&self, row: usize, col: usize) -> f32 {
        self.table[usize::from(self.code(row, col))] * self.scale(row, col)
    }

    fn code(&self, row: usize, col: usize) -> u8 {
        let index = row * self.cols + col;
        match self.width {
            Width::Nibbles => self.codes[index / 2] >> (4 - index % 2 * 4) & 15,
            Width::Integers | Width::Float8 => self.codes[index],
        }
    }

    fn scale(&self, row: usize, col: usize) -> f32 {
        self.scales.get(match self.place {
            ScalePlace::Blocks { rows, cols, across } => row / rows * across + col / cols,
            ScalePlace::Run(run) => (row * self.cols + col) / run,
        })
    }
}

/// The format whose codes index `table`, if every block has one scale, which `run` codes share; else a format of
/// integers.
fn kind_of_table(table: &[f32], cols: usize, run: usize) -> WeightType {
    let names = |kind: &WeightType| {
        let same = |numbers: &[f32; 16]| numbers.iter().zip(table).all(|(number, entry)| (number - entry).abs() < 1e-6);
        let block = kind.block_elements();
        kind.numbers().is_some_and(same) && cols.is_multiple_of(block) && run.is_multiple_of(block)
    };
    [WeightType::NF4, WeightType::FP4].into_iter().find(names).unwrap_or(WeightType::Q8_0)
}

/// The entries of a table, as fractions of a block's largest magnitude.
fn entries(table: &FloatPart<'_>) -> Result<Vec<f32>, String> {
    let entries = table.all();
    match entries.iter().position(|entry| entry.is_nan() || entry.abs() > 1.0) {
        None => Ok(entries),
        Some(index) => Err(format!("a table's entry is {} ({})", entries[index], table.place(index))),
    }
}

fn nested_scales<'a, F>(
    parts: &Parts<'_, F>,
    state: &Value,
    count: usize,
    problem: impl Fn(String) -> String,
) -> Result<Scales<'a>, String>
where
    F: Fn(&str) -> Option<Tensor<'a>>,
{
    let number = |key: &str| state[key].as_f64().ok_or_else(|| problem(format!("the {key} is {}", state[key])));
    let (run, offset) = (number("nested_blocksize")?, number("nested_offset")? as f32);
    if !(1.0..=MAX_BLOCK as f64).contains(&run) {
        return Err(problem(format!("the nested_blocksize is {run}")));
    }
    let codes = parts.part("weight.absmax", "u8", [1, count])?;
    let largest = parts.floats("weight.nested_absmax", [1, count.div_ceil(run as usize)])?;
    let table = entries(&parts.floats("weight.nested_quant_map", [1, 256])?)?;
    Ok(Scales::Nested { codes, table, largest, run: run as usize, offset })
}
