//! A checkpoint's metadata: typed getters over values that stay in the file.

use std::iter::FusedIterator;
use std::ops::Range;

use crate::cursor::Cursor;
use crate::error::{GgufError, MetadataError};
use crate::value::{Value, ValueType};

/// Metadata keys and where their values are, sorted by key.
#[derive(Debug)]
pub(crate) struct MetadataIndex(Vec<(Range<usize>, Value)>);

impl MetadataIndex {
    /// Sorts the entries by key and refuses a key that appears twice.
    pub fn new(bytes: &[u8], mut entries: Vec<(Range<usize>, Value)>) -> Result<MetadataIndex, GgufError> {
        entries.sort_by(|(a, _), (b, _)| bytes[a.clone()].cmp(&bytes[b.clone()]));
        match entries.windows(2).find(|pair| bytes[pair[0].0.clone()] == bytes[pair[1].0.clone()]) {
            Some(pair) => Err(GgufError::DuplicateKey { key: text(bytes, &pair[0].0).to_owned() }),
            None => Ok(MetadataIndex(entries)),
        }
    }
}

/// A file's metadata. Getters give `None` for a key that is not there and an error for a value of another type;
/// [`Metadata::require`] makes absence an error too.
#[derive(Clone, Copy, Debug)]
pub struct Metadata<'a> {
    bytes: &'a [u8],
    index: &'a MetadataIndex,
}

impl<'a> Metadata<'a> {
    pub(crate) fn new(bytes: &'a [u8], index: &'a MetadataIndex) -> Metadata<'a> {
        Metadata { bytes, index }
    }

    /// Keys in byte order, with their values' types.
    pub fn keys(self) -> impl ExactSizeIterator<Item = (&'a str, ValueType)> {
        self.index.0.iter().map(move |(key, value)| (text(self.bytes, key), value.value_type()))
    }

    /// A value that must be there: `metadata.require("llama.block_count", Metadata::u32)`.
    pub fn require<T>(
        self,
        key: &str,
        get: impl FnOnce(Self, &str) -> Result<Option<T>, MetadataError>,
    ) -> Result<T, MetadataError> {
        get(self, key)?.ok_or_else(|| MetadataError::Missing { key: key.to_owned() })
    }

    /// A string.
    pub fn str(self, key: &str) -> Result<Option<&'a str>, MetadataError> {
        self.convert(key, "a string", |value| match value {
            Value::String(range) => Some(text(self.bytes, range)),
            _ => None,
        })
    }

    /// A Boolean.
    pub fn bool(self, key: &str) -> Result<Option<bool>, MetadataError> {
        self.convert(key, "a Boolean", |value| match value {
            Value::Bits(ValueType::Bool, bits) => Some(*bits == 1),
            _ => None,
        })
    }

    /// A float of either width.
    pub fn f32(self, key: &str) -> Result<Option<f32>, MetadataError> {
        self.convert(key, "a float", |value| match value {
            Value::Bits(ValueType::F32, bits) => Some(f32::from_bits(*bits as u32)),
            Value::Bits(ValueType::F64, bits) => Some(f64::from_bits(*bits) as f32),
            _ => None,
        })
    }

    /// An integer of any width that fits.
    pub fn u32(self, key: &str) -> Result<Option<u32>, MetadataError> {
        self.integer(key, "0 to 4294967295")
    }

    /// An integer of any width that fits.
    pub fn u64(self, key: &str) -> Result<Option<u64>, MetadataError> {
        self.integer(key, "0 to 18446744073709551615")
    }

    /// An array of strings, read as it is iterated.
    pub fn str_array(self, key: &str) -> Result<Option<StrArray<'a>>, MetadataError> {
        self.convert(key, "an array of strings", |value| match value {
            Value::Array { element: ValueType::String, count, bytes } => Some(StrArray {
                bytes: self.bytes,
                cursor: Cursor::new(&self.bytes[bytes.clone()]),
                start: bytes.start,
                left: *count,
            }),
            _ => None,
        })
    }

    /// An array of 32-bit signed integers.
    pub fn i32_array(
        self,
        key: &str,
    ) -> Result<Option<impl ExactSizeIterator<Item = i32> + Clone + use<'a>>, MetadataError> {
        Ok(self.words(key, ValueType::I32, "an array of i32")?.map(|words| words.map(i32::from_le_bytes)))
    }

    /// An array of 32-bit floats.
    pub fn f32_array(
        self,
        key: &str,
    ) -> Result<Option<impl ExactSizeIterator<Item = f32> + Clone + use<'a>>, MetadataError> {
        Ok(self.words(key, ValueType::F32, "an array of f32")?.map(|words| words.map(f32::from_le_bytes)))
    }

    /// An array of bytes, signed or not.
    pub fn bytes(self, key: &str) -> Result<Option<&'a [u8]>, MetadataError> {
        self.convert(key, "an array of bytes", |value| match value {
            Value::Array { element: ValueType::U8 | ValueType::I8, bytes, .. } => Some(&self.bytes[bytes.clone()]),
            _ => None,
        })
    }

    fn words(
        self,
        key: &str,
        wanted: ValueType,
        expected: &'static str,
    ) -> Result<Option<impl ExactSizeIterator<Item = [u8; 4]> + Clone + use<'a>>, MetadataError> {
        let found = self.convert(key, expected, |value| match value {
            Value::Array { element, bytes, .. } if *element == wanted => Some(&self.bytes[bytes.clone()]),
            _ => None,
        })?;
        Ok(found.map(|bytes| bytes.chunks_exact(4).map(|word| [word[0], word[1], word[2], word[3]])))
    }

    fn integer<T: TryFrom<i128>>(self, key: &str, expected: &'static str) -> Result<Option<T>, MetadataError> {
        let Some(found) = self.convert(key, "an integer", integer_of)? else { return Ok(None) };
        T::try_from(found).map(Some).map_err(|_| MetadataError::Range { key: key.to_owned(), expected, found })
    }

    fn convert<T>(
        self,
        key: &str,
        expected: &'static str,
        read: impl FnOnce(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, MetadataError> {
        let Some(value) = self.find(key) else { return Ok(None) };
        match read(value) {
            Some(read) => Ok(Some(read)),
            None => Err(MetadataError::Type { key: key.to_owned(), expected, found: value.value_type() }),
        }
    }

    fn find(self, key: &str) -> Option<&'a Value> {
        let entries = &self.index.0;
        let found = entries.binary_search_by(|(range, _)| self.bytes[range.clone()].cmp(key.as_bytes())).ok()?;
        Some(&entries[found].1)
    }
}

