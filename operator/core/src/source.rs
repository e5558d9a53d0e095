//! Where the weights come from, parsed once, and the paths they have inside a pod.

use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use windlass_engine_contract::flags::fetch::MIN_CACHE_KEEP_SECONDS;
use windlass_engine_contract::paths;
use windlass_operator_api::model::{Cache, CacheType, Model};

use crate::digest::fingerprint;
use crate::quantity;
use crate::validate::{Refusal, bounded};

/// A source that an engine pod can read.
#[derive(Clone, Debug, PartialEq)]
pub enum ModelSource {
    /// A file or folder in a claim, read in place.
    Claim {
        /// The claim.
        name: String,
        /// Path in it, without a leading slash; empty for its root.
        path: String,
    },
    /// What is brought into the cache before the engine starts.
    Fetched(FetchedSource),
}

/// What is brought into the cache.
#[derive(Clone, Debug, PartialEq)]
pub struct FetchedSource {
    /// Its address.
    pub url: String,
    /// Who has it.
    pub server: Server,
    /// Secret with credentials.
    pub secret: Option<String>,
    /// ConfigMap with the key `ca.crt`.
    pub ca_config_map: Option<String>,
    /// Where it is kept.
    pub cache: ModelCache,
}

/// Kinds of servers that have models.
#[derive(Clone, Debug, PartialEq)]
pub enum Server {
    /// A web server, that has one file.
    Web {
        /// Its port.
        port: u16,
        /// The file's checksum, 64 hexadecimal digits.
        sha256: String,
    },
    /// The Hugging Face hub.
    Hub {
        /// Branch, tag or commit.
        revision: Option<String>,
    },
    /// An object store.
    Objects,
    /// A container registry.
    Registry {
        /// Its port.
        port: u16,
    },
}

/// Where fetched files are kept.
#[derive(Clone, Debug, PartialEq)]
pub enum ModelCache {
    /// The pod's own disk.
    EmptyDir {
        /// Most it may take.
        size_limit: Option<Quantity>,
    },
    /// A claim that pods share, everywhere or on a node.
    Claim {
        /// The claim.
        name: String,
        /// What of it is kept.
        keep: Keep,
    },
}

/// How much of what was fetched is kept.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Keep {
    /// Most bytes of all models together.
    pub max_bytes: Option<u64>,
    /// Longest that a model is kept unused.
    pub unused_seconds: Option<u32>,
}

const HTTPS_PORT: u16 = 443;
/// Bounds of what a model is kept unused.
const MIN_KEEP_SECONDS: i32 = MIN_CACHE_KEEP_SECONDS as i32;
const MAX_KEEP_SECONDS: i32 = 365 * 86_400;

impl ModelSource {
    pub(crate) fn validate(model: &Model) -> Result<Self, Refusal> {
        let refuse = |problem| Refusal::Source { source_text: model.source.clone(), problem };
        let Some((scheme, rest)) = model.source.split_once("://") else {
            return Err(refuse("does not start with pvc://, https://, hf://, s3://, gs://, az:// or oci://"));
        };
        let server = match scheme {
            "pvc" => return Self::claim(model, rest),
            "https" => web(model, rest)?,
            "hf" if is_repository(rest) => Server::Hub { revision: model.revision.clone() },
            "hf" => return Err(refuse("is not hf://organization/name, with a file or folder behind it or not")),
            "s3" | "gs" | "az" if is_clean(rest) => Server::Objects,
            "s3" | "gs" | "az" => return Err(refuse("is no bucket, with a path in it without empty, . or .. parts")),
            "oci" => Server::Registry { port: registry(rest).ok_or_else(|| refuse("is not oci://registry/name:tag"))? },
            _ => return Err(refuse("does not start with pvc://, https://, hf://, s3://, gs://, az:// or oci://")),
        };
        if model.sha256.is_some() && !matches!(server, Server::Web { .. }) {
            return Err(Refusal::ActsOnlyOnHttps { field: "spec.model.sha256" });
        }
        Ok(ModelSource::Fetched(FetchedSource {
            url: model.source.clone(),
            server,
            secret: model.secret_ref.as_ref().map(|reference| reference.name.clone()),
            ca_config_map: model.ca_config_map_ref.as_ref().map(|reference| reference.name.clone()),
            cache: ModelCache::validate(model.cache.as_ref())?,
        }))
    }

