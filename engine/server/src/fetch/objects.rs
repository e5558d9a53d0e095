//! Object stores: `s3://bucket/prefix`, `gs://bucket/prefix`, `az://container/prefix`, and single GGUF objects of them.
//!
//! Credentials come from files, one for each setting and named like it (`AWS_ACCESS_KEY_ID`), or from the identity that the
//! platform gives the pod.

mod connector;

use super::agent::{agent, read_credential};
use super::attempt::Interruption;
use super::checksum::Checksum;
use super::listing::{Identity, Listing, Place, RemoteFile, Wanted};
use super::proof::Proof;
use super::source::Repository;
use crate::cli::AccessArgs;
use crate::failure::Failure;
use connector::{Connector, Headers};
use futures::StreamExt;
use futures::stream;
use object_store::aws::{AmazonS3, AmazonS3Builder, AmazonS3ConfigKey};
use object_store::azure::{AzureConfigKey, MicrosoftAzureBuilder};
use object_store::gcp::{GoogleCloudStorageBuilder, GoogleConfigKey};
use object_store::path::Path as ObjectPath;
use object_store::signer::{HeaderMap, Method, SignedUrlOptions, Signer};
use object_store::{GetOptions, ObjectMeta, ObjectStore, ObjectStoreExt, RetryConfig};
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use tokio::runtime::{Builder, Runtime};
use ureq::http::header::{HeaderName, HeaderValue};
use windlass_engine_contract::termination::Reason;

/// Objects under one prefix that are looked at: more are no model.
const MAX_OBJECTS: usize = 10_000;
/// Objects that are asked about at a time.
const QUESTIONS: usize = 16;
/// What has S3 tell an object's checksum.
const CHECKSUM_MODE: (HeaderName, HeaderValue) =
    (HeaderName::from_static("x-amz-checksum-mode"), HeaderValue::from_static("ENABLED"));
/// How long a signed question is good for.
const SIGNED_FOR: Duration = Duration::from_secs(60);

/// Objects under a prefix.
pub struct Objects {
    store: Arc<Store>,
    scheme: String,
    bucket: String,
    wanted: Wanted,
}

/// A bucket, with what drives its asynchronous client.
#[derive(Debug)]
pub struct Store {
    store: Box<dyn ObjectStore>,
    /// What signs questions of our own, of S3 with credentials.
    signer: Option<AmazonS3>,
    client: Connector,
    /// Whether an ETag in the form of an MD5 is one.
    etag_is_md5: bool,
    runtime: Runtime,
}

impl Objects {
    /// Reads `bucket[/prefix]`.
    pub fn parse(access: &AccessArgs, scheme: &str, rest: &str) -> Result<Objects, Failure> {
        let (bucket, prefix) = rest.split_once('/').unwrap_or((rest, ""));
        if bucket.is_empty() {
            return Err(Failure::configuration(format!("{scheme}://{rest} names no bucket")));
        }
        if access.revision.is_some() {
            return Err(Failure::configuration("--revision is for hf:// alone"));
        }
        let settings = access.credentials_dir.as_deref().map(settings).transpose()?.unwrap_or_default();
        let client = Connector(agent(access.ca_file.as_deref())?);
        let connector = Connector(client.0.clone());
        let opened = match scheme {
            "s3" => amazon(bucket, &settings, connector),
            "gs" => google(bucket, &settings, connector),
            _ => azure(bucket, &settings, connector),
        };
        let (store, signer) =
            opened.map_err(|error| Failure::configuration(format!("{scheme}://{bucket}: {error}")))?;
        let runtime = Builder::new_multi_thread().worker_threads(1).enable_all().build();
        let runtime = runtime.map_err(|error| Failure::internal(format!("cannot start a runtime: {error}")))?;
        // Those of directory buckets are other names.
        let etag_is_md5 = scheme == "s3" && !bucket.ends_with("--x-s3");
        let store = Arc::new(Store { store, signer, client, etag_is_md5, runtime });
        Ok(Objects { store, scheme: scheme.to_owned(), bucket: bucket.to_owned(), wanted: Wanted::of(prefix) })
    }

