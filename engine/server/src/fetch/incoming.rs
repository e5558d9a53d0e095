//! A model that is loaded while it comes from its source.
//!
//! Descriptions come first, then headers, then the rest in order: whoever reads a tensor waits for it. Checksums are known
//! at the end; until [`Incoming::finish`] has said that they are right, nothing that was made of the model may be used.

use super::agent::redact;
use super::blob::Blob;
use super::checksum::Checksum;
use super::listing::{Form, RemoteFile, is_weights};
use super::record;
use super::transfer::Transfer;
use super::{prepare, storage};
use crate::cli::{ExecutorKind, FetchArgs, ServeArgs};
use crate::config::served_names;
use crate::failure::Failure;
use crate::machine;
use crate::start::open_failure;
use std::collections::HashMap;
use std::ffi::{OsStr, OsString};
use std::fs;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;
use tempfile::TempDir;
use windlass_checkpoint::{Arrival, Checkpoint, HubFolder};
use windlass_engine_contract::flags::fetch::{REVISION, SHA256};
use windlass_engine_model::Encoder;

/// A model on its way.
#[derive(Debug)]
pub struct Incoming {
    /// Links to its files, as far as those are there.
    folder: TempDir,
    /// The one file in the folder, where the model is one.
    file: Option<OsString>,
    /// Files that are on their way, by their names.
    blobs: HashMap<OsString, Arc<Blob>>,
    /// Where it will be.
    to: PathBuf,
    transfer: Mutex<Option<JoinHandle<Result<(), Failure>>>>,
    result: OnceLock<Result<(), Failure>>,
    /// Nobody waits for it any more.
    given_up: AtomicBool,
}

/// Begins to fetch the model of `args` where that is an address: `args` with a path instead, and the model where it is not
/// at that path yet. What reads whole files waits for all of them here: encoders, the stages of a pipeline, and
/// images, which are unpacked.
pub fn begin(args: &ServeArgs, first_pause: Duration) -> Result<(ServeArgs, Option<Arc<Incoming>>), Failure> {
    if args.executor == ExecutorKind::Sim || !args.model.contains("://") {
        refuse_flags_of_addresses(args)?;
        return Ok((args.clone(), None));
    }
    let to = folder(args).join(name(args));
    let served_model_name = served_names(&ServeArgs { model: redact(&args.model), ..args.clone() })?;
    let model = to.to_string_lossy().into_owned();
    let local = ServeArgs { model, served_model_name, ..args.clone() };
    let (source, download, process) = (args.model.clone(), args.download.clone(), args.process.clone());
    let fetch = FetchArgs { source, to, download, process };
    let Some(transfer) = prepare(&fetch, first_pause)? else {
        record::hold(&fetch.to);
        return Ok((local, None));
    };
    if transfer.listing.form == Form::Layers {
        transfer.run()?;
        record::hold(&fetch.to);
        return Ok((local, None));
    }
    let incoming = Incoming::start(transfer)?;
    if args.pipeline_parallel_size > 1 || incoming.is_encoder() {
        incoming.finish()?;
        return Ok((local, None));
    }
    Ok((local, Some(Arc::new(incoming))))
}

fn refuse_flags_of_addresses(args: &ServeArgs) -> Result<(), Failure> {
    let flags = [
        ("--download-dir", args.download_dir.is_some()),
        (REVISION, args.download.access.revision.is_some()),
        (SHA256, args.download.sha256.is_some()),
    ];
    match flags.into_iter().find(|(_, is_given)| *is_given) {
        Some((flag, _)) => {
            let message =
                format!("{flag} is for a model at an address, such as hf://org/name; {:?} is none", args.model);
            Err(Failure::configuration(message))
        }
        None => Ok(()),
    }
}

fn folder(args: &ServeArgs) -> PathBuf {
    args.download_dir.clone().unwrap_or_else(|| machine::cache_folder("models"))
}

/// What the model is called in its folder: as in its address, and by what tells it from others of that name.
fn name(args: &ServeArgs) -> String {
    let address = redact(&args.model);
    let last = address.trim_end_matches('/').rsplit('/').next().unwrap_or_default();
    let (stem, ending) = last.strip_suffix(".gguf").map_or((last, ""), |stem| (stem, ".gguf"));
    let plain =
        |character: char| if character.is_ascii_alphanumeric() || "._-".contains(character) { character } else { '-' };
    let stem: String = stem.chars().map(plain).collect();
    let version = format!("{address} {:?} {:?}", args.download.access.revision, args.download.sha256);
    let digest = Checksum::of_bytes(version.as_bytes()).to_string();
    format!("{stem}-{}{ending}", &digest[..8])
}

