//! The watches: one per kind and scope, each filling a store that `observe` reads, all of them together the queue of
//! services to reconcile.
//!
//! Which objects are watched is decided here; what they mean is not. Of children only those with the service's label
//! arrive; Secrets and the content of ConfigMaps are never read.

use crate::children::{Children, Form, WatchEnded, Whole, owner};
use crate::config::Scope;
use crate::metrics::Metrics;
use crate::strip;
use futures::FutureExt;
use futures::stream::{self, BoxStream, SelectAll, Stream, StreamExt, TryStreamExt};
use k8s_openapi::NamespaceResourceScope;
use k8s_openapi::api::apps::v1::{ControllerRevision, Deployment, StatefulSet};
use k8s_openapi::api::autoscaling::v2::HorizontalPodAutoscaler;
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::{Node, Service, ServiceAccount, Taint};
use k8s_openapi::api::networking::v1::NetworkPolicy;
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use kube::core::DeserializeGuard;
use kube::runtime::WatchStreamExt;
use kube::runtime::reflector::{self, ObjectRef, Store};
use kube::runtime::watcher::{self, Event, watcher};
use kube::{Api, Client, Resource, ResourceExt};
use serde::de::DeserializeOwned;
use std::collections::HashMap;
use std::fmt::Debug;
use windlass_operator_api::InferenceService;
use windlass_operator_core::names::{SERVICE_LABEL, SPOT_SUFFIX};
use windlass_operator_core::pod::Pod;

/// A service that was read, or the reason why it could not be: one bad object cannot stall the watch.
pub type Guarded = DeserializeGuard<InferenceService>;

/// What the watches of one scope hold.
#[derive(Clone)]
pub struct Stores {
    /// Every service.
    pub services: Store<Guarded>,
    /// Workloads.
    pub deployments: Children<Deployment>,
    /// Workers of pods that lead some.
    pub stateful_sets: Children<StatefulSet>,
    /// Endpoints.
    pub endpoints: Children<Service>,
    /// Identities of pods.
    pub accounts: Children<ServiceAccount>,
    /// Disruption budgets.
    pub budgets: Children<PodDisruptionBudget>,
    /// Network policies.
    pub policies: Children<NetworkPolicy>,
    /// Jobs that read models' headers.
    pub jobs: Children<Job>,
    /// What templates were made from.
    pub revisions: Children<ControllerRevision>,
    /// Autoscalers, those of others too: they may set the replicas of a service of ours.
    pub autoscalers: Store<HorizontalPodAutoscaler>,
    /// Engine pods.
    pub pods: Children<Pod, Whole<Pod>>,
    /// Nodes; `None` where only some namespaces are served, with rights on nothing else.
    pub nodes: Option<Store<Node>>,
}

/// Services and their engines: what reading them takes.
#[derive(Clone)]
pub struct Engines {
    /// Every service.
    pub services: Store<Guarded>,
    /// Engine pods.
    pub pods: Children<Pod, Whole<Pod>>,
}

impl Engines {
    /// Watches these two alone. Nothing is read until the stream is polled.
    pub fn watch(client: &Client, scope: &Scope, metrics: &Metrics) -> (Engines, BoxStream<'static, ()>) {
        let watch = Watch { client, scope, metrics };
        let (services, touched) = watch.services();
        let mut queue: Queue = SelectAll::new();
        queue.push(touched);
        let pods = watch.children(&services, &mut queue);
        (Engines { services, pods }, queue.map(drop).boxed())
    }
}

/// Services to reconcile, as the watches find them.
pub type Queue = SelectAll<BoxStream<'static, ObjectRef<Guarded>>>;

