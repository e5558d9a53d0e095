//! Models in container registries: `oci://registry/repository:tag` or `…@sha256:…`.
//!
//! An artifact's layers are its files, as ORAS, KitOps and the CNCF's ModelPack name them in annotations. An image's layers
//! are archives, in which the model is (`layers.rs`).

use super::agent::{agent, body, document, json, read_credential, redact, refused};
use super::attempt::Interruption;
use super::checksum::Checksum;
use super::listing::{Form, Identity, Listing, Place, RemoteFile, Wanted};
use super::source::Repository;
use crate::cli::AccessArgs;
use crate::failure::Failure;
use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use serde_json::Value;
use ureq::http::{Response, StatusCode, header};
use ureq::{Agent, Body};
use windlass_engine_contract::termination::Reason;

/// Manifests that are understood.
const MANIFESTS: &str = "application/vnd.oci.image.manifest.v1+json, application/vnd.docker.distribution.manifest.v2+json, application/vnd.oci.image.index.v1+json, application/vnd.docker.distribution.manifest.list.v2+json";
/// Types of an image's layers, up to how they are compressed.
const LAYERS: [&str; 2] = ["application/vnd.oci.image.layer.v1.tar", "application/vnd.docker.image.rootfs.diff.tar"];
/// How they may be.
const COMPRESSIONS: [&str; 5] = ["", "+gzip", ".gzip", "+zstd", ".zstd"];
/// Annotation of a layer that is a folder's archive.
const UNPACK: &str = "io.deis.oras.content.unpack";
/// Annotations that hold a layer's file name.
const TITLES: [&str; 2] = ["org.opencontainers.image.title", "org.cncf.model.filepath"];

/// An image or artifact of a registry.
pub struct Image {
    agent: Agent,
    /// With its scheme.
    registry: String,
    repository: String,
    /// Tag or digest.
    reference: String,
    /// `user:password`, if there is one.
    credentials: Option<String>,
}

impl Image {
    /// Reads `registry/repository[:tag|@digest]`.
    pub fn parse(access: &AccessArgs, rest: &str) -> Result<Image, Failure> {
        let wrong = || Failure::configuration(format!("oci://{rest} is not oci://registry/repository:tag"));
        if access.revision.is_some() {
            return Err(Failure::configuration("--revision is for hf:// alone: an image has its tag or digest"));
        }
        let (host, path) = rest.split_once('/').ok_or_else(wrong)?;
        let (repository, reference) = match path.split_once('@') {
            Some(parts) => parts,
            None => path.rsplit_once(':').unwrap_or((path, "latest")),
        };
        let odd = |character: char| !character.is_ascii_alphanumeric() && !"._-/:".contains(character);
        if host.is_empty() || repository.is_empty() || reference.is_empty() || path.replace('@', "").contains(odd) {
            return Err(wrong());
        }
        // As container tools do: a registry of this machine speaks plainly.
        let local = ["localhost", "127.0.0.1"].contains(&host.split(':').next().unwrap_or(host));
        let host = if host == "docker.io" { "registry-1.docker.io" } else { host };
        let credentials = access.token_file.as_deref().map(|path| read_credential("--token-file", path)).transpose()?;
        Ok(Image {
            agent: agent(access.ca_file.as_deref())?,
            registry: format!("{}://{host}", if local { "http" } else { "https" }),
            repository: repository.to_owned(),
            reference: reference.to_owned(),
            credentials: credentials.map(|text| text.trim().to_owned()),
        })
    }

    /// Asks for a manifest, with a token where the registry wants one.
    fn manifest(&self, reference: &str) -> Result<(Value, Option<String>), Interruption> {
        let url = format!("{}/v2/{}/manifests/{reference}", self.registry, self.repository);
        let mut authorization = None;
        let mut response = self.ask(&url, None)?;
        if response.status() == StatusCode::UNAUTHORIZED {
            authorization = Some(self.authorize(&response)?);
            response = self.ask(&url, authorization.as_deref())?;
        }
        match response.status() {
            StatusCode::OK => Ok((verified(reference, &body(response)?)?, authorization)),
            status => Err(refused(&url, status)),
        }
    }

