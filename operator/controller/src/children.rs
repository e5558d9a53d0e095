//! Objects of one kind by the service that they belong to: of ten thousand pods, a service finds its ten without a look
//! at the others.
//!
//! What is read seldom is held as text. A Deployment takes 24 KB as a value and 4 KB as text, and only the plan of its
//! own service reads it, which parses it in some ten microseconds.

use crate::written::ServiceKey;
use futures::FutureExt;
use kube::runtime::watcher::Event;
use kube::{Resource, ResourceExt};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::collections::{BTreeMap, HashMap};
use std::marker::PhantomData;
use std::mem::take;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock, RwLockWriteGuard};
use tokio::sync::watch;
use windlass_operator_core::names::SERVICE_LABEL;

/// The service that an object belongs to, by its label.
pub fn owner(child: &impl Resource) -> Option<&str> {
    child.meta().labels.as_ref()?.get(SERVICE_LABEL).map(String::as_str)
}

/// In which form an object is held.
pub trait Form<K> {
    /// Of `child`.
    fn of(child: &K) -> Self;
    /// The object again.
    fn read(&self) -> Option<Arc<K>>;
}

/// As it is: for what many look at.
pub struct Whole<K>(Arc<K>);

/// As JSON.
pub struct Text<K>(Box<[u8]>, PhantomData<fn() -> K>);

impl<K: Clone> Form<K> for Whole<K> {
    fn of(child: &K) -> Self {
        Whole(Arc::new(child.clone()))
    }

    fn read(&self) -> Option<Arc<K>> {
        Some(self.0.clone())
    }
}

/// Kubernetes' types read what they have written. One that did not would be looked up before it is written again, as a
/// stranger's is.
impl<K: Serialize + DeserializeOwned> Form<K> for Text<K> {
    fn of(child: &K) -> Self {
        Text(serde_json::to_vec(child).unwrap_or_default().into(), PhantomData)
    }

    fn read(&self) -> Option<Arc<K>> {
        let read = serde_json::from_slice(&self.0).map(Arc::new);
        read.inspect_err(|error| tracing::error!(%error, "a child cannot be read")).ok()
    }
}

/// The objects; clones share them.
pub struct Children<K, F = Text<K>> {
    held: Arc<RwLock<Held<F>>>,
    /// Counts what the watch has told: as long as it stands still, so do the objects.
    changes: Arc<AtomicU64>,
    /// Whether the first list has arrived.
    listed: watch::Receiver<bool>,
    kind: PhantomData<fn() -> K>,
}

/// By service, then by name.
type Held<F> = HashMap<ServiceKey, BTreeMap<Box<str>, F>>;

/// The watch has ended before its first list.
#[derive(Debug, thiserror::Error)]
#[error("the watch has ended")]
pub struct WatchEnded;

impl<K, F> Clone for Children<K, F> {
    fn clone(&self) -> Self {
        let (held, changes, listed) = (self.held.clone(), self.changes.clone(), self.listed.clone());
        Children { held, changes, listed, kind: PhantomData }
    }
}

impl<K, F: Form<K>> Children<K, F> {
    /// No objects yet, and what the watch's events go to.
    pub fn new() -> (Self, Feed<K, F>) {
        let (held, changes, (list, listed)) =
            (Arc::<RwLock<Held<F>>>::default(), Arc::default(), watch::channel(false));
        let children = Children { held: held.clone(), changes: Arc::clone(&changes), listed, kind: PhantomData };
        (children, Feed { held, changes, list, relisted: Held::new(), kind: PhantomData })
    }

    /// Objects of one service, in the order of their names.
    pub fn of(&self, service: &ServiceKey) -> Vec<Arc<K>> {
        let held = self.held.read().unwrap_or_else(PoisonError::into_inner);
        held.get(service).into_iter().flat_map(BTreeMap::values).filter_map(F::read).collect()
    }

    /// Every object.
    pub fn all(&self) -> Vec<Arc<K>> {
        let held = self.held.read().unwrap_or_else(PoisonError::into_inner);
        held.values().flat_map(BTreeMap::values).filter_map(F::read).collect()
    }

    /// A number that changes with every event.
    pub fn changes(&self) -> u64 {
        self.changes.load(Ordering::Acquire)
    }

    /// Waits for the first list.
    ///
    /// # Errors
    /// The watch has ended before.
    pub async fn listed(&self) -> Result<(), WatchEnded> {
        self.listed.clone().wait_for(|listed| *listed).await.map(drop).map_err(|_| WatchEnded)
    }

    /// Whether the first list has not arrived.
    pub fn is_missing(&self) -> bool {
        !matches!(self.listed().now_or_never(), Some(Ok(())))
    }
}

/// Takes in what the watch tells.
pub struct Feed<K, F = Text<K>> {
    held: Arc<RwLock<Held<F>>>,
    changes: Arc<AtomicU64>,
    list: watch::Sender<bool>,
    /// Of a list that is not complete yet: the objects before it stay until it is.
    relisted: Held<F>,
    kind: PhantomData<fn() -> K>,
}

impl<K: Resource, F: Form<K>> Feed<K, F> {
    /// Takes in one event.
    pub fn take(&mut self, event: &Event<K>) {
        match event {
            Event::Init => self.relisted.clear(),
            Event::InitApply(child) => insert(&mut self.relisted, child),
            Event::InitDone => {
                *self.held() = take(&mut self.relisted);
                self.list.send_replace(true);
            }
            Event::Apply(child) => {
                let mut held = self.held();
                disown(&mut held, child);
                insert(&mut held, child);
            }
            Event::Delete(child) => remove(&mut self.held(), child),
        }
        self.changes.fetch_add(1, Ordering::Release);
    }