    fn found(&self) -> object_store::Result<Vec<ObjectMeta>> {
        match &self.wanted {
            Wanted::File(path) => self
                .store
                .runtime
                .block_on(self.store.store.head(&ObjectPath::from(path.as_str())))
                .map(|one| vec![one]),
            Wanted::Folder(prefix) => {
                let prefix = ObjectPath::from(prefix.as_str());
                let listed = self.store.store.list_with_delimiter(Some(&prefix));
                self.store.runtime.block_on(listed).map(|listed| listed.objects)
            }
        }
    }

    fn file(&self, object: &ObjectMeta) -> Option<RemoteFile> {
        let name = self.wanted.name_of(object.location.as_ref())?;
        let version = object.e_tag.clone().unwrap_or_else(|| object.last_modified.to_rfc3339());
        let identity = Identity::Version(format!("{} {} {version}", self.name(), object.location));
        let (path, tag) = (object.location.clone(), object.e_tag.clone());
        let place = Place::Object { store: self.store.clone(), path, tag };
        Some(RemoteFile { name, bytes: object.size, identity, place, told: None })
    }

    /// The files with what the store says of their contents.
    fn proven(&self, files: Vec<RemoteFile>) -> object_store::Result<Vec<RemoteFile>> {
        let prove = |file: RemoteFile| async move {
            let told = match &file.place {
                Place::Object { path, .. } => self.store.told(path).await?,
                Place::Web { .. } => None,
            };
            Ok::<_, object_store::Error>(RemoteFile { told, ..file })
        };
        let proven = stream::iter(files).map(prove).buffered(QUESTIONS).collect::<Vec<_>>();
        self.store.runtime.block_on(proven).into_iter().collect()
    }
}

impl Repository for Objects {
    fn name(&self) -> String {
        format!("{}://{}", self.scheme, self.bucket)
    }

    fn list(&self) -> Result<Listing, Interruption> {
        let objects = self.found().map_err(|error| interruption(&self.name(), error))?;
        if objects.len() > MAX_OBJECTS {
            let message =
                format!("{} has {} objects there; at most {MAX_OBJECTS} are looked at", self.name(), objects.len());
            return Err(Interruption::Fatal(Failure::new(Reason::ModelInvalid, message)));
        }
        let files = objects.iter().filter_map(|object| self.file(object)).collect();
        let files = self.wanted.select(files).map_err(Interruption::Fatal)?;
        let files = self.proven(files).map_err(|error| interruption(&self.name(), error))?;
        let versions: String = files.iter().map(|file| format!("{:?};", file.identity)).collect();
        Ok(self.wanted.listing(Checksum::of_bytes(versions.as_bytes()).to_string(), files))
    }
}

impl Store {
    /// Some bytes of an object that has not changed since it had this ETag. One attempt, beside those that the store's
    /// client makes.
    pub fn read(&self, path: &ObjectPath, tag: Option<&str>, range: Range<u64>) -> Result<bytes::Bytes, Interruption> {
        let options = GetOptions::new().with_range(Some(range)).with_if_match(tag);
        let read = self.runtime.block_on(async { self.store.get_opts(path, options).await?.bytes().await });
        read.map_err(|error| interruption(path.as_ref(), error))
    }

    /// What the store says of an object's content.
    async fn told(&self, path: &ObjectPath) -> object_store::Result<Option<Proof>> {
        let headers = match self.signed_head(path).await {
            Some(headers) => Some(headers),
            None => {
                let options = GetOptions::new().with_head(true);
                self.store.get_opts(path, options).await?.extensions.get::<Headers>().map(|headers| headers.0.clone())
            }
        };
        Ok(headers.and_then(|headers| Proof::told(&headers, self.etag_is_md5)))
    }

