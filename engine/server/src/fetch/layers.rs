//! A model in the layers of a container image: the files under `/models`, where KServe's modelcars have them.
//!
//! Layers are archives from strangers. What is unpacked gets names of ours in a folder of its own, so that no path of
//! theirs leads anywhere; only plain files are, of the kinds that make a model; names and sizes are bounded.

use super::listing::{choose, is_of_a_model, is_weights};
use super::zstd::{self, is_zstd};
use crate::failure::Failure;
use flate2::bufread::MultiGzDecoder;
use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{self, BufRead, BufReader, Read, copy, sink};
use std::path::{Path, PathBuf};
use std::rc::Rc;
use tar::{Archive, Entry, EntryType};
use windlass_engine_contract::termination::Reason;

/// Where a model is in an image.
const ROOT: &str = "models";
/// What hides a file of an earlier layer begins so.
const WHITEOUT: &str = ".wh.";
/// What hides everything that earlier layers have in its folder.
const OPAQUE: &str = ".wh..wh..opq";
/// Most bytes that describe one entry of an archive.
const MAX_DESCRIPTION_BYTES: u64 = 1 << 20;
/// Most files and folders in all layers.
const MAX_ENTRIES: usize = 1 << 20;
/// First bytes of what gzip has compressed.
const GZIP: [u8; 2] = [0x1f, 0x8b];

/// Unpacks into `folder` the model that an image's layers have, the first lowest: its files' names, and where they are.
/// `most_bytes` bounds what all layers hold.
pub fn unpack(layers: &[PathBuf], folder: &Path, most_bytes: u64) -> Result<Vec<(String, PathBuf)>, Failure> {
    let mut image = Image { folder, meter: Meter::new(most_bytes), entries: 0, files: BTreeMap::new() };
    layers.iter().try_for_each(|layer| image.add(layer))?;
    image.model()
}

/// What layers make together, as far as they were read.
struct Image<'a> {
    folder: &'a Path,
    meter: Rc<Meter>,
    entries: usize,
    /// By their paths in the image.
    files: BTreeMap<String, PathBuf>,
}

/// What one layer does to those below it.
#[derive(Default)]
struct Layer {
    files: BTreeMap<String, PathBuf>,
    /// Files and folders that are not there any more.
    hidden: BTreeSet<String>,
}

impl Image<'_> {
    fn add(&mut self, path: &Path) -> Result<(), Failure> {
        let reader = self.meter.clone().over(decompressed(path).map_err(damaged)?);
        let mut archive = Archive::new(reader);
        let mut entries = archive.entries().map_err(damaged)?;
        let mut layer = Layer::default();
        loop {
            self.meter.description.set(MAX_DESCRIPTION_BYTES);
            let Some(entry) = entries.next() else { break };
            let mut entry = entry.map_err(damaged)?;
            self.meter.description.set(u64::MAX);
            self.take(&mut entry, &mut layer)?;
            copy(&mut entry, &mut sink()).map_err(damaged)?;
        }
        self.files.retain(|path, _| !ancestors(path).any(|above| layer.hidden.contains(above)));
        self.files.extend(layer.files);
        Ok(())
    }

    fn take(&mut self, entry: &mut Entry<'_, impl Read>, layer: &mut Layer) -> Result<(), Failure> {
        self.entries += 1;
        if self.entries > MAX_ENTRIES {
            return Err(invalid(format!("the image has more than {MAX_ENTRIES} files")));
        }
        let Some(path) = path(entry)? else { return Ok(()) };
        let (above, name) = path.rsplit_once('/').unwrap_or(("", &path));
        if name == OPAQUE {
            layer.hidden.insert(above.to_owned());
        } else if let Some(hidden) = name.strip_prefix(WHITEOUT) {
            layer.hidden.insert(path[..path.len() - name.len()].to_owned() + hidden);
        } else if !is_plain(entry.header().entry_type()) {
            return Err(Failure::new(
                Reason::Unsupported,
                format!("{path:?} in the image is no plain file: links and devices are not followed"),
            ));
        } else if entry.header().entry_type() != EntryType::Directory {
            // A file hides the folder that earlier layers have in its place.
            layer.hidden.insert(path.clone());
            if is_of_a_model(name) {
                layer.files.insert(path, self.store(entry)?);
            }
        }
        Ok(())
    }

    fn store(&self, entry: &mut Entry<'_, impl Read>) -> Result<PathBuf, Failure> {
        let path = self.folder.join(self.entries.to_string());
        let mut file = File::create_new(&path).map_err(|error| super::storage(&path, &error))?;
        copy(entry, &mut file).map_err(damaged)?;
        file.sync_all().map_err(|error| super::storage(&path, &error))?;
        Ok(path)
    }

    /// The files of the one folder that holds a model: the root, or one in it.
    fn model(self) -> Result<Vec<(String, PathBuf)>, Failure> {
        let mut folders: BTreeMap<&str, Vec<(String, PathBuf)>> = BTreeMap::new();
        for (path, file) in &self.files {
            let (above, name) = path.rsplit_once('/').unwrap_or(("", path));
            folders.entry(above).or_default().push((name.to_owned(), file.clone()));
        }
        if let Some(files) = folders.remove(ROOT).filter(|files| files.iter().any(|(name, _)| is_weights(name))) {
            return choose(files, |(name, _)| name);
        }
        let chosen = folders.into_iter().map(|(folder, files)| (folder, choose(files, |(name, _)| name)));
        let mut models: Vec<_> = chosen.filter_map(|(folder, files)| Some((folder, files.ok()?))).collect();
        match models.as_mut_slice() {
            [(_, files)] => Ok(std::mem::take(files)),
            [] => Err(invalid(format!("the image has no one model in /{ROOT}: neither a GGUF file nor safetensors"))),
            several => {
                let folders: Vec<&str> = several.iter().map(|(folder, _)| *folder).collect();
                Err(invalid(format!("the image has several models: in {}", folders.join(", "))))
            }
        }
    }
}

