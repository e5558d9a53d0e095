//! Mixed traffic for a while against one process, and an account of it: every request ends once, and the counters are what
//! clients were told, to the token. A minute long, or `WINDLASS_SOAK_SECONDS`; `tests/soak` runs it for ten.

use crate::common::{Answer, Client, eventually, get, post, within};
use axum::body::Body;
use futures::StreamExt;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::process::Stdio;
use std::time::{Duration, Instant};
use tokio::io::{AsyncBufReadExt, BufReader, Lines};
use tokio::process::{Child, ChildStderr, Command};
use tokio::task::JoinHandle;
use windlass_checkpoint::testing::real_model;

const CHAT: &str = "/v1/chat/completions";
const COMPLETIONS: &str = "/v1/completions";
/// Requests at once. The tenant of the second key may have two answers, so that some of its requests are refused.
const CLIENTS: usize = 16;
const KEYS: &str = "alice key-of-alice\nbob key-of-bob\n";
const LIMITS: &str = r#"{"bob": {"max_concurrent_requests": 2}}"#;
/// Kinds of requests.
const KINDS: u64 = 12;

/// What became of a request, as its client sees it.
enum Seen {
    Answered(Told),
    /// Its client went away when it had been told this.
    Cancelled(Told),
    Refused(String),
}

/// Tokens that a client was told of, and how each of its answers ended.
#[derive(Clone, Debug, Default)]
struct Told {
    prompt: u64,
    cached: u64,
    completion: u64,
    ends: Vec<String>,
}

/// A process, and what it says of answers.
struct Engine {
    child: Child,
    api: SocketAddr,
    admin: SocketAddr,
    answers: JoinHandle<Vec<Value>>,
    _files: tempfile::TempDir,
}

impl Engine {
    async fn start(model: &std::path::Path) -> Engine {
        let files = tempfile::tempdir().unwrap();
        let [keys, limits] = [("keys", KEYS), ("limits", LIMITS)].map(|(name, text)| {
            let path = files.path().join(name);
            std::fs::write(&path, text).unwrap();
            path
        });
        let flags = "--executor sim --host 127.0.0.1 --port 0 --admin-port 0 --served-model-name m --log-format json \
                     --sim-step-us 1000 --sim-prefill-token-us 1 --sim-decode-sequence-us 1 --sim-mean-answer-tokens 60 \
                     --max-num-seqs 12";
        let mut command = Command::new(crate::common::PROGRAM);
        command.arg("serve").arg(model).args(flags.split_whitespace()).arg("--api-key-file").arg(keys);
        command.arg("--tenant-limits-file").arg(limits).stderr(Stdio::piped()).kill_on_drop(true);
        let mut child = command.spawn().unwrap();
        let mut log = BufReader::new(child.stderr.take().unwrap()).lines();
        let serving = within("it serves", line(&mut log, "serving")).await.unwrap();
        let [api, admin] = ["api", "admin"].map(|port| serving[port].as_str().unwrap().parse().unwrap());
        let answers = tokio::spawn(async move {
            let mut answers = Vec::new();
            while let Some(answer) = line(&mut log, "answer").await {
                answers.push(answer);
            }
            answers
        });
        Engine { child, api, admin, answers, _files: files }
    }

    /// Asks for something as the client of this number, and sees it through.
    async fn ask(&self, index: u64) -> (String, Seen) {
        let (name, (path, body)) = (format!("soak-{index}"), asked(index));
        let key = if index % KINDS == 11 {
            "no-key"
        } else {
            ["key-of-alice", "key-of-bob"][usize::from(index.is_multiple_of(5))]
        };
        let mut request = post(path, &body);
        request.headers_mut().insert("x-request-id", name.parse().unwrap());
        request.headers_mut().insert("authorization", format!("Bearer {key}").parse().unwrap());
        let mut client = match index % 2 {
            0 => Client::connect(self.api).await,
            _ => Client::connect_http2(self.api).await,
        };
        let response = client.send(request).await.unwrap();
        let seen = match (response.status().is_success(), body["max_tokens"] == ENDLESS) {
            (true, true) => leave(response, 1 + index % 30).await,
            (true, false) => answered(&Answer::read(response).await, body["stream"] == true),
            (false, _) => Seen::Refused(Answer::read(response).await.json()["error"]["code"].to_string()),
        };
        client.connection.abort();
        (name, seen)
    }

    /// The metrics once nothing is left to do, and all answers that the process says it gave.
    async fn finish(mut self) -> (String, Vec<Value>) {
        eventually("nothing is left", async || {
            let stats = get(self.admin, "/stats").await.json();
            stats["running"] == 0 && stats["waiting"] == 0 && stats["kvUsage"] == 0.0
        })
        .await;
        let metrics = get(self.admin, "/metrics").await.text();
        let pid = self.child.id().unwrap().to_string();
        assert!(std::process::Command::new("kill").args(["-TERM", &pid]).status().unwrap().success());
        assert!(within("it ends", self.child.wait()).await.unwrap().success());
        (metrics, self.answers.await.unwrap())
    }
}

