//! Paths and documents of `custom.metrics.k8s.io/v1beta2`.

use crate::scrape::Loads;
use crate::watches::Engines;
use axum::extract::{Path, RawQuery, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::{Json, Router};
use jiff::Timestamp;
use kube::ResourceExt;
use serde_json::{Value, json};
use std::sync::Arc;
use windlass_operator_core::custom_metrics::Metric;
use windlass_operator_core::names::SERVICE_LABEL;
use windlass_operator_core::pod::Pod;
use windlass_operator_core::window::WINDOW;

const GROUP_VERSION: &str = "custom.metrics.k8s.io/v1beta2";
/// The resource of services, as the aggregation layer's paths spell it.
const SERVICES: &str = "inferenceservices.windlass.dev";

/// What one scope's metrics are answered from.
pub struct Answers {
    /// Services and pods.
    pub engines: Engines,
    /// Readings.
    pub loads: Loads,
}

type Scopes = Arc<Vec<Answers>>;

/// The API.
pub fn router(scopes: Scopes) -> Router {
    let root = format!("/apis/{GROUP_VERSION}");
    Router::new()
        .route(&root, get(|| async { Json(resources()) }))
        .route(&format!("{root}/namespaces/{{namespace}}/pods/{{name}}/{{metric}}"), get(of_pods))
        .route(&format!("{root}/namespaces/{{namespace}}/{SERVICES}/{{name}}/{{metric}}"), get(of_service))
        .with_state(scopes)
}

/// Discovery: every metric of every resource.
fn resources() -> Value {
    let resource = |kind: &str, metric: &Metric| {
        let name = format!("{kind}/{}", metric.name());
        json!({"name": name, "singularName": "", "namespaced": true, "kind": "MetricValueList", "verbs": ["get"]})
    };
    let list: Vec<Value> =
        Metric::all().flat_map(|metric| ["pods", SERVICES].map(|kind| resource(kind, &metric))).collect();
    json!({"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": GROUP_VERSION, "resources": list})
}

async fn of_service(State(scopes): State<Scopes>, Path((namespace, name, metric)): Path<Names>) -> Response {
    let Some(metric) = Metric::named(&metric) else { return unknown(&metric) };
    let service = (namespace.clone(), name.clone());
    let value = scopes.iter().find_map(|scope| {
        let names: Vec<String> = scope.engines.pods.of(&service).iter().map(|pod| pod.name_any()).collect();
        let load = scope.loads.of(&service);
        metric.value(&load, names.iter().map(String::as_str), Timestamp::now())
    });
    match value {
        Some(value) => {
            let about = json!({
                "kind": "InferenceService", "apiVersion": "windlass.dev/v1alpha1", "namespace": namespace, "name": name,
            });
            list(vec![item(about, &metric, value)])
        }
        None => not_found(&format!("{} of InferenceService {namespace}/{name} was not measured", metric.name())),
    }
}

/// Namespace, name and metric of a path.
type Names = (String, String, String);

async fn of_pods(
    State(scopes): State<Scopes>,
    Path((namespace, name, metric)): Path<Names>,
    RawQuery(query): RawQuery,
) -> Response {
    let Some(metric) = Metric::named(&metric) else { return unknown(&metric) };
    let text = label_selector(&query.unwrap_or_default());
    let Some(selector) = Selector::parse(&text) else {
        let text = format!("labelSelector {text:?} is not a list of key=value, key!=value or key");
        return status(StatusCode::BAD_REQUEST, "BadRequest", &text);
    };
    let is_meant = |pod: &Pod| {
        pod.metadata.namespace.as_ref() == Some(&namespace)
            && if name == "*" { selector.matches(pod) } else { pod.name_any() == name }
    };
    let items: Vec<Value> = scopes.iter().flat_map(|scope| measured(scope, &namespace, &metric, is_meant)).collect();
    if items.is_empty() && name != "*" {
        return not_found(&format!("{} of Pod {namespace}/{name} was not measured", metric.name()));
    }
    list(items)
}

fn label_selector(query: &str) -> String {
    let mut pairs = form_urlencoded::parse(query.as_bytes());
    pairs.find(|(key, _)| key == "labelSelector").map(|(_, value)| value.into_owned()).unwrap_or_default()
}

fn measured(scope: &Answers, namespace: &str, metric: &Metric, is_meant: impl Fn(&Pod) -> bool) -> Vec<Value> {
    let pods = scope.engines.pods.all().into_iter().filter(|pod| is_meant(pod));
    let value = |pod: &Arc<Pod>| {
        let (name, service) = (pod.name_any(), pod.labels().get(SERVICE_LABEL)?.clone());
        let load = scope.loads.of(&(namespace.to_owned(), service));
        let value = metric.value(&load, std::iter::once(name.as_str()), Timestamp::now())?;
        Some(item(json!({"kind": "Pod", "apiVersion": "/v1", "namespace": namespace, "name": name}), metric, value))
    };
    pods.filter_map(|pod| value(&pod)).collect()
}

/// `thousandths` as a quantity.
fn item(about: Value, metric: &Metric, thousandths: i64) -> Value {
    json!({
        "describedObject": about,
        "metric": {"name": metric.name(), "selector": null},
        "timestamp": Timestamp::from_second(Timestamp::now().as_second()).unwrap_or_default().to_string(),
        "windowSeconds": WINDOW.as_secs(),
        "value": format!("{thousandths}m"),
    })
}

fn list(items: Vec<Value>) -> Response {
    Json(json!({"kind": "MetricValueList", "apiVersion": GROUP_VERSION, "metadata": {}, "items": items}))
        .into_response()
}

fn unknown(metric: &str) -> Response {
    not_found(&format!("there is no metric {metric:?}; GET /apis/{GROUP_VERSION} lists them"))
}

fn not_found(message: &str) -> Response {
    status(StatusCode::NOT_FOUND, "NotFound", message)
}

fn status(code: StatusCode, reason: &str, message: &str) -> Response {
    let body = json!({
        "kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code.as_u16(), "reason": reason,
        "message": message,
    });
    (code, Json(body)).into_response()
}

/// A label selector of equalities.
#[derive(Debug, PartialEq)]
struct Selector(Vec<Requirement>);

#[derive(Debug, PartialEq)]
enum Requirement {
    Is(String, String),
    IsNot(String, String),
    Has(String),
}

impl Selector {
    /// `None` for a selector of sets, and for what is none.
    fn parse(text: &str) -> Option<Selector> {
        let parts = text.split(',').map(str::trim).filter(|part| !part.is_empty());
        parts.map(Requirement::parse).collect::<Option<_>>().map(Selector)
    }

    fn matches(&self, pod: &Pod) -> bool {
        self.0.iter().all(|requirement| match requirement {
            Requirement::Is(key, value) => pod.labels().get(key) == Some(value),
            Requirement::IsNot(key, value) => pod.labels().get(key) != Some(value),
            Requirement::Has(key) => pod.labels().contains_key(key),
        })
    }
}

impl Requirement {
    fn parse(text: &str) -> Option<Requirement> {
        let plain = |part: &str| {
            let part = part.trim();
            (!part.contains([' ', '(', '!', '='])).then(|| part.to_owned())
        };
        if let Some((key, value)) = text.split_once("!=") {
            return Some(Requirement::IsNot(plain(key)?, plain(value)?));
        }
        match text.split_once("==").or_else(|| text.split_once('=')) {
            Some((key, value)) => Some(Requirement::Is(plain(key)?, plain(value)?)),
            None => plain(text).map(Requirement::Has),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{FakeApi, Watched};
    use axum::body::{Body, to_bytes};
    use hyper::Request;
    use tower::ServiceExt;
    use windlass_engine_contract::stats::Stats;

    const POD: &str = "/api/v1/namespaces/n/pods/llama-1";

    /// One service with one pod that was read just now.
    fn api(stats: Stats) -> Router {
        let fake = FakeApi::default();
        fake.put(
            POD,
            json!({
                "apiVersion": "v1", "kind": "Pod",
                "metadata": {"namespace": "n", "name": "llama-1", "labels": {SERVICE_LABEL: "llama"}},
            }),
        );
        let mut watched = Watched::empty();
        watched.catch_up(&fake);
        let loads = Loads::default();
        loads.record(&("n".into(), "llama".into()), "llama-1", Timestamp::now(), stats);
        router(Arc::new(vec![Answers { engines: watched.stores.engines(), loads }]))
    }

    async fn ask(api: &Router, path: &str) -> (u16, Value) {
        let request = Request::get(format!("/apis/{GROUP_VERSION}{path}")).body(Body::empty()).expect("a request");
        let answer = api.clone().oneshot(request).await.expect("an answer");
        let code = answer.status().as_u16();
        let body = to_bytes(answer.into_body(), 1 << 20).await.expect("a body");
        (code, serde_json::from_slice(&body).unwrap_or_default())
    }

    fn busy() -> Stats {
        Stats { utilization: Some(0.25), waiting: 3, ..windlass_engine_contract::fixture::idle() }
    }

    #[tokio::test]
    async fn discovery_lists_metrics_of_pods_and_of_services() {
        let (code, list) = ask(&api(busy()), "").await;
        assert_eq!((code, &list["groupVersion"]), (200, &json!(GROUP_VERSION)));
        let names: Vec<_> =
            list["resources"].as_array().expect("a list").iter().map(|one| one["name"].clone()).collect();
        for name in
            ["pods/windlass_waiting_requests", "inferenceservices.windlass.dev/windlass_end_to_end_p99_milliseconds"]
        {
            assert!(names.contains(&json!(name)), "{name}: {names:?}");
        }
    }

    #[tokio::test]
    async fn a_service_and_its_pods_have_values() {
        let api = api(busy());
        let (code, of_service) =
            ask(&api, "/namespaces/n/inferenceservices.windlass.dev/llama/windlass_utilization_percent").await;
        assert_eq!((code, &of_service["items"][0]["value"]), (200, &json!("25000m")), "{of_service}");
        assert_eq!(of_service["items"][0]["describedObject"]["kind"], "InferenceService");
        for (path, items) in [
            ("/namespaces/n/pods/llama-1/windlass_waiting_requests", 1),
            (
                "/namespaces/n/pods/*/windlass_waiting_requests?labelSelector=windlass.dev%2Finference-service%3Dllama",
                1,
            ),
            (
                "/namespaces/n/pods/*/windlass_waiting_requests?labelSelector=windlass.dev%2Finference-service%3Dother",
                0,
            ),
            ("/namespaces/m/pods/*/windlass_waiting_requests", 0),
        ] {
            let (code, list) = ask(&api, path).await;
            assert_eq!((code, list["items"].as_array().map(Vec::len)), (200, Some(items)), "{path}");
        }
    }

    #[tokio::test]
    async fn what_is_not_known_is_not_found_and_never_zero() {
        let api = api(busy());
        for path in [
            "/namespaces/n/inferenceservices.windlass.dev/other/windlass_utilization_percent",
            "/namespaces/n/inferenceservices.windlass.dev/llama/cpu",
            "/namespaces/n/pods/gone/windlass_waiting_requests",
        ] {
            let (code, answer) = ask(&api, path).await;
            assert_eq!((code, &answer["reason"]), (404, &json!("NotFound")), "{path}");
        }
        let sets = "/namespaces/n/pods/*/windlass_waiting_requests?labelSelector=a%20in%20(b)";
        assert_eq!(ask(&api, sets).await.0, 400);
    }
}
