//! Volumes of a pod and who mounts them. Everything is read-only but scratch space and, while fetching, the cache.

use k8s_openapi::api::core::v1::{
    ConfigMapVolumeSource, EmptyDirVolumeSource, PersistentVolumeClaimVolumeSource, SecretVolumeSource, Volume,
    VolumeMount,
};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use windlass_engine_contract::paths;

use crate::source::{ModelCache, ModelSource};
use crate::validate::ValidatedService;

/// A volume with its mount points.
pub struct Mounted {
    /// The volume.
    pub volume: Volume,
    /// Its mount in the engine container.
    pub engine: Option<VolumeMount>,
    /// Its mount in the fetching container.
    pub fetch: Option<VolumeMount>,
}

/// Readable by the owner and by the pod's group, which is the engine's.
const SECRET_MODE: i32 = 0o440;
/// Scratch space is for small files: a runaway writer must not fill the node's disk.
const SCRATCH_SIZE: &str = "1Gi";
/// What ranks of one pod exchange through shared memory.
const SHARED_MEMORY_SIZE: &str = "1Gi";

/// Every volume of a pod of `service`.
pub fn build(service: &ValidatedService) -> Vec<Mounted> {
    let model = match &service.source {
        ModelSource::Claim { name, .. } => vec![model_claim(name)],
        ModelSource::Fetched(source) => [
            Some(cache(&source.cache)),
            source.secret.as_deref().map(model_secret),
            source.ca_config_map.as_deref().map(model_authority),
        ]
        .into_iter()
        .flatten()
        .collect(),
    };
    let shared_memory = (service.device.tensor() > 1).then(shared_memory);
    let keys = service.api_keys_secret.as_deref().map(api_keys);
    model.into_iter().chain(keys).chain(shared_memory).chain([scratch()]).collect()
}

/// Volumes of the pod that reads the model's header, each with its mount as one that fetches has it: the same sources and
/// credentials, and no cache.
pub fn for_inspection(service: &ValidatedService) -> Vec<Mounted> {
    let model = match &service.source {
        ModelSource::Claim { name, .. } => {
            let claim = model_claim(name);
            vec![Mounted { fetch: claim.engine.clone(), ..claim }]
        }
        ModelSource::Fetched(source) => {
            let secret = source.secret.as_deref().map(model_secret);
            secret.into_iter().chain(source.ca_config_map.as_deref().map(model_authority)).collect()
        }
    };
    model.into_iter().chain([scratch()]).collect()
}

fn model_claim(claim: &str) -> Mounted {
    let name = "model";
    Mounted {
        volume: claim_volume(name, claim, true),
        engine: Some(mount(name, paths::MODEL_DIR, Access::ReadOnly)),
        fetch: None,
    }
}

fn cache(cache: &ModelCache) -> Mounted {
    let name = "model-cache";
    let volume = match cache {
        ModelCache::EmptyDir { size_limit } => empty_dir(name, None, size_limit.clone()),
        ModelCache::Claim { name: claim, .. } => claim_volume(name, claim, false),
    };
    Mounted {
        volume,
        engine: Some(mount(name, paths::CACHE_DIR, Access::ReadOnly)),
        fetch: Some(mount(name, paths::CACHE_DIR, Access::ReadWrite)),
    }
}

fn model_secret(secret: &str) -> Mounted {
    let name = "model-secret";
    Mounted {
        volume: secret_volume(name, secret),
        engine: None,
        fetch: Some(mount(name, paths::MODEL_SECRET_DIR, Access::ReadOnly)),
    }
}

fn model_authority(config_map: &str) -> Mounted {
    let name = "model-ca";
    let source = ConfigMapVolumeSource {
        name: config_map.to_owned(),
        default_mode: Some(SECRET_MODE),
        ..ConfigMapVolumeSource::default()
    };
    Mounted {
        volume: Volume { name: name.into(), config_map: Some(source), ..Volume::default() },
        engine: None,
        fetch: Some(mount(name, paths::MODEL_CA_DIR, Access::ReadOnly)),
    }
}

fn api_keys(secret: &str) -> Mounted {
    let name = "api-keys";
    Mounted {
        volume: secret_volume(name, secret),
        engine: Some(mount(name, paths::API_KEYS_DIR, Access::ReadOnly)),
        fetch: None,
    }
}

fn shared_memory() -> Mounted {
    let name = "shared-memory";
    Mounted {
        volume: empty_dir(name, Some("Memory".into()), Some(Quantity(SHARED_MEMORY_SIZE.into()))),
        engine: Some(mount(name, "/dev/shm", Access::ReadWrite)),
        fetch: None,
    }
}

fn scratch() -> Mounted {
    let name = "scratch";
    let on_tmp = || Some(mount(name, "/tmp", Access::ReadWrite));
    Mounted { volume: empty_dir(name, None, Some(Quantity(SCRATCH_SIZE.into()))), engine: on_tmp(), fetch: on_tmp() }
}

fn empty_dir(name: &str, medium: Option<String>, size_limit: Option<Quantity>) -> Volume {
    let source = EmptyDirVolumeSource { medium, size_limit };
    Volume { name: name.into(), empty_dir: Some(source), ..Volume::default() }
}

fn claim_volume(name: &str, claim: &str, read_only: bool) -> Volume {
    let source =
        PersistentVolumeClaimVolumeSource { claim_name: claim.to_owned(), read_only: read_only.then_some(true) };
    Volume { name: name.into(), persistent_volume_claim: Some(source), ..Volume::default() }
}

fn secret_volume(name: &str, secret: &str) -> Volume {
    let source = SecretVolumeSource {
        secret_name: Some(secret.to_owned()),
        default_mode: Some(SECRET_MODE),
        ..SecretVolumeSource::default()
    };
    Volume { name: name.into(), secret: Some(source), ..Volume::default() }
}

enum Access {
    ReadOnly,
    ReadWrite,
}

fn mount(volume: &str, path: &str, access: Access) -> VolumeMount {
    VolumeMount {
        name: volume.to_owned(),
        mount_path: path.to_owned(),
        read_only: matches!(access, Access::ReadOnly).then_some(true),
        ..VolumeMount::default()
    }
}
