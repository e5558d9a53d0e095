//! What this process wrote last, per object: to see its own writes before the watch brings them back, and to leave
//! unwritten what would change nothing.
//!
//! The plan leaves out what the cluster already has. Where an admission policy rewrites what was applied, though, the two
//! never agree, and the same apply would be planned for ever. So the answer to the last one is remembered: as long as the
//! wish is the same and the object still has what that apply left behind, applying it again is left out.

use crate::strip;
use k8s_openapi::api::apps::v1::{ControllerRevision, Deployment, StatefulSet};
use k8s_openapi::api::autoscaling::v2::HorizontalPodAutoscaler;
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::{ConfigMap, Service, ServiceAccount};
use k8s_openapi::api::networking::v1::NetworkPolicy;
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use kube::Resource;
use serde::Serialize;
use serde_json::{Map, Value};
use std::collections::{BTreeMap, HashMap};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use windlass_operator_api::InferenceService;
use windlass_operator_core::pod::Pod;

/// How long a watch may lag behind a write. Longer than any healthy lag; then the watch is believed again, so that a
/// deletion by somebody else is not hidden for good.
pub const WATCH_LAG: Duration = Duration::from_secs(5);

/// A service: its namespace and name.
pub type ServiceKey = (String, String);

/// The last writes of one kind, by service and by the object's name.
pub struct Written<K> {
    entries: Mutex<Entries<K>>,
}

type Entries<K> = HashMap<ServiceKey, BTreeMap<String, Entry<K>>>;

struct Entry<K> {
    /// Of the last apply: fingerprints of the wish, and of what the server made of it.
    applied: Option<(u64, u64)>,
    /// The answer to the last write, until the watch has caught up with it.
    pending: Option<(Arc<K>, Instant)>,
}

impl<K> Default for Written<K> {
    fn default() -> Self {
        Written { entries: Mutex::default() }
    }
}

impl<K: Resource<DynamicType = ()>> Written<K> {
    /// Brings `watched`, the service's objects as the watch has them, up to date with what was written here. True when
    /// the watch lags: look again after [`WATCH_LAG`] even if no event comes.
    pub fn overlay(&self, service: &ServiceKey, watched: &mut Vec<Arc<K>>, now: Instant) -> bool {
        let mut entries = self.lock();
        let Some(entries) = entries.get_mut(service) else { return false };
        let mut lagging = false;
        for (name, entry) in entries {
            let Some((written, at)) = entry.pending.take() else { continue };
            let place = watched.iter().position(|object| object.meta().name.as_ref() == Some(name));
            let is_ahead = is_newer(written.as_ref(), place.map(|place| watched[place].as_ref()));
            if !is_ahead || now.duration_since(at) >= WATCH_LAG {
                continue;
            }
            entry.pending = Some((written.clone(), at));
            lagging = true;
            match place {
                Some(place) => watched[place] = written,
                None => watched.push(written),
            }
        }
        lagging
    }

    /// As [`Written::overlay`], for objects that others create: one that the watch does not have is gone.
    pub fn overlay_known(&self, service: &ServiceKey, watched: &mut Vec<Arc<K>>, now: Instant) -> bool {
        let known = watched.len();
        let lagging = self.overlay(service, watched, now);
        watched.truncate(known);
        lagging
    }

    /// Remembers the server's answer to any other write.
    pub fn patched(&self, service: &ServiceKey, mut answer: K, at: Instant) {
        strip::object(&mut answer);
        let answer = Arc::new(answer);
        self.change(service, &answer.clone(), |entry| entry.pending = Some((answer, at)));
    }

    /// Forgets an object that was deleted.
    pub fn forget_object(&self, service: &ServiceKey, name: &str) {
        if let Some(entries) = self.lock().get_mut(service) {
            entries.remove(name);
        }
    }

    /// Forgets a service that was deleted.
    pub fn forget(&self, service: &ServiceKey) {
        self.lock().remove(service);
    }

    fn change(&self, service: &ServiceKey, object: &K, change: impl FnOnce(&mut Entry<K>)) {
        let Some(name) = object.meta().name.clone() else { return };
        let mut entries = self.lock();
        let entry = entries.entry(service.clone()).or_default().entry(name);
        change(entry.or_insert(Entry { applied: None, pending: None }));
    }

