//! Tensors as the file describes them.

use std::ops::Range;

use crate::cursor::Cursor;
use crate::data::Data;
use crate::error::GgufError;
use crate::map::Bytes;
use crate::metadata::text;
use crate::types::ElementType;

/// Most dimensions of a tensor (`GGML_MAX_DIMS`).
const MAX_DIMENSIONS: u32 = 4;
/// Longest tensor name (`docs/gguf.md`).
const MAX_NAME_BYTES: usize = 64;

/// A tensor of a file: described, and its data in place.
#[derive(Clone, Copy, Debug)]
pub struct Tensor<'a> {
    /// Unique in the file.
    pub name: &'a str,
    /// Fastest first: a matrix is `[columns, rows]`.
    pub dims: &'a [u64],
    /// Element type.
    pub kind: ElementType,
    /// Its data, row-major: rows of whole blocks.
    pub bytes: Data<'a>,
    /// Where that lies in its file.
    pub offset: u64,
}

/// A validated entry of the header.
#[derive(Debug)]
pub(crate) struct TensorEntry {
    name: Range<usize>,
    dimensions: [u64; MAX_DIMENSIONS as usize],
    dimension_count: usize,
    kind: ElementType,
    /// From the start of the data.
    pub offset: u64,
    pub byte_count: u64,
}

impl TensorEntry {
    /// Reads one entry and checks all that can be known without the data's place.
    pub fn read(bytes: &[u8], cursor: &mut Cursor<'_>) -> Result<TensorEntry, GgufError> {
        let name = read_name(cursor)?;
        let label = || (text(bytes, &name).to_owned(), name.start);
        let (dimensions, dimension_count) = read_dimensions(cursor, label)?;
        let id = cursor.u32("a tensor's type")?;
        let kind = ElementType::from_id(id).ok_or_else(|| {
            let (name, offset) = label();
            GgufError::TensorType { name, offset, id }
        })?;
        let offset = cursor.u64("a tensor's offset")?;
        let dims = &dimensions[..dimension_count];
        let byte_count = byte_count(dims, kind, label)?;
        Ok(TensorEntry { name, dimensions, dimension_count, kind, offset, byte_count })
    }

    pub fn name<'a>(&self, bytes: &'a [u8]) -> &'a str {
        text(bytes, &self.name)
    }

    /// That there are two of its name, of which this is the later one.
    pub fn duplicate(&self, bytes: &[u8]) -> GgufError {
        GgufError::DuplicateTensor { name: self.name(bytes).to_owned(), offset: self.name.start }
    }

    /// The tensor of a file whose data begins at `data_start`.
    pub fn tensor<'a>(&'a self, file: &'a Bytes, data_start: usize) -> Tensor<'a> {
        let start = data_start + self.offset as usize;
        Tensor {
            name: self.name(file),
            dims: &self.dimensions[..self.dimension_count],
            kind: self.kind,
            bytes: file.data(start..start + self.byte_count as usize),
            offset: start as u64,
        }
    }
}

fn read_name(cursor: &mut Cursor<'_>) -> Result<Range<usize>, GgufError> {
    let name = cursor.string("a tensor's name")?;
    match name.len() {
        1..=MAX_NAME_BYTES => Ok(name),
        length => Err(GgufError::TensorName { length, offset: name.start, limit: MAX_NAME_BYTES }),
    }
}

fn read_dimensions(
    cursor: &mut Cursor<'_>,
    label: impl Fn() -> (String, usize),
) -> Result<([u64; MAX_DIMENSIONS as usize], usize), GgufError> {
    let count = cursor.u32("a tensor's number of dimensions")?;
    if !(1..=MAX_DIMENSIONS).contains(&count) {
        let (name, offset) = label();
        return Err(GgufError::DimensionCount { name, offset, count, limit: MAX_DIMENSIONS });
    }
    let mut dimensions = [1; MAX_DIMENSIONS as usize];
    for dimension in &mut dimensions[..count as usize] {
        *dimension = cursor.u64("a tensor's dimension")?;
    }
    Ok((dimensions, count as usize))
}

/// Bytes of a tensor, without overflow: elements stay below 2^63, and no type takes more than 8 bytes an element.
fn byte_count(dims: &[u64], kind: ElementType, label: impl Fn() -> (String, usize)) -> Result<u64, GgufError> {
    let wrong = || {
        let (name, offset) = label();
        GgufError::Dimensions { name, offset, dims: dims.to_vec() }
    };
    let elements = dims.iter().try_fold(1u64, |product, &dim| product.checked_mul(dim)).ok_or_else(wrong)?;
    if elements == 0 || elements > i64::MAX as u64 {
        return Err(wrong());
    }
    let (row, block) = (dims[0], kind.block_elements());
    if !row.is_multiple_of(block) {
        let (name, offset) = label();
        return Err(GgufError::RowLength { name, offset, kind, row, block });
    }
    (elements / block).checked_mul(kind.block_bytes()).ok_or_else(wrong)
}
