//! What requests cost the program: memory that is measured from outside, whatever they hold.

use crate::common::{Answer, Client, PROGRAM, get, within};
use axum::body::Body;
use hyper::Request;
use serde_json::{Value, json};
use std::net::SocketAddr;
use std::process::Stdio;
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::{Child, Command};
use tokio::sync::oneshot;
use windlass_checkpoint::testing::real_model;

const MIB: usize = 1 << 20;
/// Bytes of a body that is long.
const LONG: usize = 24 * MIB;
/// What a request may take whatever its length: buffers of the connection, threads that were not there before, pages that
/// the allocator keeps.
const SLACK: usize = 12 * MIB;

/// What the program's log says once they are made.
const TABLES: &str = "tables for structured answers were made";

/// The program, serving.
struct Program {
    child: Child,
    api: SocketAddr,
    admin: SocketAddr,
    /// Says so once the tables of grammars are made, which happens as serving begins.
    tables: Option<oneshot::Receiver<()>>,
}

impl Program {
    /// On the simulator.
    async fn start(flags: &str) -> Program {
        Program::serve(&format!("m --executor sim {flags}")).await
    }

    async fn serve(flags: &str) -> Program {
        let line = format!("serve --host 127.0.0.1 --port 0 --admin-port 0 --log-format json {flags}");
        let mut command = Command::new(PROGRAM);
        command.args(line.split_whitespace()).stderr(Stdio::piped()).kill_on_drop(true);
        let mut child = command.spawn().unwrap();
        let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
        let mut are_made = false;
        let addresses = within("it serves", async {
            while let Some(line) = lines.next_line().await.unwrap() {
                are_made |= line.contains(TABLES);
                let line: Value = serde_json::from_str(&line).unwrap_or_default();
                let address = |name: &str| line.get(name).and_then(Value::as_str).map(|text| text.parse().unwrap());
                if let (Some(api), Some(admin)) = (address("api"), address("admin")) {
                    return (api, admin);
                }
            }
            panic!("it ended before it served");
        });
        let (api, admin) = addresses.await;
        let (made, tables) = oneshot::channel();
        // Read to the end: the pipe must not fill.
        tokio::spawn(async move {
            let mut made = Some(made);
            loop {
                if are_made && let Some(made) = made.take() {
                    // Most tests do not wait for it.
                    let _ = made.send(());
                }
                let Ok(Some(line)) = lines.next_line().await else { return };
                are_made |= line.contains(TABLES);
            }
        });
        Program { child, api, admin, tables: Some(tables) }
    }

    /// Waits until nothing is made any more that no request asked for.
    async fn come_to_rest(&mut self) {
        if let Some(tables) = self.tables.take() {
            within("the tables", tables).await.unwrap();
        }
    }

    fn status_bytes(&self, name: &str) -> usize {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.child.id().unwrap())).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix(name)).unwrap();
        line.trim().trim_end_matches(" kB").parse::<usize>().unwrap() << 10
    }

    /// How far memory grew beyond what it was, at most, while a body was answered, and the answer.
    async fn cost_of(&self, path: &str, body: String) -> (usize, Answer) {
        let before = self.status_bytes("VmRSS:");
        // The peak begins again.
        std::fs::write(format!("/proc/{}/clear_refs", self.child.id().unwrap()), "5").unwrap();
        let request = Request::post(path).header("content-type", "application/json").body(Body::from(body)).unwrap();
        let sent = async { Answer::read(Client::connect(self.api).await.send(request).await.unwrap()).await };
        let answer = within("an answer", sent).await;
        (self.status_bytes("VmHWM:").saturating_sub(before), answer)
    }
}

/// `begin`, then `part` again and again, then `end`.
fn long(begin: &str, part: &str, end: &str) -> String {
    let mut body = String::with_capacity(LONG + 1024);
    body.push_str(begin);
    while body.len() + part.len() < LONG {
        body.push_str(part);
    }
    body.push_str(end);
    body
}

const COMPLETIONS: &str = "/v1/completions";
const CHAT: &str = "/v1/chat/completions";

