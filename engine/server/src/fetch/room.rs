//! Room in a folder of models that pods share: what no pod serves any more goes, the longest unused first.
//!
//! Whoever serves a model holds its record ([`record::hold`]); from its fetch until then it counts as used for
//! [`STARTING`]. Only what `fetch` made is ever removed: models that have a record, contents that no model links, parts
//! that nobody downloads.

use super::cache;
use super::record;
use super::storage;
use crate::cli::FetchArgs;
use crate::failure::Failure;
use std::collections::HashMap;
use std::fs::{self, File, Metadata};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use tracing::info;
use windlass_engine_contract::flags::fetch::MIN_CACHE_KEEP_SECONDS;
use windlass_engine_contract::termination::Reason;

/// From the fetch of a model until its engine holds it, at most.
pub const STARTING: Duration = Duration::from_secs(MIN_CACHE_KEEP_SECONDS as u64);
/// What a fetch holds that may have to make room, so that the next one finds what it left.
const TURN: &str = ".windlass-fetch.lock";

/// The folder that a model is fetched into, and how much of it is kept.
pub struct Room {
    folder: PathBuf,
    contents: PathBuf,
    /// What is fetched: it stays.
    own: PathBuf,
    max_bytes: Option<u64>,
    max_unused: Option<Duration>,
    _turn: Option<File>,
}

/// Something that can be removed.
struct Kept {
    path: PathBuf,
    /// Whoever uses it has this file locked.
    held_by: PathBuf,
    used: SystemTime,
}

impl Room {
    /// The room for what `args` asks for. With a bound on its size, waits until no other fetch works in it that has one.
    pub fn enter(args: &FetchArgs) -> Result<Room, Failure> {
        let folder = args.to.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let turn = args.download.cache_max_bytes.map(|_| take_turn(folder)).transpose();
        Ok(Room {
            folder: folder.to_owned(),
            contents: cache(args),
            own: args.to.clone(),
            max_bytes: args.download.cache_max_bytes,
            max_unused: args.download.cache_keep_seconds.map(Duration::from_secs),
            _turn: turn.map_err(|error| storage(folder, &error))?,
        })
    }

    /// Whether the size of what is fetched has to be known before it is.
    pub fn is_bounded(&self) -> bool {
        self.max_bytes.is_some()
    }

    /// Removes what was unused for too long, and then, the longest unused first, what leaves no room for `bytes` more.
    pub fn make(&self, bytes: u64, now: SystemTime) -> Result<(), Failure> {
        self.make_room(bytes, now).map_err(|error| storage(&self.folder, &error))?.map_or(Ok(()), Err)
    }

    fn make_room(&self, bytes: u64, now: SystemTime) -> io::Result<Option<Failure>> {
        let unused = |kept: &Kept| now.duration_since(kept.used).unwrap_or_default();
        let mut kept = self.kept()?;
        kept.retain(|kept| kept.path != self.own && unused(kept) >= STARTING);
        kept.sort_by_key(|kept| kept.used);
        let mut kept = kept.into_iter().peekable();
        while let Some(old) = kept.next_if(|kept| self.max_unused.is_some_and(|most| unused(kept) > most)) {
            self.remove(&old)?;
        }
        let Some(max) = self.max_bytes else { return Ok(None) };
        loop {
            let held = self.bytes()?;
            if held.saturating_add(bytes) <= max {
                return Ok(None);
            }
            match kept.next() {
                Some(oldest) => self.remove(&oldest)?,
                // Nothing more is stored, so nothing is refused.
                None if bytes == 0 => return Ok(None),
                None => return Ok(Some(full(max, held, bytes))),
            }
        }
    }

    /// What may go, unless somebody uses it.
    fn kept(&self) -> io::Result<Vec<Kept>> {
        let mut kept = Vec::new();
        for path in listed(&self.folder)? {
            let Ok(metadata) = fs::metadata(&path) else { continue };
            if let Some(model) = record::model_of(&path) {
                kept.push(Kept { path: model, held_by: path, used: metadata.modified()? });
            } else if is_part_of_a_file(&path) {
                kept.push(Kept { path: path.clone(), held_by: path, used: metadata.modified()? });
            }
        }
        for path in listed(&self.contents)?.into_iter().filter(|path| is_content(path)) {
            let Ok(metadata) = fs::metadata(&path) else { continue };
            if metadata.nlink() == 1 {
                kept.push(Kept { path: path.clone(), held_by: path, used: changed(&metadata) });
            }
        }
        Ok(kept)
    }