    fn ask(&self, url: &str, authorization: Option<&str>) -> Result<Response<Body>, Interruption> {
        let mut request = self.agent.get(url).header(header::ACCEPT, MANIFESTS);
        if let Some(authorization) = authorization {
            request = request.header(header::AUTHORIZATION, authorization);
        }
        request.call().map_err(|error| Interruption::Retry(error.to_string()))
    }

    /// What the registry's challenge asks for: a token of its token server, or the credentials themselves.
    fn authorize(&self, response: &Response<Body>) -> Result<String, Interruption> {
        let challenge = response.headers().get(header::WWW_AUTHENTICATE).and_then(|value| value.to_str().ok());
        let basic =
            self.credentials.as_ref().map(|credentials| format!("Basic {}", BASE64_STANDARD.encode(credentials)));
        let Some(bearer) = challenge.and_then(|challenge| challenge.strip_prefix("Bearer ")) else {
            return basic.ok_or_else(|| refused(&self.registry, StatusCode::UNAUTHORIZED));
        };
        let part = |name: &str| parameter(bearer, name).unwrap_or_default();
        let realm = part("realm");
        if !realm.starts_with("https://") && !realm.starts_with("http://") {
            return Err(refused(&self.registry, StatusCode::UNAUTHORIZED));
        }
        let url = format!("{realm}?service={}&scope=repository:{}:pull", part("service"), self.repository);
        let response = self.ask(&url, basic.as_deref())?;
        if response.status() != StatusCode::OK {
            return Err(refused(&url, response.status()));
        }
        let answer = document(response)?;
        let token = answer["token"].as_str().or(answer["access_token"].as_str());
        let none = || Interruption::Retry(format!("{} gave no token", redact(&url)));
        Ok(format!("Bearer {}", token.ok_or_else(none)?))
    }

    /// A layer that is a file.
    fn file(&self, layer: &Value, authorization: &Option<String>) -> Result<RemoteFile, Failure> {
        let kind = layer["mediaType"].as_str().unwrap_or_default();
        // Docker's own models have no titles.
        let title = title(layer).or_else(|| kind.contains(".gguf").then_some("model.gguf"));
        match title.filter(|title| !is_archive(layer, title)) {
            Some(title) => self.layer(layer, title.rsplit('/').next().unwrap_or(title), authorization),
            None => {
                let message = format!(
                    "a layer of type {kind:?} is no file, and not one of an image that is plain, gzip's or zstd's"
                );
                Err(Failure::new(Reason::Unsupported, message))
            }
        }
    }

    fn layer(&self, layer: &Value, name: &str, authorization: &Option<String>) -> Result<RemoteFile, Failure> {
        let digest = layer["digest"].as_str().unwrap_or_default();
        let sha256 = digest.strip_prefix("sha256:").and_then(|hex| Checksum::parse(hex).ok());
        let (Some(sha256), Some(bytes)) = (sha256, layer["size"].as_u64()) else {
            let message = format!("the layer {name:?} has no SHA-256 digest or no size");
            return Err(Failure::new(Reason::ModelInvalid, message));
        };
        let url = format!("{}/v2/{}/blobs/{digest}", self.registry, self.repository);
        let place = Place::Web { url, authorization: authorization.clone(), tag: None };
        Ok(RemoteFile { name: name.to_owned(), bytes, identity: Identity::Sha256(sha256), place, told: None })
    }
}

/// A manifest, which is what its digest says where it was asked for by that.
fn verified(reference: &str, bytes: &[u8]) -> Result<Value, Interruption> {
    let found = Checksum::of_bytes(bytes).to_string();
    let fatal = |reason, message| Err(Interruption::Fatal(Failure::new(reason, message)));
    match reference.split_once(':') {
        Some(("sha256", wanted)) if !found.eq_ignore_ascii_case(wanted) => {
            fatal(Reason::ChecksumMismatch, format!("the manifest {reference} has SHA-256 {found}"))
        }
        None | Some(("sha256", _)) => json(bytes),
        Some(_) => fatal(Reason::Unsupported, format!("{reference} is no SHA-256 digest, which alone is verified")),
    }
}