/// The next line of the log with this message.
async fn line(log: &mut Lines<BufReader<ChildStderr>>, message: &str) -> Option<Value> {
    loop {
        let line = log.next_line().await.unwrap()?;
        let Ok(line) = serde_json::from_str::<Value>(&line) else { continue };
        if line["message"] == message {
            return Some(line);
        }
    }
}

/// Most tokens of an answer that its client does not wait for.
const ENDLESS: u64 = 5000;

/// A request of the mix: whole and streamed, several answers and several prompts, forms and tools, such as are given up and such
/// as are refused.
fn asked(index: u64) -> (&'static str, Value) {
    let text = format!("tell me of the engine and of block {}", index % 97);
    let messages = json!([{"role": "user", "content": text}]);
    let schema = json!({"type": "object", "properties": {"a": {"enum": ["x", "y"]}, "b": {"type": "boolean"}},
        "required": ["a", "b"], "additionalProperties": false});
    let tool = json!({"type": "function", "function": {"name": "look", "parameters": schema}});
    let format = json!({"type": "json_schema", "json_schema": {"name": "n", "schema": schema}});
    let gives_up = json!({"messages": messages, "stream": true, "ignore_eos": true, "max_tokens": ENDLESS,
        "stream_options": {"include_usage": true, "continuous_usage_stats": true}});
    let (path, mut body) = match index % KINDS {
        0 => (CHAT, json!({"messages": messages})),
        1 => (CHAT, json!({"messages": messages, "stream": true})),
        2 => (CHAT, json!({"messages": messages, "n": 3, "stop": ["e"], "stream": true})),
        3 => (COMPLETIONS, json!({"prompt": [text, "of the block"], "n": 2, "stop": ["a"]})),
        4 => (COMPLETIONS, json!({"prompt": text, "stream": true, "logprobs": 1})),
        5 => (CHAT, json!({"messages": messages, "response_format": format})),
        6 => (CHAT, json!({"messages": messages, "tools": [tool], "tool_choice": "required", "stream": true})),
        7 => (CHAT, json!({"messages": messages, "guided_regex": "[a-z]{3}( [a-z]{2}){2}", "n": 2})),
        8 | 9 => (CHAT, gives_up),
        10 if index % 24 == 10 => (CHAT, json!({"messages": messages, "temperature": 7})),
        10 => (CHAT, json!({"messages": messages, "model": "another"})),
        _ => (CHAT, json!({"messages": messages, "stream": true})),
    };
    let common = json!({"model": "m", "max_tokens": 8 + index % 90, "temperature": 1.0, "seed": index});
    for (name, value) in common.as_object().unwrap() {
        body.as_object_mut().unwrap().entry(name).or_insert(value.clone());
    }
    if body["stream"] == true && body["stream_options"].is_null() {
        body["stream_options"] = json!({"include_usage": true});
    }
    (path, body)
}

fn answered(answer: &Answer, streamed: bool) -> Seen {
    let events = if streamed { answer.events() } else { vec![answer.json()] };
    let choices = events.iter().flat_map(|event| event["choices"].as_array().unwrap());
    let ends = choices.filter_map(|choice| choice["finish_reason"].as_str().map(str::to_owned)).collect();
    Seen::Answered(Told { ends, ..told(events.last().unwrap()) })
}

fn told(event: &Value) -> Told {
    let usage = &event["usage"];
    let tokens = |tokens: &Value| tokens.as_u64().unwrap_or_else(|| panic!("{event}"));
    let cached = tokens(&usage["prompt_tokens_details"]["cached_tokens"]);
    Told {
        prompt: tokens(&usage["prompt_tokens"]),
        cached,
        completion: tokens(&usage["completion_tokens"]),
        ends: Vec::new(),
    }
}

/// Reads events up to so many with tokens, and goes away.
async fn leave(response: hyper::Response<hyper::body::Incoming>, events: u64) -> Seen {
    let mut body = Body::new(response.into_body()).into_data_stream();
    let (mut text, mut seen) = (String::new(), Told::default());
    while seen.completion < events {
        text.push_str(std::str::from_utf8(&body.next().await.expect("it goes on").unwrap()).unwrap());
        let complete = text.rfind("\n\n").unwrap_or(0);
        let last = text[..complete].rsplit("\n\n").find_map(|event| event.strip_prefix("data: "));
        seen = last.map_or(seen, |event| told(&serde_json::from_str(event).unwrap()));
    }
    Seen::Cancelled(seen)
}