    /// Removes it with its record and with the contents that only it has linked; nothing where somebody uses it.
    fn remove(&self, kept: &Kept) -> io::Result<()> {
        let Ok(holder) = File::open(&kept.held_by) else { return Ok(()) };
        if holder.try_lock().is_err() {
            return Ok(());
        }
        let linked: Vec<u64> = files(&kept.path)?.iter().map(Metadata::ino).collect();
        // The record goes first: nobody takes half a model for a whole one.
        gone(fs::remove_file(&kept.held_by))?;
        gone(if kept.path.is_dir() { fs::remove_dir_all(&kept.path) } else { fs::remove_file(&kept.path) })?;
        for path in listed(&self.contents)? {
            let is_left = |found: &Metadata| found.nlink() == 1 && linked.contains(&found.ino());
            if fs::metadata(&path).is_ok_and(|found| is_left(&found)) {
                gone(fs::remove_file(&path))?;
            }
        }
        info!(path = %kept.path.display(), "removed: nobody uses it");
        Ok(())
    }

    /// Bytes on disk of what `fetch` made; a content that several models link counts once.
    fn bytes(&self) -> io::Result<u64> {
        let models = listed(&self.folder)?.into_iter();
        let models = models.filter_map(|path| record::model_of(&path).or(is_part_of_a_file(&path).then_some(path)));
        let contents = listed(&self.contents)?.into_iter().filter(|path| is_content(path));
        let mut found = HashMap::new();
        for path in models.chain(contents) {
            found.extend(files(&path)?.into_iter().map(|file| ((file.dev(), file.ino()), file.blocks() * 512)));
        }
        Ok(found.values().sum())
    }
}

fn take_turn(folder: &Path) -> io::Result<File> {
    fs::create_dir_all(folder)?;
    let file = File::options().create(true).truncate(false).write(true).open(folder.join(TURN))?;
    file.lock()?;
    Ok(file)
}

fn full(max: u64, held: u64, bytes: u64) -> Failure {
    let message = format!(
        "the cache may hold {max} bytes (--cache-max-bytes), has {held} of models that pods serve or begin to, and \
         this one needs {bytes} more"
    );
    Failure::new(Reason::ModelUnavailable, message)
}

/// What is in a folder, which need not be there.
fn listed(folder: &Path) -> io::Result<Vec<PathBuf>> {
    match fs::read_dir(folder) {
        Ok(entries) => entries.map(|entry| Ok(entry?.path())).collect(),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
        Err(error) => Err(error),
    }
}

/// Every file at or below `path`; none where it is gone. A link to elsewhere is a file of no size.
fn files(path: &Path) -> io::Result<Vec<Metadata>> {
    let Ok(metadata) = fs::symlink_metadata(path) else { return Ok(Vec::new()) };
    if !metadata.is_dir() {
        return Ok(vec![metadata]);
    }
    let below = listed(path)?.into_iter().map(|path| files(&path));
    Ok(below.collect::<io::Result<Vec<_>>>()?.concat())
}

/// A content or what was fetched of one.
fn is_content(path: &Path) -> bool {
    let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    name.starts_with("sha256-") || name.starts_with("version-")
}

/// What was fetched of a file that is named by its checksum.
fn is_part_of_a_file(path: &Path) -> bool {
    let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    let digits = name.strip_suffix(".gguf.part").unwrap_or_default();
    digits.len() == 64 && digits.bytes().all(|digit| digit.is_ascii_hexdigit())
}

/// When it was last written, renamed or linked.
fn changed(metadata: &Metadata) -> SystemTime {
    UNIX_EPOCH + Duration::from_secs(metadata.ctime().try_into().unwrap_or_default())
}

/// That something is removed, or was not there.
pub(super) fn gone(removed: io::Result<()>) -> io::Result<()> {
    removed.or_else(|error| if error.kind() == io::ErrorKind::NotFound { Ok(()) } else { Err(error) })
}

#[cfg(test)]
mod tests;
