//! Opens a checkpoint: a file, or a folder that holds exactly one.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use crate::error::{GgufError, OpenError};
use crate::header::Header;
use crate::map::Bytes;
use crate::metadata::Metadata;
use crate::tensor::Tensor;

/// Most file names that the error about an ambiguous folder lists.
const MAX_NAMES_LISTED: usize = 8;

/// A GGUF file, mapped and validated. Dropping it releases the mapping.
#[derive(Debug)]
pub struct GgufFile {
    bytes: Bytes,
    header: Header,
}

impl GgufFile {
    /// Opens the file at `path`, or the only `.gguf` file in the folder at `path`.
    pub fn open(path: &Path) -> Result<GgufFile, OpenError> {
        let path = find_file(path)?;
        let bytes = File::open(&path).and_then(|file| Bytes::map(&file)).map_err(|source| io_error(&path, source))?;
        GgufFile::validated(bytes).map_err(|source| OpenError::Invalid { path, source })
    }

    /// Reads a file's bytes that are already in memory.
    pub fn from_bytes(bytes: Vec<u8>) -> Result<GgufFile, GgufError> {
        GgufFile::validated(Bytes::Owned(bytes))
    }

    fn validated(bytes: Bytes) -> Result<GgufFile, GgufError> {
        let header = Header::read(&bytes)?;
        Ok(GgufFile { bytes, header })
    }

    /// The format's version, 2 or 3.
    pub fn version(&self) -> u32 {
        self.header.version
    }

    /// What the file says of itself: architecture, hyperparameters, tokenizer, chat template.
    pub fn metadata(&self) -> Metadata<'_> {
        Metadata::new(&self.bytes, &self.header.metadata)
    }

    /// All tensors, by name.
    pub fn tensors(&self) -> impl ExactSizeIterator<Item = Tensor<'_>> {
        self.header.tensors.iter().map(|entry| entry.tensor(&self.bytes, self.data()))
    }

    /// The tensor of this name.
    pub fn tensor(&self, name: &str) -> Option<Tensor<'_>> {
        let found = self.header.tensors.binary_search_by(|entry| entry.name(&self.bytes).cmp(name)).ok()?;
        Some(self.header.tensors[found].tensor(&self.bytes, self.data()))
    }

    fn data(&self) -> &[u8] {
        &self.bytes[self.header.data.clone()]
    }
}

fn io_error(path: &Path, source: io::Error) -> OpenError {
    OpenError::Io { path: path.to_owned(), source }
}

fn find_file(path: &Path) -> Result<PathBuf, OpenError> {
    let kind = fs::metadata(path).map_err(|source| io_error(path, source))?.file_type();
    match (kind.is_file(), kind.is_dir()) {
        (true, _) => Ok(path.to_owned()),
        (_, true) => find_in_folder(path),
        // A pipe or a device would block or never end.
        _ => Err(OpenError::NotAFile { path: path.to_owned() }),
    }
}

fn find_in_folder(folder: &Path) -> Result<PathBuf, OpenError> {
    let entries = fs::read_dir(folder).map_err(|source| io_error(folder, source))?;
    let mut found = Vec::new();
    for entry in entries {
        let path = entry.map_err(|source| io_error(folder, source))?.path();
        if path.extension().is_some_and(|extension| extension == "gguf") && path.is_file() {
            found.push(path);
        }
    }
    found.sort();
    match found.as_slice() {
        [] => Err(OpenError::NoneInFolder { path: folder.to_owned() }),
        [only] => Ok(only.clone()),
        several => Err(OpenError::SeveralInFolder { path: folder.to_owned(), names: names(several) }),
    }
}

fn names(paths: &[PathBuf]) -> Vec<String> {
    let name = |path: &PathBuf| path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    paths.iter().take(MAX_NAMES_LISTED).map(name).collect()
}
