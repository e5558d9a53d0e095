//! The Hugging Face hub, or a mirror that speaks like it: `hf://org/name`, `hf://org/name/file.gguf`,
//! `hf://org/name/folder`.
//!
//! A client of our own: two requests over the program's HTTP client, where the hub's crate would bring a second one.

use super::agent::{agent, bearer, document, redact, refused};
use super::attempt::Interruption;
use super::checksum::Checksum;
use super::listing::{Identity, Listing, Place, RemoteFile, Wanted};
use super::source::Repository;
use crate::cli::AccessArgs;
use crate::failure::Failure;
use serde_json::Value;
use std::path::PathBuf;
use ureq::Agent;
use ureq::http::{StatusCode, header};
use windlass_engine_contract::revision::is_commit;
use windlass_engine_contract::termination::Reason;

/// What is read where no revision is named.
const DEFAULT_REVISION: &str = "main";

/// A repository of the hub.
pub struct Hub {
    agent: Agent,
    endpoint: String,
    repository: String,
    revision: String,
    wanted: Wanted,
    authorization: Option<String>,
}

impl Hub {
    /// Reads `org/name[/path]`.
    pub fn parse(access: &AccessArgs, rest: &str) -> Result<Hub, Failure> {
        let parts: Vec<&str> = rest.trim_end_matches('/').split('/').collect();
        let revision = access.revision.as_deref().unwrap_or(DEFAULT_REVISION);
        let clean = |part: &str| {
            let odd = |character: char| !character.is_ascii_alphanumeric() && !"._-".contains(character);
            !part.is_empty() && !part.contains(odd) && !part.trim_matches('.').is_empty()
        };
        if parts.len() < 2 || !parts.iter().all(|part| clean(part)) {
            let message = format!("hf://{rest} is not hf://organization/name, with a file or folder behind it or not");
            return Err(Failure::configuration(message));
        }
        if !revision.split('/').all(clean) {
            return Err(Failure::configuration(format!("--revision {revision:?} is no branch, tag or commit")));
        }
        Ok(Hub {
            agent: agent(access.ca_file.as_deref())?,
            endpoint: access.hf_endpoint.trim_end_matches('/').to_owned(),
            repository: parts[..2].join("/"),
            revision: revision.to_owned(),
            wanted: Wanted::of(&parts[2..].join("/")),
            authorization: token_file(access).as_deref().map(bearer).transpose()?,
        })
    }

    fn file(&self, commit: &str, sibling: &Value) -> Option<RemoteFile> {
        let path = sibling["rfilename"].as_str()?;
        let name = self.wanted.name_of(path)?;
        let sha256 = sibling["lfs"]["sha256"].as_str().and_then(|hex| Checksum::parse(hex).ok());
        let bytes = sibling["lfs"]["size"].as_u64().or(sibling["size"].as_u64())?;
        let version = || format!("{}/{commit}/{path}", self.repository);
        let identity = match (sha256, sibling["blobId"].as_str()) {
            (Some(sha256), _) => Identity::Sha256(sha256),
            (None, Some(blob)) => Identity::Version(format!("git {blob}")),
            (None, None) => Identity::Version(version()),
        };
        let url = format!("{}/{}/resolve/{commit}/{}", self.endpoint, self.repository, in_url(path));
        let place = Place::Web { url, authorization: self.authorization.clone(), tag: None };
        Some(RemoteFile { name, bytes, identity, place, told: None })
    }
}

impl Repository for Hub {
    fn name(&self) -> String {
        format!("hf://{} at {} of {}", self.repository, self.revision, redact(&self.endpoint))
    }

    fn list(&self) -> Result<Listing, Interruption> {
        let Hub { endpoint, repository, revision, .. } = self;
        let url = format!("{endpoint}/api/models/{repository}/revision/{}?blobs=true", revision.replace('/', "%2F"));
        let mut request = self.agent.get(&url);
        if let Some(authorization) = &self.authorization {
            request = request.header(header::AUTHORIZATION, authorization);
        }
        let response = request.call().map_err(|error| Interruption::Retry(error.to_string()))?;
        if response.status() != StatusCode::OK {
            return Err(refused(&url, response.status()));
        }
        let described = document(response)?;
        let commit = described["sha"].as_str().filter(|sha| is_commit(sha));
        let (Some(commit), Some(siblings)) = (commit, described["siblings"].as_array()) else {
            let message = format!("{} does not describe a model: no commit or no files", redact(&url));
            return Err(Interruption::Fatal(Failure::new(Reason::ModelInvalid, message)));
        };
        let files = siblings.iter().filter_map(|sibling| self.file(commit, sibling)).collect();
        let files = self.wanted.select(files).map_err(Interruption::Fatal)?;
        Ok(self.wanted.listing(commit.to_owned(), files))
    }
}

/// A path with what means something else in a URL, or may not be in one, by its bytes' numbers.
fn in_url(path: &str) -> String {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"/-._~".contains(&byte);
    let spelled = |byte: u8| if is_plain(byte) { char::from(byte).to_string() } else { format!("%{byte:02X}") };
    path.bytes().map(spelled).collect()
}

/// The file with the token: the flag's, or the one that the hub's own tools leave.
fn token_file(access: &AccessArgs) -> Option<PathBuf> {
    let home = || std::env::var_os("HOME").map(|home| PathBuf::from(home).join(".cache/huggingface/token"));
    let usual = || std::env::var_os("HF_TOKEN_PATH").map(PathBuf::from).or_else(home).filter(|path| path.is_file());
    access.token_file.clone().or_else(usual)
}
