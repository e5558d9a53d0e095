//! A workload: pods of one template. Its annotations hold what was chosen when the template was made.

use k8s_openapi::api::apps::v1::{Deployment, DeploymentSpec, DeploymentStrategy, RollingUpdateDeployment};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;

use super::{metadata, pod};
use crate::choice::Choice;
use crate::digest::fingerprint;
use crate::names::{
    self, CHOSEN_COMMIT, CHOSEN_QUANTIZATION, CHOSEN_TENSOR, GIVEN_UP, SPEC_HASH, TEMPLATE_HASH, WorkloadKind,
};
use crate::observed::Defaults;
use crate::rollout::Room;
use crate::validate::ValidatedService;

/// Old ReplicaSets are for looking at: what is gone back to are ControllerRevisions.
const REPLICA_SETS: i32 = 10;
/// Choices that pods tell too. The image is in their containers.
const ON_TEMPLATE: [&str; 3] = [CHOSEN_TENSOR, CHOSEN_QUANTIZATION, CHOSEN_COMMIT];

/// The Deployment of one workload, made with this choice, of so many replicas, replaced as `room` has it.
pub fn build(
    service: &ValidatedService,
    workload: WorkloadKind,
    choice: &Choice,
    replicas: i32,
    room: Room,
    defaults: &Defaults,
) -> Deployment {
    let mut template = pod::build(&service.decided(&choice.picked), workload, &choice.image, defaults);
    let held = choice.annotations().into_iter().filter(|(key, _)| ON_TEMPLATE.contains(&key.as_str()));
    let mut held = held.peekable();
    if held.peek().is_some() {
        template.metadata.get_or_insert_default().annotations.get_or_insert_default().extend(held);
    }
    let hash = fingerprint(&template);
    let template_meta = template.metadata.get_or_insert_default();
    template_meta.annotations.get_or_insert_default().insert(TEMPLATE_HASH.to_owned(), hash.clone());
    let mut meta = metadata(service, workload.deployment(&service.name));
    meta.labels.get_or_insert_default().extend(names::workload_labels(&service.name, workload));
    let mut annotations = choice.annotations();
    annotations.insert(SPEC_HASH.to_owned(), service.spec_hash.clone());
    annotations.insert(TEMPLATE_HASH.to_owned(), hash);
    if room == Room::GivenUp {
        annotations.insert(GIVEN_UP.to_owned(), "true".to_owned());
    }
    meta.annotations = Some(annotations);
    Deployment {
        metadata: meta,
        spec: Some(DeploymentSpec {
            replicas: Some(replicas),
            selector: LabelSelector {
                match_labels: Some(names::workload_labels(&service.name, workload)),
                ..LabelSelector::default()
            },
            template,
            strategy: Some(strategy(room)),
            progress_deadline_seconds: Some(service.rollout.progress_deadline_seconds),
            paused: (service.rollout.is_paused || room == Room::GivenUp).then_some(true),
            revision_history_limit: Some(REPLICA_SETS),
            ..DeploymentSpec::default()
        }),
        status: None,
    }
}

fn strategy(room: Room) -> DeploymentStrategy {
    let (max_surge, max_unavailable) = match room {
        Room::Surge | Room::GivenUp => (1, 0),
        Room::Drain => (0, 1),
    };
    DeploymentStrategy {
        type_: Some("RollingUpdate".into()),
        rolling_update: Some(RollingUpdateDeployment {
            max_surge: Some(IntOrString::Int(max_surge)),
            max_unavailable: Some(IntOrString::Int(max_unavailable)),
        }),
    }
}
