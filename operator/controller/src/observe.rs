//! The only reads: everything that planning one service looks at, from the watches' stores.
//!
//! A service whose pods are ready is observed without a single request. Only while something is amiss are warnings and
//! the objects that the spec names looked up, because nothing that is watched tells of them.

mod diagnosis;

use crate::error::Error;
use crate::scopes::Scopes;
use crate::scrape::Loads;
use crate::watches::Stores;
use crate::written::{ServiceKey, Writes};
use jiff::Timestamp;
use k8s_openapi::NamespaceResourceScope;
use k8s_openapi::api::autoscaling::v2::HorizontalPodAutoscaler;
use k8s_openapi::api::core::v1::{ConfigMap, Event, PersistentVolumeClaim, ServiceAccount};
use kube::api::ListParams;
use kube::runtime::reflector::{self, Store};
use kube::{Api, Client, Resource, ResourceExt};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::collections::HashMap;
use std::fmt::Debug;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};
use windlass_operator_api::InferenceService;
use windlass_operator_api::autoscaling::AutoscalingMode;
use windlass_operator_core::autoscale::Memory;
use windlass_operator_core::capacity;
use windlass_operator_core::names::{self, Reference, ReferenceKind};
use windlass_operator_core::observed::{Observed, Warning};
use windlass_operator_core::plan::{Object, Plan, Step};
use windlass_operator_core::pod::Pod;
use windlass_operator_core::upgrade;

/// Pods whose warnings are read at once. They fail alike; more would cost requests and tell nothing new.
const DIAGNOSED_PODS: usize = 3;
/// Warnings read of one pod.
const WARNINGS_OF_A_POD: u32 = 20;
/// Pods of inspect Jobs read at once: one for each source that a spec had of late.
const INSPECTORS: u32 = 8;
/// Workers read at once: more of them fail alike.
const WORKERS: u32 = 32;

/// Reads for one scope of watches.
pub struct Observer {
    client: Client,
    stores: Stores,
    /// Every scope, this one among them.
    all: Scopes,
    writes: Arc<Writes>,
    loads: Loads,
    memories: Mutex<HashMap<ServiceKey, Memory>>,
    /// The operator's default engine image.
    engine_image: String,
}

/// What was read of one service.
pub struct Observation {
    /// The service with its newest status.
    pub service: Arc<InferenceService>,
    /// Everything else.
    pub observed: Observed,
    /// When to look again although no event may come.
    pub look_again: Option<Duration>,
}

impl Observer {
    /// An observer over `stores`, one scope of `all`, which sees `writes` before the watches do.
    pub fn new(
        client: Client,
        stores: Stores,
        all: Scopes,
        writes: Arc<Writes>,
        loads: Loads,
        engine_image: &str,
    ) -> Self {
        let engine_image = engine_image.to_owned();
        Observer { client, stores, all, writes, loads, memories: Mutex::default(), engine_image }
    }

    /// Reads what `service` looks like.
    ///
    /// # Errors
    /// A lookup was not answered, or the watches have ended.
    pub async fn observe(&self, service: Arc<InferenceService>, key: &ServiceKey) -> Result<Observation, Error> {
        self.stores.ready().await?;
        if self.remembered(key).is_none() {
            self.refresh(key).await?;
        }
        let mut newest = vec![service];
        let mut observed = self.stored(key);
        let is_lagging = self.overlay(key, &mut newest, &mut observed);
        let service = newest.remove(0);
        observed.memory = self.memory(&service, key).await;
        observed.is_upgrade_turn = self.is_upgrade_turn(&service, key);
        if !observed.jobs.is_empty() {
            let attempt = "list pods of inspect Jobs";
            observed.inspectors = self.labelled(key, names::INSPECTION, INSPECTORS, attempt).await?;
        }
        let unready_since = diagnosis::unready_since(&service, &observed);
        if let Some(since) = unready_since {
            if diagnosis::may_lack_something(&observed) {
                observed.absent = self.absent(&service, key).await?;
            }
            if !observed.stateful_sets.is_empty() {
                observed.workers = self.labelled(key, names::LEADER, WORKERS, "list pods of workers").await?;
            }
            observed.warnings = self.warnings(&observed.pods, key).await?;
            tracing::debug!(%since, absent = observed.absent.len(), warnings = observed.warnings.len(), "diagnosed");
        }
        let lag = is_lagging.then_some(crate::written::WATCH_LAG);
        let look_again = unready_since.map(|since| diagnosis::interval(since, Timestamp::now())).into_iter().chain(lag);
        Ok(Observation { service, observed, look_again: look_again.min() })
    }

