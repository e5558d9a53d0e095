//! One safetensors file: a JSON header that names tensors and their places, checked against the file before use.
//!
//! The format is eight bytes of header length, the header, then the tensors' data.

use std::fmt::{self, Formatter};
use std::fs::File;
use std::path::Path;

use serde::de::{Error as _, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};

use crate::data::Arrivals;
use crate::error::{HubError, SafetensorsError as Error};
use crate::map::Bytes;
use crate::tensor::Tensor;
use crate::types::ElementType;

/// Longest header, as in the format's own reader.
const MAX_HEADER_BYTES: u64 = 100_000_000;
/// Most dimensions of a tensor.
const MAX_DIMENSIONS: usize = 8;
/// Where tensors that are not data say who wrote the file.
const METADATA_KEY: &str = "__metadata__";

/// A validated file.
#[derive(Debug)]
pub(crate) struct SafetensorsFile {
    bytes: Bytes,
    /// Sorted by name.
    entries: Vec<Entry>,
}

#[derive(Debug)]
struct Entry {
    name: String,
    /// Fastest first.
    dims: Vec<u64>,
    kind: ElementType,
    /// In the file.
    start: usize,
    end: usize,
}

impl SafetensorsFile {
    pub fn open(path: &Path, arrivals: Arrivals<'_>) -> Result<SafetensorsFile, HubError> {
        let io = |source| HubError::Io { path: path.to_owned(), source };
        let bytes = File::open(path).and_then(|file| Bytes::map(&file, arrivals(path))).map_err(io)?;
        SafetensorsFile::validated(bytes).map_err(|source| HubError::Safetensors { path: path.to_owned(), source })
    }

    pub fn validated(bytes: Bytes) -> Result<SafetensorsFile, Error> {
        let entries = bytes.read_beginning(|beginning| read_header(beginning, bytes.len()))?;
        Ok(SafetensorsFile { bytes, entries })
    }

    pub fn release(&self, part: &[u8]) {
        self.bytes.release(part);
    }

    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.entries.iter().map(|entry| entry.name.as_str())
    }

    pub fn tensor(&self, name: &str) -> Option<Tensor<'_>> {
        let found = self.entries.binary_search_by(|entry| entry.name.as_str().cmp(name)).ok()?;
        let Entry { name, dims, kind, start, end } = &self.entries[found];
        let bytes = self.bytes.data(*start..*end);
        Some(Tensor { name, dims, kind: *kind, bytes, offset: *start as u64 })
    }
}

/// The entries of a file of `file_bytes`, of which `bytes` are the beginning, or all.
fn read_header(bytes: &[u8], file_bytes: usize) -> Result<Vec<Entry>, Error> {
    let length = bytes.first_chunk().map(|length| u64::from_le_bytes(*length));
    let length = length.ok_or(Error::TooShort { bytes: bytes.len() })?;
    let available = bytes.len() as u64 - 8;
    if length > available.min(MAX_HEADER_BYTES) {
        return Err(Error::HeaderLength { length, available: available.min(MAX_HEADER_BYTES) });
    }
    let data_start = 8 + length as usize;
    let mut json = serde_json::Deserializer::from_slice(&bytes[8..data_start]);
    let reader = EntryReader { data_start, data_bytes: file_bytes - data_start };
    let entries = json.deserialize_map(reader).and_then(|entries| json.end().map(|()| entries));
    let mut entries = entries.map_err(|error| Error::Json(error.to_string()))??;
    refuse_overlap(&mut entries, data_start)?;
    refuse_gaps(&entries, data_start, file_bytes)?;
    entries.sort_by(|a, b| a.name.cmp(&b.name));
    refuse_twins(&entries)?;
    Ok(entries)
}

/// Reads tensors' descriptions one by one: a whole header as JSON values would take many times its bytes.
struct EntryReader {
    /// Where data begins in the file.
    data_start: usize,
    data_bytes: usize,
}

impl<'de> Visitor<'de> for EntryReader {
    type Value = Result<Vec<Entry>, Error>;

    fn expecting(&self, formatter: &mut Formatter<'_>) -> fmt::Result {
        formatter.write_str("an object of tensors")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut entries = Ok(Vec::new());
        while let Some(name) = map.next_key::<String>()? {
            if name == METADATA_KEY {
                map.next_value::<IgnoredAny>()?;
                continue;
            }
            let described = map.next_value().map_err(|error| A::Error::custom(format!("tensor {name:?}: {error}")))?;
            let entry = read_entry(name, described, self.data_start, self.data_bytes);
            entries = entries.and_then(|mut entries: Vec<Entry>| {
                entries.push(entry?);
                Ok(entries)
            });
        }
        Ok(entries)
    }
}

