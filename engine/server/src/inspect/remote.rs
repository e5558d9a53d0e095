//! The headers of a model that is elsewhere, by ranges: the beginning of each of its files, in a scratch file as long as the
//! whole, whose other bytes are holes. The checkpoint's own reader then checks tensors against the true lengths, and no
//! weight is fetched.

use crate::cli::InspectArgs;
use crate::failure::Failure;
use crate::fetch::attempt::persist;
use crate::fetch::listing::{Form, RemoteFile};
use crate::fetch::range::RangeReader;
use crate::fetch::source::{FileSource, Source};
use crate::start::open;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::Duration;
use tracing::debug;
use windlass_checkpoint::Checkpoint;
use windlass_engine_contract::termination::Reason;

/// Bytes that are asked for first of a file whose header has any length: with a vocabulary of 128,000 words it takes some
/// 8 MiB.
const FIRST_BYTES: u64 = 1 << 20;
/// The same where the first bytes tell the length.
const FIRST_SAFETENSORS_BYTES: u64 = 1 << 17;
/// No header is longer; what is not read by then is damaged.
const MOST_BYTES: u64 = 256 << 20;

/// Files with headers, and those that describe the model.
pub struct RemoteModel {
    files: Vec<RemoteFile>,
    revision: Option<String>,
    reader: RangeReader,
}

/// Whether a model is named by an address.
pub fn is_address(model: &str) -> bool {
    model.contains("://")
}

impl RemoteModel {
    /// Checks the flags, reads the credentials they name, and has the source tell its files.
    pub fn find(args: &InspectArgs, first_pause: Duration) -> Result<RemoteModel, Failure> {
        let (files, revision) = match Source::parse(&args.model, &args.access, first_pause)? {
            Source::File(FileSource::Stdin) => return Err(Failure::configuration("standard input has no address")),
            Source::File(FileSource::Http(source)) => source.describe().map(|(file, tag)| (vec![file], tag))?,
            Source::Repository(repository) => {
                let listing = persist(&repository.name(), first_pause, || repository.list())?;
                if listing.form == Form::Layers {
                    let message =
                        format!("{} is an image: what is in its layers is known when it is fetched", args.model);
                    return Err(Failure::new(Reason::Unsupported, message));
                }
                (listing.files, Some(listing.revision))
            }
        };
        let files = files.into_iter().filter(|file| describes(&file.name)).collect();
        Ok(RemoteModel { files, revision, reader: RangeReader::new(args.access.ca_file.as_deref(), first_pause)? })
    }

    /// Gives `look` the checkpoint, and the source's name of this version of it, as soon as enough of it is there.
    pub fn inspect<T>(&self, look: impl Fn(&Checkpoint, Option<String>) -> Result<T, Failure>) -> Result<T, Failure> {
        let folder = tempfile::tempdir().map_err(|error| scratch(&error))?;
        let begin = |file| Beginning::new(folder.path(), file);
        let mut beginnings = self.files.iter().map(begin).collect::<Result<Vec<_>, _>>()?;
        let mut bytes = FIRST_BYTES;
        loop {
            let mut has_grown = false;
            for beginning in &mut beginnings {
                has_grown |= beginning.extend(&self.reader, bytes)?;
            }
            match open(folder.path()).and_then(|checkpoint| look(&checkpoint, self.revision.clone())) {
                Err(failure) if failure.reason == Reason::ModelInvalid && has_grown => {
                    debug!(bytes, cause = failure.message, "a header goes on");
                }
                done => return done,
            }
            bytes = (bytes * 4).min(MOST_BYTES);
        }
    }
}

fn describes(name: &str) -> bool {
    name == "config.json" || [".index.json", ".safetensors", ".gguf"].iter().any(|end| name.ends_with(end))
}

/// A file as far as it is there.
struct Beginning<'a> {
    file: &'a RemoteFile,
    scratch: File,
    have: u64,
}

impl<'a> Beginning<'a> {
    fn new(folder: &Path, file: &'a RemoteFile) -> Result<Beginning<'a>, Failure> {
        let create = |path| File::options().create_new(true).read(true).write(true).open(path);
        let created = create(folder.join(&file.name)).and_then(|made| made.set_len(file.bytes).map(|()| made));
        Ok(Beginning { file, scratch: created.map_err(|error| scratch(&error))?, have: 0 })
    }

    /// Fetches what is missing of a header that has `bytes` where nothing tells its length; whether there was any.
    fn extend(&mut self, reader: &RangeReader, bytes: u64) -> Result<bool, Failure> {
        let range = self.have..self.header_bytes(bytes).min(MOST_BYTES).min(self.file.bytes);
        if range.is_empty() {
            return Ok(false);
        }
        let part = reader.read(self.file, &range)?;
        self.scratch.write_all_at(&part, range.start).map_err(|error| scratch(&error))?;
        self.have = range.end;
        Ok(true)
    }

    fn header_bytes(&self, otherwise: u64) -> u64 {
        match self.file.name.rsplit_once('.').map(|(_, ending)| ending) {
            Some("json") => self.file.bytes,
            Some("safetensors") => self.told().unwrap_or(FIRST_SAFETENSORS_BYTES),
            _ => otherwise,
        }
    }

    /// What a safetensors file says of its header's length.
    fn told(&self) -> Option<u64> {
        let mut length = [0; 8];
        self.scratch.read_exact_at(&mut length, 0).ok().filter(|()| self.have > 0)?;
        Some(u64::from_le_bytes(length).saturating_add(8))
    }
}

fn scratch(error: &std::io::Error) -> Failure {
    Failure::new(Reason::ModelUnavailable, format!("cannot keep headers in temporary files: {error}"))
}