    /// Looks up what `plan` wants to apply and no watch has shown: an object of that name may be somebody else's.
    /// True when one was found, and the plan must be made again.
    ///
    /// # Errors
    /// A lookup was not answered.
    pub async fn find_strangers(&self, key: &ServiceKey, plan: &Plan, observed: &mut Observed) -> Result<bool, Error> {
        let mut found = false;
        for step in &plan.steps {
            let Step::Apply(object) = step else { continue };
            found |= match object {
                Object::ServiceAccount(wish) => self.stranger(key, wish, &mut observed.service_accounts).await?,
                Object::Service(wish) => self.stranger(key, wish, &mut observed.services).await?,
                Object::NetworkPolicy(wish) => self.stranger(key, wish, &mut observed.network_policies).await?,
                Object::PodDisruptionBudget(wish) => self.stranger(key, wish, &mut observed.disruption_budgets).await?,
                // Named by a fingerprint: nobody else has one of that name by accident.
                Object::Job(_) | Object::ControllerRevision(_) | Object::StatefulSet(_) => false,
                Object::ConfigMap(wish) => self.stranger(key, wish, &mut observed.capacities).await?,
                Object::HorizontalPodAutoscaler(_) => false,
                Object::Deployment(wish) => self.stranger(key, wish.as_ref(), &mut observed.deployments).await?,
            };
        }
        Ok(found)
    }

    /// Keeps what the autoscaler remembers for the next observation.
    pub fn remember(&self, key: &ServiceKey, memory: Memory) {
        self.memories.lock().unwrap_or_else(PoisonError::into_inner).insert(key.clone(), memory);
    }

    /// Forgets a service that was deleted.
    pub fn forget(&self, key: &ServiceKey) {
        self.memories.lock().unwrap_or_else(PoisonError::into_inner).remove(key);
        self.loads.forget(key);
        self.writes.forget(key);
    }

    fn stored(&self, key: &ServiceKey) -> Observed {
        let (namespace, name) = (key.0.as_str(), key.1.as_str());
        let stores = &self.stores;
        Observed {
            deployments: stores.deployments.of(key),
            stateful_sets: stores.stateful_sets.of(key),
            workers: Vec::new(),
            services: stores.endpoints.of(key),
            service_accounts: stores.accounts.of(key),
            disruption_budgets: stores.budgets.of(key),
            network_policies: stores.policies.of(key),
            jobs: stores.jobs.of(key),
            revisions: stores.revisions.of(key),
            autoscalers: autoscalers_of(&stores.autoscalers, namespace, name),
            capacities: Vec::new(),
            pods: stores.pods.of(key),
            inspectors: Vec::new(),
            nodes: stores.nodes.as_ref().map(reflector::Store::state),
            is_upgrade_turn: false,
            warnings: Vec::new(),
            absent: Vec::new(),
            load: self.loads.of(key),
            memory: Memory::default(),
        }
    }

    /// Reads the service itself, at the first look of this process: what a watch tells first may be a spec from before
    /// the one that an earlier process has carried out. The answer counts as an answer to a write does.
    async fn refresh(&self, key: &ServiceKey) -> Result<(), Error> {
        let api = Api::<InferenceService>::namespaced(self.client.clone(), &key.0);
        let newest = api.get_opt(&key.1).await.map_err(Error::attempting("read the service"))?;
        // Where it is gone, the watch is about to tell.
        if let Some(newest) = newest {
            self.writes.services.patched(key, newest, Instant::now());
        }
        Ok(())
    }

    fn remembered(&self, key: &ServiceKey) -> Option<Memory> {
        self.memories.lock().unwrap_or_else(PoisonError::into_inner).get(key).cloned()
    }

    /// What the autoscaler remembers; at the first look of this process, what an earlier one wrote down.
    async fn memory(&self, service: &InferenceService, key: &ServiceKey) -> Memory {
        let known = self.remembered(key);
        let mode = service.spec.autoscaling.as_ref().map(|autoscaling| autoscaling.mode);
        match known {
            Some(known) => known,
            None if mode == Some(AutoscalingMode::Builtin) => self.kept(service, key).await,
            None => Memory::default(),
        }
    }

    /// What cannot be read counts as never learned: it is learned again within minutes.
    async fn kept(&self, service: &InferenceService, key: &ServiceKey) -> Memory {
        let api = Api::<ConfigMap>::namespaced(self.client.clone(), &key.0);
        let uid = service.metadata.uid.as_deref().unwrap_or_default();
        match api.get_opt(&capacity::name(&key.1)).await {
            Ok(found) => found.map(|map| capacity::restored(&map, uid, Timestamp::now())).unwrap_or_default(),
            Err(error) => {
                tracing::warn!(error = %crate::error::chain(&error), "what the autoscaler learned was not read");
                Memory::default()
            }
        }
    }