impl Stores {
    /// Starts every watch of `scope`. Nothing is read until the queue is polled.
    pub fn watch(client: &Client, scope: &Scope, metrics: &Metrics) -> (Stores, Queue) {
        let watch = Watch { client, scope, metrics };
        let (services, touched) = watch.services();
        let mut queue: Queue = SelectAll::new();
        queue.push(touched);
        let stores = Stores {
            deployments: watch.children(&services, &mut queue),
            stateful_sets: watch.children(&services, &mut queue),
            endpoints: watch.children(&services, &mut queue),
            accounts: watch.children(&services, &mut queue),
            budgets: watch.children(&services, &mut queue),
            policies: watch.children(&services, &mut queue),
            jobs: watch.children(&services, &mut queue),
            revisions: watch.children(&services, &mut queue),
            autoscalers: watch.autoscalers(&services, &mut queue),
            pods: watch.children(&services, &mut queue),
            nodes: None,
            services,
        };
        let nodes = (*scope == Scope::Cluster).then(|| watch.nodes(&stores, &mut queue));
        (Stores { nodes, ..stores }, queue)
    }

    /// Waits for the first list of every kind: a plan made before would take what has not arrived for missing.
    ///
    /// # Errors
    /// The watches have ended.
    pub async fn ready(&self) -> Result<(), WatchEnded> {
        listed(&self.services).await?;
        self.deployments.listed().await?;
        self.stateful_sets.listed().await?;
        self.endpoints.listed().await?;
        self.accounts.listed().await?;
        self.budgets.listed().await?;
        self.policies.listed().await?;
        self.jobs.listed().await?;
        self.revisions.listed().await?;
        listed(&self.autoscalers).await?;
        if let Some(nodes) = &self.nodes {
            listed(nodes).await?;
        }
        self.pods.listed().await
    }

    /// Kinds whose first list has not arrived.
    pub fn missing(&self) -> Vec<&'static str> {
        [
            is_missing(&self.services).then_some("inferenceservices"),
            self.deployments.is_missing().then_some("deployments"),
            self.stateful_sets.is_missing().then_some("statefulsets"),
            self.endpoints.is_missing().then_some("services"),
            self.accounts.is_missing().then_some("serviceaccounts"),
            self.budgets.is_missing().then_some("poddisruptionbudgets"),
            self.policies.is_missing().then_some("networkpolicies"),
            self.jobs.is_missing().then_some("jobs"),
            self.revisions.is_missing().then_some("controllerrevisions"),
            is_missing(&self.autoscalers).then_some("horizontalpodautoscalers"),
            self.nodes.as_ref().is_some_and(is_missing).then_some("nodes"),
            self.pods.is_missing().then_some("pods"),
        ]
        .into_iter()
        .flatten()
        .collect()
    }

    /// Whether the first list of services has arrived.
    pub fn has_services(&self) -> bool {
        !is_missing(&self.services)
    }

    /// What reading engines takes.
    pub fn engines(&self) -> Engines {
        Engines { services: self.services.clone(), pods: self.pods.clone() }
    }

    /// Every service that could be read.
    pub fn services(&self) -> Vec<InferenceService> {
        self.services.state().iter().filter_map(|service| service.0.as_ref().ok().cloned()).collect()
    }
}

async fn listed<K>(store: &Store<K>) -> Result<(), WatchEnded>
where
    K: reflector::Lookup<DynamicType = ()> + Clone + 'static,
{
    store.wait_until_ready().await.map_err(|_| WatchEnded)
}

fn is_missing<K>(store: &Store<K>) -> bool
where
    K: reflector::Lookup<DynamicType = ()> + Clone + 'static,
{
    store.wait_until_ready().now_or_never().is_none()
}

/// What every watch of a scope has in common.
struct Watch<'a> {
    client: &'a Client,
    scope: &'a Scope,
    metrics: &'a Metrics,
}

