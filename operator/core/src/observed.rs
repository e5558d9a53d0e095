//! What was read from the cluster before planning: plain data, complete, and nothing else.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::apps::v1::{ControllerRevision, Deployment, StatefulSet};
use k8s_openapi::api::autoscaling::v2::HorizontalPodAutoscaler;
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::{ConfigMap, Node, Service, ServiceAccount};
use k8s_openapi::api::networking::v1::NetworkPolicy;
use k8s_openapi::api::policy::v1::PodDisruptionBudget;

use crate::autoscale::Memory;
use crate::names::Reference;
use crate::pod::Pod;
use crate::window::LoadWindow;

/// Everything that planning one service looks at besides its spec.
///
/// Objects are those that carry the service's labels (see [`crate::names::selector`]); objects of the same name that
/// belong to somebody else must be included too, so that they are refused instead of overwritten.
#[derive(Clone, Debug, Default)]
pub struct Observed {
    /// Workloads, by label or by name.
    pub deployments: Vec<Arc<Deployment>>,
    /// Services, by label or by name.
    pub services: Vec<Arc<Service>>,
    /// ServiceAccounts, by label or by name.
    pub service_accounts: Vec<Arc<ServiceAccount>>,
    /// Budgets, by label or by name.
    pub disruption_budgets: Vec<Arc<PodDisruptionBudget>>,
    /// Policies, by label or by name.
    pub network_policies: Vec<Arc<NetworkPolicy>>,
    /// Jobs, by label.
    pub jobs: Vec<Arc<Job>>,
    /// Revisions, by label.
    pub revisions: Vec<Arc<ControllerRevision>>,
    /// Autoscalers whose target is the service or one of its workloads, whoever made them; and those of our names.
    pub autoscalers: Vec<Arc<HorizontalPodAutoscaler>>,
    /// What the autoscaler learned, looked up by name before it is written; of whomever it is.
    pub capacities: Vec<Arc<ConfigMap>>,
    /// Pods, by label, terminating ones included.
    pub pods: Vec<Arc<Pod>>,
    /// Workers of each pod that leads some, by label.
    pub stateful_sets: Vec<Arc<StatefulSet>>,
    /// Their pods, looked up while the service is not ready.
    pub workers: Vec<Arc<Pod>>,
    /// Pods of the inspect Jobs, looked up while there is one.
    pub inspectors: Vec<Arc<Pod>>,
    /// Every node of the cluster; `None` where they may not be read.
    pub nodes: Option<Vec<Arc<Node>>>,
    /// This service's turn has come to take the operator's default engine image: [`crate::upgrade::whose_turn`].
    pub is_upgrade_turn: bool,
    /// Warning events about the service's pods and ReplicaSets, newest first, bounded by the observer.
    pub warnings: Vec<Warning>,
    /// Of [`crate::names::references`], those that were looked up and do not exist.
    pub absent: Vec<Reference>,
    /// Readings of the engines.
    pub load: Arc<LoadWindow>,
    /// What the autoscaler remembered at the end of the last plan: [`crate::plan::Plan::memory`].
    pub memory: Memory,
}

/// A Warning event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Warning {
    /// The object it is about, `Pod/name`.
    pub about: String,
    /// The event's reason, as `FailedMount`.
    pub reason: String,
    /// The event's text.
    pub message: String,
    /// When it was last seen.
    pub at: Timestamp,
}

/// What the operator's own configuration gives to every service.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Defaults {
    /// Engine image for specs that name none.
    pub engine_image: String,
    /// Pull policy of the engine's image; `None` leaves it to Kubernetes.
    pub image_pull_policy: Option<String>,
    /// Namespace of the operator's pods, which alone may reach the admin port (with `monitoring_namespace`).
    /// `None` when the operator runs outside the cluster.
    pub operator_namespace: Option<String>,
    /// Labels of the operator's pods.
    pub operator_pod_labels: BTreeMap<String, String>,
    /// Namespace whose pods may read `/metrics`.
    pub monitoring_namespace: Option<String>,
    /// DNS suffix of the cluster, `cluster.local`.
    pub cluster_domain: String,
    /// Between readings of an engine with traffic: three of them missing are a silence.
    pub scrape_active: Duration,
    /// Between readings of an idle engine.
    pub scrape_idle: Duration,
    /// How long pods wait for their model's header to be read; `None`: it is not read.
    pub inspect_timeout: Option<Duration>,
}
