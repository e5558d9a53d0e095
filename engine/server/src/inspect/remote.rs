//! The header of a file behind a URL, by HTTP range: its beginning, in a scratch file as long as the whole, whose other
//! bytes are holes. The checkpoint's own reader then checks tensors against the true length, and no weight is fetched.

use crate::cli::InspectArgs;
use crate::failure::Failure;
use crate::fetch::source::HttpSource;
use crate::start::open;
use std::fs::File;
use std::io::Write;
use std::time::Duration;
use tracing::debug;
use windlass_checkpoint::Checkpoint;
use windlass_engine_contract::termination::Reason;

/// Bytes that are asked for first: with a vocabulary of 128,000 words a header takes some 8 MiB.
const FIRST_BYTES: u64 = 1 << 20;
/// No header is longer; what is not read by then is damaged.
const MOST_BYTES: u64 = 256 << 20;

/// A source of headers.
pub struct Header {
    source: HttpSource,
    folder: tempfile::TempDir,
}

/// Whether a model is named by a URL.
pub fn is_url(model: &str) -> bool {
    model.starts_with("https://") || model.starts_with("http://")
}

impl Header {
    /// Checks the flags and reads the credentials they name.
    pub fn read(args: &InspectArgs) -> Result<Header, Failure> {
        let source = HttpSource::new(&args.model, args.token_file.as_deref(), args.ca_file.as_deref(), Duration::ZERO)?;
        let folder = tempfile::tempdir().map_err(|error| scratch(&error))?;
        Ok(Header { source, folder })
    }

    /// Gives `look` the checkpoint and the server's tag of it, as soon as enough of it is there.
    pub fn inspect<T>(&self, look: impl Fn(&Checkpoint, Option<String>) -> Result<T, Failure>) -> Result<T, Failure> {
        let path = self.folder.path().join("header.gguf");
        let mut file = File::create(&path).map_err(|error| scratch(&error))?;
        let (mut have, mut wanted) = (0, FIRST_BYTES);
        loop {
            let part = self.source.part(have, wanted)?;
            file.write_all(&part.bytes).map_err(|error| scratch(&error))?;
            have += part.bytes.len() as u64;
            file.set_len(part.whole.max(have)).map_err(|error| scratch(&error))?;
            let is_last = part.bytes.is_empty() || have >= part.whole.min(MOST_BYTES);
            match open(&path).and_then(|checkpoint| look(&checkpoint, part.tag)) {
                Err(failure) if failure.reason == Reason::ModelInvalid && !is_last => {
                    debug!(bytes = have, cause = failure.message, "the header goes on");
                }
                done => return done,
            }
            wanted = (wanted * 4).min(MOST_BYTES);
        }
    }
}

fn scratch(error: &std::io::Error) -> Failure {
    Failure::new(Reason::ModelUnavailable, format!("cannot keep the header in a temporary file: {error}"))
}
