//! The plan: what is to be done, in order, with no choices left.

use std::time::Duration;

use k8s_openapi::api::apps::v1::{ControllerRevision, Deployment, StatefulSet};
use k8s_openapi::api::autoscaling::v2::HorizontalPodAutoscaler;
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::{ConfigMap, Service, ServiceAccount};
use k8s_openapi::api::networking::v1::NetworkPolicy;
use k8s_openapi::api::policy::v1::PodDisruptionBudget;

use crate::assess::Assessment;
use crate::autoscale::Memory;
use crate::status::Outcome;

/// What is to be done for one service.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Writes, in order. A failed step ends the run; the next plan takes it up again.
    pub steps: Vec<Step>,
    /// What the autoscaler remembers until the next plan.
    pub memory: Memory,
    /// Findings for `status`: given to [`crate::status::compute`] with the outcome of the steps.
    pub assessment: Assessment,
    /// When to plan again although nothing has changed.
    pub requeue_after: Duration,
}

impl Plan {
    /// What is remembered after the plan ended with `outcome`; `before`: what was remembered when it was made. What was
    /// learned is written by the last step: where one failed, it was not.
    pub fn remembered(self, before: &Memory, outcome: &Outcome) -> Memory {
        match outcome {
            Outcome::Applied => self.memory,
            Outcome::Failed { .. } | Outcome::NamespaceEnds => Memory { kept: before.kept, ..self.memory },
        }
    }
}

/// One write.
#[derive(Clone, Debug, PartialEq)]
#[allow(clippy::large_enum_variant)] // a plan has a handful of steps, and most of them are the largest
pub enum Step {
    /// Server-side apply, forced, by the field manager [`FIELD_MANAGER`].
    Apply(Object),
    /// Merge patch a label or an annotation of a pod.
    MarkPod {
        /// The pod.
        pod: String,
        /// Which.
        mark: Mark,
        /// Its value; `None` removes it.
        value: Option<String>,
    },
    /// Merge patch `spec.replicas` of the Deployment's `scale` subresource, by the manager [`SCALE_MANAGER`].
    Scale {
        /// The Deployment.
        deployment: String,
        /// Its replicas.
        replicas: i32,
    },
    /// Merge patch `spec.replicas` of a ReplicaSet's `scale` subresource to 0: its pods do not start.
    Withdraw {
        /// The ReplicaSet.
        replica_set: String,
    },
    /// Tell the engine in a pod to drain, then delete the pod with this UID: its node is taken back.
    Evacuate {
        /// The pod.
        pod: String,
        /// Its UID.
        uid: String,
        /// Its address, if it has one.
        address: Option<String>,
        /// What is left of the node's life; `None`: the pod has its own grace period.
        budget: Option<Duration>,
    },
    /// Delete in the foreground or background as the API server's default has it, with this UID as precondition.
    Delete {
        /// Kind of the object.
        kind: Kind,
        /// Its name.
        name: String,
        /// Its UID: an object made anew under the name is not meant.
        uid: String,
    },
}

/// A key in a pod's metadata.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mark {
    /// In `metadata.labels`.
    Label(&'static str),
    /// In `metadata.annotations`.
    Annotation(&'static str),
}

/// Field manager of everything but replicas.
pub const FIELD_MANAGER: &str = "windlass-operator";
/// Field manager of replicas.
pub const SCALE_MANAGER: &str = "windlass-operator-scale";

/// Kinds of children.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    /// core/v1
    ServiceAccount,
    /// core/v1
    Service,
    /// networking.k8s.io/v1
    NetworkPolicy,
    /// policy/v1
    PodDisruptionBudget,
    /// batch/v1
    Job,
    /// apps/v1
    ControllerRevision,
    /// autoscaling/v2
    HorizontalPodAutoscaler,
    /// apps/v1
    Deployment,
}

/// A child as it is to be applied.
#[derive(Clone, Debug, PartialEq)]
#[allow(clippy::large_enum_variant)] // as above
pub enum Object {
    /// The identity of the pods.
    ServiceAccount(ServiceAccount),
    /// The endpoint.
    Service(Service),
    /// Who may connect.
    NetworkPolicy(NetworkPolicy),
    /// How many pods may be evicted at once.
    PodDisruptionBudget(PodDisruptionBudget),
    /// What the autoscaler learned.
    ConfigMap(ConfigMap),
    /// What reads the model's header.
    Job(Box<Job>),
    /// What a template was made from.
    ControllerRevision(ControllerRevision),
    /// What sets `spec.replicas` in mode HPA.
    HorizontalPodAutoscaler(Box<HorizontalPodAutoscaler>),
    /// The other nodes of a replica.
    StatefulSet(Box<StatefulSet>),
    /// A workload.
    Deployment(Box<Deployment>),
}
