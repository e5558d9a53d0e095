//! A model's way from a source that lists its files into the cache, and from there to where it is wanted.

use super::agent::{agent, redact};
use super::attempt::persist;
use super::blob::{Blob, blob_path, missing_bytes};
use super::download::{self, Downloader, Missing};
use super::layers;
use super::listing::{Form, Listing, RemoteFile};
use super::partial::Partial;
use super::record::{self, FetchRecord};
use super::room::{Room, gone};
use super::source::Repository;
use super::{cache, storage};
use crate::cli::FetchArgs;
use crate::failure::Failure;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};
use tracing::info;
use windlass_engine_contract::revision::is_commit;
use windlass_engine_contract::termination::Reason;

/// A model whose files are known, and for which there is room.
pub struct Transfer {
    /// What is fetched.
    pub listing: Listing,
    /// Its files that are not in the cache.
    pub missing: Vec<Missing>,
    /// Where it is wanted.
    pub to: PathBuf,
    name: String,
    cache: PathBuf,
    /// What an image may hold.
    max_bytes: u64,
    downloader: Downloader,
    started: Instant,
    _room: Room,
    /// Keeps others from fetching the same file to the same place.
    turn: Option<Partial>,
}

impl Transfer {
    /// Lists the files and makes room for them; `None` where they are there already.
    pub fn prepare(
        args: &FetchArgs,
        repository: &dyn Repository,
        first_pause: Duration,
    ) -> Result<Option<Transfer>, Failure> {
        let room = Room::enter(args)?;
        if is_there(args) {
            info!(to = %args.to.display(), "already there");
            room.make(0, SystemTime::now())?;
            return Ok(None);
        }
        let listing = persist(&repository.name(), first_pause, || repository.list())?;
        let listing = Listing { revision: of_source(args, &listing.revision), ..listing };
        // What was unpacked of an image is not in the cache, where each file of others is looked for.
        if listing.form == Form::Layers && FetchRecord::renew(&args.to, &listing.revision) {
            info!(to = %args.to.display(), "already there");
            room.make(0, SystemTime::now())?;
            return Ok(None);
        }
        Transfer::of(args, repository.name(), listing, room, first_pause).map(Some)
    }

    /// Makes room for the files of a listing.
    pub fn of(
        args: &FetchArgs,
        name: String,
        listing: Listing,
        room: Room,
        first_pause: Duration,
    ) -> Result<Transfer, Failure> {
        let started = Instant::now();
        check_size(args, &listing)?;
        let cache = cache(args);
        room.make(needed_bytes(&listing, &cache), SystemTime::now())?;
        let missing = download::open(&cache, &listing.files)?;
        let agent = agent(args.download.access.ca_file.as_deref())?;
        let downloader = Downloader { agent, connections: args.download.connections, first_pause };
        let (to, max_bytes) = (args.to.clone(), args.download.max_bytes);
        Ok(Transfer { listing, missing, to, name, cache, max_bytes, downloader, started, _room: room, turn: None })
    }

    /// The same, while `turn` is held.
    pub fn in_turn(self, turn: Partial) -> Transfer {
        Transfer { turn: Some(turn), ..self }
    }

    /// Fetches what is missing, verifies it, and puts all of it where it is wanted.
    pub fn run(self) -> Result<(), Failure> {
        let bytes = self.downloader.fetch(&self.missing)?;
        let former = record::files_of(&self.to);
        let files = match self.listing.form {
            Form::Layers => self.unpack()?,
            Form::File | Form::Folder => self.place().map_err(|error| storage(&self.to, &error))?,
        };
        remove_others(&self.to, &former, &files).map_err(|error| storage(&self.to, &error))?;
        let (to, revision, seconds) = (&self.to, &self.listing.revision, self.started.elapsed().as_secs_f64());
        info!(to = %to.display(), revision, bytes, seconds, "fetched {}", self.name);
        FetchRecord::write(to, revision, seconds, files).map_err(|error| storage(to, &error))?;
        self.turn.into_iter().for_each(Partial::discard);
        Ok(())
    }

