//! What can be wrong with a checkpoint: one enum for finding the file, one for its header, one for a value asked of it.

use std::io;
use std::path::PathBuf;

use crate::types::ElementType;
use crate::value::ValueType;

/// Why a path gave no checkpoint.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// The file or folder could not be read.
    #[error("cannot read {}: {source}", path.display())]
    Io {
        /// What was to be read.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The folder holds no `.gguf` file.
    #[error("no .gguf file in the folder {}", path.display())]
    NoneInFolder {
        /// The folder.
        path: PathBuf,
    },
    /// The folder holds several `.gguf` files.
    #[error("{} .gguf files in the folder {} ({}); name one of them", names.len(), path.display(), names.join(", "))]
    SeveralInFolder {
        /// The folder.
        path: PathBuf,
        /// The first few file names, sorted.
        names: Vec<String>,
    },
    /// The path is neither a file nor a folder.
    #[error("{} is neither a file nor a folder", path.display())]
    NotAFile {
        /// The path.
        path: PathBuf,
    },
    /// A folder of the hub's kind that cannot be used.
    #[error(transparent)]
    Hub(#[from] HubError),
    /// The file is not a checkpoint that can be used.
    #[error("{}: {source}", path.display())]
    Invalid {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        source: GgufError,
    },
}

/// Why bytes are not a GGUF file that can be used.
#[derive(Debug, PartialEq, thiserror::Error)]
pub enum GgufError {
    /// The first four bytes are not `GGUF`.
    #[error("not a GGUF file: it starts with {found:02x?}, not with \"GGUF\"")]
    Magic {
        /// The first bytes, up to four.
        found: Vec<u8>,
    },
    /// A version this reader does not know.
    #[error("GGUF version {found} is not supported; versions 2 and 3 are")]
    Version {
        /// The file's version.
        found: u32,
    },
    /// The file is written for big-endian machines.
    #[error("big-endian GGUF files are not supported; convert it to little-endian")]
    BigEndian,
    /// A part of a checkpoint that was split over several files, in memory or under a name that does not lead to the
    /// others.
    #[error(
        "part {} of {count} of a split checkpoint, which must be a file whose name ends in -{:05}-of-{count:05}.gguf",
        number.saturating_add(1), number.saturating_add(1)
    )]
    Split {
        /// This part, from 0.
        number: u64,
        /// Parts there are.
        count: u64,
    },
    /// A part under another part's name.
    #[error(
        "it says it is part {} of {found_of} and is named as part {} of {count}",
        found.saturating_add(1), number + 1
    )]
    PartNumber {
        /// The part it says it is, from 0.
        found: u64,
        /// Parts it says there are.
        found_of: u64,
        /// The part it should be, from 0.
        number: u64,
        /// Parts there are.
        count: u64,
    },
    /// Parts with tensors too few or too many.
    #[error("its parts hold {found} tensors and should hold {expected}")]
    PartTensors {
        /// Tensors of all parts.
        found: usize,
        /// What the first part says.
        expected: u64,
    },
    /// The header says there is more than the file holds.
    #[error("truncated: {field} at offset {offset} needs {needed} bytes, {remaining} are left")]
    Truncated {
        /// What was being read.
        field: &'static str,
        /// Where it starts in the file.
        offset: usize,
        /// Bytes it needs.
        needed: u64,
        /// Bytes from there to the end of the file.
        remaining: usize,
    },
    /// A count beyond what any real file has, or beyond what the rest of the file could hold.
    #[error("{what} is {count}, more than the {limit} there can be")]
    Count {
        /// What is counted.
        what: &'static str,
        /// What the header says.
        count: u64,
        /// The most there can be.
        limit: u64,
    },
    /// A string that is not UTF-8.
    #[error("{field} at offset {offset} is not UTF-8")]
    NotUtf8 {
        /// What was being read.
        field: &'static str,
        /// Where it starts in the file.
        offset: usize,
    },
    /// A metadata key that is empty or too long.
    #[error("a metadata key of {length} bytes at offset {offset}; keys have 1 to {limit} bytes")]
    KeyLength {
        /// Bytes of the key.
        length: usize,
        /// Where it starts in the file.
        offset: usize,
        /// Longest key.
        limit: usize,
    },
    /// Two metadata entries with one key.
    #[error("metadata key {key:?} appears twice")]
    DuplicateKey {
        /// The key.
        key: String,
    },
    /// A value type that GGUF does not have.
    #[error("metadata key {key:?} has the unknown value type {id}")]
    ValueType {
        /// The key.
        key: String,
        /// The type's number in the file.
        id: u32,
    },
    /// A Boolean that is neither 0 nor 1.
    #[error("metadata key {key:?} has the Boolean {found}; 0 and 1 are valid")]
    Bool {
        /// The key.
        key: String,
        /// The byte found.
        found: u8,
    },
    /// Arrays within arrays, too deep.
    #[error("metadata key {key:?} nests arrays deeper than {limit}")]
    Nesting {
        /// The key.
        key: String,
        /// Deepest nesting.
        limit: u32,
    },
    /// `general.alignment` is not usable.
    #[error("general.alignment is {found}; it must be a power of two from 8 to {limit}")]
    Alignment {
        /// The value.
        found: u64,
        /// Largest alignment.
        limit: u64,
    },
    /// `general.alignment`, `split.no` or `split.count` is not an integer.
    #[error(transparent)]
    Metadata(#[from] MetadataError),
    /// A tensor name that is empty or too long.
    #[error("a tensor name of {length} bytes at offset {offset}; names have 1 to {limit} bytes")]
    TensorName {
        /// Bytes of the name.
        length: usize,
        /// Where it starts in the file.
        offset: usize,
        /// Longest name.
        limit: usize,
    },
    /// Two tensors with one name.
    #[error("tensor {name:?} appears twice, once at offset {offset}")]
    DuplicateTensor {
        /// The tensor.
        name: String,
        /// Where its entry in the header names it, from the start of the file.
        offset: usize,
    },
    /// A tensor with too few or too many dimensions.
    #[error("tensor {name:?} at offset {offset} has {count} dimensions; 1 to {limit} are valid")]
    DimensionCount {
        /// The tensor.
        name: String,
        /// Where its entry in the header names it, from the start of the file.
        offset: usize,
        /// Dimensions it has.
        count: u32,
        /// Most dimensions.
        limit: u32,
    },
    /// A dimension of 0, or elements beyond what 63 bits count.
    #[error(
        "tensor {name:?} at offset {offset} has the dimensions {dims:?}: each must be positive and their product below 2^63"
    )]
    Dimensions {
        /// The tensor.
        name: String,
        /// Where its entry in the header names it, from the start of the file.
        offset: usize,
        /// As in the file, fastest first.
        dims: Vec<u64>,
    },
    /// A tensor type that this reader does not know.
    #[error("tensor {name:?} at offset {offset} has the unknown type {id}")]
    TensorType {
        /// The tensor.
        name: String,
        /// Where its entry in the header names it, from the start of the file.
        offset: usize,
        /// The type's number in the file.
        id: u32,
    },
    /// A row that is no whole number of the type's blocks.
    #[error("tensor {name:?} at offset {offset}, of type {kind}, has rows of {row} elements; {block} must divide that")]
    RowLength {
        /// The tensor.
        name: String,
        /// Where its entry in the header names it, from the start of the file.
        offset: usize,
        /// Its type.
        kind: ElementType,
        /// Elements in a row.
        row: u64,
        /// Elements in a block.
        block: u64,
    },
    /// A tensor that does not start at a multiple of the alignment.
    #[error("tensor {name:?} starts at offset {offset}, which is no multiple of the alignment {alignment}")]
    TensorAlignment {
        /// The tensor.
        name: String,
        /// From the start of the data.
        offset: u64,
        /// The file's alignment.
        alignment: u64,
    },
    /// A tensor whose data lies outside the file.
    #[error("tensor {name:?} needs {bytes} bytes at offset {offset} of the data, which has {available}")]
    TensorOutside {
        /// The tensor.
        name: String,
        /// From the start of the data.
        offset: u64,
        /// Bytes it needs.
        bytes: u64,
        /// Bytes of data in the file.
        available: u64,
    },
    /// Two tensors that share bytes.
    #[error("tensors {first:?} and {second:?} overlap: {second:?} begins at offset {offset} of the data")]
    Overlap {
        /// The one that starts first.
        first: String,
        /// The other.
        second: String,
        /// Where that starts, from the start of the data.
        offset: u64,
    },
    /// Bytes that belong to no tensor.
    #[error("bytes {start} to {end} of the data belong to no tensor: the file is not what its header says")]
    Gap {
        /// Where they start, from the start of the data.
        start: u64,
        /// Where the next tensor does, or the file ends.
        end: u64,
    },
}