    /// A panic elsewhere leaves the map whole: every change of it is one insert, remove or assignment.
    fn lock(&self) -> MutexGuard<'_, Entries<K>> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<K: Resource<DynamicType = ()> + Serialize> Written<K> {
    /// Whether applying `desired` over `observed` would change nothing.
    pub fn is_current(&self, service: &ServiceKey, desired: &K, observed: Option<&K>) -> bool {
        let (Some(observed), Some(name)) = (observed, desired.meta().name.as_ref()) else { return false };
        let entries = self.lock();
        let applied = entries.get(service).and_then(|entries| entries.get(name)).and_then(|entry| entry.applied);
        applied.is_some_and(|applied| applied == fingerprints(desired, observed))
    }

    /// Remembers the server's answer to an apply of `desired`.
    pub fn applied(&self, service: &ServiceKey, desired: &K, answer: K, at: Instant) {
        let applied = fingerprints(desired, &answer);
        self.change(service, &answer, |entry| entry.applied = Some(applied));
        self.patched(service, answer, at);
    }
}

/// The last writes of every kind.
#[derive(Default)]
pub struct Writes {
    /// Statuses of services.
    pub services: Written<InferenceService>,
    /// Workloads.
    pub deployments: Written<Deployment>,
    /// Workers of pods that lead some.
    pub stateful_sets: Written<StatefulSet>,
    /// Endpoints.
    pub endpoints: Written<Service>,
    /// Identities of pods.
    pub accounts: Written<ServiceAccount>,
    /// Disruption budgets.
    pub budgets: Written<PodDisruptionBudget>,
    /// Network policies.
    pub policies: Written<NetworkPolicy>,
    /// What autoscalers learned.
    pub capacities: Written<ConfigMap>,
    /// Jobs that read models' headers.
    pub jobs: Written<Job>,
    /// What templates were made from.
    pub revisions: Written<ControllerRevision>,
    /// Autoscalers of mode HPA.
    pub autoscalers: Written<HorizontalPodAutoscaler>,
    /// Annotations of pods.
    pub pods: Written<Pod>,
}

impl Writes {
    /// Forgets a service that was deleted.
    pub fn forget(&self, service: &ServiceKey) {
        let Writes {
            services,
            deployments,
            stateful_sets,
            endpoints,
            accounts,
            budgets,
            policies,
            capacities,
            jobs,
            revisions,
            autoscalers,
            pods,
        } = self;
        services.forget(service);
        deployments.forget(service);
        stateful_sets.forget(service);
        endpoints.forget(service);
        accounts.forget(service);
        budgets.forget(service);
        policies.forget(service);
        capacities.forget(service);
        jobs.forget(service);
        revisions.forget(service);
        autoscalers.forget(service);
        pods.forget(service);
    }
}

/// Whether `written` is a later version than `watched`. Versions that are no numbers are not compared: the watch wins.
fn is_newer<K: Resource>(written: &K, watched: Option<&K>) -> bool {
    let version = |object: &K| object.meta().resource_version.as_deref()?.parse::<u64>().ok();
    match (version(written), watched.map(version)) {
        (Some(_), None) => true,
        (Some(written), Some(Some(watched))) => written > watched,
        _ => false,
    }
}

/// Fingerprints of the wish, and of those parts of `object` that the wish is about.
fn fingerprints(desired: &impl Serialize, object: &impl Serialize) -> (u64, u64) {
    // Every Kubernetes type serializes; should one not, its two fingerprints still only ever equal themselves.
    let [desired, object] =
        [serde_json::to_value(desired), serde_json::to_value(object)].map(|value| value.unwrap_or_default());
    (fingerprint(&desired), fingerprint(&within(&object, &desired)))
}

fn fingerprint(value: &Value) -> u64 {
    let mut hasher = DefaultHasher::new();
    value.to_string().hash(&mut hasher);
    hasher.finish()
}

/// The parts of `object` that `wish` names: defaults, status and other managers' fields fall away. Lists and selectors are
/// kept whole: what somebody adds to them changes what they mean.
fn within(object: &Value, wish: &Value) -> Value {
    let (Value::Object(fields), Value::Object(wishes)) = (object, wish) else { return object.clone() };
    let part = |(name, wish): (&String, &Value)| {
        let field = fields.get(name).cloned().unwrap_or_default();
        (name.clone(), if is_selector(name) { field } else { within(&field, wish) })
    };
    Value::Object(wishes.iter().map(part).collect::<Map<_, _>>())
}

