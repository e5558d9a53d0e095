//! Clients that mean harm, or are merely broken: each gets its answer or is cut, and a canary beside them never notices.

use crate::common::{
    Answer, Client, FAST, MODEL, TestServer, chat, config, eventually, get, post, serve, serve_at, start, within,
};
use crate::encoders::{cosine, embed, encoder, vectors};
use axum::body::{Body, Bytes};
use futures::StreamExt;
use hyper::{Request, StatusCode};
use hyper_util::rt::{TokioExecutor, TokioIo};
use serde_json::{Value, json};
use std::net::SocketAddr;
use std::time::{Duration, Instant};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use windlass_checkpoint::testing::real_model;

const CHAT: &str = "/v1/chat/completions";
const COMPLETIONS: &str = "/v1/completions";

/// Somebody who streams the same answer again and again and compares.
struct Canary {
    stop: oneshot::Sender<()>,
    answers: JoinHandle<u32>,
}

impl Canary {
    async fn start(server: &TestServer) -> Canary {
        let api = server.api;
        let expected = Canary::ask(api).await;
        let (stop, mut stopped) = oneshot::channel();
        let answers = tokio::spawn(async move {
            let mut answers = 0;
            while stopped.try_recv().is_err() {
                assert_eq!(Canary::ask(api).await, expected);
                answers += 1;
            }
            answers
        });
        Canary { stop, answers }
    }

    /// The choices of a complete stream.
    async fn ask(api: SocketAddr) -> Vec<Value> {
        let body = chat(json!({"max_tokens": 50, "stream": true, "seed": 7}));
        let answer = within("the canary's answer", Client::connect(api).await.post(CHAT, &body)).await;
        assert_eq!(answer.status, StatusCode::OK, "{}", answer.text());
        answer.events().iter().map(|event| event["choices"].clone()).collect()
    }

    /// It had at least one answer, and all were right.
    async fn undisturbed(self) {
        let _ = self.stop.send(());
        assert!(within("the canary's end", self.answers).await.unwrap() > 0);
    }
}

fn impatient(flags: &str) -> windlass_engine::config::Config {
    let mut config = config(flags);
    config.patience.header = Duration::from_millis(300);
    config.patience.body = Duration::from_millis(300);
    config.patience.read = Duration::from_millis(300);
    config
}

/// Everything that the other side sends until it closes.
async fn until_closed(stream: &mut TcpStream) -> String {
    let mut answer = Vec::new();
    // A reset is an end, too.
    let _ = within("the connection closes", stream.read_to_end(&mut answer)).await;
    String::from_utf8_lossy(&answer).into_owned()
}

/// Values at and beyond the edges of every kind.
fn edges() -> Vec<Value> {
    let mut edges: Vec<Value> = [
        "null",
        "true",
        "0",
        "-1",
        "1",
        "0.5",
        "-0.0",
        "1e308",
        "-1e308",
        "2147483648",
        "4294967296",
        "9223372036854775807",
        "9223372036854775808",
        "18446744073709551615",
        "\"\"",
        "\"NaN\"",
        "\"x\"",
        "[]",
        "{}",
        "[null]",
        "[[]]",
        "[{}]",
        "[-1]",
        "[1e30]",
        "{\"\":0}",
        "{\"-1\":100}",
        "[\"\"]",
        "[\"\\u0000\"]",
    ]
    .iter()
    .map(|text| serde_json::from_str(text).unwrap())
    .collect();
    edges.push(Value::from("\u{10ffff}".repeat(10_000)));
    edges.push((0..10_000).map(|i| json!(format!("stop {i}"))).collect());
    edges.push((0..100_000).map(|i| (i.to_string(), json!(1))).collect::<serde_json::Map<_, _>>().into());
    edges
}

const FIELDS: &[&str] = &[
    "model",
    "messages",
    "prompt",
    "max_tokens",
    "max_completion_tokens",
    "min_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "stream",
    "stream_options",
    "n",
    "best_of",
    "logprobs",
    "top_logprobs",
    "logit_bias",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "response_format",
    "tools",
    "tool_choice",
    "user",
    "metadata",
    "echo",
    "suffix",
    "use_beam_search",
    "length_penalty",
    "prompt_logprobs",
    "allowed_token_ids",
    "bad_words",
    "guided_json",
    "guided_regex",
    "structured_outputs",
    "priority",
    "cache_salt",
    "chat_template",
    "chat_template_kwargs",
    "truncate_prompt_tokens",
    "typical_p",
    "parallel_tool_calls",
    "include_reasoning",
    "documents",
    "continue_final_message",
    "add_generation_prompt",
    "nobody_knows",
];

