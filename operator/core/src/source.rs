//! Where the weights come from, parsed once, and the paths they have inside a pod.

use windlass_engine_contract::paths;
use windlass_operator_api::model::{Cache, CacheType, Model};

use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

use crate::validate::Refusal;

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
    /// A file behind a URL, fetched into the cache.
    Https(HttpsSource),
}

/// A file behind a URL.
#[derive(Clone, Debug, PartialEq)]
pub struct HttpsSource {
    /// The URL.
    pub url: String,
    /// The URL's port.
    pub port: u16,
    /// The file's checksum, 64 hexadecimal digits.
    pub sha256: String,
    /// Secret with the key `token`.
    pub token_secret: Option<String>,
    /// ConfigMap with the key `ca.crt`.
    pub ca_config_map: Option<String>,
    /// Where the file is kept.
    pub cache: ModelCache,
}

/// Where fetched files are kept.
#[derive(Clone, Debug, PartialEq)]
pub enum ModelCache {
    /// The pod's own disk.
    EmptyDir {
        /// Most it may take.
        size_limit: Option<Quantity>,
    },
    /// A claim that pods share.
    Claim {
        /// The claim.
        name: String,
    },
}

const HTTPS_PORT: u16 = 443;

impl ModelSource {
    pub(crate) fn validate(model: &Model) -> Result<Self, Refusal> {
        if let Some(rest) = model.source.strip_prefix("pvc://") {
            return Self::claim(model, rest);
        }
        let Some(rest) = model.source.strip_prefix("https://") else {
            return Err(refused(model, "does not start with pvc:// or https://"));
        };
        Self::https(model, rest)
    }

    fn claim(model: &Model, rest: &str) -> Result<Self, Refusal> {
        let inert = [
            ("spec.model.sha256", model.sha256.is_some()),
            ("spec.model.secretRef", model.secret_ref.is_some()),
            ("spec.model.caConfigMapRef", model.ca_config_map_ref.is_some()),
            ("spec.model.cache", model.cache.is_some()),
        ];
        if let Some((field, _)) = inert.into_iter().find(|(_, given)| *given) {
            return Err(Refusal::ActsOnlyOnHttps { field });
        }
        let (name, path) = rest.split_once('/').unwrap_or((rest, ""));
        let clean = |part: &str| !part.is_empty() && part != "." && part != ".." && !part.contains(char::is_whitespace);
        if name.is_empty() || !(path.is_empty() || path.split('/').all(clean)) {
            return Err(refused(model, "is not pvc://claim/path/in/claim, without empty, . or .. parts"));
        }
        Ok(ModelSource::Claim { name: name.to_owned(), path: path.to_owned() })
    }

    fn https(model: &Model, rest: &str) -> Result<Self, Refusal> {
        let (authority, path) = rest.split_once('/').unwrap_or((rest, ""));
        let odd = rest.contains(|character: char| character.is_whitespace() || character == '#');
        if authority.is_empty() || path.is_empty() || odd || authority.contains(['@', '?']) {
            return Err(refused(model, "is not https://host/path, without credentials, spaces or fragment"));
        }
        let port = port(authority).ok_or_else(|| refused(model, "has a port that is not between 1 and 65535"))?;
        let sha256 = model.sha256.clone().ok_or(Refusal::MissingForHttps { field: "spec.model.sha256" })?;
        if sha256.len() != 64 || !sha256.bytes().all(|digit| digit.is_ascii_hexdigit()) {
            return Err(Refusal::Union { field: "spec.model.sha256", problem: "is not 64 hexadecimal digits" });
        }
        Ok(ModelSource::Https(HttpsSource {
            url: model.source.clone(),
            port,
            sha256,
            token_secret: model.secret_ref.as_ref().map(|reference| reference.name.clone()),
            ca_config_map: model.ca_config_map_ref.as_ref().map(|reference| reference.name.clone()),
            cache: ModelCache::validate(model.cache.as_ref())?,
        }))
    }

    /// What `windlass-engine serve` is given.
    pub fn path_in_pod(&self) -> String {
        match self {
            ModelSource::Claim { path, .. } if path.is_empty() => paths::MODEL_DIR.to_owned(),
            ModelSource::Claim { path, .. } => format!("{}/{path}", paths::MODEL_DIR),
            ModelSource::Https(source) => source.path_in_pod(),
        }
    }
}

impl HttpsSource {
    /// The file in the cache. Its name is its content, so pods of several versions can share a claim.
    pub fn path_in_pod(&self) -> String {
        format!("{}/{}.gguf", paths::CACHE_DIR, self.sha256)
    }
}

impl ModelCache {
    fn validate(cache: Option<&Cache>) -> Result<Self, Refusal> {
        let Some(cache) = cache else { return Ok(ModelCache::EmptyDir { size_limit: None }) };
        let union = |field, problem| Err(Refusal::Union { field, problem });
        match (cache.kind, &cache.claim_name, &cache.size_limit) {
            (CacheType::EmptyDir, None, size_limit) => Ok(ModelCache::EmptyDir { size_limit: size_limit.clone() }),
            (CacheType::PersistentVolumeClaim, Some(name), None) => Ok(ModelCache::Claim { name: name.clone() }),
            (CacheType::EmptyDir, Some(_), _) => {
                union("spec.model.cache.claimName", "only with type PersistentVolumeClaim")
            }
            (CacheType::PersistentVolumeClaim, None, _) => {
                union("spec.model.cache.claimName", "required with type PersistentVolumeClaim")
            }
            (CacheType::PersistentVolumeClaim, _, Some(_)) => {
                union("spec.model.cache.sizeLimit", "only with type EmptyDir")
            }
        }
    }
}

fn refused(model: &Model, problem: &'static str) -> Refusal {
    Refusal::Source { source_text: model.source.clone(), problem }
}

/// The port of `host`, `host:port`, `[address]` or `[address]:port`.
fn port(authority: &str) -> Option<u16> {
    let host_end = authority.rfind(']').map_or(0, |bracket| bracket + 1);
    match authority[host_end..].rsplit_once(':') {
        None => Some(HTTPS_PORT),
        Some((_, digits)) => digits.parse().ok().filter(|port| *port > 0),
    }
}