/// The name of a layer's file.
fn title(layer: &Value) -> Option<&str> {
    TITLES.iter().find_map(|title| layer["annotations"][title].as_str())
}

/// Whether a layer with a title is an archive. What its type says means nothing: tools give that of images to any file.
fn is_archive(layer: &Value, title: &str) -> bool {
    let kind = layer["mediaType"].as_str().unwrap_or_default();
    let is_of_an_image = LAYERS.iter().any(|layer| kind.starts_with(layer));
    let says_so = ["tar", "tar+gzip", "tar.gzip", "tar+zstd"].iter().any(|ending| kind.ends_with(ending));
    let is_named_so = [".tar", ".tar.gz", ".tgz", ".tar.zst"].iter().any(|ending| title.ends_with(ending));
    is_named_so || says_so && !is_of_an_image || layer["annotations"][UNPACK].as_str() == Some("true")
}

/// Whether a layer is one of an image, of those that can be unpacked.
fn is_of_an_image(layer: &Value) -> bool {
    let kind = layer["mediaType"].as_str().unwrap_or_default();
    let mut compressions = LAYERS.iter().filter_map(|layer| kind.strip_prefix(layer));
    title(layer).is_none() && compressions.any(|compression| COMPRESSIONS.contains(&compression))
}

impl Repository for Image {
    fn name(&self) -> String {
        format!("oci://{}/{}:{}", self.registry.rsplit("://").next().unwrap_or(""), self.repository, self.reference)
    }

    fn list(&self) -> Result<Listing, Interruption> {
        let (mut manifest, mut authorization) = self.manifest(&self.reference)?;
        if let Some(first) = manifest["manifests"][0]["digest"].as_str().map(str::to_owned) {
            (manifest, authorization) = self.manifest(&first)?;
        }
        let layers = manifest["layers"].as_array().cloned().unwrap_or_default();
        if !layers.is_empty() && layers.iter().all(is_of_an_image) {
            let name = |index: usize| format!("layer {index}");
            let files = layers.iter().enumerate().map(|(index, layer)| self.layer(layer, &name(index), &authorization));
            let files = files.collect::<Result<Vec<_>, _>>().map_err(Interruption::Fatal)?;
            return Ok(Listing { revision: revision(&files), files, form: Form::Layers });
        }
        let wanted = Wanted::Folder(String::new());
        let files = layers.iter().map(|layer| self.file(layer, &authorization)).collect::<Result<Vec<_>, _>>();
        let files = files.map_err(Interruption::Fatal)?;
        let files = files.into_iter().filter(|file| wanted.name_of(&file.name).is_some()).collect();
        let files = wanted.select(files).map_err(Interruption::Fatal)?;
        Ok(wanted.listing(revision(&files), files))
    }
}

/// What names exactly these files.
fn revision(files: &[RemoteFile]) -> String {
    let names = files.iter().map(|file| format!("{}={:?};", file.name, file.identity)).collect::<String>();
    Checksum::of_bytes(names.as_bytes()).to_string()
}

/// `registry` of `realm="https://…",service="registry"`.
fn parameter<'a>(challenge: &'a str, name: &str) -> Option<&'a str> {
    let mut parts = challenge.split(',').filter_map(|part| part.trim().split_once('='));
    parts.find(|(key, _)| *key == name).map(|(_, value)| value.trim_matches('"'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_challenge_is_read_by_its_parameters() {
        let challenge = r#"realm="https://auth.example/token",service="registry.example""#;
        assert_eq!(parameter(challenge, "service"), Some("registry.example"));
        assert_eq!(parameter(challenge, "scope"), None);
    }
}
