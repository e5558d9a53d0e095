//! The commands for a person, run as programs against a server in this process.

use crate::common::{FAST, MODEL, TestServer, serve, within};
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use serde_json::{Value, json};
use std::net::SocketAddr;
use std::path::Path;
use std::process::{Output, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use tokio::io::AsyncWriteExt;

/// Runs the program with some input.
async fn run(arguments: &[&str], input: &str) -> Output {
    let mut command = tokio::process::Command::new(env!("CARGO_BIN_EXE_windlass-engine"));
    command.args(arguments).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).kill_on_drop(true);
    let mut child = command.spawn().unwrap();
    child.stdin.take().unwrap().write_all(input.as_bytes()).await.unwrap();
    within("the program ends", child.wait_with_output()).await.unwrap()
}

#[track_caller]
fn succeeded(output: Output) -> String {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

fn url(server: &TestServer) -> String {
    format!("http://{}", server.api)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_conversation_is_remembered_until_it_is_reset() {
    let server = serve(FAST).await;
    let said = run(&["chat", &url(&server), "--max-tokens", "4"], "hi\n\nand\n/reset\nhi\n/quit\nnot read\n").await;
    let answers = succeeded(said);
    assert_eq!(answers.lines().count(), 3, "{answers}");
    assert!(answers.lines().all(|answer| answer.split_whitespace().count() == 4), "{answers}");
    // "user hi", then all of it, then "user hi" again.
    let prompts = server.stats().await["promptTokens"].as_u64().unwrap();
    assert_eq!(prompts, 2 + (2 + 5 + 2) + 2);
    let nobody = run(&["chat", "http://127.0.0.1:1"], "").await;
    assert_eq!(nobody.status.code(), Some(10), "{}", String::from_utf8_lossy(&nobody.stderr));
}

fn write_requests(file: &Path, count: usize) {
    let line = |i: usize| {
        let body = json!({"prompt": "word ".repeat(i % 7 + 1), "max_tokens": 3});
        json!({"custom_id": format!("r{i}"), "method": "POST", "url": "/v1/completions", "body": body}).to_string()
    };
    std::fs::write(file, (0..count).map(|i| line(i) + "\n").collect::<String>()).unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_batch_that_was_killed_goes_on_where_it_stopped() {
    let server = serve(FAST).await;
    let folder = tempfile::tempdir().unwrap();
    let (input, output) = (folder.path().join("in.jsonl"), folder.path().join("out.jsonl"));
    write_requests(&input, 40);
    let url = url(&server);
    let arguments = ["batch", &url, input.to_str().unwrap(), output.to_str().unwrap(), "--concurrency", "4"];
    succeeded(run(&arguments, "").await);
    // As a kill leaves it: some lines, and half of one.
    let text = std::fs::read_to_string(&output).unwrap();
    let kept: String = text.lines().take(25).map(|line| format!("{line}\n")).collect();
    std::fs::write(&output, kept + "{\"id\":\"batch_r").unwrap();
    let before = server.stats().await["finished"].as_u64().unwrap();
    succeeded(run(&arguments, "").await);
    assert_eq!(server.stats().await["finished"].as_u64().unwrap() - before, 15);
    let text = std::fs::read_to_string(&output).unwrap();
    let mut names: Vec<String> = text
        .lines()
        .map(|line| {
            let answer: Value = serde_json::from_str(line).unwrap();
            assert_eq!((&answer["response"]["status_code"], &answer["error"]), (&json!(200), &Value::Null), "{answer}");
            assert_eq!(answer["response"]["body"]["usage"]["completion_tokens"], 3);
            answer["custom_id"].as_str().unwrap().to_owned()
        })
        .collect();
    names.sort();
    names.dedup();
    assert_eq!(names.len(), 40);
    assert!(succeeded(run(&arguments, "").await).contains("answered already"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_bench_measures_and_draws() {
    let server = serve(FAST).await;
    let folder = tempfile::tempdir().unwrap();
    let (svg, figures) = (folder.path().join("a.svg"), folder.path().join("a.json"));
    let url = url(&server);
    let sizes = ["--requests", "20", "--prompt-tokens", "20", "--answer-tokens", "5", "--rates", "50,200"];
    let files = ["--svg", svg.to_str().unwrap(), "--json", figures.to_str().unwrap()];
    let table = succeeded(run(&[&["bench", url.as_str()][..], &sizes, &files].concat(), "").await);
    assert!(table.contains(MODEL) && table.matches("20 answered, 0 failed").count() == 2, "{table}");
    let runs: Value = serde_json::from_str(&std::fs::read_to_string(figures).unwrap()).unwrap();
    for run in runs.as_array().unwrap() {
        let ms = |name: &str, share: &str| run[name][share].as_f64().unwrap();
        assert!(0.0 < ms("ttft_ms", "p50") && ms("ttft_ms", "p50") <= ms("ttft_ms", "p99"), "{run}");
        assert!(ms("ttft_ms", "p99") < ms("end_to_end_ms", "p99"), "{run}");
    }
    assert!(std::fs::read_to_string(svg).unwrap().starts_with("<svg"));
}

#[tokio::test(flavor = "multi_thread")]
async fn fit_says_what_fits_and_what_does_not() {
    let Some(model) = windlass_checkpoint::testing::real_model() else { return };
    let model = model.to_str().unwrap();
    let told = succeeded(run(&["fit", model, "--memory", "64Mi,16Gi"], "").await);
    assert!(told.contains("2 × 30 layers × 3 heads × 128 bytes (bf16)"), "{told}");
    let line = |memory: &str| told.lines().find(|line| line.starts_with(memory)).unwrap();
    assert!(line("64.0 MiB").contains("does not fit") && !line("16.0 GiB").contains("does not fit"), "{told}");
    let speeds = ["--prefill-tokens-per-second", "1000", "--decode-tokens-per-second", "400"];
    let peak = [&["fit", model, "--memory", "16Gi", "--requests-per-second", "4"][..], &speeds].concat();
    // (500 / 1000 + 200 / 400) s a request, four a second, at most 80 % busy.
    assert!(succeeded(run(&peak, "").await).contains("replicas                  5"));
    assert_eq!(run(&["fit", model, "--memory", "lots"], "").await.status.code(), Some(2));
}

#[tokio::test(flavor = "multi_thread")]
async fn kernels_are_made_for_gpus_that_can_run_them() {
    let refused = async |arguments: &[&str]| {
        let ended = run(&[&["kernels", "build"], arguments].concat(), "").await;
        (ended.status.code(), String::from_utf8(ended.stderr).unwrap())
    };
    let (code, told) = refused(&["--compute-capability", "nine"]).await;
    assert!(code == Some(2) && told.contains("such as 9.0"), "{told}");
    let (code, told) = refused(&["--compute-capability", "7.5"]).await;
    assert!(code != Some(0) && told.contains("capability 7.5; the kernels need 8.0"), "{told}");
}

/// A server that puts one prompt off for ever, gives another up the first time, and answers.
async fn moody() -> SocketAddr {
    let models = get(async || Json(json!({"data": [{"id": "m"}]})));
    let routes = Router::new().route("/v1/models", models).route("/v1/completions", post(complete));
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move { axum::serve(listener, routes.with_state(Arc::default())).await });
    address
}

async fn complete(State(given_up): State<Arc<AtomicBool>>, Json(body): Json<Value>) -> Response {
    let failed = StatusCode::INTERNAL_SERVER_ERROR;
    match body["prompt"].as_str() {
        Some("never") => (StatusCode::TOO_MANY_REQUESTS, [("retry-after", "0")], "later").into_response(),
        Some("twice") if !given_up.swap(true, Ordering::Relaxed) => {
            (failed, [("x-should-retry", "true"), ("retry-after", "0")], "given up").into_response()
        }
        Some("broken") => (failed, [("x-should-retry", "false")], "no").into_response(),
        _ => Json(json!({"id": "x"})).into_response(),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_server_puts_off_is_asked_again_and_keeps_nothing_else_from_its_answer() {
    let url = format!("http://{}", moody().await);
    let folder = tempfile::tempdir().unwrap();
    let (input, output) = (folder.path().join("in.jsonl"), folder.path().join("out.jsonl"));
    let line = |name: &str| json!({"custom_id": name, "url": "/v1/completions", "body": {"prompt": name}}).to_string();
    let names = ["never", "twice", "broken", "good"];
    std::fs::write(&input, names.map(line).join("\n")).unwrap();
    let arguments = ["batch", &url, input.to_str().unwrap(), output.to_str().unwrap(), "--concurrency", "1"];
    let ended = run(&arguments, "").await;
    let told = String::from_utf8_lossy(&ended.stderr).into_owned();
    assert_eq!(ended.status.code(), Some(10), "{told}");
    assert!(told.contains("for 1 requests the server asked to come back"), "{told}");
    let statuses: std::collections::BTreeMap<String, u64> = std::fs::read_to_string(&output)
        .unwrap()
        .lines()
        .map(|line| serde_json::from_str::<Value>(line).unwrap())
        .map(|line| (line["custom_id"].as_str().unwrap().to_owned(), line["response"]["status_code"].as_u64().unwrap()))
        .collect();
    assert_eq!(
        statuses,
        [("broken", 500), ("good", 200), ("twice", 200)].map(|(name, code)| (name.to_owned(), code)).into()
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_line_that_could_never_be_admitted_is_answered_with_its_error() {
    let server = serve(&format!("{FAST} --max-num-seqs 4 --max-queue-requests 4")).await;
    let folder = tempfile::tempdir().unwrap();
    let (input, output) = (folder.path().join("in.jsonl"), folder.path().join("out.jsonl"));
    let line = |name: &str, n: u32| {
        let body = json!({"prompt": "a", "max_tokens": 1, "n": n});
        json!({"custom_id": name, "url": "/v1/completions", "body": body}).to_string()
    };
    std::fs::write(&input, [line("many", 64), line("few", 2)].join("\n")).unwrap();
    let url = url(&server);
    succeeded(run(&["batch", &url, input.to_str().unwrap(), output.to_str().unwrap()], "").await);
    let text = std::fs::read_to_string(&output).unwrap();
    let many = text.lines().find(|line| line.contains("\"many\"")).unwrap();
    assert!(many.contains("\"status_code\":400") && many.contains("takes 8 at once"), "{text}");
    assert!(text.lines().any(|line| line.contains("\"few\"") && line.contains("\"status_code\":200")), "{text}");
}