impl Incoming {
    /// Lets the transfer begin; returns as soon as everything is there that describes the model.
    fn start(transfer: Transfer) -> Result<Incoming, Failure> {
        let to = transfer.to.clone();
        let folder = link(&transfer).map_err(|error| storage(&to, &error))?;
        let (files, form) = (&transfer.listing.files, transfer.listing.form);
        let name = |file: &RemoteFile| OsString::from(&file.name);
        let file = files.first().filter(|_| form == Form::File).map(name);
        let blobs = files.iter().filter_map(|file| Some((name(file), transfer.blob(file)?))).collect();
        let transfer = Mutex::new(Some(thread::spawn(|| transfer.run())));
        let (result, given_up) = (OnceLock::new(), AtomicBool::new(false));
        let incoming = Incoming { folder, file, blobs, to, transfer, result, given_up };
        let is_description = |name: &OsStr| name.to_str().is_some_and(|name| !is_weights(name));
        let mut descriptions = incoming.blobs.iter().filter(|(name, _)| is_description(name));
        if descriptions.any(|(_, blob)| !blob.wait_for(blob.bytes())) {
            incoming.finish()?;
        }
        Ok(incoming)
    }

    /// Opens the model as soon as its headers are there. Whoever reads a tensor waits for it.
    pub fn open(&self) -> Result<Checkpoint, Failure> {
        Checkpoint::open_arriving(&self.path(), &|path| self.arrival(path)).map_err(open_failure)
    }

    /// Waits until all of the model is there, is what it should be, and has its place.
    pub fn finish(&self) -> Result<(), Failure> {
        let join = || {
            let transfer = self.transfer.lock().unwrap_or_else(PoisonError::into_inner).take();
            let joined = transfer.map_or(Ok(Ok(())), JoinHandle::join);
            joined.unwrap_or_else(|_| Err(Failure::internal("fetching the model panicked")))
        };
        self.result.get_or_init(join).clone()?;
        record::hold(&self.to);
        // A link that is left leads nowhere.
        let _ = fs::remove_dir_all(self.folder.path());
        Ok(())
    }

    /// Lets those go on who wait for some of the model: nothing will be made of it.
    pub fn give_up(&self) {
        if !self.has_failed() {
            self.given_up.store(true, Ordering::Relaxed);
            self.blobs.values().for_each(|blob| blob.abandon());
        }
    }

    /// Why nothing was made of the model: that it does not come, where that is so.
    pub fn explain(&self, failure: Failure) -> Failure {
        match !self.given_up.load(Ordering::Relaxed) && self.has_failed() {
            true => self.finish().err().unwrap_or(failure),
            false => failure,
        }
    }

    fn has_failed(&self) -> bool {
        self.blobs.values().any(|blob| blob.is_abandoned())
    }

    fn is_encoder(&self) -> bool {
        let open = || HubFolder::open_arriving(&self.path(), &|path| self.arrival(path));
        HubFolder::is_at(&self.path()) && open().is_ok_and(|folder| Encoder::is_in(&folder))
    }

    fn path(&self) -> PathBuf {
        self.file.as_ref().map_or(self.folder.path().to_owned(), |file| self.folder.path().join(file))
    }

    fn arrival(&self, path: &Path) -> Option<Arc<dyn Arrival>> {
        self.blobs.get(path.file_name()?).map(|blob| blob.clone() as Arc<dyn Arrival>)
    }
}

/// A folder beside where the model will be, with its files under their names: those that are on their way by their open
/// files, whose own names change when they are complete.
fn link(transfer: &Transfer) -> io::Result<TempDir> {
    let beside = std::path::absolute(&transfer.to)?.parent().map_or(PathBuf::from("/"), Path::to_owned);
    fs::create_dir_all(&beside)?;
    let folder = tempfile::Builder::new().prefix(".incoming-").tempdir_in(beside)?;
    for file in &transfer.listing.files {
        let link = folder.path().join(&file.name);
        match transfer.blob(file) {
            _ if file.bytes == 0 => fs::write(link, b"")?,
            Some(blob) => symlink(format!("/proc/self/fd/{}", blob.file().as_raw_fd()), link)?,
            None => symlink(std::path::absolute(transfer.content(file))?, link)?,
        }
    }
    Ok(folder)
}