#[tokio::test(flavor = "multi_thread")]
async fn a_long_body_of_anything_takes_four_times_its_bytes_at_most() {
    let program = Program::start("").await;
    let completion = |begin: &str, part: &str, end: &str| {
        (COMPLETIONS, long(&format!("{{\"model\":\"m\",{begin}"), part, &format!("{end}}}")))
    };
    let chat = |begin: &str, part: &str, end: &str| {
        (CHAT, long(&format!("{{\"model\":\"m\",{begin}"), part, &format!("{end}}}")))
    };
    let hi = "\"messages\":[{\"role\":\"user\",\"content\":\"hi\"}],";
    let with = |fields: &str| format!("{hi}{fields}");
    let names: String = (0..LONG / 16).map(|i| format!("\"f{i:09}\":0,")).collect();
    let bodies = [
        completion("\"prompt\":[", "0,", "0]"),
        completion("\"prompt\":[[", "0,", "0]]"),
        completion("\"prompt\":[", "[],", "[]]"),
        completion("\"prompt\":[", "\"\",", "\"\"]"),
        completion("\"prompt\":\"", "a", "\""),
        completion("\"prompt\":\"", "\\u0061", "\""),
        completion("\"prompt\":\"a\",\"stop\":[", "\"\",", "\"\"]"),
        completion("\"prompt\":\"a\",\"stop_token_ids\":[", "0,", "0]"),
        completion("\"prompt\":\"a\",\"allowed_token_ids\":[", "0,", "0]"),
        completion("\"prompt\":\"a\",\"guided_json\":[", "0,", "0]"),
        completion("\"prompt\":\"a\",\"guided_json\":\"[", "0,", "0]\""),
        completion("\"prompt\":\"a\",\"guided_choice\":[", "\"\",", "\"\"]"),
        completion("\"prompt\":\"a\",\"guided_regex\":\"", "a", "\""),
        completion("\"prompt\":\"a\",\"suffix\":[", "0,", "0]"),
        completion("\"prompt\":\"a\",\"nobody_knows\":[", "{},", "{}]"),
        completion("\"prompt\":\"a\",\"nobody_knows\":", "[", ""),
        completion(&format!("\"prompt\":\"a\",\"logit_bias\":{{{names}\"x\":0}},\"u\":["), "0,", "0]"),
        completion(&format!("{names}\"u\":["), "0,", "0]"),
        chat("\"messages\":[", "0,", "0]"),
        chat("\"messages\":[", "{\"role\":\"user\",\"content\":\"\"},", "{}]"),
        chat("\"messages\":[{\"role\":\"user\",\"content\":[", "0,", "0]}]"),
        chat("\"messages\":[{\"role\":\"user\",\"content\":[", "{\"type\":\"text\",\"text\":\"\"},", "0]}]"),
        chat("\"messages\":[{\"role\":\"user\",\"content\":\"", "a ", "\"}]"),
        chat("\"messages\":[{\"role\":\"assistant\",\"tool_calls\":[", "0,", "0]}]"),
        chat(
            "\"messages\":[{\"role\":\"assistant\",\"tool_calls\":[{\"id\":\"a\",\"type\":\"function\",\"function\":{\"name\":\"f\",\"arguments\":\"[",
            "0,",
            "0]\"}}]}]",
        ),
        chat(&with("\"tools\":["), "0,", "0]"),
        chat(
            &with("\"tools\":[{\"type\":\"function\",\"function\":{\"name\":\"f\",\"parameters\":{\"a\":["),
            "0,",
            "0]}}}]",
        ),
        chat(&with("\"tool_choice\":["), "0,", "0]"),
        chat(&with("\"documents\":["), "{},", "{}]"),
        chat(&with("\"chat_template_kwargs\":{\"a\":["), "0,", "0]}"),
        chat(&with("\"response_format\":{\"type\":\"json_schema\",\"json_schema\":{\"schema\":["), "0,", "0]}}"),
        chat(&with("\"metadata\":["), "0,", "0]"),
        ("/tokenize", long("{\"prompt\":\"", "a", "\"}")),
        ("/detokenize", long("{\"tokens\":[", "0,", "0]}")),
        ("/generate", long("{\"inputs\":\"a\",\"parameters\":{\"stop\":[", "\"\",", "\"\"]}}")),
        (
            "/generate",
            long("{\"inputs\":\"a\",\"parameters\":{\"grammar\":{\"type\":\"json\",\"value\":[", "0,", "0]}}}"),
        ),
        ("/v1/generate", long("{\"prompt\":\"", "a", "\"}")),
        (CHAT, long("", "[", "")),
    ];
    for (path, body) in bodies {
        let (shown, bytes): (String, usize) = (body.chars().take(90).collect(), body.len());
        let (cost, answer) = program.cost_of(path, body).await;
        assert!(cost <= 4 * bytes + SLACK, "{path} {shown}: {} MiB for {} MiB", cost / MIB, bytes / MIB);
        // What changes nothing may be as long as it likes.
        let ignored = shown.contains("metadata");
        let status = answer.status.as_u16();
        assert!(if ignored { status == 200 } else { (400..500).contains(&status) }, "{path} {shown}: {status}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn bodies_that_come_together_stay_within_their_memory() {
    const ROOM: usize = 256 * MIB;
    let mut program = Program::start(&format!("--body-memory-bytes {ROOM}")).await;
    program.come_to_rest().await;
    let before = program.status_bytes("VmRSS:");
    std::fs::write(format!("/proc/{}/clear_refs", program.child.id().unwrap()), "5").unwrap();
    let body = long("{\"model\":\"m\",\"prompt\":[", "0,", "0]}");
    let send = |body: String| async {
        let request =
            Request::post(COMPLETIONS).header("content-type", "application/json").body(Body::from(body)).unwrap();
        // The server may close before it has read all of a body that it refuses.
        match Client::connect(program.api).await.send(request).await {
            Ok(response) => response.status().as_u16(),
            Err(_) => 0,
        }
    };
    let statuses = within("answers", futures::future::join_all((0..20).map(|_| send(body.clone())))).await;
    assert!(statuses.iter().all(|status| [0, 400, 429].contains(status)), "{statuses:?}");
    assert!(statuses.contains(&400), "{statuses:?}: one at a time is read");
    let grown = program.status_bytes("VmHWM:").saturating_sub(before);
    assert!(grown <= ROOM + 20 * MIB, "{} MiB", grown / MIB);
    // A short one finds room beside them, and a long one that never fits is told so.
    let (_, answer) =
        program.cost_of(COMPLETIONS, "{\"model\":\"m\",\"prompt\":\"a\",\"max_tokens\":1}".to_owned()).await;
    assert_eq!(answer.status.as_u16(), 200, "{}", answer.text());
    let small = Program::start("--body-memory-bytes 16777216").await;
    let (_, answer) = small.cost_of(COMPLETIONS, long("{\"model\":\"m\",\"prompt\":[", "0,", "0]}")).await;
    assert_eq!(answer.status.as_u16(), 413, "{}", answer.text());
}

/// What `/metrics` says of a program's memory, all kinds together.
async fn ledger_bytes(program: &Program) -> f64 {
    let metrics = get(program.admin, "/metrics").await.text();
    let kinds = metrics.lines().filter(|line| line.starts_with("windlass:memory_bytes{"));
    kinds.map(|line| line.rsplit(' ').next().unwrap().parse::<f64>().unwrap()).sum()
}

/// Once keys and values fill their pool, and a form was asked for: 1,456 tokens of 22.5 KiB are 32 MiB. With more models
/// and flags `tests/memory/run` says the same.
#[tokio::test(flavor = "multi_thread")]
async fn what_is_resident_is_what_the_ledger_says() {
    let Some(model) = real_model() else { return };
    let flags = "--served-model-name m --max-num-seqs 8 --kv-cache-memory-bytes 33554432";
    let program = Program::serve(&format!("{} {flags}", model.display())).await;
    let ask = async |body: Value| {
        let answer = Client::connect(program.api).await.post(COMPLETIONS, &body).await;
        assert!(answer.status.is_success(), "{}", answer.text());
    };
    for first in 300..304 {
        let prompt: Vec<u32> = std::iter::once(first).chain(400..799).collect();
        ask(json!({"model": "m", "prompt": prompt, "max_tokens": 2})).await;
    }
    ask(json!({"model": "m", "prompt": "a", "max_tokens": 4, "guided_json": {"type": "object"}})).await;
    let (ledger, resident) = (ledger_bytes(&program).await, program.status_bytes("RssAnon:") as f64);
    let most = 0.03 * ledger + 10.0 * MIB as f64;
    assert!((resident - ledger).abs() <= most, "{} MiB of {} MiB", resident / MIB as f64, ledger / MIB as f64);
}