fn integer_of(value: &Value) -> Option<i128> {
    use ValueType::*;
    let Value::Bits(value_type, bits) = *value else { return None };
    match value_type {
        U8 | U16 | U32 | U64 => Some(bits.into()),
        I8 => Some((bits as i8).into()),
        I16 => Some((bits as i16).into()),
        I32 => Some((bits as i32).into()),
        I64 => Some((bits as i64).into()),
        F32 | F64 | Bool | String | Array => None,
    }
}

/// A string of the file. Validated when the file was opened; if somebody wrote to the mapped file since, it is empty.
pub(crate) fn text<'a>(bytes: &'a [u8], range: &Range<usize>) -> &'a str {
    std::str::from_utf8(&bytes[range.clone()]).unwrap_or_default()
}

/// An array of strings, decoded as it is iterated. Cloning it starts again from the same place.
#[derive(Clone, Debug)]
pub struct StrArray<'a> {
    bytes: &'a [u8],
    cursor: Cursor<'a>,
    start: usize,
    left: usize,
}

impl<'a> Iterator for StrArray<'a> {
    type Item = &'a str;

    fn next(&mut self) -> Option<&'a str> {
        self.left = self.left.checked_sub(1)?;
        let range = self.cursor.string("a string").unwrap_or_default();
        Some(text(self.bytes, &(self.start + range.start..self.start + range.end)))
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        (self.left, Some(self.left))
    }
}

impl ExactSizeIterator for StrArray<'_> {}
impl FusedIterator for StrArray<'_> {}
