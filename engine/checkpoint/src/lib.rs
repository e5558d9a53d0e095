//! Reads checkpoints: header, metadata and tensor data, validated before anything is allocated or trusted.
//!
//! A [`Checkpoint`] is a GGUF file (`ggml`'s `docs/gguf.md`, versions 2 and 3, little-endian) or a folder with
//! `config.json` and safetensors. Files are mapped, their headers are walked once, and afterwards every string, array and
//! tensor handed out lies inside the file. A file may still be on its way ([`Arrival`]): its tensors are known as soon as its
//! header is there, and whoever reads one's data waits for it. This crate knows no model: which tensors there must be, and which element types
//! can be computed on, is for its callers to say. It never opens a pickle.

mod checkpoint;
mod cursor;
mod data;
mod error;
mod file;
mod header;
mod hub;
mod last_word;
mod map;
mod metadata;
mod safetensors;
mod split;
mod tensor;
pub mod testing;
mod types;
mod value;

pub use checkpoint::Checkpoint;
pub use data::{Arrival, Arrivals, Data};
pub use error::{GgufError, HubError, MetadataError, OpenError, SafetensorsError};
pub use file::GgufFile;
pub use hub::HubFolder;
pub use last_word::{BYTES, LastWord, say_on_lost_file, say_on_lost_memory};
pub use metadata::{Metadata, StrArray};
pub use tensor::Tensor;
pub use types::ElementType;
pub use value::ValueType;