    /// The headers of an S3 object, its checksum among them, which the store's client does not ask for; `None` where
    /// they cannot be had so.
    async fn signed_head(&self, path: &ObjectPath) -> Option<HeaderMap> {
        let (name, value) = CHECKSUM_MODE;
        let options = SignedUrlOptions::new().with_signed_header(name.clone(), value.clone());
        let url = self.signer.as_ref()?.signed_url_opts(Method::HEAD, path, SIGNED_FOR, &options).await.ok()?;
        let agent = self.client.0.clone();
        let ask = move || agent.head(url.as_str()).header(name, value).call();
        let answer = tokio::task::spawn_blocking(ask).await.ok()?.ok()?;
        answer.status().is_success().then(|| answer.headers().clone())
    }
}

fn interruption(source: &str, error: object_store::Error) -> Interruption {
    use object_store::Error::{NotFound, PermissionDenied, Precondition, Unauthenticated};
    match error {
        Precondition { .. } => {
            let message = format!("cannot fetch {source}: the object changed while it was fetched");
            Interruption::Fatal(Failure::new(Reason::ModelUnavailable, message))
        }
        NotFound { .. } | PermissionDenied { .. } | Unauthenticated { .. } => {
            let message = format!("cannot fetch {source}: {error}");
            Interruption::Fatal(Failure::new(Reason::ModelUnavailable, message))
        }
        other => Interruption::Retry(other.to_string()),
    }
}

/// The settings of a folder: a file for each, named like it.
fn settings(folder: &Path) -> Result<Vec<(String, String)>, Failure> {
    let wrong =
        |error: std::io::Error| Failure::configuration(format!("--credentials-dir {}: {error}", folder.display()));
    let mut settings = Vec::new();
    for entry in std::fs::read_dir(folder).map_err(wrong)? {
        let path = entry.map_err(wrong)?.path();
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default().to_ascii_lowercase();
        // A mounted Secret has folders of its own, whose names begin with dots.
        if path.is_file() && !name.starts_with('.') {
            settings.push((name, read_credential("--credentials-dir", &path)?.trim().to_owned()));
        }
    }
    Ok(settings)
}

/// Few attempts: parts are attempted again by themselves.
fn retry() -> RetryConfig {
    RetryConfig { max_retries: 2, ..RetryConfig::default() }
}

type Opened = object_store::Result<(Box<dyn ObjectStore>, Option<AmazonS3>)>;

fn amazon(bucket: &str, settings: &[(String, String)], connector: Connector) -> Opened {
    let mut builder = AmazonS3Builder::from_env().with_bucket_name(bucket).with_retry(retry());
    for (name, value) in settings {
        builder = builder.with_config(name.parse::<AmazonS3ConfigKey>()?, value);
    }
    let plain = builder.get_config_value(&AmazonS3ConfigKey::Endpoint).is_some_and(|url| url.starts_with("http://"));
    let anonymous = builder.get_config_value(&AmazonS3ConfigKey::SkipSignature).is_some_and(|skip| skip == "true");
    let store = builder.with_allow_http(plain).with_http_connector(connector).build()?;
    Ok((Box::new(store.clone()), (!anonymous).then_some(store)))
}

fn google(bucket: &str, settings: &[(String, String)], connector: Connector) -> Opened {
    let mut builder = GoogleCloudStorageBuilder::from_env().with_bucket_name(bucket).with_retry(retry());
    for (name, value) in settings {
        builder = builder.with_config(name.parse::<GoogleConfigKey>()?, value);
    }
    Ok((Box::new(builder.with_http_connector(connector).build()?), None))
}

fn azure(container: &str, settings: &[(String, String)], connector: Connector) -> Opened {
    let mut builder = MicrosoftAzureBuilder::from_env().with_container_name(container).with_retry(retry());
    for (name, value) in settings {
        builder = builder.with_config(name.parse::<AzureConfigKey>()?, value);
    }
    Ok((Box::new(builder.with_http_connector(connector).build()?), None))
}