/// The sum of a metric's samples that have this label.
fn metric(metrics: &str, name: &str, label: &str) -> u64 {
    let samples = metrics.lines().filter(|line| line.split(['{', ' ']).next() == Some(name) && line.contains(label));
    samples.map(|line| line.rsplit(' ').next().unwrap().parse::<f64>().unwrap() as u64).sum()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_soak_of_mixed_traffic_is_accounted_for_to_the_token() {
    let Some(model) = real_model() else { return };
    let seconds = std::env::var("WINDLASS_SOAK_SECONDS").map_or(60, |seconds| seconds.parse().unwrap());
    let (engine, end) = (Engine::start(&model).await, Instant::now() + Duration::from_secs(seconds));
    let indices = futures::stream::iter(0..).take_while(|_| std::future::ready(Instant::now() < end));
    let asked = indices.map(|index| within("a request ends", engine.ask(index))).buffer_unordered(CLIENTS);
    let seen: BTreeMap<String, Seen> = asked.collect().await;
    let (metrics, answers) = engine.finish().await;
    let mut given: BTreeMap<String, Vec<Value>> = BTreeMap::new();
    for answer in answers {
        given.entry(answer["request"].as_str().unwrap().to_owned()).or_default().push(answer);
    }
    let sums = Sums::of(&seen, &given);
    println!("{} requests in {seconds} s: {sums:?}", seen.len());
    assert!(sums.cancelled > 0 && sums.refused.len() >= 3, "{sums:?}");
    sums.compare(&metrics);
}

/// Sums over requests.
#[derive(Debug, Default)]
struct Sums {
    prompt: u64,
    cached: u64,
    /// Tokens of complete answers.
    complete: u64,
    /// Tokens of answers that nobody waited for: what was computed and told until the process knew.
    given_up: u64,
    ends: BTreeMap<String, u64>,
    cancelled: u64,
    refused: BTreeMap<String, u64>,
}

impl Sums {
    /// Of what clients saw, each request held against what the process says that it gave.
    fn of(seen: &BTreeMap<String, Seen>, given: &BTreeMap<String, Vec<Value>>) -> Sums {
        let mut sums = Sums::default();
        for (name, seen) in seen {
            let given = given.get(name).map_or(&[][..], Vec::as_slice);
            match seen {
                Seen::Answered(told) => sums.answered(name, told, given),
                Seen::Cancelled(told) => sums.cancelled(name, told, given),
                Seen::Refused(code) => {
                    assert!(given.is_empty(), "{name} was refused, and answered: {given:?}");
                    *sums.refused.entry(code.trim_matches('"').to_owned()).or_default() += 1;
                }
            }
        }
        assert_eq!(given.keys().filter(|name| !seen.contains_key(*name)).count(), 0, "answers that nobody asked for");
        sums
    }

    fn answered(&mut self, name: &str, told: &Told, given: &[Value]) {
        let tokens: u64 = given.iter().map(|answer| answer["completion_tokens"].as_u64().unwrap()).sum();
        assert_eq!((tokens, given.len()), (told.completion, told.ends.len()), "{name}: {told:?}, {given:?}");
        assert!(given.iter().all(|answer| answer["outcome"] == "complete"), "{name}: {given:?}");
        self.count(told);
        self.complete += told.completion;
        for end in &told.ends {
            *self.ends.entry(end.clone()).or_default() += 1;
        }
    }

    fn cancelled(&mut self, name: &str, told: &Told, given: &[Value]) {
        let [answer] = given else { panic!("{name} ended {} times: {given:?}", given.len()) };
        let tokens = answer["completion_tokens"].as_u64().unwrap();
        assert!(
            answer["outcome"] == "abandoned" && (told.completion..ENDLESS).contains(&tokens),
            "{name}: {told:?}, {answer}"
        );
        self.count(told);
        self.given_up += tokens;
        self.cancelled += 1;
    }

    fn count(&mut self, told: &Told) {
        self.prompt += told.prompt;
        self.cached += told.cached;
    }

    /// Holds the counters to the sums.
    fn compare(&self, metrics: &str) {
        let ended = |reasons: &[&str]| reasons.iter().filter_map(|reason| self.ends.get(*reason)).sum::<u64>();
        let refused = |code: &str| self.refused.get(code).copied().unwrap_or(0);
        for (name, label, expected) in [
            ("vllm:prompt_tokens_total", "", self.prompt),
            ("vllm:prompt_tokens_cached_total", "", self.cached),
            ("vllm:request_generation_tokens_sum", "", self.complete),
            ("vllm:generation_tokens_total", "", self.complete + self.given_up),
            ("vllm:request_success_total", "\"length\"", ended(&["length"])),
            ("vllm:request_success_total", "\"stop\"", ended(&["stop", "tool_calls"])),
            ("vllm:request_success_total", "\"abort\"", self.cancelled),
            ("vllm:request_success_total", "\"error\"", 0),
            ("windlass:admission_rejections_total", "", refused("tenant_concurrency")),
            ("windlass:kv_blocks_leaked", "", 0),
        ] {
            assert_eq!(metric(metrics, name, label), expected, "{name} {label}: {self:?}");
        }
    }
}