    fn claim(model: &Model, rest: &str) -> Result<Self, Refusal> {
        if model.sha256.is_some() {
            return Err(Refusal::ActsOnlyOnHttps { field: "spec.model.sha256" });
        }
        let inert = [
            ("spec.model.secretRef", model.secret_ref.is_some()),
            ("spec.model.caConfigMapRef", model.ca_config_map_ref.is_some()),
            ("spec.model.cache", model.cache.is_some()),
        ];
        if let Some((field, _)) = inert.into_iter().find(|(_, given)| *given) {
            return Err(Refusal::NothingIsFetched { field });
        }
        if !is_clean(rest) {
            let problem = "is not pvc://claim/path/in/claim, without empty, . or .. parts";
            return Err(Refusal::Source { source_text: model.source.clone(), problem });
        }
        let (name, path) = rest.split_once('/').unwrap_or((rest, ""));
        Ok(ModelSource::Claim { name: name.to_owned(), path: path.to_owned() })
    }

    /// What `windlass-engine serve` is given.
    pub fn path_in_pod(&self) -> String {
        match self {
            ModelSource::Claim { path, .. } if path.is_empty() => paths::MODEL_DIR.to_owned(),
            ModelSource::Claim { path, .. } => format!("{}/{path}", paths::MODEL_DIR),
            ModelSource::Fetched(source) => source.path_in_pod(),
        }
    }
}

impl FetchedSource {
    /// Has a source of the hub mean this commit.
    pub fn pin(&mut self, commit: &str) {
        if let Server::Hub { revision } = &mut self.server {
            *revision = Some(commit.to_owned());
        }
    }

    /// The file or folder in the cache. Its name is that of its content, or of its address and revision, so pods of several
    /// versions can share a claim.
    pub fn path_in_pod(&self) -> String {
        let file = if self.url.ends_with(".gguf") { ".gguf" } else { "" };
        match &self.server {
            Server::Web { sha256, .. } => format!("{}/{sha256}.gguf", paths::CACHE_DIR),
            Server::Hub { revision } => format!("{}/{}{file}", paths::CACHE_DIR, fingerprint(&(&self.url, revision))),
            Server::Objects | Server::Registry { .. } => {
                format!("{}/{}{file}", paths::CACHE_DIR, fingerprint(&self.url))
            }
        }
    }

    /// The server's port; `None` for an object store, whose address a Secret may hold.
    pub fn port(&self) -> Option<u16> {
        match self.server {
            Server::Web { port, .. } | Server::Registry { port } => Some(port),
            Server::Hub { .. } => Some(HTTPS_PORT),
            Server::Objects => None,
        }
    }
}

impl ModelCache {
    fn validate(cache: Option<&Cache>) -> Result<Self, Refusal> {
        let Some(cache) = cache else { return Ok(ModelCache::EmptyDir { size_limit: None }) };
        let union = |field, problem| Err(Refusal::Union { field, problem });
        match (cache.kind, &cache.claim_name) {
            (CacheType::EmptyDir, Some(_)) => {
                union("spec.model.cache.claimName", "only with types PersistentVolumeClaim and Node")
            }
            (CacheType::EmptyDir, None) if cache.keep_unused_seconds.is_some() => {
                union("spec.model.cache.keepUnusedSeconds", "only with types PersistentVolumeClaim and Node")
            }
            (CacheType::EmptyDir, None) => Ok(ModelCache::EmptyDir { size_limit: cache.size_limit.clone() }),
            (CacheType::PersistentVolumeClaim | CacheType::Node, None) => {
                union("spec.model.cache.claimName", "required with types PersistentVolumeClaim and Node")
            }
            (CacheType::Node, Some(_)) if cache.size_limit.is_none() => {
                union("spec.model.cache.sizeLimit", "required with type Node")
            }
            (CacheType::PersistentVolumeClaim | CacheType::Node, Some(name)) => {
                Ok(ModelCache::Claim { name: name.clone(), keep: Keep::validate(cache)? })
            }
        }
    }
}

impl Keep {
    fn validate(cache: &Cache) -> Result<Self, Refusal> {
        let bytes = |limit: &Quantity| {
            let wrong =
                || Refusal::Union { field: "spec.model.cache.sizeLimit", problem: "is no amount, such as 200Gi" };
            quantity::bytes(limit).ok_or_else(wrong)
        };
        let max_bytes = cache.size_limit.as_ref().map(bytes).transpose()?;
        let seconds =
            |seconds| bounded("spec.model.cache.keepUnusedSeconds", seconds, MIN_KEEP_SECONDS, MAX_KEEP_SECONDS);
        Ok(Keep { max_bytes, unused_seconds: cache.keep_unused_seconds.map(seconds).transpose()? })
    }
}