fn is_selector(name: &str) -> bool {
    ["selector", "podSelector"].contains(&name)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn key() -> ServiceKey {
        ("n".into(), "s".into())
    }

    fn wish(port: u16) -> Service {
        serde_json::from_value(json!({
            "metadata": {"namespace": "n", "name": "a", "labels": {"ours": "1"}},
            "spec": {"ports": [{"port": port}]},
        }))
        .expect("a service")
    }

    /// What a server answers: the wish with defaults, a version, and somebody else's annotation.
    fn answer(version: &str, port: u16) -> Service {
        serde_json::from_value(json!({
            "metadata": {
                "namespace": "n", "name": "a", "resourceVersion": version,
                "labels": {"ours": "1"}, "annotations": {"theirs": version},
            },
            "spec": {"type": "ClusterIP", "ports": [{"port": port, "protocol": "TCP"}]},
        }))
        .expect("a service")
    }

    fn wrote(version: &str) -> Written<Service> {
        let written = Written::default();
        written.applied(&key(), &wish(80), answer(version, 80), Instant::now());
        written
    }

    #[test]
    fn the_same_wish_over_what_the_last_apply_left_is_current() {
        let mut later = answer("9", 80);
        later.status = Some(Default::default());
        assert!(wrote("1").is_current(&key(), &wish(80), Some(&later)), "version, status, annotations are not ours");
    }

    #[test]
    fn a_field_that_the_wish_leaves_to_others_may_change() {
        let mut scaled = answer("9", 80);
        scaled.spec.get_or_insert_default().type_ = Some("NodePort".into());
        assert!(wrote("1").is_current(&key(), &wish(80), Some(&scaled)));
    }

    #[test]
    fn a_new_wish_a_drifted_field_a_lost_label_and_a_deleted_object_are_not_current() {
        let written = wrote("1");
        assert!(!written.is_current(&key(), &wish(81), Some(&answer("1", 80))), "new wish");
        assert!(!written.is_current(&key(), &wish(80), Some(&answer("2", 81))), "drift");
        let mut longer = answer("2", 80);
        longer.spec.get_or_insert_default().ports.get_or_insert_default().push(Default::default());
        assert!(!written.is_current(&key(), &wish(80), Some(&longer)), "an item added by somebody");
        let mut unlabelled = answer("2", 80);
        unlabelled.metadata.labels = None;
        assert!(!written.is_current(&key(), &wish(80), Some(&unlabelled)), "lost label");
        assert!(!written.is_current(&key(), &wish(80), None), "deleted");
        assert!(!Written::default().is_current(&key(), &wish(80), Some(&answer("1", 80))), "first apply of a process");
    }

    fn seen(written: &Written<Service>, watched: Option<Service>, now: Instant) -> (Option<String>, bool) {
        let mut objects: Vec<_> = watched.into_iter().map(Arc::new).collect();
        let lagging = written.overlay(&key(), &mut objects, now);
        assert!(objects.len() <= 1);
        (objects.first().and_then(|object| object.metadata.resource_version.clone()), lagging)
    }

    #[test]
    fn own_writes_are_seen_before_the_watch_brings_them() {
        let (written, now) = (wrote("10"), Instant::now());
        assert_eq!(seen(&written, Some(answer("9", 79)), now), (Some("10".into()), true));
        assert_eq!(seen(&written, None, now), (Some("10".into()), true));
        assert_eq!(seen(&written, Some(answer("11", 80)), now), (Some("11".into()), false));
        assert_eq!(seen(&written, None, now), (None, false), "once the watch has caught up, an absence is a deletion");
    }

    #[test]
    fn of_what_was_written_as_little_is_held_as_of_what_is_watched() {
        let (written, mut whole) = (Written::default(), answer("10", 80));
        whole.metadata.managed_fields = Some(vec![Default::default()]);
        written.patched(&key(), whole, Instant::now());
        let mut seen = Vec::new();
        written.overlay(&key(), &mut seen, Instant::now());
        assert_eq!(seen, [Arc::new(answer("10", 80))]);
    }

    #[test]
    fn an_absence_is_believed_after_the_longest_lag() {
        assert_eq!(seen(&wrote("10"), None, Instant::now() + WATCH_LAG), (None, false));
    }

    #[test]
    fn a_patch_is_seen_and_leaves_the_applied_wish_current() {
        let written = wrote("10");
        written.patched(&key(), answer("12", 80), Instant::now());
        assert_eq!(seen(&written, Some(answer("11", 80)), Instant::now()).0.as_deref(), Some("12"));
        assert!(written.is_current(&key(), &wish(80), Some(&answer("12", 80))));
    }
}
