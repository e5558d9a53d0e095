//! The only writes: walks a plan in order, without a choice of its own, and says how it ended.

use crate::error::Error;
use crate::metrics::Metrics;
use crate::scrape;
use crate::written::{ServiceKey, Writes, Written};
use jiff::Timestamp;
use k8s_openapi::NamespaceResourceScope;
use k8s_openapi::api::apps::v1::{ControllerRevision, Deployment, ReplicaSet};
use k8s_openapi::api::autoscaling::v2::HorizontalPodAutoscaler;
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::{Service, ServiceAccount};
use k8s_openapi::api::events::v1::Event as EventObject;
use k8s_openapi::api::networking::v1::NetworkPolicy;
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta, Time};
use kube::api::{DeleteParams, Patch, PatchParams, PostParams, Preconditions};
use kube::{Api, Client, Resource, ResourceExt};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::json;
use std::fmt::Debug;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};
use windlass_engine_contract::ADMIN_PORT;
use windlass_operator_api::InferenceService;
use windlass_operator_core::observed::Observed;
use windlass_operator_core::plan::{FIELD_MANAGER, Kind, Mark, Object, SCALE_MANAGER, Step};
use windlass_operator_core::pod::Pod;
use windlass_operator_core::status::{Event, StatusChange};

/// Of a node's notice, kept for streams to end with their error event and for the process to end.
const LAST_WORDS: Duration = Duration::from_secs(3);
/// Until an engine that was told to drain is taken to be silent.
const DRAIN_ANSWER: Duration = Duration::from_secs(1);
/// Longest text of an event that the API server takes, bytes.
const MAX_NOTE_BYTES: usize = 1024;

/// Writes for one client.
pub struct Applier {
    client: Client,
    writes: Arc<Writes>,
    metrics: Metrics,
    /// Name of this replica, as events report it.
    identity: String,
}

/// Requests of one plan: for which service, over what.
struct Target<'a> {
    key: &'a ServiceKey,
    observed: &'a Observed,
}

impl Applier {
    /// An applier that notes what it writes in `writes`.
    pub fn new(client: Client, writes: Arc<Writes>, metrics: Metrics, identity: &str) -> Self {
        Applier { client, writes, metrics, identity: identity.to_owned() }
    }

    /// Carries out `steps` in order, to the first that fails.
    ///
    /// # Errors
    /// A request was refused or not answered.
    pub async fn apply(&self, key: &ServiceKey, observed: &Observed, steps: &[Step]) -> Result<(), Error> {
        let target = Target { key, observed };
        for step in steps {
            self.step(&target, step).await.map_err(|error| Error::attempting(attempt(step))(error))?;
        }
        Ok(())
    }

    /// Writes the status where it changed, then the events of the change.
    ///
    /// # Errors
    /// The status could not be written. An event that could not is only logged: the status says the same.
    pub async fn publish(&self, service: &InferenceService, change: StatusChange) -> Result<(), Error> {
        if let Some(status) = &change.status {
            self.status(service, status).await.map_err(Error::attempting("write the status"))?;
        }
        for event in &change.events {
            if let Err(error) = self.event(service, event).await {
                tracing::warn!(reason = event.reason, error = %crate::error::chain(&error), "an event was not written");
            }
        }
        Ok(())
    }

    /// Tells that `service` cannot be read: without its status there is no other place to say so.
    pub async fn tell_unreadable(&self, service: &impl Resource<DynamicType = ()>, why: &str) {
        let message = format!("this version of the operator cannot read the resource, which stays as it is: {why}");
        let event = Event { warning: true, reason: "Unreadable".to_owned(), action: "Read", message };
        if let Err(error) = self.event(service, &event).await {
            tracing::warn!(reason = event.reason, error = %crate::error::chain(&error), "an event was not written");
        }
    }

    async fn step(&self, target: &Target<'_>, step: &Step) -> Result<(), kube::Error> {
        match step {
            Step::Apply(object) => self.object(target, object).await,
            Step::MarkPod { pod, mark, value } => self.mark(target, pod, *mark, value.as_deref()).await,
            Step::Scale { deployment, replicas } => self.scale(target, deployment, *replicas).await,
            Step::Evacuate { pod, uid, address, budget } => {
                self.evacuate(target, pod, uid, address.as_deref(), *budget).await
            }
            Step::Withdraw { replica_set } => self.withdraw(target, replica_set).await,
            Step::Delete { kind, name, uid } => self.delete(target, *kind, name, uid).await,
        }
    }