impl Watch<'_> {
    /// Services, queued when anything but their status has changed.
    fn services(&self) -> (Store<Guarded>, BoxStream<'static, ObjectRef<Guarded>>) {
        let (store, events) = self.stored(self.objects(), strip::object);
        let (all, mut seen) = (store.clone(), HashMap::new());
        (store, events.flat_map(move |event| stream::iter(changed_services(event, &all, &mut seen))).boxed())
    }

    /// Children of one kind; every change of one queues the service it belongs to.
    fn children<K, F>(&self, services: &Store<Guarded>, queue: &mut Queue) -> Children<K, F>
    where
        F: Form<K> + Send + Sync + 'static,
        K: Resource<DynamicType = (), Scope = NamespaceResourceScope>
            + Clone
            + DeserializeOwned
            + Debug
            + Send
            + Sync
            + 'static,
    {
        let labelled = watcher::Config::default().labels(SERVICE_LABEL);
        let (children, mut feed) = Children::new();
        let events = self.start(self.objects(), labelled, strip::object, move |event| feed.take(event));
        let services = services.clone();
        queue.push(events.flat_map(move |event| stream::iter(owners(event, &services))).boxed());
        children
    }

    /// Autoscalers, each of which queues the service that it sets the replicas of.
    fn autoscalers(&self, services: &Store<Guarded>, queue: &mut Queue) -> Store<HorizontalPodAutoscaler> {
        let (store, events) = self.stored(self.objects(), strip::autoscaler);
        let services = services.clone();
        queue.push(events.flat_map(move |event| stream::iter(scaled_by(event, &services))).boxed());
        store
    }

    /// Nodes; one whose taints change, or that goes, queues the services that have pods on it.
    fn nodes(&self, stores: &Stores, queue: &mut Queue) -> Store<Node> {
        let (store, events) = self.stored(Api::all(self.client.clone()), strip::node);
        let (pods, mut seen) = (stores.pods.clone(), HashMap::new());
        queue.push(events.flat_map(move |event| stream::iter(residents(event, &pods, &mut seen))).boxed());
        store
    }

    /// The objects of a kind in the scope.
    fn objects<K: Resource<DynamicType = (), Scope = NamespaceResourceScope>>(&self) -> Api<K> {
        match self.scope {
            Scope::Cluster => Api::all(self.client.clone()),
            Scope::Namespace(name) => Api::namespaced(self.client.clone(), name),
        }
    }

    /// A watch that fills a store, and yields what the store has taken in.
    fn stored<K>(&self, api: Api<K>, strip: fn(&mut K)) -> (Store<K>, impl Stream<Item = Event<K>> + Send + 'static)
    where
        K: Resource<DynamicType = ()> + Clone + DeserializeOwned + Debug + Send + Sync + 'static,
    {
        let (store, mut writer) = reflector::store();
        let take_in = move |event: &_| writer.apply_watcher_event(event);
        (store, self.start(api, watcher::Config::default(), strip, take_in))
    }

    /// A watch that resumes after errors, and yields what `take_in` was given.
    fn start<K>(
        &self,
        api: Api<K>,
        config: watcher::Config,
        strip: fn(&mut K),
        take_in: impl FnMut(&Event<K>) + Send + 'static,
    ) -> impl Stream<Item = Event<K>> + Send + 'static
    where
        K: Resource<DynamicType = ()> + Clone + DeserializeOwned + Debug + Send + Sync + 'static,
    {
        let events = watcher(api, config).default_backoff().modify(strip).inspect_ok(take_in);
        let (kind, metrics) = (K::plural(&()).into_owned(), self.metrics.clone());
        events.filter_map(move |event| {
            let event = event.inspect_err(|error| {
                metrics.watch_broke(&kind);
                tracing::warn!(kind, error = %crate::error::chain(error), "{}", hint(error));
            });
            std::future::ready(event.ok())
        })
    }
}

/// What a person can do about a broken watch.
fn hint(error: &watcher::Error) -> &'static str {
    let code = match error {
        watcher::Error::InitialListFailed(kube::Error::Api(status))
        | watcher::Error::WatchStartFailed(kube::Error::Api(status)) => status.code,
        watcher::Error::WatchError(status) => status.code,
        _ => 0,
    };
    match code {
        403 => "the service account may not watch this kind: compare its role with the chart's",
        404 => "the API server does not know this kind: install the windlass-crds chart",
        _ => "a watch broke off and is resumed",
    }
}