    fn held(&self) -> RwLockWriteGuard<'_, Held<F>> {
        self.held.write().unwrap_or_else(PoisonError::into_inner)
    }
}

fn insert<K: Resource, F: Form<K>>(held: &mut Held<F>, child: &K) {
    if let Some(service) = service_of(child) {
        held.entry(service).or_default().insert(child.name_any().into(), F::of(child));
    }
}

fn remove<K: Resource, F>(held: &mut Held<F>, child: &K) {
    if let Some(service) = service_of(child) {
        remove_named(held, &service, &child.name_any());
    }
}

/// Takes an object that is new to its service from the one that it belonged to: its label may have changed.
fn disown<K: Resource, F>(held: &mut Held<F>, child: &K) {
    let (Some(service), name) = (service_of(child), child.name_any()) else { return };
    if held.get(&service).is_some_and(|held| held.contains_key(name.as_str())) {
        return;
    }
    let mut others = held.iter().filter(|(other, held)| other.0 == service.0 && held.contains_key(name.as_str()));
    if let Some(before) = others.next().map(|(other, _)| other.clone()) {
        remove_named(held, &before, &name);
    }
}

fn remove_named<F>(held: &mut Held<F>, service: &ServiceKey, name: &str) {
    let Some(left) = held.get_mut(service) else { return };
    left.remove(name);
    if left.is_empty() {
        held.remove(service);
    }
}

fn service_of(child: &impl Resource) -> Option<ServiceKey> {
    Some((child.namespace()?, owner(child)?.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use k8s_openapi::api::apps::v1::Deployment;
    use serde_json::json;
    use windlass_operator_core::pod::Pod;

    fn pod(name: &str, service: &str) -> Pod {
        let labels = json!({"windlass.dev/inference-service": service});
        serde_json::from_value(json!({"metadata": {"namespace": "n", "name": name, "labels": labels}})).expect("a pod")
    }

    fn names(children: &Children<Pod, Whole<Pod>>, service: &str) -> Vec<String> {
        children.of(&("n".into(), service.into())).iter().map(|pod| pod.name_any()).collect()
    }

    #[test]
    fn a_service_has_the_children_of_its_label_as_the_watch_tells_them() {
        let (children, mut feed) = Children::<Pod, Whole<Pod>>::new();
        let listed = [pod("1", "a"), pod("2", "a"), pod("3", "b")].map(Event::InitApply);
        [Event::Init].into_iter().chain(listed).chain([Event::InitDone]).for_each(|event| feed.take(&event));
        assert_eq!((names(&children, "a"), names(&children, "b")), (vec!["1".into(), "2".into()], vec!["3".into()]));
        assert!(children.of(&("other".into(), "a".into())).is_empty(), "a namesake in another namespace");
        assert_eq!(children.changes(), 5);

        feed.take(&Event::Apply(pod("4", "a")));
        feed.take(&Event::Delete(pod("1", "a")));
        feed.take(&Event::Apply(pod("3", "a")));
        assert_eq!(names(&children, "a"), ["2", "3", "4"]);
        assert!(names(&children, "b").is_empty(), "what changed hands is in one of them");

        // What was deleted while nobody watched shows in the next list alone.
        [Event::Init, Event::InitApply(pod("2", "a")), Event::InitDone].iter().for_each(|event| feed.take(event));
        assert_eq!(names(&children, "a"), ["2"]);
        assert_eq!(children.held.read().expect("held").len(), 1, "services that have gone are kept");
    }

    #[test]
    fn until_a_list_is_complete_the_one_before_stands() {
        let (children, mut feed) = Children::<Pod, Whole<Pod>>::new();
        [Event::Init, Event::InitApply(pod("1", "a")), Event::InitDone].iter().for_each(|event| feed.take(event));
        [Event::Init, Event::InitApply(pod("2", "a"))].iter().for_each(|event| feed.take(event));
        assert_eq!(names(&children, "a"), ["1"]);
        feed.take(&Event::InitDone);
        assert_eq!(names(&children, "a"), ["2"]);
    }

    #[test]
    fn the_first_list_is_awaited_and_a_watch_that_ends_before_it_is_told() {
        let (children, mut feed) = Children::<Pod, Whole<Pod>>::new();
        assert!(children.is_missing());
        assert!(children.listed().now_or_never().is_none());
        [Event::Init, Event::InitDone].iter().for_each(|event| feed.take(event));
        assert!(!children.is_missing());
        drop(feed);
        assert!(matches!(children.listed().now_or_never(), Some(Ok(()))), "what was listed stays so");
        let ended = Children::<Pod, Whole<Pod>>::new().0;
        assert!(matches!(ended.listed().now_or_never(), Some(Err(WatchEnded))));
    }

    #[test]
    fn what_is_held_as_text_is_read_as_it_was() {
        let (children, mut feed) = Children::<Deployment>::new();
        let deployment: Deployment = serde_json::from_value(json!({
            "metadata": {
                "namespace": "n", "name": "a", "labels": {"windlass.dev/inference-service": "a"},
                "creationTimestamp": "2026-01-01T00:00:00Z",
            },
            "spec": {
                "selector": {}, "strategy": {"rollingUpdate": {"maxSurge": "25%", "maxUnavailable": 0}},
                "template": {"spec": {"containers": [{"name": "engine", "resources": {"limits": {"cpu": "500m"}}}]}},
            },
            "status": {"observedGeneration": 7},
        }))
        .expect("a Deployment");
        feed.take(&Event::Apply(deployment.clone()));
        assert_eq!(children.of(&("n".into(), "a".into())), [Arc::new(deployment)]);
    }
}
