//! Reads GGUF checkpoints: header, metadata and tensor data, validated before anything is allocated or trusted.
//!
//! The format is the one of `ggml`'s `docs/gguf.md`, versions 2 and 3, little-endian. A file is mapped, its header is
//! walked once, and afterwards every string, array and tensor handed out lies inside the file. This crate knows no
//! model: which tensors there must be, and which element types can be computed on, is for its callers to say. It reads
//! no safetensors and never a pickle.

mod cursor;
mod error;
mod file;
mod header;
mod map;
mod metadata;
mod split;
mod tensor;
pub mod testing;
mod types;
mod value;

pub use error::{GgufError, MetadataError, OpenError};
pub use file::GgufFile;
pub use metadata::{Metadata, StrArray};
pub use tensor::Tensor;
pub use types::GgmlType;
pub use value::ValueType;