    /// Puts our own later writes over what the watches brought. True where a watch lags.
    fn overlay(&self, key: &ServiceKey, service: &mut Vec<Arc<InferenceService>>, observed: &mut Observed) -> bool {
        let (writes, now) = (&self.writes, Instant::now());
        [
            writes.services.overlay(key, service, now),
            writes.deployments.overlay(key, &mut observed.deployments, now),
            writes.stateful_sets.overlay(key, &mut observed.stateful_sets, now),
            writes.endpoints.overlay(key, &mut observed.services, now),
            writes.accounts.overlay(key, &mut observed.service_accounts, now),
            writes.budgets.overlay(key, &mut observed.disruption_budgets, now),
            writes.policies.overlay(key, &mut observed.network_policies, now),
            writes.jobs.overlay(key, &mut observed.jobs, now),
            writes.revisions.overlay(key, &mut observed.revisions, now),
            writes.autoscalers.overlay(key, &mut observed.autoscalers, now),
            writes.pods.overlay_known(key, &mut observed.pods, now),
        ]
        .contains(&true)
    }

    /// Whether this service may take the operator's default engine image now.
    fn is_upgrade_turn(&self, service: &InferenceService, key: &ServiceKey) -> bool {
        if !upgrade::is_automatic(service) || !upgrade::is_outdated(service, &self.engine_image) {
            return false;
        }
        let Some(services) = self.all.every_service() else { return false };
        upgrade::whose_turn(services.iter(), &self.engine_image) == Some((&key.0, &key.1))
    }

    /// Pods of the service that no watch brings: those with `label`, at most `limit`.
    async fn labelled(
        &self,
        key: &ServiceKey,
        label: &str,
        limit: u32,
        attempt: &'static str,
    ) -> Result<Vec<Arc<Pod>>, Error> {
        let about = format!("{label},app.kubernetes.io/instance={}", key.1);
        let list = ListParams::default().labels(&about).limit(limit);
        let pods = Api::<Pod>::namespaced(self.client.clone(), &key.0).list(&list).await;
        Ok(pods.map_err(Error::attempting(attempt))?.items.into_iter().map(Arc::new).collect())
    }

    async fn stranger<K>(&self, key: &ServiceKey, wish: &K, known: &mut Vec<Arc<K>>) -> Result<bool, Error>
    where
        K: Resource<DynamicType = (), Scope = NamespaceResourceScope> + Clone + DeserializeOwned + Serialize + Debug,
    {
        let name = wish.name_any();
        if known.iter().any(|object| object.name_any() == name) {
            return Ok(false);
        }
        let attempt = format!("look up {}/{name}", K::kind(&()));
        let api = Api::<K>::namespaced(self.client.clone(), &key.0);
        let found = api.get_opt(&name).await.map_err(Error::attempting(attempt))?;
        let is_found = found.is_some();
        known.extend(found.map(Arc::new));
        Ok(is_found)
    }

    /// Of the objects that the spec names, those that do not exist.
    async fn absent(&self, service: &InferenceService, key: &ServiceKey) -> Result<Vec<Reference>, Error> {
        let mut absent = Vec::new();
        for reference in names::references(service) {
            let (name, namespace) = (reference.name.as_str(), key.0.as_str());
            let exists = match reference.kind {
                ReferenceKind::PersistentVolumeClaim => self.exists::<PersistentVolumeClaim>(namespace, name).await?,
                ReferenceKind::ServiceAccount => self.exists::<ServiceAccount>(namespace, name).await?,
            };
            absent.extend((!exists).then_some(reference));
        }
        Ok(absent)
    }

    /// Whether the object exists. Only its metadata is asked for; where even that is not allowed, it is taken to exist.
    async fn exists<K>(&self, namespace: &str, name: &str) -> Result<bool, Error>
    where
        K: Resource<DynamicType = (), Scope = NamespaceResourceScope> + Clone + DeserializeOwned + Debug,
    {
        let api = Api::<K>::namespaced(self.client.clone(), namespace);
        match api.get_metadata_opt(name).await {
            Ok(found) => Ok(found.is_some()),
            Err(kube::Error::Api(status)) if status.code == 403 => Ok(true),
            Err(error) => Err(Error::attempting(format!("look up {}/{name}", K::kind(&())))(error)),
        }
    }

    /// Warnings about the oldest pods that have no container for longer than a start takes, newest first.
    async fn warnings(&self, pods: &[Arc<Pod>], key: &ServiceKey) -> Result<Vec<Warning>, Error> {
        let (api, now) = (Api::<Event>::namespaced(self.client.clone(), &key.0), Timestamp::now());
        let mut stuck: Vec<_> = pods.iter().filter(|pod| diagnosis::is_stuck(pod, now)).collect();
        stuck.sort_by_key(|pod| pod.created());
        let mut warnings = Vec::new();
        for pod in stuck.into_iter().take(DIAGNOSED_PODS) {
            let name = pod.name_any();
            let about = format!("type=Warning,involvedObject.kind=Pod,involvedObject.name={name}");
            let list = ListParams::default().fields(&about).limit(WARNINGS_OF_A_POD);
            let events = api.list(&list).await.map_err(Error::attempting(format!("list events of Pod/{name}")))?;
            warnings.extend(events.items.into_iter().filter_map(diagnosis::warning));
        }
        warnings.sort_by_key(|warning| std::cmp::Reverse(warning.at));
        Ok(warnings)
    }
}