/// Why a metadata value could not be had.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum MetadataError {
    /// No such key.
    #[error("metadata key {key:?} is missing")]
    Missing {
        /// The key.
        key: String,
    },
    /// The value has another type, or does not fit the one asked for.
    #[error("metadata key {key:?} must be {expected}; it is {found}")]
    Type {
        /// The key.
        key: String,
        /// What was asked for, with its article.
        expected: &'static str,
        /// What there is.
        found: ValueType,
    },
    /// An integer outside the range asked for.
    #[error("metadata key {key:?} is {found}, outside {expected}")]
    Range {
        /// The key.
        key: String,
        /// The range asked for.
        expected: &'static str,
        /// What there is.
        found: i128,
    },
}

/// Why a folder is no model that can be used.
#[derive(Debug, thiserror::Error)]
pub enum HubError {
    /// A file could not be read.
    #[error("cannot read {}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// A file that must be there is not.
    #[error("{} is missing", path.display())]
    Missing {
        /// The file.
        path: PathBuf,
    },
    /// No safetensors.
    #[error("the folder {} has neither model.safetensors nor model.safetensors.index.json", path.display())]
    NoWeights {
        /// The folder.
        path: PathBuf,
    },
    /// A JSON file with more in it than any real one.
    #[error("{} has {values} values; at most {limit} are read", path.display())]
    ManyValues {
        /// The file.
        path: PathBuf,
        /// At most so many.
        values: usize,
        /// Most values.
        limit: usize,
    },
    /// A text file beyond any real one.
    #[error("{} has {bytes} bytes; at most {limit} are read", path.display())]
    TooLarge {
        /// The file.
        path: PathBuf,
        /// Its size.
        bytes: u64,
        /// Largest size.
        limit: u64,
    },
    /// A file that is not JSON.
    #[error("{} is not JSON: {problem}", path.display())]
    Json {
        /// The file.
        path: PathBuf,
        /// What the parser said.
        problem: String,
    },
    /// An index that leads nowhere.
    #[error("{}: {problem}", path.display())]
    Index {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        problem: String,
    },
    /// A tensor in two shards.
    #[error("tensor {name:?} is in {first} and in {second}")]
    Duplicate {
        /// The tensor.
        name: String,
        /// One file.
        first: String,
        /// The other.
        second: String,
    },
    /// A shard that is damaged.
    #[error("{}: {source}", path.display())]
    Safetensors {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        source: SafetensorsError,
    },
}