/// An entry's path, if it is at or below the root, or hides the root.
fn path(entry: &Entry<'_, impl Read>) -> Result<Option<String>, Failure> {
    let path = String::from_utf8_lossy(&entry.path_bytes()).into_owned();
    let parts: Vec<&str> = path.split('/').filter(|part| !part.is_empty() && *part != ".").collect();
    let is_below = parts.first() == Some(&ROOT);
    if is_below && parts.contains(&"..") {
        return Err(invalid(format!("{path:?} in the image leads out of its folder")));
    }
    let hides_it = parts.len() == 1 && (parts[0] == OPAQUE || parts[0].strip_prefix(WHITEOUT) == Some(ROOT));
    Ok((is_below || hides_it).then(|| parts.join("/")))
}

/// A path, and the folders that it is in, to the top, whose path is empty.
fn ancestors(path: &str) -> impl Iterator<Item = &str> {
    let folders = path.match_indices('/').map(|(end, _)| &path[..end]);
    ["", path].into_iter().chain(folders)
}

fn is_plain(kind: EntryType) -> bool {
    matches!(kind, EntryType::Regular | EntryType::Continuous | EntryType::Directory)
}

fn decompressed(path: &Path) -> io::Result<Box<dyn Read>> {
    let mut file = BufReader::with_capacity(1 << 18, File::open(path)?);
    Ok(match file.fill_buf()? {
        start if start.starts_with(&GZIP) => Box::new(MultiGzDecoder::new(file)),
        start if is_zstd(start) => Box::new(zstd::Frames::new(file)),
        _ => Box::new(file),
    })
}

/// What may still be read.
struct Meter {
    /// Of all layers.
    bytes: Cell<u64>,
    /// Of one entry's description.
    description: Cell<u64>,
}

impl Meter {
    fn new(bytes: u64) -> Rc<Meter> {
        Rc::new(Meter { bytes: Cell::new(bytes), description: Cell::new(u64::MAX) })
    }

    fn over<R>(self: Rc<Meter>, reader: R) -> Metered<R> {
        Metered { reader, meter: self }
    }

    fn spend(left: &Cell<u64>, bytes: usize, what: &str) -> io::Result<()> {
        let rest = left.get().checked_sub(bytes as u64).ok_or_else(|| io::Error::other(what.to_owned()))?;
        left.set(rest);
        Ok(())
    }
}

struct Metered<R> {
    reader: R,
    meter: Rc<Meter>,
}

impl<R: Read> Read for Metered<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.reader.read(buffer)?;
        Meter::spend(&self.meter.bytes, read, "its layers hold more than --max-bytes")?;
        Meter::spend(&self.meter.description, read, "a file's description is longer than any name")?;
        Ok(read)
    }
}

fn damaged(error: io::Error) -> Failure {
    invalid(format!("the image cannot be unpacked: {error}"))
}

fn invalid(message: String) -> Failure {
    Failure::new(Reason::ModelInvalid, message)
}
