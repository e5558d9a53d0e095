//! Reconciles against a server at its own contract: which requests are made, which are not, and what is told.

use super::*;
use crate::scopes::Scopes;
use crate::scrape::Loads;
use crate::testing::{FakeApi, Watched};
use crate::written::Writes;
use kube::runtime::reflector::ObjectRef;
use serde_json::{Value, json};
use windlass_engine_contract::fixture::idle;

const SERVICE: &str = "/apis/windlass.dev/v1alpha1/namespaces/n/inferenceservices/llama";
const DEPLOYMENT: &str = "/apis/apps/v1/namespaces/n/deployments/llama";
const POLICY: &str = "/apis/networking.k8s.io/v1/namespaces/n/networkpolicies/llama";
const ENDPOINT: &str = "/api/v1/namespaces/n/services/llama";
const POD: &str = "/api/v1/namespaces/n/pods/llama-1";
const CLAIM: &str = "/api/v1/namespaces/n/persistentvolumeclaims/models";

/// A service, its server, and the operator's view of it.
struct World {
    api: FakeApi,
    watched: Watched,
    loads: Loads,
    context: Arc<Context>,
}

impl World {
    fn new() -> Self {
        let api = FakeApi::default();
        api.put(CLAIM, json!({"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "models"}}));
        api.put(
            SERVICE,
            json!({
                "apiVersion": "windlass.dev/v1alpha1", "kind": "InferenceService",
                "metadata": {"namespace": "n", "name": "llama"},
                "spec": {"model": {"source": "pvc://models/llama.gguf"}},
            }),
        );
        World::over(api)
    }

    /// A freshly started operator over what `api` holds.
    fn over(api: FakeApi) -> Self {
        let (watched, loads) = (Watched::empty(), Loads::default());
        let (client, writes, metrics) = (api.client(), Arc::new(Writes::default()), Metrics::new().expect("names"));
        let (stores, all) = (watched.stores.clone(), Scopes::default());
        let context = Arc::new(Context {
            observer: Observer::new(client.clone(), stores, all, writes.clone(), loads.clone(), "engine:1"),
            applier: Applier::new(client, writes, metrics.clone(), "operator-0"),
            defaults: defaults(),
            metrics,
            failures: Failures::default(),
            endings: Endings::default(),
        });
        let mut world = World { api, watched, loads, context };
        world.watched.catch_up(&world.api);
        world
    }

    /// Reconciles what the watch holds.
    async fn reconcile(&self) -> Action {
        reconcile(self.service(), self.context.clone()).await.expect("no failure")
    }

    /// Reconciles what the watch holds, in vain: the category of the failure, and what follows.
    async fn fail(&self) -> (&'static str, Action) {
        let error = reconcile(self.service(), self.context.clone()).await.expect_err("a failure");
        (error.category(), after_error(self.service(), &error, self.context.clone()))
    }

    fn service(&self) -> Arc<Guarded> {
        let service = ObjectRef::new("llama").within("n");
        self.watched.stores.services.get(&service).expect("the service is watched")
    }

    /// Failed reconciles so far, of a category.
    fn failures(&self, category: &str) -> bool {
        let text = self.context.metrics.render(&[]).expect("text");
        text.contains(&format!("windlass_operator_reconcile_errors_total{{category=\"{category}\"}} 1\n"))
    }

    /// Lets the cluster and the engine do their part: a ready pod of the current template that was read.
    fn serve(&mut self) {
        let deployment = self.api.get(DEPLOYMENT).expect("applied");
        let template = &deployment["spec"]["template"]["metadata"];
        self.api.put(
            POD,
            json!({
                "apiVersion": "v1", "kind": "Pod",
                "metadata": {
                    "namespace": "n", "name": "llama-1", "labels": template["labels"],
                    "annotations": template["annotations"],
                },
                "spec": {"containers": []},
                "status": {"conditions": [{
                    "type": "Ready", "status": "True", "lastTransitionTime": "2026-01-01T00:00:01Z",
                }]},
            }),
        );
        self.api.change(DEPLOYMENT, |deployment| {
            let generation = deployment["metadata"]["generation"].clone();
            deployment["status"] = json!({
                "observedGeneration": generation, "replicas": 1, "readyReplicas": 1, "updatedReplicas": 1,
                "availableReplicas": 1,
            });
        });
        self.loads.record(&("n".into(), "llama".into()), "llama-1", Timestamp::now(), idle());
        self.watched.catch_up(&self.api);
    }

    /// Reconciles until nothing is written any more, as the watch keeps up.
    async fn settle(&mut self) {
        for _ in 0..5 {
            self.reconcile().await;
            self.watched.catch_up(&self.api);
        }
        self.api.requests();
    }

    fn condition(&self, kind: &str) -> Value {
        let service = self.api.get(SERVICE).expect("the service");
        let conditions = service["status"]["conditions"].as_array().cloned().unwrap_or_default();
        conditions.into_iter().find(|found| found["type"] == kind).unwrap_or_default()
    }
}

fn defaults() -> Defaults {
    Defaults {
        engine_image: "engine:1".into(),
        image_pull_policy: None,
        operator_namespace: Some("windlass-system".into()),
        operator_pod_labels: [("app".to_owned(), "operator".to_owned())].into(),
        monitoring_namespace: None,
        cluster_domain: "cluster.local".into(),
        scrape_active: Duration::from_secs(5),
        scrape_idle: Duration::from_secs(30),
        inspect_timeout: None,
    }
}

#[tokio::test]
async fn a_new_service_gets_its_children_then_its_status() {
    let world = World::new();
    world.reconcile().await;
    let writes = world.api.writes();
    let kinds = ["serviceaccounts", "networkpolicies", "services", "deployments", "inferenceservices"];
    let first = |kind: &str| writes.iter().position(|write| write.contains(&format!("/{kind}/")));
    let places: Vec<_> = kinds.iter().map(|kind| first(kind).unwrap_or_else(|| panic!("{kind}: {writes:?}"))).collect();
    assert!(places.is_sorted(), "configuration, then the workload, then the status: {writes:?}");
    assert!(writes.iter().any(|write| write.starts_with("POST ") && write.contains("/events")), "{writes:?}");
    assert_eq!(world.condition("Ready")["reason"], "Starting");
}

#[tokio::test]
async fn own_writes_are_not_repeated_while_the_watch_lags() {
    let world = World::new();
    world.reconcile().await;
    world.api.requests();
    world.reconcile().await;
    assert_eq!(world.api.writes(), [format!("PATCH {SERVICE}/status")], "the rollout has begun: only that is told");
    world.reconcile().await;
    assert_eq!(world.api.writes(), Vec::<String>::new());
}

#[tokio::test]
async fn a_service_at_rest_costs_no_request_at_all() {
    let mut world = World::new();
    world.settle().await;
    world.serve();
    world.settle().await;
    assert_eq!(world.condition("Ready")["status"], "True", "{}", world.condition("Ready"));
    world.reconcile().await;
    assert_eq!(world.api.requests(), Vec::<String>::new());
}

#[tokio::test]
async fn a_restarted_operator_finds_everything_as_it_should_be() {
    let mut world = World::new();
    world.settle().await;
    world.serve();
    world.settle().await;
    let restarted = World::over(world.api);
    restarted.loads.record(&("n".into(), "llama".into()), "llama-1", Timestamp::now(), idle());
    restarted.reconcile().await;
    assert_eq!(restarted.api.writes(), Vec::<String>::new());
}

#[tokio::test]
async fn a_restarted_operator_does_not_act_on_the_spec_before_the_last_change() {
    let mut world = World::new();
    let before = world.api.get(SERVICE).expect("the service");
    world.api.change(SERVICE, |service| service["spec"]["replicas"] = 3.into());
    world.watched.catch_up(&world.api);
    world.settle().await;
    let mut restarted = World::over(world.api);
    // Watches tell each kind for itself: here the newest Deployment with an older service.
    let told = FakeApi::default();
    told.put(SERVICE, before);
    told.put(DEPLOYMENT, restarted.api.get(DEPLOYMENT).expect("applied"));
    restarted.watched.catch_up(&told);
    restarted.reconcile().await;
    assert_eq!(restarted.api.get(DEPLOYMENT).expect("there")["spec"]["replicas"], 3);
}

#[tokio::test]
async fn drift_is_mended_by_one_apply() {
    let mut world = World::new();
    world.settle().await;
    world.api.change(DEPLOYMENT, |deployment| deployment["spec"]["progressDeadlineSeconds"] = 7.into());
    world.watched.catch_up(&world.api);
    world.reconcile().await;
    let applied = world.api.writes();
    assert!(applied.contains(&format!("PATCH {DEPLOYMENT}")), "{applied:?}");
    assert_ne!(world.api.get(DEPLOYMENT).expect("there")["spec"]["progressDeadlineSeconds"], 7);
}

#[tokio::test]
async fn what_somebody_else_adds_to_a_selector_or_a_rule_is_mended() {
    let mut world = World::new();
    world.settle().await;
    for (path, place, addition) in [
        (ENDPOINT, "/spec/selector/a", json!("b")),
        (POLICY, "/spec/podSelector/matchLabels/a", json!("b")),
        (POLICY, "/spec/ingress/0/from/0/podSelector/matchLabels", json!({"a": "b"})),
    ] {
        let before = world.api.get(path).expect("applied");
        let (parent, name) = place.rsplit_once('/').expect("a place");
        world.api.change(path, |object| object.pointer_mut(parent).expect("a map")[name] = addition);
        world.watched.catch_up(&world.api);
        world.reconcile().await;
        assert!(world.api.writes().contains(&format!("PATCH {path}")), "{place}");
        world.api.put(path, before);
        world.settle().await;
    }
}

#[tokio::test]
async fn a_refusal_becomes_a_condition_with_the_servers_text_and_is_tried_again() {
    let mut world = World::new();
    world.api.refuse("/deployments/", 403, "exceeded quota: team, requested: count/deployments.apps=1, limited: 0");
    assert_eq!(world.fail().await, ("forbidden", Action::requeue(BACKOFF.0)));
    let ready = world.condition("Ready");
    assert_eq!(ready["status"], "False");
    assert!(ready["message"].as_str().is_some_and(|text| text.contains("exceeded quota: team")), "{ready}");
    assert!(world.failures("forbidden"));
    assert_eq!(world.fail().await.1, Action::requeue(BACKOFF.0 * 2));

    world.api.accept();
    world.watched.catch_up(&world.api);
    world.reconcile().await;
    assert!(world.api.get(DEPLOYMENT).is_some());

    // What went well in between is no part of the next trouble.
    world.api.change(DEPLOYMENT, |deployment| deployment["spec"]["progressDeadlineSeconds"] = 7.into());
    world.api.refuse("/deployments/", 403, "exceeded quota: team");
    world.watched.catch_up(&world.api);
    assert_eq!(world.fail().await.1, Action::requeue(BACKOFF.0));
}

#[tokio::test]
async fn a_server_in_trouble_is_a_failure_and_one_that_is_flooded_gets_no_status() {
    for (code, category, told) in [(500, "server", "ApplyFailed"), (429, "throttled", "")] {
        let world = World::new();
        world.api.refuse("/deployments/", code, "failed calling webhook");
        assert_eq!(world.fail().await, (category, Action::requeue(BACKOFF.0)));
        assert!(world.failures(category), "{category}");
        assert_eq!(world.condition("Ready")["reason"].as_str().unwrap_or_default(), told);
    }
}

#[tokio::test]
async fn somebody_elses_object_is_left_alone_and_named() {
    let world = World::new();
    let theirs = json!({"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"namespace": "n", "name": "llama"},
        "spec": {"selector": {}, "template": {}}});
    world.api.put(DEPLOYMENT, theirs);
    let before = world.api.get(DEPLOYMENT);
    world.reconcile().await;
    assert_eq!(world.api.get(DEPLOYMENT), before);
    assert_eq!(world.condition("Stalled")["reason"], "NameTaken");
}

#[tokio::test]
async fn an_admission_policy_that_rewrites_what_is_applied_starts_no_endless_loop() {
    let mut world = World::new();
    world.api.mutate(|object| {
        if object["kind"] == "Deployment" {
            object["spec"]["revisionHistoryLimit"] = 3.into();
        }
    });
    world.settle().await;
    world.reconcile().await;
    assert!(!world.api.writes().contains(&format!("PATCH {DEPLOYMENT}")));
}

#[tokio::test]
async fn a_missing_claim_is_named_by_its_field() {
    let mut world = World::new();
    let absent = json!({"model": {"source": "pvc://elsewhere/llama.gguf"}});
    world.api.change(SERVICE, |service| service["spec"] = absent);
    world.watched.catch_up(&world.api);
    world.reconcile().await;
    let ready = world.condition("Ready");
    assert_eq!(ready["reason"], "ReferenceNotFound");
    assert!(ready["message"].as_str().is_some_and(|text| text.contains("spec.model.source")), "{ready}");
}

#[tokio::test]
async fn a_service_that_cannot_be_read_is_told_of_and_left_alone() {
    let mut world = World::new();
    world.api.change(SERVICE, |service| service["spec"]["model"] = 7.into());
    world.watched.catch_up(&world.api);
    assert_eq!(world.reconcile().await, Action::await_change());
    let writes = world.api.writes();
    assert!(matches!(&writes[..], [one] if one.starts_with("POST ") && one.ends_with("/events")), "{writes:?}");
}

#[tokio::test]
async fn a_service_on_its_way_out_is_left_to_the_garbage_collector() {
    let mut world = World::new();
    world.api.change(SERVICE, |service| service["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z".into());
    world.watched.catch_up(&world.api);
    assert_eq!(world.reconcile().await, Action::await_change());
    assert_eq!(world.api.requests(), Vec::<String>::new());
}

#[tokio::test]
async fn in_a_namespace_that_is_being_deleted_one_attempt_is_made_and_told_and_no_other() {
    let mut world = World::new();
    let text = "unable to create new content in namespace n because it is being terminated";
    world.api.refuse("/deployments/", 403, text);
    assert_eq!(world.reconcile().await, Action::await_change());
    assert_eq!(world.condition("Ready")["reason"], "NamespaceTerminating");
    assert!(!world.failures("forbidden"), "it is no failure");
    let writes = world.api.writes();
    assert!(!writes.iter().any(|write| write.contains("/events")), "none could be made: {writes:?}");
    world.watched.catch_up(&world.api);
    assert_eq!(world.reconcile().await, Action::await_change());
    assert_eq!(world.api.requests(), Vec::<String>::new());

    // The service of that name in the next namespace of that name.
    world.api.change(SERVICE, |service| service["metadata"]["uid"] = "another".into());
    world.watched.catch_up(&world.api);
    world.reconcile().await;
    assert!(!world.api.requests().is_empty(), "it is looked after");
}

#[test]
fn the_delay_doubles_to_its_bound_and_starts_over_after_success() {
    let (failures, key) = (Failures::default(), ("n".to_owned(), "a".to_owned()));
    let delays: Vec<_> = (0..8).map(|_| failures.next_delay(&key).as_secs()).collect();
    assert_eq!(delays, [1, 2, 4, 8, 16, 32, 60, 60]);
    failures.clear(&key);
    assert_eq!(failures.next_delay(&key).as_secs(), 1);
    assert_eq!(backoff(u32::MAX), BACKOFF.1);
}
