//! What a source's address names: one file, or a repository of several.

use super::agent::{self, unavailable};
use super::attempt::Interruption;
use super::hub::Hub;
use super::listing::Listing;
use super::objects::Objects;
use super::oci::Image;
use super::partial::Partial;
use super::storage;
use super::web;
pub use super::web::HttpSource;
use crate::cli::AccessArgs;
use crate::failure::Failure;
use std::path::Path;
use std::time::Duration;

/// Where the bytes come from.
pub enum Source {
    /// One file whose checksum is known.
    File(FileSource),
    /// Files that a server lists.
    Repository(Box<dyn Repository>),
}

/// One file whose checksum is known.
pub enum FileSource {
    /// Standard input; it cannot be resumed.
    Stdin,
    /// A web server.
    Http(Box<HttpSource>),
}

/// A server that says which files a model has.
pub trait Repository {
    /// The address without secrets.
    fn name(&self) -> String;
    /// The revision and its files. One attempt.
    fn list(&self) -> Result<Listing, Interruption>;
}

impl Source {
    /// Checks the flags and reads the credentials they name.
    pub fn parse(source: &str, access: &AccessArgs, first_pause: Duration) -> Result<Source, Failure> {
        let (scheme, rest) = source.split_once("://").unwrap_or(("", source));
        let repository: Box<dyn Repository> = match scheme {
            "http" | "https" => return http(source, access, first_pause).map(Source::File),
            "" if source == "-" => return Ok(Source::File(FileSource::Stdin)),
            "hf" => Box::new(Hub::parse(access, rest)?),
            "s3" | "gs" | "az" => Box::new(Objects::parse(access, scheme, rest)?),
            "oci" => Box::new(Image::parse(access, rest)?),
            _ => {
                let message = format!(
                    "the source must begin with hf://, s3://, gs://, az://, oci://, https:// or http://, or be -; it is {}",
                    agent::redact(source)
                );
                return Err(Failure::configuration(message));
            }
        };
        Ok(Source::Repository(repository))
    }
}

fn http(source: &str, access: &AccessArgs, first_pause: Duration) -> Result<FileSource, Failure> {
    if access.revision.is_some() {
        return Err(Failure::configuration("--revision is for hf:// alone"));
    }
    let source = HttpSource::new(source, access.token_file.as_deref(), access.ca_file.as_deref(), first_pause)?;
    Ok(FileSource::Http(Box::new(source)))
}

impl FileSource {
    /// The address without secrets.
    pub fn name(&self) -> String {
        match self {
            FileSource::Stdin => "standard input".to_owned(),
            FileSource::Http(source) => source.name(),
        }
    }

    /// Bytes that `partial` lacks.
    pub fn remaining(&self, partial: &mut Partial) -> Result<u64, Failure> {
        let FileSource::Http(source) = self else {
            return Err(Failure::configuration("--cache-max-bytes is for a source that tells its length; - does not"));
        };
        let there = partial.resume().map_err(|error| storage(Path::new("the file"), &error))?;
        Ok(source.length()?.saturating_sub(there))
    }

    /// Brings everything into `partial`, at most `max_bytes`.
    pub fn download(&self, partial: &mut Partial, max_bytes: u64) -> Result<(), Failure> {
        match self {
            FileSource::Http(source) => source.download(partial, max_bytes),
            FileSource::Stdin => {
                partial.restart().map_err(|error| storage(Path::new("the file"), &error))?;
                match web::copy(&mut std::io::stdin().lock(), partial, None, max_bytes) {
                    Ok(()) => Ok(()),
                    Err(Interruption::Fatal(failure)) => Err(failure),
                    Err(Interruption::Retry(cause)) => Err(unavailable("standard input", &cause)),
                }
            }
        }
    }
}