/// Autoscalers that may concern `name`: ours, and those of others whose target it or one of its workloads may be.
fn autoscalers_of(
    store: &Store<HorizontalPodAutoscaler>,
    namespace: &str,
    name: &str,
) -> Vec<Arc<HorizontalPodAutoscaler>> {
    let concerns = |hpa: &HorizontalPodAutoscaler| {
        let target = hpa.spec.as_ref().map(|spec| spec.scale_target_ref.name.as_str()).unwrap_or_default();
        target.strip_suffix(names::SPOT_SUFFIX).unwrap_or(target) == name || target == name || hpa.name_any() == name
    };
    store.state_filter(|hpa| hpa.metadata.namespace.as_deref() == Some(namespace) && concerns(hpa))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{FakeApi, Watched};
    use serde_json::json;
    use windlass_operator_core::assess::Assessment;

    /// A service that takes every default engine image, as it stands.
    fn upgrading(name: &str, image: &str, progressing: &str) -> serde_json::Value {
        json!({
            "apiVersion": "windlass.dev/v1alpha1", "kind": "InferenceService",
            "metadata": {"namespace": name, "name": name},
            "spec": {"model": {"source": "pvc://models/a.gguf"}, "rollout": {"engineUpgrade": "Automatic"}},
            "status": {"choices": {"engineImage": image}, "conditions": [{
                "type": "Progressing", "status": "True", "reason": progressing, "message": "",
                "lastTransitionTime": "1970-01-01T00:01:00Z",
            }]},
        })
    }

    #[tokio::test]
    async fn a_config_map_of_the_name_is_looked_up_before_it_is_written() {
        let (api, key) = (FakeApi::default(), ("n".to_owned(), "a".to_owned()));
        let map =
            json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"namespace": "n", "name": "a-capacity"}});
        let wish: ConfigMap = serde_json::from_value(map.clone()).expect("a ConfigMap");
        let plan = Plan {
            steps: vec![Step::Apply(Object::ConfigMap(wish))],
            memory: Memory::default(),
            assessment: Assessment::Leaving,
            requeue_after: Duration::ZERO,
        };
        let stores = Watched::empty().stores;
        let observer =
            Observer::new(api.client(), stores, Scopes::default(), Arc::default(), Loads::default(), "engine:1");
        let mut observed = Observed::default();
        assert!(!observer.find_strangers(&key, &plan, &mut observed).await.expect("an answer"), "there is none");
        api.put("/api/v1/namespaces/n/configmaps/a-capacity", map);
        assert!(observer.find_strangers(&key, &plan, &mut observed).await.expect("an answer"));
        assert_eq!(observed.capacities.len(), 1);
    }

    #[tokio::test]
    async fn of_all_scopes_one_service_at_a_time_takes_another_image() {
        let scope = |service: serde_json::Value| {
            let (api, mut watched) = (FakeApi::default(), Watched::empty());
            let name = service["metadata"]["name"].as_str().expect("a name").to_owned();
            api.put(&format!("/apis/windlass.dev/v1alpha1/namespaces/{name}/inferenceservices/{name}"), service);
            watched.catch_up(&api);
            watched
        };
        let ours = scope(upgrading("b", "engine:1", "Complete"));
        let is_turn = |other: &Stores| {
            let all = Scopes::default();
            all.set(vec![ours.stores.clone(), other.clone()]);
            let client = FakeApi::default().client();
            let observer =
                Observer::new(client, ours.stores.clone(), all, Arc::default(), Loads::default(), "engine:2");
            let service = ours.stores.services().remove(0);
            observer.is_upgrade_turn(&service, &("b".into(), "b".into()))
        };
        for (name, image, progressing, expected) in [
            ("a", "engine:2", "RollingOut", false),
            ("a", "engine:2", "Complete", true),
            ("a", "engine:1", "Complete", false),
            ("c", "engine:1", "Complete", true),
        ] {
            let other = scope(upgrading(name, image, progressing));
            assert_eq!(is_turn(&other.stores), expected, "{name} {image} {progressing}");
        }
        let (services, _writer) = reflector::store();
        let unlisted = Stores { services, ..Watched::empty().stores };
        assert!(!is_turn(&unlisted), "another scope has not told its services");
    }
}
