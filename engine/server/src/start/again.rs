//! A model that is read again, after a sleep that kept nothing of it.

use super::{load_and_digest, load_failure, open};
use crate::failure::Failure;
use std::path::{Path, PathBuf};
use windlass_checkpoint::Checkpoint;
use windlass_engine_contract::termination::Reason;
use windlass_engine_model::DecoderConfig;

/// Where a model is, and what it was at the start: clients were told a word for that.
pub struct Again {
    path: PathBuf,
    decoder: DecoderConfig,
    /// The weights' digest.
    weights: String,
}

impl Again {
    /// Of a model whose weights have this digest.
    ///
    /// # Errors
    /// If it is none that can be read.
    pub fn new(path: &Path, file: &Checkpoint, weights: &str) -> Result<Again, Failure> {
        Ok(Again { path: path.to_owned(), decoder: decoder(file)?, weights: weights.to_owned() })
    }

    /// Loads it, if its files hold what they held.
    ///
    /// # Errors
    /// If they do not, or it cannot be loaded.
    pub fn load<T>(&self, load: impl FnOnce(&Checkpoint) -> Result<T, Failure>) -> Result<T, Failure> {
        let file = open(&self.path)?;
        let (weights, loaded) = load_and_digest(&file, || load(&file));
        if weights? != self.weights || decoder(&file)? != self.decoder {
            return Err(self.changed());
        }
        loaded
    }

    fn changed(&self) -> Failure {
        let message = format!(
            "{} is not the model that was served before the sleep: put its files back and wake the server again, or restart the \
             server, which then serves the new model under a fingerprint of its own",
            self.path.display()
        );
        Failure::new(Reason::ChecksumMismatch, message)
    }
}

fn decoder(file: &Checkpoint) -> Result<DecoderConfig, Failure> {
    DecoderConfig::read(file).map_err(|error| load_failure(error.into()))
}