fn web(model: &Model, rest: &str) -> Result<Server, Refusal> {
    let refuse = |problem| Refusal::Source { source_text: model.source.clone(), problem };
    let (authority, path) = rest.split_once('/').unwrap_or((rest, ""));
    let odd = rest.contains(|character: char| character.is_whitespace() || character == '#');
    if authority.is_empty() || path.is_empty() || odd || authority.contains(['@', '?']) {
        return Err(refuse("is not https://host/path, without credentials, spaces or fragment"));
    }
    let port = port(authority).ok_or_else(|| refuse("has a port that is not between 1 and 65535"))?;
    let sha256 = model.sha256.clone().ok_or(Refusal::MissingForHttps { field: "spec.model.sha256" })?;
    if sha256.len() != 64 || !sha256.bytes().all(|digit| digit.is_ascii_hexdigit()) {
        return Err(Refusal::Union { field: "spec.model.sha256", problem: "is not 64 hexadecimal digits" });
    }
    Ok(Server::Web { port, sha256 })
}

/// `organization/name[/path]`, each part of letters, digits, `.`, `_` and `-`.
fn is_repository(text: &str) -> bool {
    let is_part = |part: &str| {
        let is_plain = part.chars().all(|character| character.is_ascii_alphanumeric() || "._-".contains(character));
        is_plain && !part.trim_matches('.').is_empty()
    };
    text.contains('/') && text.split('/').all(is_part)
}

/// Parts between slashes, none of which is empty, `.` or `..`, or has a space.
fn is_clean(text: &str) -> bool {
    let is_part = |part: &str| !part.is_empty() && part != "." && part != ".." && !part.contains(char::is_whitespace);
    text.split('/').all(is_part)
}

/// The registry's port in `registry/repository[:tag|@digest]`.
fn registry(text: &str) -> Option<u16> {
    let (host, name) = text.split_once('/')?;
    let is_plain = |character: char| character.is_ascii_alphanumeric() || "._-/:@".contains(character);
    let is_named =
        !host.is_empty() && !host.contains('@') && name.starts_with(|first: char| first.is_ascii_alphanumeric());
    port(host).filter(|_| is_named && name.chars().all(is_plain) && is_clean(name))
}