/// Services whose spec, labels, annotations or existence changed, by a fingerprint of those parts. A relist may hide
/// deletions, so it queues every service.
fn changed_services(
    event: Event<Guarded>,
    all: &Store<Guarded>,
    seen: &mut HashMap<ObjectRef<Guarded>, Revision>,
) -> Vec<ObjectRef<Guarded>> {
    match event {
        Event::Apply(service) | Event::InitApply(service) => {
            let (key, revision) = (ObjectRef::from_obj(&service), Revision::of(&service));
            let is_new = seen.insert(key.clone(), revision.clone()).is_none_or(|previous| previous != revision);
            if is_new { vec![key] } else { Vec::new() }
        }
        Event::Delete(service) => {
            let key = ObjectRef::from_obj(&service);
            seen.remove(&key);
            vec![key]
        }
        Event::Init => Vec::new(),
        Event::InitDone => {
            seen.retain(|key, _| all.get(key).is_some());
            everyone(all)
        }
    }
}

/// The parts of a service whose change asks for a reconcile; its status is written by us.
#[derive(Clone, Debug, PartialEq)]
struct Revision {
    uid: Option<String>,
    generation: Option<i64>,
    is_deleted: bool,
    annotations: Option<std::collections::BTreeMap<String, String>>,
}

impl Revision {
    fn of(service: &Guarded) -> Self {
        let meta = service.meta();
        Revision {
            uid: meta.uid.clone(),
            generation: meta.generation,
            is_deleted: meta.deletion_timestamp.is_some(),
            annotations: meta.annotations.clone(),
        }
    }
}

/// The service that a changed child belongs to; after a relist, which may hide deletions, all of them.
fn owners<K: Resource>(event: Event<K>, services: &Store<Guarded>) -> Vec<ObjectRef<Guarded>> {
    match event {
        Event::Apply(child) | Event::Delete(child) => {
            let namespace = child.namespace().unwrap_or_default();
            owner(&child).map(|name| ObjectRef::new(name).within(&namespace)).into_iter().collect()
        }
        Event::Init | Event::InitApply(_) => Vec::new(),
        Event::InitDone => everyone(services),
    }
}

fn everyone(services: &Store<Guarded>) -> Vec<ObjectRef<Guarded>> {
    services.state().iter().map(|service| ObjectRef::from_obj(service.as_ref())).collect()
}

/// The services whose replicas a changed autoscaler sets, or set.
fn scaled_by(event: Event<HorizontalPodAutoscaler>, services: &Store<Guarded>) -> Vec<ObjectRef<Guarded>> {
    match event {
        Event::Apply(hpa) | Event::Delete(hpa) => {
            let (namespace, spec) = (hpa.namespace().unwrap_or_default(), hpa.spec.unwrap_or_default());
            let target = spec.scale_target_ref.name;
            let spot = target.strip_suffix(SPOT_SUFFIX).map(str::to_owned);
            let names = [Some(target), spot].into_iter().flatten();
            names
                .map(|name| ObjectRef::new(&name).within(&namespace))
                .filter(|name| services.get(name).is_some())
                .collect()
        }
        Event::Init | Event::InitApply(_) => Vec::new(),
        Event::InitDone => everyone(services),
    }
}

/// What about a node may move its pods.
#[derive(PartialEq)]
struct Standing {
    taints: Option<Vec<Taint>>,
    is_deleted: bool,
}

