//! Object stores: `s3://bucket/prefix`, `gs://bucket/prefix`, `az://container/prefix`, and single GGUF objects of them.
//!
//! Credentials come from files, one for each setting and named like it (`AWS_ACCESS_KEY_ID`), or from the identity that the
//! platform gives the pod.

mod connector;

use super::agent::{agent, read_credential};
use super::attempt::Interruption;
use super::checksum::Checksum;
use super::listing::{Identity, Listing, Place, RemoteFile, Wanted};
use super::source::Repository;
use crate::cli::AccessArgs;
use crate::failure::Failure;
use connector::Connector;
use object_store::aws::{AmazonS3Builder, AmazonS3ConfigKey};
use object_store::azure::{AzureConfigKey, MicrosoftAzureBuilder};
use object_store::gcp::{GoogleCloudStorageBuilder, GoogleConfigKey};
use object_store::path::Path as ObjectPath;
use object_store::{ObjectMeta, ObjectStore, ObjectStoreExt, RetryConfig};
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use tokio::runtime::{Builder, Runtime};
use windlass_engine_contract::termination::Reason;

/// Objects under one prefix that are looked at: more are no model.
const MAX_OBJECTS: usize = 10_000;

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
        let connector = Connector(agent(access.ca_file.as_deref())?);
        let store = match scheme {
            "s3" => amazon(bucket, &settings, connector),
            "gs" => google(bucket, &settings, connector),
            _ => azure(bucket, &settings, connector),
        };
        let store = store.map_err(|error| Failure::configuration(format!("{scheme}://{bucket}: {error}")))?;
        let runtime = Builder::new_multi_thread().worker_threads(1).enable_all().build();
        let runtime = runtime.map_err(|error| Failure::internal(format!("cannot start a runtime: {error}")))?;
        let (scheme, bucket) = (scheme.to_owned(), bucket.to_owned());
        Ok(Objects { store: Arc::new(Store { store, runtime }), scheme, bucket, wanted: Wanted::of(prefix) })
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
        let place = Place::Object { store: self.store.clone(), path: object.location.clone() };
        Some(RemoteFile { name, bytes: object.size, identity, place })
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
        let versions: String = files.iter().map(|file| format!("{:?};", file.identity)).collect();
        Ok(Listing { revision: Checksum::of_bytes(versions.as_bytes()).to_string(), files })
    }
}

impl Store {
    /// Some bytes of an object. One attempt, beside those that the store's client makes.
    pub fn read(&self, path: &ObjectPath, range: Range<u64>) -> Result<bytes::Bytes, Interruption> {
        let read = self.runtime.block_on(self.store.get_range(path, range));
        read.map_err(|error| interruption(path.as_ref(), error))
    }
}

fn interruption(source: &str, error: object_store::Error) -> Interruption {
    use object_store::Error::{NotFound, PermissionDenied, Unauthenticated};
    match error {
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

type Opened = object_store::Result<Box<dyn ObjectStore>>;

fn amazon(bucket: &str, settings: &[(String, String)], connector: Connector) -> Opened {
    let mut builder = AmazonS3Builder::from_env().with_bucket_name(bucket).with_retry(retry());
    for (name, value) in settings {
        builder = builder.with_config(name.parse::<AmazonS3ConfigKey>()?, value);
    }
    let plain = builder.get_config_value(&AmazonS3ConfigKey::Endpoint).is_some_and(|url| url.starts_with("http://"));
    Ok(Box::new(builder.with_allow_http(plain).with_http_connector(connector).build()?))
}

fn google(bucket: &str, settings: &[(String, String)], connector: Connector) -> Opened {
    let mut builder = GoogleCloudStorageBuilder::from_env().with_bucket_name(bucket).with_retry(retry());
    for (name, value) in settings {
        builder = builder.with_config(name.parse::<GoogleConfigKey>()?, value);
    }
    Ok(Box::new(builder.with_http_connector(connector).build()?))
}

fn azure(container: &str, settings: &[(String, String)], connector: Connector) -> Opened {
    let mut builder = MicrosoftAzureBuilder::from_env().with_container_name(container).with_retry(retry());
    for (name, value) in settings {
        builder = builder.with_config(name.parse::<AzureConfigKey>()?, value);
    }
    Ok(Box::new(builder.with_http_connector(connector).build()?))
}