/// The port of `host`, `host:port`, `[address]` or `[address]:port`.
fn port(authority: &str) -> Option<u16> {
    let host_end = authority.rfind(']').map_or(0, |bracket| bracket + 1);
    match authority[host_end..].rsplit_once(':') {
        None => Some(HTTPS_PORT),
        Some((_, digits)) => digits.parse().ok().filter(|port| *port > 0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{SHA256, ServiceBuilder, service};
    use crate::validate::validate;
    use serde_json::json;

    fn parsed(spec: ServiceBuilder) -> Option<ModelSource> {
        validate(&spec.build()).ok().map(|service| service.source)
    }

    fn fetched(source: &str) -> Option<FetchedSource> {
        let mut spec = service().model("source", json!(source));
        if source.starts_with("https") {
            spec = spec.model("sha256", json!(SHA256));
        }
        match parsed(spec)? {
            ModelSource::Fetched(fetched) => Some(fetched),
            ModelSource::Claim { .. } => None,
        }
    }

    #[test]
    fn the_port_is_the_one_that_is_named_or_that_of_https() {
        for (source, port) in [
            ("https://host/a", Some(443)),
            ("https://host:1/a", Some(1)),
            ("https://host:65535/a", Some(65_535)),
            ("https://[::1]/a", Some(443)),
            ("https://[fd00::]/a", Some(443)),
            ("https://[fd00::]:8443/a", Some(8443)),
            ("hf://organization/name", Some(443)),
            ("oci://registry/name", Some(443)),
            ("oci://registry:5000/name", Some(5000)),
            ("oci://[::1]:5000/name", Some(5000)),
            ("s3://bucket/a", None),
        ] {
            assert_eq!(fetched(source).map(|fetched| fetched.port()), Some(port), "{source}");
        }
        for source in ["https://host:0/a", "https://host:65536/a", "https://host:/a", "oci://registry:x/name"] {
            assert_eq!(fetched(source), None, "{source}");
        }
    }

    #[test]
    fn what_an_address_is_made_of_is_checked_by_its_kind() {
        for source in [
            "https://host/a%20b?version=1",
            "hf://organization/name",
            "hf://organization/na.me-1_0/folder/file.gguf",
            "hf://organization/name/..a",
            "s3://bucket",
            "gs://bucket/a..b/.hidden",
            "az://container/a.gguf",
            "oci://registry/team/name:8b",
            "oci://registry/name@sha256:0a",
        ] {
            assert!(fetched(source).is_some(), "{source}");
        }
        for source in [
            "https:///a",
            "https://host",
            "https://host/",
            "https://host/a b",
            "https://host/a#b",
            "https://user@host/a",
            "https://host?a/b",
            "hf://organization",
            "hf://organization/",
            "hf://organization//name",
            "hf://organization/na me",
            "hf://organization/./name",
            "hf://organization/..",
            "s3://",
            "s3://bucket//a",
            "s3://bucket/./a",
            "s3://bucket/..",
            "s3://bucket/a b",
            "oci://registry",
            "oci:///name",
            "oci://user@registry/name",
            "oci://registry/",
            "oci://registry/-name",
            "oci://registry/na me",
            "oci://registry/name?tag",
            "oci://registry/team//name",
            "oci://registry/team/../name",
            "ftp://host/a",
            "models/a",
        ] {
            assert_eq!(fetched(source), None, "{source}");
        }
    }

    #[test]
    fn who_writes_a_wrong_address_is_told_what_would_be_right() {
        for (source, told) in [
            ("models/a", "does not start with pvc://"),
            ("ftp://host/a", "does not start with pvc://"),
            ("pvc://models//a", "is not pvc://claim/path/in/claim"),
            ("https://host", "is not https://host/path"),
            ("https://host:0/a", "has a port that is not between 1 and 65535"),
            ("hf://name", "is not hf://organization/name"),
            ("s3://", "is no bucket"),
            ("gs://bucket//a", "is no bucket"),
            ("az://container/..", "is no bucket"),
            ("oci://registry", "is not oci://registry/name:tag"),
        ] {
            let refusals = validate(&service().model("source", json!(source)).build()).expect_err("refused");
            assert!(refusals[0].to_string().contains(&format!("{source:?} {told}")), "{}", refusals[0]);
        }
    }

    #[test]
    fn a_claim_is_read_from_a_path_in_it_or_from_its_root() {
        let read = |source: &str| match parsed(service().model("source", json!(source)))? {
            source @ ModelSource::Claim { .. } => Some(source.path_in_pod()),
            ModelSource::Fetched(_) => None,
        };
        assert_eq!(read("pvc://models").as_deref(), Some("/models"));
        assert_eq!(read("pvc://models/a/b.gguf").as_deref(), Some("/models/a/b.gguf"));
        for source in ["pvc://", "pvc:///a", "pvc://models/", "pvc://models/./a", "pvc://models/a b"] {
            assert_eq!(read(source), None, "{source}");
        }
    }

    #[test]
    fn a_checksum_is_64_hexadecimal_digits() {
        let with = |sha256: &str| parsed(service().https().model("sha256", json!(sha256))).is_some();
        assert!(with(SHA256) && with(&SHA256.to_uppercase()));
        for sha256 in [&SHA256[1..], &format!("{SHA256}0"), &SHA256.replace('0', "g")] {
            assert!(!with(sha256), "{sha256}");
        }
    }

    #[test]
    fn what_is_fetched_is_kept_where_its_address_and_version_lead() {
        let place = |source: &str| fetched(source).map(|fetched| fetched.path_in_pod()).unwrap_or_default();
        assert_eq!(place("https://host/a"), format!("/var/cache/windlass/{SHA256}.gguf"));
        assert_ne!(place("s3://bucket/a"), place("s3://bucket/b"));
        assert_eq!(place("s3://bucket/a"), place("s3://bucket/a"));
        assert!(place("oci://registry/a").starts_with("/var/cache/windlass/"));
    }

    #[test]
    fn what_is_kept_of_a_cache_has_bounds() {
        let cached = |cache: serde_json::Value| match parsed(service().https().model("cache", cache))? {
            ModelSource::Fetched(FetchedSource { cache, .. }) => Some(cache),
            ModelSource::Claim { .. } => None,
        };
        let unused = |seconds: i64| {
            cached(json!({"type": "PersistentVolumeClaim", "claimName": "c", "keepUnusedSeconds": seconds}))
        };
        for seconds in [3600, 31_536_000] {
            let keep = Keep { max_bytes: None, unused_seconds: u32::try_from(seconds).ok() };
            assert_eq!(unused(seconds), Some(ModelCache::Claim { name: "c".into(), keep }));
        }
        assert_eq!((unused(3599), unused(31_536_001)), (None, None));
        let node = cached(json!({"type": "Node", "claimName": "c", "sizeLimit": "1Ki"}));
        let keep = Keep { max_bytes: Some(1024), unused_seconds: None };
        assert_eq!(node, Some(ModelCache::Claim { name: "c".into(), keep }));
    }
}