/// Why bytes are no safetensors file.
#[derive(Debug, PartialEq, thiserror::Error)]
pub enum SafetensorsError {
    /// Not even a header length.
    #[error("not a safetensors file: it has {bytes} bytes")]
    TooShort {
        /// Bytes there are.
        bytes: usize,
    },
    /// A header longer than the file or than any real one.
    #[error(
        "not a safetensors file, or truncated: its header should have {length} bytes; at most {available} are possible"
    )]
    HeaderLength {
        /// What the file says.
        length: u64,
        /// The most there can be.
        available: u64,
    },
    /// A header that is no JSON object of tensors.
    #[error("its header is not JSON of tensors: {0}")]
    Json(String),
    /// A tensor that contradicts itself or the file.
    #[error("tensor {name:?}: {problem}")]
    Entry {
        /// The tensor.
        name: String,
        /// What is wrong.
        problem: String,
    },
    /// Two tensors that share bytes.
    #[error("tensors {first:?} and {second:?} overlap: {second:?} begins at offset {offset} of the data")]
    Overlap {
        /// The one that starts first.
        first: String,
        /// The other.
        second: String,
        /// Where that starts, from the start of the data.
        offset: u64,
    },
    /// Bytes that belong to no tensor.
    #[error("bytes {start} to {end} of the data belong to no tensor: the file is not what its header says")]
    Gap {
        /// Where they start, from the start of the data.
        start: u64,
        /// Where the next tensor does, or the file ends.
        end: u64,
    },
}
