//! Opens a checkpoint: a file, the parts of one that was split, or a folder that holds exactly one checkpoint.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use crate::data::Arrivals;
use crate::error::{GgufError, OpenError};
use crate::header::Header;
use crate::map::Bytes;
use crate::metadata::Metadata;
use crate::split;
use crate::tensor::Tensor;

/// Most file names that the error about an ambiguous folder lists.
const MAX_NAMES_LISTED: usize = 8;

/// A GGUF checkpoint, mapped and validated: one file, or all parts of a split one. Dropping it releases the mapping.
#[derive(Debug)]
pub struct GgufFile {
    /// At least one; the first has the metadata.
    parts: Vec<MappedPart>,
    /// Part and entry of every tensor, sorted by name.
    tensors: Vec<(usize, usize)>,
}

#[derive(Debug)]
struct MappedPart {
    bytes: Bytes,
    header: Header,
}

impl GgufFile {
    /// Opens the file at `path` with the other parts where it was split, or the only checkpoint in the folder at `path`.
    pub fn open(path: &Path) -> Result<GgufFile, OpenError> {
        GgufFile::open_arriving(path, &|_| None)
    }

    /// The same where files may still be on their way.
    pub fn open_arriving(path: &Path, arrivals: Arrivals<'_>) -> Result<GgufFile, OpenError> {
        let path = find_file(path)?;
        let part = MappedPart::open(&path, arrivals)?;
        let parts = if part.header.part.count > 1 { open_parts(&path, &part, arrivals)? } else { vec![part] };
        GgufFile::join(parts).map_err(|source| OpenError::Invalid { path, source })
    }

    /// Reads a file's bytes that are already in memory.
    pub fn from_bytes(bytes: Vec<u8>) -> Result<GgufFile, GgufError> {
        let part = MappedPart::validated(Bytes::from(bytes))?;
        match part.header.part {
            split::Part { count: 1, .. } => GgufFile::join(vec![part]),
            split::Part { number, count, .. } => Err(GgufError::Split { number, count }),
        }
    }

    /// Joins parts that are in order.
    fn join(parts: Vec<MappedPart>) -> Result<GgufFile, GgufError> {
        let entries = |index: usize| (0..parts[index].header.tensors.len()).map(move |entry| (index, entry));
        let mut tensors: Vec<(usize, usize)> = (0..parts.len()).flat_map(entries).collect();
        let name = |(part, entry): (usize, usize)| parts[part].header.tensors[entry].name(&parts[part].bytes);
        tensors.sort_by(|&a, &b| name(a).cmp(name(b)));
        if let Some(pair) = tensors.windows(2).find(|pair| name(pair[0]) == name(pair[1])) {
            let (part, entry) = pair[1];
            return Err(parts[part].header.tensors[entry].duplicate(&parts[part].bytes));
        }
        match parts[0].header.part.tensors {
            Some(expected) if parts.len() > 1 && expected != tensors.len() as u64 => {
                Err(GgufError::PartTensors { found: tensors.len(), expected })
            }
            _ => Ok(GgufFile { parts, tensors }),
        }
    }

    /// The format's version, 2 or 3.
    pub fn version(&self) -> u32 {
        self.parts[0].header.version
    }

    /// What the file says of itself: architecture, hyperparameters, tokenizer, chat template.
    pub fn metadata(&self) -> Metadata<'_> {
        Metadata::new(&self.parts[0].bytes, &self.parts[0].header.metadata)
    }

    /// All tensors, by name.
    pub fn tensors(&self) -> impl ExactSizeIterator<Item = Tensor<'_>> {
        self.tensors.iter().map(|&place| self.at(place))
    }

    /// The tensor of this name.
    pub fn tensor(&self, name: &str) -> Option<Tensor<'_>> {
        let found = self.tensors.binary_search_by(|&place| self.at(place).name.cmp(name)).ok()?;
        Some(self.at(self.tensors[found]))
    }

    pub(crate) fn release(&self, part: &[u8]) {
        self.parts.iter().for_each(|file| file.bytes.release(part));
    }

    fn at(&self, (part, entry): (usize, usize)) -> Tensor<'_> {
        let MappedPart { bytes, header } = &self.parts[part];
        header.tensors[entry].tensor(bytes, header.data.start)
    }
}

impl MappedPart {
    fn open(path: &Path, arrivals: Arrivals<'_>) -> Result<MappedPart, OpenError> {
        let bytes = File::open(path).and_then(|file| Bytes::map(&file, arrivals(path)));
        let bytes = bytes.map_err(|source| io_error(path, source))?;
        MappedPart::validated(bytes).map_err(|source| OpenError::Invalid { path: path.to_owned(), source })
    }

    fn validated(bytes: Bytes) -> Result<MappedPart, GgufError> {
        let header = bytes.read_beginning(|beginning| Header::read(beginning, bytes.len()))?;
        Ok(MappedPart { bytes, header })
    }
}

/// Opens all parts, in order, of the checkpoint of which `part` at `path` is one.
fn open_parts(path: &Path, part: &MappedPart, arrivals: Arrivals<'_>) -> Result<Vec<MappedPart>, OpenError> {
    let split::Part { number, count, .. } = part.header.part;
    let invalid = |path: &Path, source| OpenError::Invalid { path: path.to_owned(), source };
    let Some((name, _, _)) = split::parse(path).filter(|&(_, named, of)| (named, of) == (number, count)) else {
        return Err(invalid(path, GgufError::Split { number, count }));
    };
    // No capacity is reserved: the number of parts is the file's claim until they are found.
    let mut parts = Vec::new();
    for number in 0..count {
        let path = split::part_path(&name, number, count);
        let part = MappedPart::open(&path, arrivals)?;
        let split::Part { number: found, count: found_of, .. } = part.header.part;
        if (found, found_of) != (number, count) {
            return Err(invalid(&path, GgufError::PartNumber { found, found_of, number, count }));
        }
        parts.push(part);
    }
    Ok(parts)
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

/// The folder's only file, or the first part of its only split one.
fn find_in_folder(folder: &Path) -> Result<PathBuf, OpenError> {
    let entries = fs::read_dir(folder).map_err(|source| io_error(folder, source))?;
    let mut found = Vec::new();
    for entry in entries {
        let path = entry.map_err(|source| io_error(folder, source))?.path();
        let later_part = split::parse(&path).is_some_and(|(_, number, _)| number > 0);
        if path.extension().is_some_and(|extension| extension == "gguf") && path.is_file() && !later_part {
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