    async fn object(&self, target: &Target<'_>, object: &Object) -> Result<(), kube::Error> {
        let (writes, observed) = (&self.writes, target.observed);
        match object {
            Object::ServiceAccount(wish) => {
                self.server_side(target, wish, &observed.service_accounts, &writes.accounts).await
            }
            Object::Service(wish) => self.server_side(target, wish, &observed.services, &writes.endpoints).await,
            Object::NetworkPolicy(wish) => {
                self.server_side(target, wish, &observed.network_policies, &writes.policies).await
            }
            Object::PodDisruptionBudget(wish) => {
                self.server_side(target, wish, &observed.disruption_budgets, &writes.budgets).await
            }
            // Not watched: the plan says when it is due.
            Object::ConfigMap(wish) => self.server_side(target, wish, &[], &writes.capacities).await,
            Object::Job(wish) => self.server_side(target, wish.as_ref(), &observed.jobs, &writes.jobs).await,
            Object::ControllerRevision(wish) => {
                self.server_side(target, wish, &observed.revisions, &writes.revisions).await
            }
            Object::HorizontalPodAutoscaler(wish) => {
                self.server_side(target, wish.as_ref(), &observed.autoscalers, &writes.autoscalers).await
            }
            Object::StatefulSet(wish) => {
                self.server_side(target, wish.as_ref(), &observed.stateful_sets, &writes.stateful_sets).await
            }
            Object::Deployment(wish) => {
                self.server_side(target, wish.as_ref(), &observed.deployments, &writes.deployments).await
            }
        }
    }

    /// Server-side apply of `wish`, unless it would change nothing.
    async fn server_side<K>(
        &self,
        target: &Target<'_>,
        wish: &K,
        observed: &[Arc<K>],
        written: &Written<K>,
    ) -> Result<(), kube::Error>
    where
        K: Resource<DynamicType = (), Scope = NamespaceResourceScope> + Clone + DeserializeOwned + Serialize + Debug,
    {
        let name = wish.name_any();
        let current = observed.iter().find(|object| object.name_any() == name);
        if written.is_current(target.key, wish, current.map(Arc::as_ref)) {
            return Ok(());
        }
        let request = PatchParams::apply(FIELD_MANAGER).force();
        let answer = self.api::<K>(target).patch(&name, &request, &Patch::Apply(wish)).await;
        let answer = self.counted::<K, _>(answer)?;
        written.applied(target.key, wish, answer, Instant::now());
        tracing::info!(kind = %K::kind(&()), name, "applied");
        Ok(())
    }

    async fn mark(&self, target: &Target<'_>, pod: &str, mark: Mark, value: Option<&str>) -> Result<(), kube::Error> {
        let patch = Patch::Merge(match mark {
            Mark::Label(key) => json!({"metadata": {"labels": {key: value}}}),
            Mark::Annotation(key) => json!({"metadata": {"annotations": {key: value}}}),
        });
        let request = PatchParams { field_manager: Some(FIELD_MANAGER.to_owned()), ..PatchParams::default() };
        let answer = self.api::<Pod>(target).patch_metadata(pod, &request, &patch).await;
        match self.counted::<Pod, _>(gone_is_fine(answer))? {
            Some(answer) => self.marked(target, answer.metadata),
            None => tracing::debug!(pod, "was gone before it could be marked"),
        }
        Ok(())
    }

    /// Notes new metadata of a pod, whose other parts stay as they were observed.
    fn marked(&self, target: &Target<'_>, metadata: ObjectMeta) {
        let observed = target.observed.pods.iter().find(|pod| pod.metadata.name == metadata.name);
        if let Some(pod) = observed {
            let pod = Pod { metadata, ..Pod::clone(pod) };
            self.writes.pods.patched(target.key, pod, Instant::now());
        }
    }

    async fn scale(&self, target: &Target<'_>, deployment: &str, replicas: i32) -> Result<(), kube::Error> {
        let request = scaling();
        let patch = Patch::Merge(json!({"spec": {"replicas": replicas}}));
        let answer = self.api::<Deployment>(target).patch_scale(deployment, &request, &patch).await;
        let answer = self.counted::<Deployment, _>(answer)?;
        self.scaled(target, deployment, replicas, answer.metadata.resource_version);
        tracing::info!(deployment, replicas, "scaled");
        Ok(())
    }

    async fn withdraw(&self, target: &Target<'_>, replica_set: &str) -> Result<(), kube::Error> {
        let request = scaling();
        let patch = Patch::Merge(json!({"spec": {"replicas": 0}}));
        let answer = self.api::<ReplicaSet>(target).patch_scale(replica_set, &request, &patch).await;
        self.counted::<ReplicaSet, _>(gone_is_fine(answer))?;
        tracing::info!(replica_set, "withdrawn");
        Ok(())
    }

