//! A checkpoint of either kind.

use std::path::Path;

use crate::data::Arrivals;
use crate::error::{GgufError, OpenError};
use crate::file::GgufFile;
use crate::hub::HubFolder;
use crate::tensor::Tensor;

/// A model's weights and description.
#[derive(Debug)]
pub enum Checkpoint {
    /// A GGUF file, or the parts of one.
    Gguf(GgufFile),
    /// A folder with `config.json` and safetensors.
    Hub(HubFolder),
}

impl Checkpoint {
    /// Opens what is at `path`: a GGUF file, a folder with `config.json`, or one with exactly one GGUF checkpoint.
    pub fn open(path: &Path) -> Result<Checkpoint, OpenError> {
        Checkpoint::open_arriving(path, &|_| None)
    }

    /// The same where files with tensors may still be on their way: it returns as soon as their headers are there.
    pub fn open_arriving(path: &Path, arrivals: Arrivals<'_>) -> Result<Checkpoint, OpenError> {
        match HubFolder::is_at(path) {
            true => Ok(Checkpoint::Hub(HubFolder::open_arriving(path, arrivals)?)),
            false => GgufFile::open_arriving(path, arrivals).map(Checkpoint::Gguf),
        }
    }

    /// Reads a GGUF file's bytes that are already in memory.
    pub fn from_bytes(bytes: Vec<u8>) -> Result<Checkpoint, GgufError> {
        GgufFile::from_bytes(bytes).map(Checkpoint::Gguf)
    }

    /// All tensors, by name.
    pub fn tensors(&self) -> Box<dyn Iterator<Item = Tensor<'_>> + '_> {
        match self {
            Checkpoint::Gguf(file) => Box::new(file.tensors()),
            Checkpoint::Hub(folder) => Box::new(folder.tensors()),
        }
    }

    /// The tensor of this name.
    pub fn tensor(&self, name: &str) -> Option<Tensor<'_>> {
        match self {
            Checkpoint::Gguf(file) => file.tensor(name),
            Checkpoint::Hub(folder) => folder.tensor(name),
        }
    }

    /// Gives the memory of tensors' bytes back once they were read, so that a file and what is made of it are not held
    /// both. They can be read again.
    pub fn release(&self, bytes: &[u8]) {
        match self {
            Checkpoint::Gguf(file) => file.release(bytes),
            Checkpoint::Hub(folder) => folder.release(bytes),
        }
    }
}

impl From<GgufFile> for Checkpoint {
    fn from(file: GgufFile) -> Checkpoint {
        Checkpoint::Gguf(file)
    }
}

impl From<HubFolder> for Checkpoint {
    fn from(folder: HubFolder) -> Checkpoint {
        Checkpoint::Hub(folder)
    }
}
