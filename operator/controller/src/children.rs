//! Objects of one kind by the service that they belong to, beside the store that holds them: of ten thousand pods, a
//! service finds its ten without a look at the others.

use crate::written::ServiceKey;
use kube::runtime::reflector::{self, ObjectRef, Store, store::Writer};
use kube::runtime::watcher::Event;
use kube::{Resource, ResourceExt};
use std::collections::{BTreeSet, HashMap};
use std::mem::take;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock, RwLockWriteGuard};
use windlass_operator_core::names::SERVICE_LABEL;

/// The name of the service that `child` belongs to, by its label.
pub fn owner(child: &impl Resource) -> Option<&str> {
    child.meta().labels.as_ref()?.get(SERVICE_LABEL).map(String::as_str)
}

/// A store of one kind, and its index.
#[derive(Clone)]
pub struct Children<K>
where
    K: Resource<DynamicType = ()> + Clone + 'static,
{
    store: Store<K>,
    names: Arc<RwLock<Names>>,
    changes: Arc<AtomicU64>,
}

/// Names of children by service. It may have names that the store lacks, and none of the store's is missing.
type Names = HashMap<ServiceKey, BTreeSet<String>>;

impl<K> Children<K>
where
    K: Resource<DynamicType = ()> + Clone + 'static,
{
    /// An empty one, and what fills it.
    pub fn new() -> (Children<K>, Feed<K>) {
        let ((store, writer), names, changes) = (reflector::store(), Arc::<RwLock<Names>>::default(), Arc::default());
        let children = Children { store, names: names.clone(), changes: Arc::clone(&changes) };
        (children, Feed { writer, names, changes, listed: Names::new() })
    }

    /// Those of `service`.
    pub fn of(&self, service: &ServiceKey) -> Vec<Arc<K>> {
        let names = self.names.read().unwrap_or_else(PoisonError::into_inner);
        let names = names.get(service).into_iter().flatten();
        let found = names.filter_map(|name| self.store.get(&ObjectRef::new(name).within(&service.0)));
        found.filter(|child| owner(child.as_ref()) == Some(&service.1)).collect()
    }

    /// Those of every service.
    pub fn all(&self) -> &Store<K> {
        &self.store
    }

    /// Events so far: what was made of the store at this count stands as long as it is the same.
    pub fn changes(&self) -> u64 {
        self.changes.load(Ordering::Acquire)
    }
}

/// Fills a store and its index with what a watch brings.
pub struct Feed<K>
where
    K: Resource<DynamicType = ()> + Clone + 'static,
{
    writer: Writer<K>,
    names: Arc<RwLock<Names>>,
    changes: Arc<AtomicU64>,
    /// Of the list that is coming in.
    listed: Names,
}

impl<K> Feed<K>
where
    K: Resource<DynamicType = ()> + Clone + 'static,
{
    /// Takes in an event; the index first, so that whoever finds the store filled finds all of it.
    pub fn take(&mut self, event: &Event<K>) {
        match event {
            Event::Init => self.listed.clear(),
            Event::InitApply(child) => insert(&mut self.listed, child),
            Event::InitDone => *self.index() = take(&mut self.listed),
            Event::Apply(child) => insert(&mut self.index(), child),
            Event::Delete(child) => remove(&mut self.index(), child),
        }
        self.writer.apply_watcher_event(event);
        self.changes.fetch_add(1, Ordering::Release);
    }

    fn index(&self) -> RwLockWriteGuard<'_, Names> {
        self.names.write().unwrap_or_else(PoisonError::into_inner)
    }
}

fn insert(names: &mut Names, child: &impl Resource) {
    if let Some(service) = service_of(child) {
        names.entry(service).or_default().insert(child.name_any());
    }
}

fn remove(names: &mut Names, child: &impl Resource) {
    let Some(service) = service_of(child) else { return };
    let Some(left) = names.get_mut(&service) else { return };
    left.remove(&child.name_any());
    if left.is_empty() {
        names.remove(&service);
    }
}

fn service_of(child: &impl Resource) -> Option<ServiceKey> {
    Some((child.namespace()?, owner(child)?.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use k8s_openapi::api::core::v1::Pod;
    use serde_json::json;

    fn pod(name: &str, service: &str) -> Pod {
        let labels = json!({"windlass.dev/inference-service": service});
        serde_json::from_value(json!({"metadata": {"namespace": "n", "name": name, "labels": labels}})).expect("a pod")
    }

    fn names(children: &Children<Pod>, service: &str) -> Vec<String> {
        children.of(&("n".into(), service.into())).iter().map(|pod| pod.name_any()).collect()
    }

    #[test]
    fn a_service_has_the_children_of_its_label_as_the_watch_tells_them() {
        let (children, mut feed) = Children::new();
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
        assert_eq!(children.names.read().expect("names").len(), 1, "names of services that have gone are kept");
    }

    #[test]
    fn until_a_list_is_complete_the_one_before_stands() {
        let (children, mut feed) = Children::new();
        [Event::Init, Event::InitApply(pod("1", "a")), Event::InitDone].iter().for_each(|event| feed.take(event));
        [Event::Init, Event::InitApply(pod("2", "a"))].iter().for_each(|event| feed.take(event));
        assert_eq!(names(&children, "a"), ["1"]);
        feed.take(&Event::InitDone);
        assert_eq!(names(&children, "a"), ["2"]);
    }
}
