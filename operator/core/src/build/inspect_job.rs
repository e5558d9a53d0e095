//! The Job that reads a model's header where its pods would run: in the service's namespace, as its ServiceAccount, with
//! its Secret and volumes. The answer is its termination message.

use std::collections::BTreeMap;

use k8s_openapi::api::batch::v1::{Job, JobSpec};
use k8s_openapi::api::core::v1::{Container, LocalObjectReference, PodSpec, PodTemplateSpec, ResourceRequirements};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

use super::{args, metadata, pod, service_account, some, volumes};
use crate::names::{INSPECTION, instance_labels};
use crate::observed::Defaults;
use crate::validate::ValidatedService;

/// Name of the container.
const CONTAINER: &str = "inspect";
/// Digits of the source's fingerprint in a Job's name: an edited source gets a Job of its own.
const DIGITS: usize = 8;
/// A source that answers neither yes nor no is given up.
const DEADLINE_SECONDS: i64 = 120;
/// How long a failure is remembered before the model is read again.
const REMEMBERED_SECONDS: i32 = 600;

/// Name of the Job for the service's source.
pub fn name(service: &ValidatedService) -> String {
    let digits = service.source_hash.get(..DIGITS).unwrap_or(&service.source_hash);
    format!("{}-i-{digits}", service.name)
}

/// The Job.
pub fn build(service: &ValidatedService, defaults: &Defaults) -> Job {
    Job {
        metadata: metadata(service, name(service)),
        spec: Some(JobSpec {
            // A failure is told at once: pods go on without the answer, and a later Job asks again.
            backoff_limit: Some(0),
            active_deadline_seconds: Some(DEADLINE_SECONDS),
            ttl_seconds_after_finished: Some(REMEMBERED_SECONDS),
            template: PodTemplateSpec {
                // None of the labels by which the Service and the budget know engine pods.
                metadata: Some(ObjectMeta { labels: Some(labels(service)), ..ObjectMeta::default() }),
                spec: Some(spec(service, defaults)),
            },
            ..JobSpec::default()
        }),
        status: None,
    }
}

fn labels(service: &ValidatedService) -> BTreeMap<String, String> {
    let mut labels = instance_labels(&service.name);
    labels.insert("app.kubernetes.io/name".into(), "windlass-inspect".into());
    labels.insert(INSPECTION.into(), service.source_hash.clone());
    labels
}

fn spec(service: &ValidatedService, defaults: &Defaults) -> PodSpec {
    let mounted = volumes::for_inspection(service);
    let secrets = service.image_pull_secrets.iter().map(|name| LocalObjectReference { name: name.clone() });
    let image = service.engine.image.as_deref().unwrap_or(&defaults.engine_image);
    PodSpec {
        containers: vec![Container {
            args: Some(args::inspect(&service.source)),
            resources: Some(resources()),
            volume_mounts: Some(mounted.iter().filter_map(|mounted| mounted.fetch.clone()).collect()),
            ..pod::container(CONTAINER, image, defaults)
        }],
        volumes: Some(mounted.into_iter().map(|mounted| mounted.volume).collect()),
        restart_policy: Some("Never".into()),
        service_account_name: Some(service_account::name(service)),
        automount_service_account_token: Some(false),
        enable_service_links: Some(false),
        image_pull_secrets: some(secrets.collect()),
        security_context: Some(pod::pod_security()),
        // Where the claim can be mounted, and a user's pods may be; not on the GPUs that it is to find out about.
        node_selector: (!service.scheduling.node_selector.is_empty()).then(|| service.scheduling.node_selector.clone()),
        tolerations: some(service.scheduling.tolerations.clone()),
        ..PodSpec::default()
    }
}

/// A header is some MiB.
fn resources() -> ResourceRequirements {
    let amounts = |cpu: &str, memory: &str| {
        let amounts = [("cpu", cpu), ("memory", memory)];
        Some(amounts.map(|(name, amount)| (name.to_owned(), Quantity(amount.to_owned()))).into())
    };
    ResourceRequirements { requests: amounts("10m", "64Mi"), limits: amounts("1", "512Mi"), claims: None }
}