const ENCODER_FIELDS: &[&str] = &[
    "model",
    "input",
    "text_1",
    "text_2",
    "query",
    "documents",
    "top_n",
    "return_documents",
    "encoding_format",
    "dimensions",
    "truncate_prompt_tokens",
    "user",
    "priority",
    "nobody_knows",
];

/// Sends `body` with every edge in the place of one field: each gets an answer or a short reason, and no 5xx.
async fn answered_or_refused(server: &TestServer, path: &str, body: &Value, field: &str) {
    let mut client = Client::connect(server.api).await;
    for edge in edges() {
        let mut body = body.clone();
        body[field] = edge.clone();
        let answer = within(field, client.post(path, &body)).await;
        let shown: String = edge.to_string().chars().take(60).collect();
        let status = answer.status.as_u16();
        assert!((200..500).contains(&status), "{path} {field} {shown}: {status} {:.300}", answer.text());
        if status != 200 {
            let error = &answer.json()["error"];
            let short = error["message"].as_str().is_some_and(|text| text.chars().count() <= 1001);
            assert!(short, "{field} {shown}: {:.300}", error.to_string());
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_encoders_fields_at_their_edges_are_answered_or_refused() {
    let Some(server) = encoder("").await else { return };
    let canary = || async { vectors(&embed(&server, json!({"input": "A man is eating food."})).await).remove(0) };
    let expected = canary().await;
    let requests = [
        ("/v1/embeddings", json!({"model": "minilm", "input": "a text"})),
        ("/v1/score", json!({"model": "minilm", "text_1": "a text", "text_2": "another"})),
        ("/v1/rerank", json!({"model": "minilm", "query": "a text", "documents": ["one", "two"]})),
    ];
    for (path, body) in requests {
        let (server, body, canary, expected) = (&server, &body, &canary, &expected);
        let ask = |field: &'static str| async move {
            answered_or_refused(server, path, body, field).await;
            assert!(cosine(&canary().await, expected) > 0.99999, "{path} {field}");
        };
        futures::stream::iter(ENCODER_FIELDS.iter().copied()).for_each_concurrent(2, ask).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn every_field_at_its_edges_is_answered_or_refused() {
    let server = serve(&format!("{FAST} --max-model-len 256")).await;
    let canary = Canary::start(&server).await;
    let completion = json!({"model": MODEL, "prompt": "the engine", "max_tokens": 2});
    for (path, body) in [(CHAT, chat(json!({"max_tokens": 2}))), (COMPLETIONS, completion)] {
        let ask = |field: &'static str| answered_or_refused(&server, path, &body, field);
        futures::stream::iter(FIELDS.iter().copied()).for_each_concurrent(4, ask).await;
    }
    canary.undisturbed().await;
    server.until("nothing is left", |stats| stats["running"] == 0 && stats["kvUsage"] == 0.0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_stops_reading_is_cut_and_its_request_ends() {
    let server = start(impatient("--sim-step-us 100 --sim-decode-sequence-us 1 --sim-mean-answer-tokens 0")).await;
    let canary = Canary::start(&server).await;
    // Long enough to fill every buffer on the way.
    let prompts = vec!["go"; 32];
    let body = json!({"model": MODEL, "prompt": prompts, "max_tokens": 8000, "stream": true}).to_string();
    let mut deaf = TcpStream::connect(server.api).await.unwrap();
    let head = format!("POST {COMPLETIONS} HTTP/1.1\r\nHost: a\r\nContent-Length: {}\r\n\r\n{body}", body.len());
    deaf.write_all(head.as_bytes()).await.unwrap();
    server.until("it runs", |stats| stats["running"].as_u64() >= Some(32)).await;
    eventually("its requests are aborted", async || {
        server.metric("vllm:request_success_total{engine=\"0\",finished_reason=\"abort\"").await > 31.0
    })
    .await;
    assert!(!until_closed(&mut deaf).await.contains("[DONE]"), "it was complete: nothing was tested");
    canary.undisturbed().await;
    server.until("nothing is left", |stats| stats["running"] == 0 && stats["kvUsage"] == 0.0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_http2_stream_whose_window_stays_closed_ends_alone() {
    let server = start(impatient(FAST)).await;
    let canary = Canary::start(&server).await;
    let socket = TcpStream::connect(server.api).await.unwrap();
    let mut builder = hyper::client::conn::http2::Builder::new(TokioExecutor::new());
    let narrow = builder.initial_stream_window_size(1000);
    let (mut sender, connection) = narrow.handshake::<_, Body>(TokioIo::new(socket)).await.unwrap();
    let connection = tokio::spawn(connection);
    let uri = format!("http://a{CHAT}");
    let body = chat(json!({"max_tokens": 8000, "stream": true}));
    let unread = sender.send_request(post(&uri, &body)).await.unwrap();
    server.until("it runs", |stats| stats["running"].as_u64() >= Some(1)).await;
    eventually("it is aborted", async || {
        server.metric("vllm:request_success_total{engine=\"0\",finished_reason=\"abort\"").await > 0.0
    })
    .await;
    // The connection and its other streams live on.
    let other = sender.send_request(post(&uri, &chat(json!({"max_tokens": 1})))).await.unwrap();
    assert_eq!(Answer::read(other).await.status, StatusCode::OK);
    // Whoever reads on learns that it is no complete answer.
    let rest = within("an end", axum::body::to_bytes(Body::new(unread.into_body()), usize::MAX)).await;
    assert!(rest.is_err(), "{rest:?}");
    assert!(!connection.is_finished());
    canary.undisturbed().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn connections_that_say_nothing_or_too_little_are_closed() {
    let server = start(impatient(FAST)).await;
    let canary = Canary::start(&server).await;
    for said in [
        &b""[..],
        b"P",
        b"PRI * HTTP/2.0\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET /v1/models HTTP/1.1\r\nHost: a\r\nX-Slow: ",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"\x00\x01\x02\x03\x04\x05\x06\x07\x08\x09\x0a",
    ] {
        let mut stream = TcpStream::connect(server.api).await.unwrap();
        stream.write_all(said).await.unwrap();
        let answer = until_closed(&mut stream).await;
        assert!(!answer.contains("200 OK"), "{answer}");
    }
    canary.undisturbed().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_body_that_never_ends_is_408() {
    let server = start(impatient(FAST)).await;
    let mut stream = TcpStream::connect(server.api).await.unwrap();
    stream
        .write_all(format!("POST {CHAT} HTTP/1.1\r\nHost: a\r\nContent-Length: 99\r\n\r\n{{").as_bytes())
        .await
        .unwrap();
    let answer = until_closed(&mut stream).await;
    assert!(answer.starts_with("HTTP/1.1 408") && answer.contains("body_timeout"), "{answer}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_body_in_a_hundred_thousand_pieces_is_read() {
    let server = serve(FAST).await;
    let canary = Canary::start(&server).await;
    let mut body = chat(json!({"max_tokens": 1})).to_string();
    body.push_str(&" ".repeat(100_000));
    let mut request =
        format!("POST {CHAT} HTTP/1.1\r\nHost: a\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n");
    body.chars().for_each(|c| request.push_str(&format!("1\r\n{c}\r\n")));
    request.push_str("0\r\n\r\n");
    let mut stream = TcpStream::connect(server.api).await.unwrap();
    within("it is taken", stream.write_all(request.as_bytes())).await.unwrap();
    assert!(until_closed(&mut stream).await.starts_with("HTTP/1.1 200"));
    canary.undisturbed().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn json_that_is_deep_is_refused_and_a_compressed_body_is_not_unpacked() {
    let server = serve(FAST).await;
    let deep = format!("{{\"messages\":{}", "[".repeat(1_000_000));
    let mut client = Client::connect(server.api).await;
    let request = |encoding: Option<&str>, body: Bytes| {
        let mut request = Request::post(CHAT).header("content-type", "application/json");
        if let Some(encoding) = encoding {
            request = request.header("content-encoding", encoding);
        }
        request.body(Body::from(body)).unwrap()
    };
    let answer = Answer::read(client.send(request(None, deep.into())).await.unwrap()).await;
    assert_eq!((answer.status.as_u16(), &answer.json()["error"]["code"]), (400, &json!("invalid_json")));
    let answer =
        Answer::read(client.send(request(Some("gzip"), Bytes::from_static(b"\x1f\x8b\x08"))).await.unwrap()).await;
    assert_eq!((answer.status.as_u16(), &answer.json()["error"]["code"]), (415, &json!("unsupported_media_type")));
}

/// What a server answers to a request with these headers and this body, and to whatever it finds behind them, on a
/// connection that stays open as far as the client is concerned.
async fn answer_to(server: &TestServer, headers: &str, body: &str) -> String {
    let mut stream = TcpStream::connect(server.api).await.unwrap();
    let request = format!("POST {CHAT} HTTP/1.1\r\nHost: a\r\n{headers}\r\n\r\n{body}{HIDDEN}");
    // The server may close before it has read all of it.
    let _ = stream.write_all(request.as_bytes()).await;
    until_closed(&mut stream).await
}

const HIDDEN: &str = "GET /hidden HTTP/1.1\r\nHost: a\r\n\r\n";
/// What a body looks like to whoever reads chunks, or a length.
const NO_CHUNK: &str = "0\r\n\r\n";
const TWO_BYTES: &str = "{}";

#[tokio::test(flavor = "multi_thread")]
async fn requests_hidden_in_requests_get_one_answer_or_none() {
    let server = start(impatient(FAST)).await;
    let canary = Canary::start(&server).await;
    // What is not hidden is found: each of the others could fail.
    for (headers, body) in [("Content-Length: 2", TWO_BYTES), ("Transfer-Encoding: chunked", NO_CHUNK)] {
        let answer = answer_to(&server, headers, body).await;
        assert_eq!(answer.matches("HTTP/1.1 ").count(), 2, "{headers:?}: {answer}");
        assert!(answer.contains("/hidden"), "{answer}");
    }
    for (headers, body) in [
        ("Content-Length: 2\r\nContent-Length: 3", TWO_BYTES),
        ("Content-Length: 2, 3", TWO_BYTES),
        ("Content-Length: +2", TWO_BYTES),
        ("Content-Length: -1", ""),
        ("Content-Length: 99999999999999999999", ""),
        ("Content-Length: 0x2", TWO_BYTES),
        ("Content-Length: 2 2", TWO_BYTES),
        ("Transfer-Encoding: chunked\r\nContent-Length: 5", NO_CHUNK),
        ("Content-Length: 5\r\nTransfer-Encoding: chunked", NO_CHUNK),
        ("Transfer-Encoding: xchunked", NO_CHUNK),
        ("Transfer-Encoding: gzip, chunked", NO_CHUNK),
        ("Transfer-Encoding: chunked, chunked", NO_CHUNK),
        ("Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked", NO_CHUNK),
        ("Transfer-Encoding: chunked, identity", NO_CHUNK),
        ("Transfer-Encoding : chunked", NO_CHUNK),
        ("Transfer-Encoding: chunked\r\n X: folded", NO_CHUNK),
        ("X-Bare: a\nTransfer-Encoding: chunked", NO_CHUNK),
        ("X-Bare: a\nContent-Length: 2", TWO_BYTES),
        ("Content-Length: 2\r\n\nX: a", TWO_BYTES),
        ("X-Nul: a\0b\r\nContent-Length: 2", TWO_BYTES),
        ("Host: b\r\nContent-Length: 2", TWO_BYTES),
        ("Content-Length : 2", TWO_BYTES),
        ("Authorization: Bearer a\r\nAuthorization: Bearer b\r\nContent-Length: 2", TWO_BYTES),
    ] {
        let answer = answer_to(&server, headers, body).await;
        assert!(answer.matches("HTTP/1.1 ").count() <= 1 && !answer.contains("/hidden"), "{headers:?}: {answer}");
        assert!(answer.is_empty() || answer.starts_with("HTTP/1.1 4"), "{headers:?}: {answer}");
    }
    canary.undisturbed().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_flood_of_http2_resets_ends_that_connection_at_most() {
    let server = serve(FAST).await;
    let canary = Canary::start(&server).await;
    let socket = TcpStream::connect(server.api).await.unwrap();
    let builder = hyper::client::conn::http2::Builder::new(TokioExecutor::new());
    let (sender, connection) = builder.handshake::<_, Body>(TokioIo::new(socket)).await.unwrap();
    tokio::spawn(connection);
    for _ in 0..2000 {
        let mut sender = sender.clone();
        if sender.ready().await.is_err() {
            break;
        }
        // Dropped at once: HEADERS, DATA and RST_STREAM.
        let asked = sender.send_request(post(&format!("http://a{CHAT}"), &chat(json!({"max_tokens": 1000}))));
        drop(tokio::time::timeout(Duration::from_micros(50), asked).await);
    }
    drop(sender);
    canary.undisturbed().await;
    server.until("nothing is left", |stats| stats["running"] == 0 && stats["waiting"] == 0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_hundred_clients_that_leave_in_every_phase_leave_nothing_behind() {
    let times = "--sim-step-us 1000 --sim-prefill-token-us 100 --sim-decode-sequence-us 1 --sim-mean-answer-tokens 0";
    let server = serve(&format!("{times} --max-num-seqs 16")).await;
    let canary = Canary::start(&server).await;
    let (server, long) = (&server, "word ".repeat(2000));
    let long = &long;
    let leave = |number: u64| async move {
        let mut client = Client::connect(server.api).await;
        match number % 4 {
            // While the prompt is on its way, or computed.
            0 => drop(
                tokio::time::timeout(
                    Duration::from_millis(number),
                    client.send(post(COMPLETIONS, &json!({"model": MODEL, "prompt": long, "max_tokens": 1000}))),
                )
                .await,
            ),
            // In the middle of a stream.
            1 => drop(
                client.open(CHAT, &chat(json!({"max_tokens": 5000, "stream": true}))).await.read_until("content").await,
            ),
            // Before the whole answer is there.
            2 => drop(
                tokio::time::timeout(
                    Duration::from_millis(number),
                    client.send(post(CHAT, &chat(json!({"max_tokens": 5000})))),
                )
                .await,
            ),
            // With half a request sent.
            _ => {
                let mut stream = TcpStream::connect(server.api).await.unwrap();
                let half = format!("POST {CHAT} HTTP/1.1\r\nHost: a\r\nContent-Length: 999\r\n\r\n{{\"model\"");
                stream.write_all(half.as_bytes()).await.unwrap();
            }
        }
    };
    within("all leave", futures::future::join_all((0..100).map(leave))).await;
    canary.undisturbed().await;
    server
        .until("nothing is left", |stats| stats["running"] == 0 && stats["waiting"] == 0 && stats["kvUsage"] == 0.0)
        .await;
    let leaked = server.metric("windlass:kv_blocks_leaked").await;
    assert!(leaked.abs() < f64::EPSILON, "{leaked}");
}

#[tokio::test(flavor = "multi_thread")]
async fn errors_tell_nothing_of_the_machine() {
    let server = serve(FAST).await;
    let mut client = Client::connect(server.api).await;
    for path in
        ["/../../etc/passwd", "/v1/models/..%2f..%2fetc", "/%00", "/v1/models/%ff", "/v1/chat/completions/x", "//"]
    {
        let answer = client.get(path).await.unwrap();
        let text = answer.text();
        assert!(answer.status.is_client_error() && !text.contains(".rs") && !text.contains("/src/"), "{path}: {text}");
    }
    assert_eq!(get(server.api, "/health").await.status, StatusCode::OK);
}

#[tokio::test(flavor = "multi_thread")]
async fn hostile_tools_are_refused_soon_and_nobody_else_feels_them() {
    let server = serve(&format!("{FAST} --max-model-len 256")).await;
    let canary = Canary::start(&server).await;
    let tool = |name: &str, parameters: Value| json!({"type": "function", "function": {"name": name, "parameters": parameters}});
    let property = |schema: Value| json!({"type": "object", "properties": {"a": schema}, "required": ["a"]});
    let nested = (0..60).fold(json!({"type": "string"}), |inner, _| property(inner));
    let values: Vec<String> = (0..20_000).map(|index| format!("value {index}")).collect();
    let tools = [
        tool("f", property(json!({"type": "string", "pattern": "(a+)+$"}))),
        tool("f", property(json!({"type": "string", "pattern": "(a{1,1000}){1,1000}"}))),
        tool("f", property(json!({"type": "string", "pattern": "(".repeat(5000)}))),
        tool("f", property(json!({"enum": values}))),
        tool("f", property(json!({"$ref": "#"}))),
        tool("f", property(json!({"$ref": "#/properties/a"}))),
        tool("f", property(json!({"$ref": "http://127.0.0.1:1/schema"}))),
        tool("f", nested),
        tool("f", json!({"type": "object", "minProperties": 1_000_000_000})),
        tool("f", property(json!({"type": "array", "items": {}, "minItems": 4_000_000_000_u32}))),
        tool("f", json!({"type": "object", "allOf": vec![json!({"properties": {"a": {}}}); 2000]})),
        tool("\" %json {} ", json!({})),
        tool("f\nstart: /.*/", json!({})),
    ];
    for tool in &tools {
        for choice in [json!("required"), json!({"type": "function", "function": {"name": "f"}})] {
            let began = Instant::now();
            let body = chat(json!({"tools": [tool], "tool_choice": choice, "max_tokens": 4}));
            let answer = within("an answer", server.post(CHAT, &body)).await;
            let shown: String = tool.to_string().chars().take(100).collect();
            let status = answer.status.as_u16();
            assert!((200..500).contains(&status), "{shown}: {status} {:.200}", answer.text());
            assert!(began.elapsed().as_secs() < 5, "{shown} took {:?}", began.elapsed());
        }
    }
    let deep = format!("{{\"model\":\"{MODEL}\",\"messages\":[],\"tools\":{}", "[".repeat(100_000));
    let request = Request::post(CHAT).header("content-type", "application/json").body(Body::from(deep)).unwrap();
    let answer = Client::connect(server.api).await.send(request).await.unwrap();
    assert_eq!(answer.status().as_u16(), 400);
    canary.undisturbed().await;
    server.until("nothing is left", |stats| stats["running"] == 0 && stats["kvUsage"] == 0.0).await;
}

/// Schemas and grammars that compile by recursion, or by copying: how each is written, and whether it may be taken.
fn bottomless() -> Vec<(&'static str, Value, bool)> {
    let schema = |count: usize, target: fn(usize) -> Value| {
        let definitions: serde_json::Map<String, Value> =
            (0..count).map(|number| (format!("d{number}"), target(number + 1))).collect();
        let mut schema = json!({"$ref": "#/$defs/d0", "$defs": definitions});
        schema["$defs"][format!("d{count}")] = json!({"type": "null"});
        schema
    };
    let nested = |number| json!({"type": "object", "properties": {"a": {"$ref": format!("#/$defs/d{number}")}}});
    let bare = |number| json!({"$ref": format!("#/$defs/d{number}")});
    // What two references lead to is copied twice, thirty times over.
    let doubled = |number| {
        let twice = json!({"type": ["array", "null"], "$ref": format!("#/$defs/d{number}")});
        json!({"type": ["array", "null"], "prefixItems": [twice, twice]})
    };
    let rules = |count: usize, name: &str, body: fn(String) -> String| {
        let rule = |number: usize| format!("{name}{number}: {}\n", body(format!("{name}{}", number + 1)));
        let chain: String = (0..count).map(rule).collect();
        json!(format!("start: {name}0\n{chain}{name}{count}: \" the\"\n"))
    };
    let plain = |next| next;
    let in_groups = |next| format!("{}{next}{}", "(".repeat(27), " \" of\")".repeat(27));
    vec![
        ("guided_json", schema(210, nested), true),
        ("guided_json", schema(531, bare), true),
        ("guided_json", schema(3000, nested), false),
        ("guided_json", schema(6000, bare), false),
        ("guided_json", schema(30, doubled), false),
        ("guided_grammar", rules(667, "r", plain), true),
        ("guided_grammar", rules(925, "T", plain), true),
        ("guided_grammar", rules(9000, "r", plain), false),
        ("guided_grammar", rules(9000, "T", plain), false),
        ("guided_grammar", rules(500, "r", in_groups), false),
    ]
}

/// Why they are refused that may not be taken: the last is of tools, which are a part of the prompt.
const TOO_MUCH: [&str; 5] = [
    "lead from one to the next",
    "nests too deeply",
    "takes more memory than",
    "takes longer than",
    "tokens can hold; shorten it",
];

/// The ways in which a form comes in.
fn ways(field: &str, form: &Value) -> Vec<(&'static str, Value)> {
    let completion = |extra: Value| {
        let mut body = json!({"model": MODEL, "prompt": "go", "max_tokens": 2});
        body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        body
    };
    if field == "guided_grammar" {
        let structured = json!({"structured_outputs": {"grammar": form}, "max_tokens": 2});
        return vec![(CHAT, chat(structured)), (COMPLETIONS, completion(json!({"guided_grammar": form})))];
    }
    let format = json!({"type": "json_schema", "json_schema": {"name": "a", "schema": form}});
    let tool = json!({"type": "function", "function": {"name": "f", "parameters": form}});
    let inputs =
        json!({"inputs": "a", "parameters": {"grammar": {"type": "json", "value": form}, "max_new_tokens": 2}});
    vec![
        (CHAT, chat(json!({"response_format": format, "max_tokens": 2}))),
        (CHAT, chat(json!({"tools": [tool], "tool_choice": "required", "max_tokens": 2}))),
        (COMPLETIONS, completion(json!({"guided_json": form}))),
        ("/generate", inputs),
    ]
}

#[tokio::test(flavor = "multi_thread")]
async fn forms_that_lead_too_far_end_their_request_alone() {
    let server = serve(FAST).await;
    let canary = Canary::start(&server).await;
    for (field, form, taken) in bottomless() {
        for (path, body) in ways(field, &form) {
            let began = Instant::now();
            let answer = within("an answer", server.post(path, &body)).await;
            let shown = format!("{path} {:.100}: {} {:.300}", form.to_string(), answer.status, answer.text());
            // What is taken may be more than this vocabulary can say.
            let too_much = TOO_MUCH.iter().any(|why| answer.text().contains(why));
            assert!(answer.status.is_success() || answer.status.is_client_error(), "{shown}");
            assert_eq!(too_much, !taken, "{shown}");
            assert!(began.elapsed().as_secs() < 10, "{shown} took {:?}", began.elapsed());
        }
    }
    canary.undisturbed().await;
}

/// Letters that can be read in ever more ways: from the first token on, and after a dozen words.
const AMBIGUOUS: &str = "start: x\nx: x x x x | x x x | x x | /[a-z ]/";
const AMBIGUOUS_LATER: &str = "start: y{12} x\ny: / [a-z]+/\nx: x x | /[a-z ]/";

/// The longest of a stream's times between events.
async fn longest_gap(server: &TestServer, tokens: u32) -> Duration {
    let body = chat(json!({"max_tokens": tokens, "stream": true}));
    let answer = Client::connect(server.api).await.send(post(CHAT, &body)).await.unwrap();
    let mut events = Body::new(answer.into_body()).into_data_stream();
    let (mut last, mut longest) = (None, Duration::ZERO);
    while let Some(event) = within("an event", events.next()).await {
        event.unwrap();
        let now = Instant::now();
        longest = last.map_or(longest, |last| longest.max(now - last));
        last = Some(now);
    }
    longest
}

#[tokio::test(flavor = "multi_thread")]
async fn masks_that_take_long_hold_up_nobody_else_and_end_in_an_error_that_says_why() {
    // A vocabulary of the usual size.
    let Some(model) = real_model() else { return };
    let server = serve_at(&model, &format!("--executor sim --served-model-name {MODEL} {FAST}")).await;
    let refused = server.chat(json!({"guided_grammar": AMBIGUOUS, "max_tokens": 50})).await;
    assert_eq!(refused.json()["error"]["code"], "invalid_structure", "{}", refused.text());
    let ask = || server.chat(json!({"guided_grammar": AMBIGUOUS_LATER, "n": 16, "max_tokens": 400}));
    let others = futures::future::join_all((0..4).map(|_| ask()));
    let (answers, gap) = futures::join!(others, longest_gap(&server, 2000));
    assert!(gap < Duration::from_millis(500), "a stream beside them waited {gap:?}");
    for answer in answers {
        let code = answer.json()["error"]["code"].clone();
        assert_eq!((answer.status.as_u16(), code.as_str()), (400, Some("structure_too_slow")), "{}", answer.text());
    }
    server.until("nothing is left", |stats| stats["running"] == 0 && stats["kvUsage"] == 0.0).await;
}