/// What the header says of a tensor, whatever else stands beside it.
#[derive(Deserialize)]
#[serde(expecting = "an object of dtype, shape and data_offsets")]
struct Described {
    dtype: Option<String>,
    shape: Option<Sizes>,
    data_offsets: Option<Sizes>,
}

/// A list of sizes, of which no more are kept than a tensor can have.
struct Sizes {
    first: Vec<u64>,
    count: usize,
}

impl<'de> Deserialize<'de> for Sizes {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Sizes, D::Error> {
        deserializer.deserialize_seq(SizesReader)
    }
}

struct SizesReader;

impl<'de> Visitor<'de> for SizesReader {
    type Value = Sizes;

    fn expecting(&self, formatter: &mut Formatter<'_>) -> fmt::Result {
        formatter.write_str("a list of sizes")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut sequence: A) -> Result<Sizes, A::Error> {
        let mut sizes = Sizes { first: Vec::new(), count: 0 };
        while let Some(size) = sequence.next_element()? {
            sizes.count += 1;
            if sizes.count <= MAX_DIMENSIONS {
                sizes.first.push(size);
            }
        }
        Ok(sizes)
    }
}

/// Reads one tensor's description; its data begins at `data_start` of the file at the earliest.
fn read_entry(name: String, described: Described, data_start: usize, data_bytes: usize) -> Result<Entry, Error> {
    let entry = |problem: String| Error::Entry { name: name.clone(), problem };
    let Described { dtype, shape, data_offsets } = described;
    let kind = dtype.as_deref().ok_or_else(|| entry("its dtype is missing".into()))?;
    let kind = element_type(kind).ok_or_else(|| entry(format!("its dtype is {kind:?}, which is unknown")))?;
    let Sizes { first: mut dims, count } = shape.ok_or_else(|| entry("its shape is missing".into()))?;
    if count > MAX_DIMENSIONS {
        return Err(entry(format!("it has {count} dimensions; at most {MAX_DIMENSIONS} are read")));
    }
    dims.reverse();
    let offsets = data_offsets.filter(|offsets| offsets.count == 2).map(|offsets| offsets.first);
    let Some([start, end]) = offsets.as_deref() else {
        return Err(entry("its data_offsets are no pair of offsets".into()));
    };
    let elements = dims.iter().try_fold(kind.block_bytes(), |product, &dim| product.checked_mul(dim));
    let needed = elements.ok_or_else(|| entry(format!("its shape {dims:?} overflows")))?;
    if *end > data_bytes as u64 || start > end {
        let problem = format!("its data lies at {start}..{end} of the data, which has {data_bytes} bytes");
        return Err(entry(problem));
    }
    if end - start != needed {
        return Err(entry(format!("its data at offset {start} has {} bytes; its shape needs {needed}", end - start)));
    }
    let place = |offset: u64| data_start + offset as usize;
    let (start, end) = (place(*start), place(*end));
    Ok(Entry { name, dims, kind, start, end })
}

/// `data_start`: where data begins in the file.
fn refuse_overlap(entries: &mut [Entry], data_start: usize) -> Result<(), Error> {
    entries.sort_by_key(|entry| (entry.start, entry.end));
    match entries.windows(2).find(|pair| pair[0].end > pair[1].start) {
        Some(pair) => {
            let [first, second] = [&pair[0], &pair[1]].map(|entry| entry.name.clone());
            Err(Error::Overlap { first, second, offset: (pair[1].start - data_start) as u64 })
        }
        None => Ok(()),
    }
}

/// Entries are sorted by place and do not overlap. The format has no room for anything between them.
fn refuse_gaps(entries: &[Entry], data_start: usize, file_bytes: usize) -> Result<(), Error> {
    let ends = std::iter::once(data_start).chain(entries.iter().map(|entry| entry.end));
    let starts = entries.iter().map(|entry| entry.start).chain([file_bytes]);
    match ends.zip(starts).find(|(end, start)| end != start) {
        Some((end, start)) => Err(Error::Gap { start: (end - data_start) as u64, end: (start - data_start) as u64 }),
        None => Ok(()),
    }
}

/// Entries are sorted by name.
fn refuse_twins(entries: &[Entry]) -> Result<(), Error> {
    match entries.windows(2).find(|pair| pair[0].name == pair[1].name) {
        Some(pair) => Err(Error::Entry { name: pair[0].name.clone(), problem: "it is there twice".into() }),
        None => Ok(()),
    }
}

fn element_type(dtype: &str) -> Option<ElementType> {
    let name = match dtype {
        "F8_E4M3" => "f8_e4m3",
        "F8_E5M2" => "f8_e5m2",
        "BOOL" | "U8" | "I8" | "U16" | "I16" | "F16" | "BF16" | "U32" | "I32" | "F32" | "U64" | "I64" | "F64" => {
            &dtype.to_ascii_lowercase()
        }
        _ => return None,
    };
    ElementType::named(name)
}
