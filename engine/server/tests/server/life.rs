//! The life of a server: readiness, disconnects, drain, connection age, and what it tells about itself.

use crate::common::{Answer, Client, FAST, SLOW, chat, config, endless, eventually, get, post, serve, start, within};
use crate::llama::Llama;
use hyper::StatusCode;
use serde_json::{Value, json};
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use windlass_engine::lifecycle::{Lifecycle, Stage};
use windlass_engine::serve::Server;
use windlass_engine_contract::stats::{MAX_STATS_BYTES, Phase, Stats};

const CHAT: &str = "/v1/chat/completions";

#[tokio::test(flavor = "multi_thread")]
async fn it_is_ready_once_a_token_was_generated() {
    let lifecycle = Lifecycle::default();
    let mut config = config("--sim-load-seconds 0.5");
    // A port that is known before the server is.
    let probe = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    config.admin_address = probe.local_addr().unwrap();
    let admin = config.admin_address;
    drop(probe);
    let starting = tokio::spawn(Server::start(config, lifecycle));
    eventually("the admin port answers", async || tokio::net::TcpStream::connect(admin).await.is_ok()).await;
    assert_eq!(get(admin, "/readyz").await.status, StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(get(admin, "/livez").await.status, StatusCode::OK);
    assert_eq!(get(admin, "/stats").await.json()["phase"], "Starting");
    let server = within("it starts", starting).await.unwrap().unwrap();
    assert_eq!(get(admin, "/readyz").await.status, StatusCode::OK);
    let stats: Stats = serde_json::from_slice(&get(admin, "/stats").await.body).unwrap();
    assert_eq!((stats.phase, stats.simulated), (Phase::Ready, true));
    assert!(stats.start.unwrap().load_seconds >= 0.5);
    drop(server);
}

#[tokio::test(flavor = "multi_thread")]
async fn clients_that_come_early_all_at_once_wait_in_the_queue() {
    let mut config = config("--sim-load-seconds 2");
    // Ports that are known before the server is.
    let free = || std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let (api, admin) = (free(), free());
    (config.api_address, config.admin_address) = (api, admin);
    let starting = tokio::spawn(Server::start(config, Lifecycle::default()));
    eventually("the admin port answers", async || tokio::net::TcpStream::connect(admin).await.is_ok()).await;
    let connect = |_| async move { tokio::net::TcpStream::connect(api).await.unwrap() };
    let waiting = within("all connect", futures::future::join_all((0..500).map(connect))).await;
    // None of them was accepted yet: a queue that is too short would have kept them until then.
    assert_eq!(get(admin, "/stats").await.json()["phase"], "Starting");
    within("it starts", starting).await.unwrap().unwrap();
    drop(waiting);
}

#[tokio::test(flavor = "multi_thread")]
async fn every_answer_names_what_it_depends_on() {
    let server = serve(FAST).await;
    let fingerprint = server.stats().await["fingerprint"].clone();
    assert!(fingerprint.as_str().is_some_and(|word| word.starts_with("fp_")), "{fingerprint}");
    let whole = server.chat(json!({"max_tokens": 2})).await.json();
    assert_eq!(whole["system_fingerprint"], fingerprint);
    let events = server.chat(json!({"max_tokens": 2, "stream": true})).await.events();
    assert!(events.iter().all(|event| event["system_fingerprint"] == fingerprint));
    let completion = json!({"model": "sim-model", "prompt": "the", "max_tokens": 2});
    assert_eq!(server.post("/v1/completions", &completion).await.json()["system_fingerprint"], fingerprint);
    let name =
        format!("windlass:build_info{{device=\"sim\",engine=\"0\",fingerprint=\"{}\"", fingerprint.as_str().unwrap());
    assert!((server.metric(&name).await - 1.0).abs() < f64::EPSILON);
    let other = serve("--sim-step-us 1000 --sim-mean-answer-tokens 9").await;
    assert_ne!(other.stats().await["fingerprint"], fingerprint);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_goes_away_ends_its_request() {
    let server = serve(SLOW).await;
    let mut client = Client::connect(server.api).await;
    let stream = client.open(CHAT, &endless(true)).await;
    server.until("it runs", |stats| stats["running"] == 1).await;
    drop((stream, client));
    server.until("it is aborted", |stats| stats["running"] == 0 && stats["kvUsage"] == 0.0).await;

    let mut client = Client::connect(server.api).await;
    let whole = tokio::spawn(async move { client.send(post(CHAT, &endless(false))).await.map(drop) });
    server.until("it runs", |stats| stats["running"] == 1).await;
    whole.abort();
    server.until("it is aborted", |stats| stats["running"] == 0 && stats["kvUsage"] == 0.0).await;
    let aborted = server.metric("vllm:request_success_total{engine=\"0\",finished_reason=\"abort\"").await;
    assert!((aborted - 2.0).abs() < f64::EPSILON, "{aborted}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_waiting_request_can_go_away_too() {
    let server = serve(&format!("{SLOW} --max-num-seqs 1")).await;
    let (mut first, mut second) = (Client::connect(server.api).await, Client::connect(server.api).await);
    let running = first.open(CHAT, &endless(true)).await;
    let waiting = second.open(CHAT, &endless(true)).await;
    server.until("one waits", |stats| stats["waiting"] == 1).await;
    drop((waiting, second));
    server.until("nobody waits", |stats| stats["waiting"] == 0 && stats["running"] == 1).await;
    drop((running, first));
    server.until("nobody runs", |stats| stats["running"] == 0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn drain_lets_streams_finish_and_refuses_new_requests() {
    let server = serve(&format!("{SLOW} --drain-accept-seconds 0")).await;
    let body = chat(json!({"max_tokens": 60, "stream": true, "seed": 1}));
    let undisturbed = server.post(CHAT, &body).await.events();
    let mut client = Client::connect(server.api).await;
    let mut stream = client.open(CHAT, &body).await;
    assert!(within("the first token", stream.read_until("content")).await);

    let drained = Client::connect(server.admin).await.post("/drain", &json!({})).await;
    assert_eq!(drained.status, StatusCode::ACCEPTED);
    assert_eq!(get(server.admin, "/readyz").await.status, StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(server.stats().await["phase"], "Draining");
    within("new requests are refused", server.lifecycle.reached(Stage::Refusing)).await;
    let refused = server.post(CHAT, &body).await;
    assert_eq!(refused.status, StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!((refused.header("retry-after"), refused.header("connection")), (Some("1"), Some("close")));
    assert_eq!(refused.json()["error"]["code"], "shutting_down");

    assert!(within("the stream ends", stream.read_until("[DONE]")).await);
    let finished = Answer { status: StatusCode::OK, headers: Default::default(), body: stream.text.clone().into() };
    let texts = |events: Vec<Value>| -> Vec<Value> { events.iter().map(|event| event["choices"].clone()).collect() };
    assert_eq!(texts(finished.events()), texts(undisturbed));
    within("the server ends", server.end).await.unwrap().unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_are_served_and_connections_closed_while_endpoints_propagate() {
    let server = serve(&format!("{FAST} --drain-accept-seconds 60 --drain-timeout-seconds 60")).await;
    let mut pooled = Client::connect(server.api).await;
    let answer = pooled.post(CHAT, &chat(json!({"max_tokens": 1}))).await;
    assert_eq!(answer.header("connection"), None);
    let mut http2 = Client::connect_http2(server.api).await;
    assert_eq!(http2.post(CHAT, &chat(json!({"max_tokens": 1}))).await.status, StatusCode::OK);

    server.lifecycle.advance(Stage::Closing);
    let answer = pooled.post(CHAT, &chat(json!({"max_tokens": 1}))).await;
    assert_eq!((answer.status, answer.header("connection")), (StatusCode::OK, Some("close")));
    within("the HTTP/1.1 connection closes", pooled.connection).await.unwrap();
    within("the HTTP/2 connection closes", http2.connection).await.unwrap();
    let fresh = server.post(CHAT, &chat(json!({"max_tokens": 1}))).await;
    assert_eq!((fresh.status, fresh.header("connection")), (StatusCode::OK, Some("close")));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_that_outlasts_the_drain_ends_with_an_error_event() {
    let server = serve(&format!("{SLOW} --drain-accept-seconds 0 --drain-timeout-seconds 1")).await;
    let mut client = Client::connect(server.api).await;
    let mut stream = client.open(CHAT, &endless(true)).await;
    assert!(within("the first token", stream.read_until("content")).await);
    server.lifecycle.advance(Stage::Closing);
    assert!(within("the error event", stream.read_until("\"error\"")).await);
    assert!(stream.text.contains("shut down") && !stream.text.contains("[DONE]"), "{}", stream.text);
    within("the server ends", server.end).await.unwrap().unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn an_old_connection_is_closed_between_requests_and_says_so() {
    let server = serve(&format!("{FAST} --max-connection-age-seconds 1")).await;
    let mut client = Client::connect(server.api).await;
    // A stream that is longer than the age goes on to its end.
    let long = chat(json!({"max_tokens": 1500, "stream": true}));
    let mut stream = client.open(CHAT, &long).await;
    assert!(within("it ends", stream.read_until("[DONE]")).await);
    let mut answers = 0;
    eventually("a response closes the connection", async || {
        answers += 1;
        client.get("/v1/models").await.unwrap().header("connection") == Some("close")
    })
    .await;
    within("the connection closes", client.connection).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn an_old_http2_connection_is_told_to_go_away() {
    let server = serve(&format!("{FAST} --max-connection-age-seconds 1")).await;
    let mut client = Client::connect_http2(server.api).await;
    let long = chat(json!({"max_tokens": 1500, "stream": true}));
    let mut stream = client.open(CHAT, &long).await;
    assert!(within("it ends", stream.read_until("[DONE]")).await);
    within("the connection closes", client.connection).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn metrics_and_stats_tell_the_same_story() {
    let server = serve(FAST).await;
    for _ in 0..3 {
        server.chat(json!({"max_tokens": 5})).await;
    }
    let response = get(server.admin, "/stats").await;
    assert!(response.body.len() <= MAX_STATS_BYTES, "{} bytes", response.body.len());
    let stats: Stats = serde_json::from_slice(&response.body).unwrap();
    assert_eq!((stats.finished, stats.generation_tokens, stats.prompt_tokens), (3, 15, 18));
    assert_eq!((stats.time_to_first_token.total(), stats.inter_token.total(), stats.end_to_end.total()), (3, 12, 3));
    let effective = stats.effective.unwrap();
    assert_eq!((effective.device.as_str(), effective.max_sequences, effective.block_tokens), ("sim", 64, 16));
    for (name, value) in [
        ("vllm:generation_tokens_total", 15.0),
        ("vllm:prompt_tokens_total", 18.0),
        ("vllm:time_to_first_token_seconds_count", 3.0),
        ("vllm:inter_token_latency_seconds_count", 12.0),
        ("vllm:e2e_request_latency_seconds_count", 3.0),
        ("vllm:request_success_total{engine=\"0\",finished_reason=\"length\"", 3.0),
        ("vllm:num_requests_running", 0.0),
        ("vllm:cache_config_info{", 1.0),
        ("windlass:kv_blocks_leaked", 0.0),
    ] {
        let found = server.metric(name).await;
        assert!((found - value).abs() < f64::EPSILON, "{name}: {found}");
    }
    let text = get(server.admin, "/metrics").await.text();
    let mut samples = text.lines().filter(|line| !line.starts_with('#'));
    assert!(samples.all(|line| line.contains("model_name=\"sim-model\"") && line.contains("engine=\"0\"")), "{text}");
    // What only scores a prompt computes it, too.
    let scored = json!({"model": "sim-model", "prompt": "the engine of a block", "max_tokens": 0, "echo": true});
    assert_eq!(server.post("/v1/completions", &scored).await.status, StatusCode::OK);
    server.until("its prompt is counted", |stats| stats["promptTokens"] == 23 && stats["finished"] == 4).await;
    for (name, value) in [
        ("vllm:prompt_tokens_total", 23.0),
        ("vllm:prompt_tokens_by_source_total{engine=\"0\",model_name=\"sim-model\",source=\"local_compute\"}", 23.0),
        ("vllm:request_prompt_tokens_count", 4.0),
        ("vllm:e2e_request_latency_seconds_count", 4.0),
        ("vllm:time_to_first_token_seconds_count", 3.0),
        ("vllm:corrupted_requests_total", 0.0),
        ("vllm:prompt_tokens_recomputed_total", 0.0),
        ("vllm:external_prefix_cache_queries_total", 0.0),
    ] {
        let found = server.metric(name).await;
        assert!((found - value).abs() < f64::EPSILON, "{name}: {found}");
    }
    // The last token of a prompt is computed once for each of its answers.
    server.chat(json!({"max_tokens": 20, "n": 3})).await;
    eventually("it is counted", async || {
        (server.metric("vllm:prompt_tokens_recomputed_total").await - 2.0).abs() < 0.1
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stalled_engine_is_neither_ready_nor_for_long_alive() {
    // One step takes far longer than the server may stall.
    let server = serve("--sim-step-us 10000000 --stall-timeout-seconds 1 --sim-load-seconds 0");
    // The first token takes a step, too.
    let server = within("the first token", server).await;
    let mut client = Client::connect(server.api).await;
    let _stream = client.open(CHAT, &endless(true)).await;
    eventually("it is not ready", async || {
        get(server.admin, "/readyz").await.status == StatusCode::SERVICE_UNAVAILABLE
    })
    .await;
    eventually("it is not alive", async || get(server.admin, "/livez").await.status == StatusCode::SERVICE_UNAVAILABLE)
        .await;
    let told = get(server.admin, "/livez").await.text();
    assert!(told.contains("the executor has been in one step for"), "{told}");
    let utilization = server.stats().await["utilization"].as_f64().unwrap();
    assert!(utilization > 0.0, "a step in progress counts as busy: {utilization}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_silent_stream_says_that_it_is_alive() {
    let mut config = config("--sim-step-us 500000");
    config.patience.keep_alive = Duration::from_millis(20);
    let server = start(config).await;
    let mut client = Client::connect(server.api).await;
    let mut stream = client.open(CHAT, &endless(true)).await;
    assert!(within("a comment", stream.read_until(": keep-alive\n\n")).await);
    assert!(!stream.text.contains("data:"), "{}", stream.text);
    assert!(within("the first token", stream.read_until("data:")).await);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_header_that_never_ends_is_cut() {
    let mut config = config(FAST);
    config.patience.header = Duration::from_millis(50);
    let server = start(config).await;
    let mut stream = tokio::net::TcpStream::connect(server.api).await.unwrap();
    stream.write_all(b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nX-Slow: ").await.unwrap();
    let mut rest = Vec::new();
    within("the connection is cut", stream.read_to_end(&mut rest)).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_header_that_is_too_long_is_431() {
    let server = serve(FAST).await;
    let mut stream = tokio::net::TcpStream::connect(server.api).await.unwrap();
    let header = format!("GET /v1/models HTTP/1.1\r\nHost: a\r\nX-Long: {}\r\n\r\n", "x".repeat(70_000));
    // The server may close before it has read all of it.
    let _ = stream.write_all(header.as_bytes()).await;
    let mut answer = Vec::new();
    let _ = within("an answer", stream.read_to_end(&mut answer)).await;
    assert!(answer.starts_with(b"HTTP/1.1 431"), "{}", String::from_utf8_lossy(&answer));
}

#[tokio::test(flavor = "multi_thread")]
async fn many_streams_at_once_all_end_and_leave_nothing_behind() {
    let server = serve(&format!("{FAST} --max-num-seqs 16")).await;
    let server = &server;
    let ask = |seed: u64| async move {
        let events = server.chat(json!({"max_tokens": 40, "stream": true, "seed": seed})).await.events();
        assert_eq!(events.last().unwrap()["choices"][0]["finish_reason"], "length");
    };
    within("all end", futures::future::join_all((0..64).map(ask))).await;
    server.until("nothing is left", |stats| stats["running"] == 0 && stats["kvUsage"] == 0.0).await;
    assert_eq!(server.stats().await["finished"], 64);
}

#[test]
fn the_binary_reports_a_wrong_flag_in_its_termination_message() {
    let folder = tempfile::tempdir().unwrap();
    let log = folder.path().join("termination-log");
    let run = |arguments: &[&str]| {
        let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_windlass-engine"));
        command.args(arguments).arg("--termination-log").arg(&log).output().unwrap()
    };
    for (arguments, code, word) in [
        (&["serve", "/no/such/model.gguf", "--port", "0", "--admin-port", "0"][..], 10, "/no/such/model.gguf"),
        (&["serve", "m", "--no-such-flag"], 2, "--no-such-flag"),
        (&["serve", "m", "--gpu-memory-utilization", "90"], 2, "more than 0 and at most 1"),
        (&["serve", "m", "--device", "cuda"], 15, "--device cuda: no CUDA driver is installed"),
        (&["fetch", "https://host/file", "--to", "f", "--sha256", "00"], 2, "--sha256"),
        (&["fetch", "ftp://host/file", "--to", "f", "--sha256", "00"], 2, "ftp://host/file"),
    ] {
        let output = run(arguments);
        assert_eq!(output.status.code(), Some(code), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
        let written = std::fs::read_to_string(&log).unwrap();
        let termination = windlass_engine_contract::termination::Termination::parse(&written).unwrap();
        assert!(termination.message.contains(word), "{arguments:?}: {termination:?}");
        assert_eq!(i32::from(termination.reason.exit_code()), code);
    }
    assert!(run(&["--help"]).status.success());
}

#[test]
fn the_binary_that_is_refused_memory_tells_how_much_and_exits_with_14() {
    let folder = tempfile::tempdir().unwrap();
    Llama { vocabulary: 320, noise: 0.0 }.write(folder.path());
    let log = folder.path().join("termination-log");
    let limited = "ulimit -v 600000; exec \"$0\" \"$@\"";
    let flags = "--device cpu --threads 1 --port 0 --admin-port 0 --kv-cache-memory-bytes 1000000000 --termination-log";
    let mut command = std::process::Command::new("sh");
    command.args(["-c", limited, env!("CARGO_BIN_EXE_windlass-engine"), "serve"]).arg(folder.path());
    let output = command.args(flags.split(' ')).arg(&log).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(14), "{:?}: {said}", output.status);
    let written = std::fs::read_to_string(&log).unwrap();
    let termination = windlass_engine_contract::termination::Termination::parse(&written).unwrap();
    let (bytes, rest) = termination.message.split_once(' ').unwrap();
    assert!(bytes.parse::<u64>().is_ok_and(|bytes| bytes > 1 << 20), "{termination:?}");
    assert!(rest.contains("--kv-cache-memory-bytes"), "{termination:?}");
    assert!(said.contains(&termination.message), "{said}");
}

#[tokio::test(flavor = "multi_thread")]
async fn sigterm_drains_and_exits_with_zero() {
    let mut child = tokio::process::Command::new(env!("CARGO_BIN_EXE_windlass-engine"))
        .args(["serve", "m", "--executor", "sim", "--host", "127.0.0.1", "--port", "0", "--admin-port", "0"])
        .args(["--drain-accept-seconds", "0"])
        .stderr(std::process::Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .unwrap();
    let mut lines = tokio::io::BufReader::new(child.stderr.take().unwrap());
    let mut log = String::new();
    while !log.contains("serving") {
        use tokio::io::AsyncBufReadExt;
        let read = within("a log line", lines.read_line(&mut log)).await.unwrap();
        assert!(read > 0, "{log}");
    }
    let pid = child.id().unwrap().to_string();
    assert!(std::process::Command::new("kill").args(["-TERM", &pid]).status().unwrap().success());
    let status = within("it exits", child.wait()).await.unwrap();
    assert_eq!(status.code(), Some(0));
}

#[tokio::test(flavor = "multi_thread")]
async fn flags_that_change_answers_change_what_they_depend_on() {
    let folder = tempfile::tempdir().unwrap();
    let template = |name: &str, text: &str| {
        let path = folder.path().join(name);
        std::fs::write(&path, text).unwrap();
        format!("--chat-template {}", path.display())
    };
    let one = "{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}";
    let flags = [
        String::new(),
        template("a", one),
        template("b", &format!("the {one}")),
        "--reasoning-parser qwen3".to_owned(),
        "--tool-call-parser hermes".to_owned(),
    ];
    let mut words = std::collections::BTreeSet::new();
    for flags in &flags {
        let fingerprint = serve(&format!("{FAST} {flags}")).await.stats().await["fingerprint"].clone();
        assert!(words.insert(fingerprint.to_string()), "{flags:?} changes nothing");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_that_speaks_needs_no_sign_of_life() {
    let mut config = config(SLOW);
    config.patience.keep_alive = Duration::from_secs(1);
    let server = start(config).await;
    let answer = server.chat(json!({"max_tokens": 120, "stream": true})).await;
    assert!(answer.text().contains("[DONE]") && !answer.text().contains("keep-alive"), "{}", answer.text());
}

#[test]
fn a_port_that_is_taken_is_told() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    for flag in ["--port", "--admin-port"] {
        let other = if flag == "--port" { "--admin-port" } else { "--port" };
        let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_windlass-engine"));
        command.args(["serve", "m", "--executor", "sim", "--host", "127.0.0.1", flag, &port, other, "0"]);
        let output = command.output().unwrap();
        let told = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{told}");
        assert!(told.contains("cannot listen on 127.0.0.1:") && told.contains(&port), "{told}");
    }
}