/// The services that have pods on a node whose standing has changed. The first sight of a node is no change: services are
/// queued by themselves at a start.
fn residents(
    event: Event<Node>,
    pods: &Children<Pod, Whole<Pod>>,
    seen: &mut HashMap<String, Standing>,
) -> Vec<ObjectRef<Guarded>> {
    let (node, is_gone) = match event {
        Event::Apply(node) => (node, false),
        Event::Delete(node) => (node, true),
        Event::InitApply(node) => {
            seen.insert(node.name_any(), standing(&node));
            return Vec::new();
        }
        Event::Init | Event::InitDone => return Vec::new(),
    };
    let name = node.name_any();
    let before = if is_gone { seen.remove(&name) } else { seen.insert(name.clone(), standing(&node)) };
    if !is_gone && before.is_none_or(|before| before == standing(&node)) {
        return Vec::new();
    }
    let here = |pod: &Pod| pod.spec.node_name.as_deref() == Some(&name);
    let pods = pods.all().into_iter().filter(|pod| here(pod));
    let mut owners: Vec<_> = pods.filter_map(|pod| owner_ref(pod.as_ref())).collect();
    owners.sort_by(|left, right| (&left.namespace, &left.name).cmp(&(&right.namespace, &right.name)));
    owners.dedup();
    owners
}

fn standing(node: &Node) -> Standing {
    let taints = node.spec.as_ref().and_then(|spec| spec.taints.clone());
    Standing { taints, is_deleted: node.metadata.deletion_timestamp.is_some() }
}

fn owner_ref(child: &impl Resource) -> Option<ObjectRef<Guarded>> {
    Some(ObjectRef::new(owner(child)?).within(child.meta().namespace.as_deref()?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn service(generation: i64, ready: &str) -> Guarded {
        serde_json::from_value(json!({
            "apiVersion": "windlass.dev/v1alpha1", "kind": "InferenceService",
            "metadata": {"namespace": "n", "name": "a", "uid": "u", "generation": generation},
            "spec": {"model": {"source": "pvc://models/a.gguf"}},
            "status": {"selector": ready},
        }))
        .expect("a service")
    }

    #[test]
    fn a_status_update_queues_nothing_and_a_new_generation_does() {
        let ((all, _writer), mut seen) = (reflector::store(), HashMap::new());
        let mut queued = |event| changed_services(event, &all, &mut seen).len();
        assert_eq!(queued(Event::Apply(service(1, "no"))), 1);
        assert_eq!(queued(Event::Apply(service(1, "yes"))), 0);
        assert_eq!(queued(Event::Apply(service(2, "yes"))), 1);
        assert_eq!(queued(Event::Delete(service(2, "yes"))), 1);
        assert_eq!(queued(Event::Apply(service(2, "yes"))), 1, "made anew");
    }

    #[test]
    fn a_relist_queues_every_service_because_it_may_hide_a_deletion() {
        let (services, mut writer) = reflector::store();
        for event in [Event::Init, Event::InitApply(service(1, "no")), Event::InitDone] {
            writer.apply_watcher_event(&event);
        }
        assert_eq!(owners::<Pod>(Event::InitDone, &services).len(), 1);
        assert_eq!(changed_services(Event::InitDone, &services, &mut HashMap::new()).len(), 1);
    }

    #[test]
    fn a_child_queues_the_service_of_its_label_in_its_namespace() {
        let (services, _writer) = reflector::store();
        let mut pod = Pod::default();
        pod.metadata.namespace = Some("n".into());
        assert!(owners(Event::Apply(pod.clone()), &services).is_empty());
        pod.metadata.labels = Some([(SERVICE_LABEL.to_owned(), "a".to_owned())].into());
        assert_eq!(owners(Event::Delete(pod), &services), [ObjectRef::new("a").within("n")]);
    }

    #[test]
    fn an_object_that_cannot_be_read_still_has_a_name() {
        let bad: Guarded = serde_json::from_value(json!({
            "metadata": {"namespace": "n", "name": "bad"}, "spec": {"model": 7},
        }))
        .expect("guarded");
        assert!(bad.0.is_err());
        assert_eq!(bad.meta().name.as_deref(), Some("bad"));
    }
}