    /// Notes the new replicas of a Deployment, whose other parts stay as they were observed.
    fn scaled(&self, target: &Target<'_>, name: &str, replicas: i32, version: Option<String>) {
        let mut newest = target.observed.deployments.clone();
        self.writes.deployments.overlay(target.key, &mut newest, Instant::now());
        let Some(found) = newest.iter().find(|found| found.metadata.name.as_deref() == Some(name)) else { return };
        let mut deployment = Deployment::clone(found);
        deployment.metadata.resource_version = version;
        deployment.spec.get_or_insert_default().replicas = Some(replicas);
        self.writes.deployments.patched(target.key, deployment, Instant::now());
    }

    /// Tells the engine how long it has, then deletes its pod with that grace. An engine that does not answer drains by
    /// its own time when the deletion reaches it.
    async fn evacuate(
        &self,
        target: &Target<'_>,
        pod: &str,
        uid: &str,
        address: Option<&str>,
        budget: Option<Duration>,
    ) -> Result<(), kube::Error> {
        if let (Some(address), Some(budget)) = (address.and_then(|text| text.parse::<IpAddr>().ok()), budget) {
            let admin = SocketAddr::new(address, ADMIN_PORT);
            if let Err(error) = scrape::drain(admin, budget.saturating_sub(LAST_WORDS), DRAIN_ANSWER).await {
                tracing::warn!(pod, %error, "the engine was not told to drain");
            }
        }
        let request = DeleteParams {
            grace_period_seconds: budget.and_then(|budget| u32::try_from(budget.as_secs().max(1)).ok()),
            preconditions: Some(this_one(uid)),
            ..DeleteParams::default()
        };
        let answer = self.api::<Pod>(target).delete(pod, &request).await;
        self.counted::<Pod, _>(gone_is_fine(answer))?;
        tracing::info!(pod, ?budget, "evacuated");
        self.leaves(target, pod);
        Ok(())
    }

    /// Notes that a pod leaves, before the watch tells it.
    fn leaves(&self, target: &Target<'_>, name: &str) {
        let observed = target.observed.pods.iter().find(|pod| pod.metadata.name.as_deref() == Some(name));
        if let Some(pod) = observed {
            let mut pod = Pod::clone(pod);
            pod.metadata.deletion_timestamp = Some(Time(Timestamp::now()));
            pod.metadata.resource_version = pod.metadata.resource_version.as_deref().and_then(next_version);
            self.writes.pods.patched(target.key, pod, Instant::now());
        }
    }

    async fn delete(&self, target: &Target<'_>, kind: Kind, name: &str, uid: &str) -> Result<(), kube::Error> {
        let writes = &self.writes;
        match kind {
            Kind::ServiceAccount => self.remove::<ServiceAccount>(target, name, uid, &writes.accounts).await,
            Kind::Service => self.remove::<Service>(target, name, uid, &writes.endpoints).await,
            Kind::NetworkPolicy => self.remove::<NetworkPolicy>(target, name, uid, &writes.policies).await,
            Kind::PodDisruptionBudget => self.remove::<PodDisruptionBudget>(target, name, uid, &writes.budgets).await,
            Kind::Job => self.remove::<Job>(target, name, uid, &writes.jobs).await,
            Kind::ControllerRevision => self.remove::<ControllerRevision>(target, name, uid, &writes.revisions).await,
            Kind::HorizontalPodAutoscaler => {
                self.remove::<HorizontalPodAutoscaler>(target, name, uid, &writes.autoscalers).await
            }
            Kind::Deployment => self.remove::<Deployment>(target, name, uid, &writes.deployments).await,
        }
    }

    async fn remove<K>(
        &self,
        target: &Target<'_>,
        name: &str,
        uid: &str,
        written: &Written<K>,
    ) -> Result<(), kube::Error>
    where
        K: Resource<DynamicType = (), Scope = NamespaceResourceScope> + Clone + DeserializeOwned + Serialize + Debug,
    {
        let request = DeleteParams { preconditions: Some(this_one(uid)), ..DeleteParams::background() };
        let answer = self.api::<K>(target).delete(name, &request).await;
        self.counted::<K, _>(gone_is_fine(answer))?;
        written.forget_object(target.key, name);
        tracing::info!(kind = %K::kind(&()), name, "deleted");
        Ok(())
    }

    async fn status(&self, service: &InferenceService, status: &impl Serialize) -> Result<(), kube::Error> {
        let (namespace, name) = (service.namespace().unwrap_or_default(), service.name_any());
        let api = Api::<InferenceService>::namespaced(self.client.clone(), &namespace);
        let body = json!({
            "apiVersion": InferenceService::api_version(&()), "kind": InferenceService::kind(&()),
            "metadata": {"name": name, "uid": service.metadata.uid},
            "status": status,
        });
        let request = PatchParams::apply(FIELD_MANAGER).force();
        let answer = gone_is_fine(api.patch_status(&name, &request, &Patch::Apply(body)).await);
        if let Some(answer) = self.counted::<InferenceService, _>(answer)? {
            self.writes.services.patched(&(namespace, name), answer, Instant::now());
        }
        Ok(())
    }

