//! A workload: pods of one template. Its annotations hold what was chosen when the template was made.

use std::collections::BTreeMap;

use k8s_openapi::api::apps::v1::{Deployment, DeploymentSpec, DeploymentStrategy, RollingUpdateDeployment};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;

use super::{metadata, pod};
use crate::digest::fingerprint;
use crate::names::{self, ENGINE_IMAGE, SPEC_HASH, TEMPLATE_HASH, WorkloadKind};
use crate::observed::Defaults;
use crate::validate::{Device, ValidatedService};

/// Without progress for so long, a rollout is reported as stuck. It goes on being tried.
const PROGRESS_DEADLINE_SECONDS: i32 = 600;
const REVISION_HISTORY_LIMIT: i32 = 10;

/// The Deployment of one workload with this engine image and so many replicas.
pub fn build(
    service: &ValidatedService,
    workload: WorkloadKind,
    image: &str,
    replicas: i32,
    defaults: &Defaults,
) -> Deployment {
    let mut template = pod::build(service, workload, image, defaults);
    let hash = fingerprint(&template);
    let template_meta = template.metadata.get_or_insert_default();
    template_meta.annotations.get_or_insert_default().insert(TEMPLATE_HASH.to_owned(), hash.clone());
    let mut meta = metadata(service, workload.deployment(&service.name));
    meta.labels.get_or_insert_default().extend(names::workload_labels(&service.name, workload));
    meta.annotations = Some(BTreeMap::from([
        (SPEC_HASH.to_owned(), service.spec_hash.clone()),
        (TEMPLATE_HASH.to_owned(), hash),
        (ENGINE_IMAGE.to_owned(), image.to_owned()),
    ]));
    Deployment {
        metadata: meta,
        spec: Some(DeploymentSpec {
            replicas: Some(replicas),
            selector: LabelSelector {
                match_labels: Some(names::workload_labels(&service.name, workload)),
                ..LabelSelector::default()
            },
            template,
            strategy: Some(strategy(&service.device)),
            progress_deadline_seconds: Some(PROGRESS_DEADLINE_SECONDS),
            revision_history_limit: Some(REVISION_HISTORY_LIMIT),
            ..DeploymentSpec::default()
        }),
        status: None,
    }
}

/// Without GPUs a new pod comes before an old one goes. With GPUs there may be none to spare, and waiting for one
/// would never end, so an old pod drains first.
fn strategy(device: &Device) -> DeploymentStrategy {
    let (max_surge, max_unavailable) = match device {
        Device::Cpu => (1, 0),
        Device::NvidiaGpu { .. } => (0, 1),
    };
    DeploymentStrategy {
        type_: Some("RollingUpdate".into()),
        rolling_update: Some(RollingUpdateDeployment {
            max_surge: Some(IntOrString::Int(max_surge)),
            max_unavailable: Some(IntOrString::Int(max_unavailable)),
        }),
    }
}
