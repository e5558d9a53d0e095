//! A span for every request that generates, to a collector by OTLP over HTTP. Off unless an endpoint is named.
//!
//! A request that carries W3C's `traceparent` goes on with its trace, and is sampled where its caller was; others begin
//! one. Attributes are numbers and names, by the words that vLLM uses: no prompt, no answer.

use crate::failure::Failure;
use async_trait::async_trait;
use axum::body::Bytes;
use axum::http::{HeaderMap, Request, Response};
use opentelemetry::KeyValue;
use opentelemetry::propagation::TextMapPropagator;
use opentelemetry::trace::{Span as _, SpanKind, Status, Tracer as _, TracerProvider as _};
use opentelemetry_http::{HeaderExtractor, HttpClient, HttpError};
use opentelemetry_otlp::{Protocol, SpanExporter, WithExportConfig, WithHttpConfig};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::propagation::TraceContextPropagator;
use opentelemetry_sdk::trace::{SdkTracer, SdkTracerProvider, Span};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

/// Longest time for one message to the collector.
const SEND_TIMEOUT: Duration = Duration::from_secs(10);
/// What the collector knows the program as.
const SERVICE: &str = "windlass-engine";

/// The way to a collector. Messages leave from a thread of its own; where they do not get through, spans are lost and
/// requests are not.
pub struct Traces {
    provider: SdkTracerProvider,
    tracer: SdkTracer,
}

/// A request being traced. It ends when it is dropped.
#[derive(Debug)]
pub struct RequestSpan(Mutex<Traced>);

#[derive(Debug)]
struct Traced {
    span: Span,
    sum: Answered,
}

/// What became of answers.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Answered {
    /// Tokens of the prompt.
    pub prompt_tokens: u32,
    /// Tokens generated.
    pub completion_tokens: u32,
    /// Found in the prefix cache.
    pub cached_tokens: u32,
    /// From admission to the first token.
    pub first_token_seconds: Option<f64>,
    /// From admission to the end.
    pub seconds: f64,
    /// It was given up.
    pub failed: bool,
}

impl Traces {
    /// Sends to `endpoint`, the whole address with its path.
    pub fn start(endpoint: &str) -> Result<Traces, Failure> {
        let wrong = |why: String| Failure::configuration(format!("--otlp-traces-endpoint {endpoint}: {why}"));
        if !endpoint.starts_with("http://") && !endpoint.starts_with("https://") {
            return Err(wrong("write http://host:4318/v1/traces".to_owned()));
        }
        let exporter = SpanExporter::builder()
            .with_http()
            .with_http_client(Client::new())
            .with_protocol(Protocol::HttpBinary)
            .with_endpoint(endpoint)
            .with_timeout(SEND_TIMEOUT)
            .build()
            .map_err(|error| wrong(error.to_string()))?;
        let version = KeyValue::new("service.version", env!("CARGO_PKG_VERSION"));
        let resource = Resource::builder().with_service_name(SERVICE).with_attribute(version).build();
        let provider = SdkTracerProvider::builder().with_batch_exporter(exporter).with_resource(resource).build();
        Ok(Traces { tracer: provider.tracer(SERVICE), provider })
    }

    /// A request of this name begins.
    pub fn begin(&self, headers: &HeaderMap, request: &str, path: &str) -> RequestSpan {
        let parent = TraceContextPropagator::new().extract(&HeaderExtractor(headers));
        let builder = self.tracer.span_builder("llm_request").with_kind(SpanKind::Server).with_attributes([
            KeyValue::new("gen_ai.request.id", request.to_owned()),
            KeyValue::new("url.path", path.to_owned()),
        ]);
        let span = self.tracer.build_with_context(builder, &parent);
        RequestSpan(Mutex::new(Traced { span, sum: Answered::default() }))
    }

    /// Sends what is left. Blocks for as long as the collector takes.
    pub fn finish(&self) {
        // Its failures are logged by itself.
        let _ = self.provider.shutdown();
    }
}

impl RequestSpan {
    /// One of the request's answers ended.
    pub fn answered(&self, answer: Answered) {
        let mut traced = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let sum = &mut traced.sum;
        *sum = Answered {
            prompt_tokens: sum.prompt_tokens + answer.prompt_tokens,
            completion_tokens: sum.completion_tokens + answer.completion_tokens,
            cached_tokens: sum.cached_tokens + answer.cached_tokens,
            first_token_seconds: sum.first_token_seconds.or(answer.first_token_seconds),
            seconds: sum.seconds.max(answer.seconds),
            failed: sum.failed || answer.failed,
        };
    }
}

impl Drop for Traced {
    fn drop(&mut self) {
        let Answered { prompt_tokens, completion_tokens, cached_tokens, first_token_seconds, seconds, failed } =
            self.sum;
        let count = |name, tokens: u32| KeyValue::new(name, i64::from(tokens));
        self.span.set_attributes([
            count("gen_ai.usage.prompt_tokens", prompt_tokens),
            count("gen_ai.usage.completion_tokens", completion_tokens),
            count("gen_ai.usage.cached_tokens", cached_tokens),
            KeyValue::new("gen_ai.latency.e2e", seconds),
        ]);
        if let Some(seconds) = first_token_seconds {
            self.span.set_attribute(KeyValue::new("gen_ai.latency.time_to_first_token", seconds));
        }
        if failed {
            self.span.set_status(Status::error("an answer was given up"));
        }
        self.span.end();
    }
}

/// Carries messages to the collector.
#[derive(Debug)]
struct Client(ureq::Agent);

impl Client {
    fn new() -> Client {
        let config = ureq::Agent::config_builder().timeout_global(Some(SEND_TIMEOUT)).http_status_as_error(false);
        Client(config.build().into())
    }
}

#[async_trait]
impl HttpClient for Client {
    /// Called on the exporter's own thread, which may block.
    async fn send_bytes(&self, request: Request<Bytes>) -> Result<Response<Bytes>, HttpError> {
        let (head, body) = request.into_parts();
        let mut response = self.0.run(Request::from_parts(head, body.to_vec()))?;
        let bytes = response.body_mut().read_to_vec()?;
        let (head, _) = response.into_parts();
        Ok(Response::from_parts(head, Bytes::from(bytes)))
    }
}