    /// Creates the event. Transitions are rare, so none is folded into an older one, whose text would hide its own.
    async fn event(&self, service: &impl Resource<DynamicType = ()>, event: &Event) -> Result<(), kube::Error> {
        let now = Timestamp::now();
        let namespace = service.namespace().unwrap_or_default();
        let metadata = ObjectMeta {
            name: Some(format!("{}.{:x}", service.name_any(), now.as_nanosecond())),
            namespace: Some(namespace.clone()),
            ..ObjectMeta::default()
        };
        let object = EventObject {
            metadata,
            event_time: Some(MicroTime(now)),
            type_: Some(if event.warning { "Warning" } else { "Normal" }.to_owned()),
            reason: Some(event.reason.clone()),
            action: Some(event.action.to_owned()),
            note: Some(clipped(&event.message, MAX_NOTE_BYTES).to_owned()),
            regarding: Some(service.object_ref(&())),
            reporting_controller: Some("windlass.dev/operator".to_owned()),
            reporting_instance: Some(self.identity.clone()),
            ..EventObject::default()
        };
        let api = Api::<EventObject>::namespaced(self.client.clone(), &namespace);
        let answer = api.create(&PostParams::default(), &object).await;
        self.counted::<EventObject, _>(answer).map(drop)
    }

    fn api<K>(&self, target: &Target<'_>) -> Api<K>
    where
        K: Resource<DynamicType = (), Scope = NamespaceResourceScope>,
    {
        Api::namespaced(self.client.clone(), &target.key.0)
    }

    /// Counts a write by its kind and result.
    fn counted<K: Resource<DynamicType = ()>, T>(&self, answer: Result<T, kube::Error>) -> Result<T, kube::Error> {
        let result = match &answer {
            Ok(_) => "done",
            Err(kube::Error::Api(_)) => "refused",
            Err(_) => "failed",
        };
        self.metrics.wrote(&K::plural(&()), result);
        answer
    }
}

/// A change of replicas, by the manager of those.
fn scaling() -> PatchParams {
    PatchParams { field_manager: Some(SCALE_MANAGER.to_owned()), ..PatchParams::default() }
}

/// An object made anew under the name is not meant.
fn this_one(uid: &str) -> Preconditions {
    Preconditions { uid: Some(uid.to_owned()), resource_version: None }
}

/// What a step attempts, in words.
fn attempt(step: &Step) -> String {
    match step {
        Step::Apply(object) => {
            let (kind, name) = match object {
                Object::ServiceAccount(object) => ("ServiceAccount", object.name_any()),
                Object::Service(object) => ("Service", object.name_any()),
                Object::NetworkPolicy(object) => ("NetworkPolicy", object.name_any()),
                Object::PodDisruptionBudget(object) => ("PodDisruptionBudget", object.name_any()),
                Object::ConfigMap(object) => ("ConfigMap", object.name_any()),
                Object::Job(object) => ("Job", object.name_any()),
                Object::ControllerRevision(object) => ("ControllerRevision", object.name_any()),
                Object::HorizontalPodAutoscaler(object) => ("HorizontalPodAutoscaler", object.name_any()),
                Object::StatefulSet(object) => ("StatefulSet", object.name_any()),
                Object::Deployment(object) => ("Deployment", object.name_any()),
            };
            format!("apply {kind}/{name}")
        }
        Step::MarkPod { pod, mark: Mark::Label(key), .. } => format!("label Pod/{pod} with {key}"),
        Step::MarkPod { pod, mark: Mark::Annotation(key), .. } => format!("annotate Pod/{pod} with {key}"),
        Step::Evacuate { pod, .. } => format!("delete Pod/{pod}, whose node is taken back"),
        Step::Scale { deployment, replicas } => format!("scale Deployment/{deployment} to {replicas}"),
        Step::Withdraw { replica_set } => format!("scale ReplicaSet/{replica_set} to 0"),
        Step::Delete { kind, name, .. } => format!("delete {kind:?}/{name}"),
    }
}

/// A version after `version`, so that what was noted counts until the watch brings the server's own.
fn next_version(version: &str) -> Option<String> {
    Some((version.parse::<u64>().ok()? + 1).to_string())
}

/// An object that is gone, or was made anew under its name, is not the one that was meant.
fn gone_is_fine<T>(answer: Result<T, kube::Error>) -> Result<Option<T>, kube::Error> {
    match answer {
        Ok(answer) => Ok(Some(answer)),
        Err(kube::Error::Api(status)) if matches!(status.code, 404 | 409) => Ok(None),
        Err(error) => Err(error),
    }
}

/// The longest prefix of `text` within `bytes` that ends between characters.
fn clipped(text: &str, bytes: usize) -> &str {
    &text[..text.floor_char_boundary(bytes)]
}

#[cfg(test)]
mod tests;
