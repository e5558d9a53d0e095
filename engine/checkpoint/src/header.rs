//! Walks a file's header once and keeps an index of what it found.

use std::ops::Range;

use crate::cursor::Cursor;
use crate::error::GgufError;
use crate::metadata::{Metadata, MetadataIndex};
use crate::split::Part;
use crate::tensor::TensorEntry;
use crate::value::Value;

/// Most metadata entries, and most tensors. The largest published checkpoints have some thousands; an index of this
/// many takes a few MiB.
const MAX_ENTRIES: u64 = 1 << 16;
/// Longest metadata key (`docs/gguf.md`).
const MAX_KEY_BYTES: usize = 65_535;
/// Alignment where the file names none.
const DEFAULT_ALIGNMENT: u64 = 32;
/// Beyond a huge page no alignment has a purpose.
const MAX_ALIGNMENT: u64 = 2 << 20;
/// Fewest bytes of a metadata entry: a key of one byte, a type, a value of one byte.
const SMALLEST_METADATA_BYTES: u64 = 8 + 1 + 4 + 1;
/// Fewest bytes of a tensor entry: a name of one byte, one dimension, type and offset.
const SMALLEST_TENSOR_BYTES: u64 = 8 + 1 + 4 + 8 + 4 + 8;

/// What a file holds and where. Every range in it lies inside the file it was read from.
#[derive(Debug)]
pub(crate) struct Header {
    pub version: u32,
    pub metadata: MetadataIndex,
    pub part: Part,
    /// Sorted by name.
    pub tensors: Vec<TensorEntry>,
    /// Where tensor data lies in the file.
    pub data: Range<usize>,
}

impl Header {
    /// Reads and checks everything up to the tensors' data, and that the data is inside the file. `bytes` are the
    /// beginning of a file of `length`, or all of it.
    pub fn read(bytes: &[u8], length: usize) -> Result<Header, GgufError> {
        let mut cursor = Cursor::new(bytes);
        let version = read_version(bytes, &mut cursor)?;
        let tensor_count = read_count(&mut cursor, "the number of tensors")?;
        let metadata_count = read_count(&mut cursor, "the number of metadata entries")?;
        let metadata = read_metadata(bytes, &mut cursor, metadata_count)?;
        let view = Metadata::new(bytes, &metadata);
        let part = Part::read(view)?;
        let alignment = read_alignment(view)?;
        let mut tensors = read_tensors(bytes, &mut cursor, tensor_count)?;
        let data = data_range(length, cursor.position(), alignment);
        check_places(bytes, &mut tensors, alignment, data.len() as u64)?;
        sort_by_name(bytes, &mut tensors)?;
        Ok(Header { version, metadata, part, tensors, data })
    }
}

fn read_version(bytes: &[u8], cursor: &mut Cursor<'_>) -> Result<u32, GgufError> {
    let magic = || GgufError::Magic { found: bytes[..bytes.len().min(4)].to_vec() };
    let found = cursor.range(4, "the magic").map_err(|_| magic())?;
    if &bytes[found] != b"GGUF" {
        return Err(magic());
    }
    match cursor.u32("the version")? {
        version @ 2..=3 => Ok(version),
        swapped if (1..=3).contains(&swapped.swap_bytes()) => Err(GgufError::BigEndian),
        found => Err(GgufError::Version { found }),
    }
}

fn read_count(cursor: &mut Cursor<'_>, what: &'static str) -> Result<u64, GgufError> {
    let count = cursor.u64(what)?;
    match count {
        0..=MAX_ENTRIES => Ok(count),
        _ => Err(GgufError::Count { what, count, limit: MAX_ENTRIES }),
    }
}

/// An empty list with room for `count` entries, after checking that the rest of the file could hold as many.
fn room_for<T>(cursor: &Cursor<'_>, what: &'static str, count: u64, smallest_bytes: u64) -> Result<Vec<T>, GgufError> {
    let limit = cursor.remaining() as u64 / smallest_bytes;
    match count {
        count if count <= limit => Ok(Vec::with_capacity(count as usize)),
        _ => Err(GgufError::Count { what, count, limit }),
    }
}