    /// A file's content as far as it is there; `None` where it is complete.
    pub fn blob(&self, file: &RemoteFile) -> Option<Arc<Blob>> {
        let mut missing = self.missing.iter();
        missing.find(|(missing, _)| missing.identity == file.identity).map(|(_, blob)| blob.clone())
    }

    /// Where a file's content is once it is complete.
    pub fn content(&self, file: &RemoteFile) -> PathBuf {
        blob_path(&self.cache, &file.identity)
    }

    /// Links the cache's contents to where they are wanted: one file, or a folder of files, of which it gives the names.
    fn place(&self) -> io::Result<Vec<String>> {
        for file in &self.listing.files {
            let to = if self.listing.form == Form::File { self.to.clone() } else { self.to.join(&file.name) };
            fs::create_dir_all(to.parent().unwrap_or(Path::new(".")))?;
            let mut linking = to.clone().into_os_string();
            linking.push(".linking");
            let _ = fs::remove_file(&linking);
            match file.bytes {
                0 => fs::write(&linking, b"")?,
                _ => fs::hard_link(self.content(file), &linking)?,
            }
            fs::rename(&linking, &to)?;
        }
        let in_folder = self.listing.files.iter().filter(|_| self.listing.form == Form::Folder);
        Ok(in_folder.map(|file| file.name.clone()).collect())
    }

    /// Puts what the layers hold of a model where it is wanted, and lets go of the layers; the names of its files.
    fn unpack(&self) -> Result<Vec<String>, Failure> {
        let stored = |error| storage(&self.to, &error);
        let layers: Vec<PathBuf> = self.listing.files.iter().map(|layer| self.content(layer)).collect();
        let folder = tempfile::Builder::new().prefix(".unpacking-").tempdir_in(&self.cache).map_err(stored)?;
        let files = layers::unpack(&layers, folder.path(), self.max_bytes)?;
        fs::create_dir_all(&self.to).map_err(stored)?;
        files.iter().try_for_each(|(name, file)| fs::rename(file, self.to.join(name))).map_err(stored)?;
        // One that is left behind is cleared away when room is needed.
        layers.iter().for_each(|layer| drop(fs::remove_file(layer)));
        Ok(files.into_iter().map(|(name, _)| name).collect())
    }
}

/// Removes from a folder what an earlier fetch put there and this one did not: where a branch has moved on, an index of
/// shards that are there no more would be read as this revision's.
fn remove_others(folder: &Path, former: &[String], files: &[String]) -> io::Result<()> {
    let mut others = former.iter().filter(|name| !files.contains(name));
    others.try_for_each(|name| gone(fs::remove_file(folder.join(name))))
}

/// A revision as a record keeps it: one of a repository means other files with another address.
fn of_source(args: &FetchArgs, revision: &str) -> String {
    format!("{revision} of {}", redact(&args.source))
}

/// Bytes that are still to be stored: of an image, layers that are not there, and about as much again of what is in them.
fn needed_bytes(listing: &Listing, cache: &Path) -> u64 {
    let missing: u64 = listing.files.iter().map(|file| missing_bytes(cache, file)).sum();
    match listing.form {
        Form::Layers => listing.files.iter().fold(missing, |sum, layer| sum.saturating_add(layer.bytes)),
        Form::File | Form::Folder => missing,
    }
}

/// Whether a revision that can never mean other files was fetched before.
fn is_there(args: &FetchArgs) -> bool {
    let commit = args.download.access.revision.as_deref().filter(|revision| is_commit(revision));
    commit.is_some_and(|commit| FetchRecord::renew(&args.to, &of_source(args, commit)))
}

fn check_size(args: &FetchArgs, listing: &Listing) -> Result<(), Failure> {
    let bytes = listing.files.iter().fold(0, |sum: u64, file| sum.saturating_add(file.bytes));
    let most = args.download.max_bytes;
    match bytes <= most {
        true => Ok(()),
        false => {
            let message = format!("the model has {bytes} bytes; --max-bytes is {most}");
            Err(Failure::new(Reason::ModelInvalid, message))
        }
    }
}
