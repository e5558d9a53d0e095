//! The engine's command lines: flags from fields, then the user's own. Each flag is one argument, `--flag=value`.

use windlass_engine_contract::flags::{self, fetch, inspect};
use windlass_engine_contract::{ADMIN_PORT, API_PORT, PIPELINE_PORT, paths};

use crate::source::{FetchedSource, Keep, ModelCache, ModelSource, Server};
use crate::validate::{Device, ValidatedService};

/// Key of the bearer token in the Secret of `model.secretRef`.
pub const TOKEN_KEY: &str = "token";
/// Key of the certificates in the ConfigMap of `model.caConfigMapRef`.
pub const CA_KEY: &str = "ca.crt";
/// The variable that holds the address of a pod whose replica has other nodes.
pub const POD_IP: &str = "POD_IP";

/// Of IPv4 too; pods of some clusters have addresses of IPv6 alone.
const EVERY_ADDRESS: &str = "::";

/// Arguments of the serving container.
pub fn serve(service: &ValidatedService) -> Vec<String> {
    let engine = &service.engine;
    let names = service.served_names.iter().map(|name| Some(flag(flags::SERVED_MODEL_NAME, name)));
    let rest = [
        Some(flag(flags::HOST, EVERY_ADDRESS)),
        Some(flag(flags::PORT, API_PORT)),
        // Probes and scrapes come over the pod network.
        Some(flag(flags::ADMIN_HOST, EVERY_ADDRESS)),
        Some(flag(flags::ADMIN_PORT, ADMIN_PORT)),
        device(&service.device),
        Some(flag(flags::TENSOR_PARALLEL_SIZE, service.device.tensor())),
        engine.quantization.flag().map(|value| flag(flags::QUANTIZATION, value)),
        engine.kv_cache_data_type.flag().map(|value| flag(flags::KV_CACHE_DTYPE, value)),
        engine.max_model_tokens.map(|value| flag(flags::MAX_MODEL_LEN, value)),
        engine.max_sequences.map(|value| flag(flags::MAX_NUM_SEQS, value)),
        service.api_keys_secret.as_ref().map(|_| flag(flags::API_KEY_DIR, paths::API_KEYS_DIR)),
        Some(flag(flags::DRAIN_TIMEOUT_SECONDS, service.drain_timeout_seconds)),
    ];
    let first = ["serve".to_owned(), service.source.path_in_pod()];
    let own = names.chain(rest).flatten().chain(pipeline(service.nodes));
    first.into_iter().chain(own).chain(engine.extra_args.iter().cloned()).collect()
}

/// Arguments of the container that fetches the model.
pub fn fetch(source: &FetchedSource) -> Vec<String> {
    let fixed = [fetch::SUBCOMMAND.to_owned(), source.url.clone()];
    let version = match &source.server {
        Server::Web { sha256, .. } => Some(flag(fetch::SHA256, sha256)),
        _ => revision(source),
    };
    let to = flag(fetch::TO, source.path_in_pod());
    fixed.into_iter().chain(version).chain([to]).chain(credentials(source)).chain(kept(&source.cache)).collect()
}

fn revision(source: &FetchedSource) -> Option<String> {
    let Server::Hub { revision } = &source.server else { return None };
    revision.as_ref().map(|revision| flag(fetch::REVISION, revision))
}

/// What of a cache that pods share is kept.
fn kept(cache: &ModelCache) -> impl Iterator<Item = String> {
    let keep = match cache {
        ModelCache::EmptyDir { .. } => Keep::default(),
        ModelCache::Claim { keep, .. } => keep.clone(),
    };
    let max_bytes = keep.max_bytes.map(|bytes| flag(fetch::CACHE_MAX_BYTES, bytes));
    max_bytes.into_iter().chain(keep.unused_seconds.map(|seconds| flag(fetch::CACHE_KEEP_SECONDS, seconds)))
}

/// Where the credentials of a source and the authority of its server are.
fn credentials(source: &FetchedSource) -> impl Iterator<Item = String> {
    let token = source.secret.as_ref().map(|_| match source.server {
        Server::Objects => flag(fetch::CREDENTIALS_DIR, paths::MODEL_SECRET_DIR),
        _ => flag(fetch::TOKEN_FILE, mounted(paths::MODEL_SECRET_DIR, TOKEN_KEY)),
    });
    let authority = source.ca_config_map.as_ref().map(|_| flag(fetch::CA_FILE, mounted(paths::MODEL_CA_DIR, CA_KEY)));
    token.into_iter().chain(authority)
}

/// Arguments of the container that reads the model's header.
pub fn inspect(source: &ModelSource) -> Vec<String> {
    let ModelSource::Fetched(fetched) = source else {
        return vec![inspect::SUBCOMMAND.to_owned(), source.path_in_pod(), inspect::SUMMARY.to_owned()];
    };
    let fixed = [inspect::SUBCOMMAND, &fetched.url, inspect::SUMMARY].map(str::to_owned);
    fixed.into_iter().chain(revision(fetched)).chain(credentials(fetched)).collect()
}

/// On a GPU node the engine finds the device itself; that it did is seen in what it reports, not in what it is told.
fn device(device: &Device) -> Option<String> {
    matches!(device, Device::Cpu).then(|| flag(flags::DEVICE, "cpu"))
}

/// Where the first of several nodes waits for the others.
fn pipeline(nodes: u32) -> Vec<String> {
    if nodes == 1 {
        return Vec::new();
    }
    vec![
        flag(flags::PIPELINE_PARALLEL_SIZE, nodes),
        flag(flags::MASTER_ADDR, format!("$({POD_IP})")),
        flag(flags::MASTER_PORT, PIPELINE_PORT),
    ]
}

fn mounted(folder: &str, key: &str) -> String {
    format!("{folder}/{key}")
}

fn flag(name: &str, value: impl std::fmt::Display) -> String {
    format!("{name}={value}")
}