fn read_metadata(bytes: &[u8], cursor: &mut Cursor<'_>, count: u64) -> Result<MetadataIndex, GgufError> {
    let mut entries = room_for(cursor, "the number of metadata entries", count, SMALLEST_METADATA_BYTES)?;
    for _ in 0..count {
        let key = cursor.string("a metadata key")?;
        if !(1..=MAX_KEY_BYTES).contains(&key.len()) {
            return Err(GgufError::KeyLength { length: key.len(), offset: key.start, limit: MAX_KEY_BYTES });
        }
        let value = Value::read(cursor, crate::metadata::text(bytes, &key))?;
        entries.push((key, value));
    }
    MetadataIndex::new(bytes, entries)
}

fn read_alignment(metadata: Metadata<'_>) -> Result<u64, GgufError> {
    let found = metadata.u64("general.alignment")?.unwrap_or(DEFAULT_ALIGNMENT);
    match found.is_power_of_two() && (8..=MAX_ALIGNMENT).contains(&found) {
        true => Ok(found),
        false => Err(GgufError::Alignment { found, limit: MAX_ALIGNMENT }),
    }
}

fn read_tensors(bytes: &[u8], cursor: &mut Cursor<'_>, count: u64) -> Result<Vec<TensorEntry>, GgufError> {
    let mut tensors = room_for(cursor, "the number of tensors", count, SMALLEST_TENSOR_BYTES)?;
    for _ in 0..count {
        tensors.push(TensorEntry::read(bytes, cursor)?);
    }
    Ok(tensors)
}

/// From the first aligned byte after the header to the end; empty where the file ends before it.
fn data_range(length: usize, header_end: usize, alignment: u64) -> Range<usize> {
    header_end.next_multiple_of(alignment as usize).min(length)..length
}

/// Every tensor aligned, inside the data, and behind the one before it: so all of them together are no more than the file, and
/// nothing is hidden between them.
fn check_places(bytes: &[u8], tensors: &mut [TensorEntry], alignment: u64, available: u64) -> Result<(), GgufError> {
    for tensor in tensors.iter() {
        let (name, offset) = (|| tensor.name(bytes).to_owned(), tensor.offset);
        if !offset.is_multiple_of(alignment) {
            return Err(GgufError::TensorAlignment { name: name(), offset, alignment });
        }
        if offset.checked_add(tensor.byte_count).is_none_or(|end| end > available) {
            return Err(GgufError::TensorOutside { name: name(), offset, bytes: tensor.byte_count, available });
        }
    }
    tensors.sort_by_key(|tensor| tensor.offset);
    if let Some(pair) = tensors.windows(2).find(|pair| pair[0].offset + pair[0].byte_count > pair[1].offset) {
        let [first, second] = [&pair[0], &pair[1]].map(|tensor| tensor.name(bytes).to_owned());
        return Err(GgufError::Overlap { first, second, offset: pair[1].offset });
    }
    let ends = tensors.iter().map(|tensor| (tensor.offset + tensor.byte_count).next_multiple_of(alignment));
    match std::iter::once(0).chain(ends).zip(tensors.iter()).find(|(end, tensor)| *end != tensor.offset) {
        Some((start, tensor)) => Err(GgufError::Gap { start, end: tensor.offset }),
        None => Ok(()),
    }
}

fn sort_by_name(bytes: &[u8], tensors: &mut [TensorEntry]) -> Result<(), GgufError> {
    tensors.sort_by(|a, b| a.name(bytes).cmp(b.name(bytes)));
    match tensors.windows(2).find(|pair| pair[0].name(bytes) == pair[1].name(bytes)) {
        Some(pair) => Err(pair[1].duplicate(bytes)),
        None => Ok(()),
    }
}
