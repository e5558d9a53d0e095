//! Spans of requests as a collector gets them: this test is the collector, and reads OTLP's protobuf.

use crate::common::{Client, FAST, chat, eventually, get, post, serve};
use axum::Router;
use axum::body::Bytes;
use axum::extract::State;
use axum::routing::post as route;
use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;
use opentelemetry_proto::tonic::common::v1::any_value::Value;
use opentelemetry_proto::tonic::trace::v1::Span;
use prost::Message;
use serde_json::json;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use windlass_engine::lifecycle::Stage;

type Received = Arc<Mutex<Vec<Span>>>;

/// A collector that keeps what it gets.
async fn collector() -> (SocketAddr, Received) {
    let received = Received::default();
    let take = async |State(received): State<Received>, body: Bytes| {
        let message = ExportTraceServiceRequest::decode(body).unwrap();
        let scopes = message.resource_spans.into_iter().flat_map(|resource| resource.scope_spans);
        received.lock().unwrap().extend(scopes.flat_map(|scope| scope.spans));
    };
    let routes = Router::new().route("/v1/traces", route(take)).with_state(received.clone());
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move { axum::serve(listener, routes).await.unwrap() });
    (address, received)
}

fn number(span: &Span, name: &str) -> f64 {
    let attribute = span.attributes.iter().find(|attribute| attribute.key == name);
    match attribute.and_then(|attribute| attribute.value.as_ref()?.value.clone()) {
        Some(Value::IntValue(number)) => number as f64,
        Some(Value::DoubleValue(number)) => number,
        other => panic!("{name} is {other:?} in {span:?}"),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_goes_on_with_its_callers_trace() {
    let (collector, received) = collector().await;
    let server = serve(&format!("{FAST} --otlp-traces-endpoint http://{collector}/v1/traces")).await;
    let mut request = post("/v1/chat/completions", &chat(json!({"max_tokens": 5, "stream": true})));
    let parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
    request.headers_mut().insert("traceparent", parent.parse().unwrap());
    request.headers_mut().insert("x-request-id", "traced-1".parse().unwrap());
    let mut client = Client::connect(server.api).await;
    crate::common::Answer::read(client.send(request).await.unwrap()).await;
    drop(client);
    server.chat(json!({"max_tokens": 3})).await;
    // What asks for no answer is no span.
    get(server.api, "/v1/models").await;
    server.lifecycle.advance(Stage::Closing);
    eventually("both spans arrive", async || received.lock().unwrap().len() == 2).await;
    let spans = received.lock().unwrap().clone();
    let traced = spans.iter().find(|span| !span.parent_span_id.is_empty()).unwrap();
    let hex = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    assert_eq!(hex(&traced.trace_id), "0af7651916cd43dd8448eb211c80319c");
    assert_eq!(hex(&traced.parent_span_id), "b7ad6b7169203331");
    assert_eq!((traced.name.as_str(), number(traced, "gen_ai.usage.completion_tokens")), ("llm_request", 5.0));
    assert!(number(traced, "gen_ai.usage.prompt_tokens") > 0.0);
    let (first, whole) = (number(traced, "gen_ai.latency.time_to_first_token"), number(traced, "gen_ai.latency.e2e"));
    assert!(0.0 < first && first < whole && whole < 10.0, "{first} {whole}");
    assert!(format!("{traced:?}").contains("traced-1"));
    assert!(!format!("{spans:?}").contains("tell me of"), "a prompt is in a span");
    let other = spans.iter().find(|span| span.parent_span_id.is_empty()).unwrap();
    assert_ne!(other.trace_id, traced.trace_id);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_collector_that_is_not_there_costs_no_answer() {
    let server = serve(&format!("{FAST} --otlp-traces-endpoint http://127.0.0.1:9/v1/traces")).await;
    assert!(server.chat(json!({"max_tokens": 3})).await.status.is_success());
}
