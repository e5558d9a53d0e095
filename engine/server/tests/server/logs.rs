//! What the log says of requests.

use crate::common::{Answer, Client, post, within};
use hyper::StatusCode;
use serde_json::{Value, json};
use std::net::SocketAddr;
use windlass_checkpoint::testing::SafetensorsBuilder;

const CHAT: &str = "/v1/chat/completions";

/// A server as a process of its own, whose log is read.
struct Logged {
    log: tokio::io::Lines<tokio::io::BufReader<tokio::process::ChildStderr>>,
    api: SocketAddr,
    /// Ends with this.
    _child: tokio::process::Child,
}

impl Logged {
    async fn start(flags: &[&str]) -> Logged {
        let mut child = tokio::process::Command::new(env!("CARGO_BIN_EXE_windlass-engine"))
            .args(["serve", "m", "--executor", "sim", "--host", "127.0.0.1", "--port", "0", "--admin-port", "0"])
            .args(["--log-format", "json"])
            .args(flags)
            .stderr(std::process::Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .unwrap();
        let log = tokio::io::AsyncBufReadExt::lines(tokio::io::BufReader::new(child.stderr.take().unwrap()));
        let mut server = Logged { log, api: ([127, 0, 0, 1], 0).into(), _child: child };
        server.api = server.line("serving").await["api"].as_str().unwrap().parse().unwrap();
        server
    }

    /// The next line with this message.
    async fn line(&mut self, message: &str) -> Value {
        self.lines_until(message).await.pop().unwrap()
    }

    /// Lines up to the next one with this message.
    async fn lines_until(&mut self, message: &str) -> Vec<Value> {
        let mut lines = Vec::new();
        while lines.last().is_none_or(|line: &Value| line["message"] != message) {
            let line = within("a log line", self.log.next_line()).await.unwrap().unwrap();
            lines.push(serde_json::from_str(&line).unwrap());
        }
        lines
    }

    async fn ask(&self, name: &str, extra: Value) -> Answer {
        let mut body = json!({"model": "m", "messages": [{"role": "user", "content": "mellifluous"}], "max_tokens": 3});
        body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        let mut request = post(CHAT, &body);
        request.headers_mut().insert("x-request-id", name.parse().unwrap());
        Answer::read(Client::connect(self.api).await.send(request).await.unwrap()).await
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_log_line_names_the_request_and_quotes_nothing() {
    let mut server = Logged::start(&[]).await;
    let answer = server.ask("trace-42", json!({})).await;
    assert_eq!(
        (answer.header("x-request-id"), answer.json()["id"].as_str()),
        (Some("trace-42"), Some("chatcmpl-trace-42"))
    );
    let lines = server.lines_until("answer").await;
    assert!(lines.iter().all(|line| !line.to_string().contains("mellifluous") && line["text"].is_null()), "{lines:?}");
    let line = lines.last().unwrap();
    assert_eq!((&line["request"], &line["completion_tokens"]), (&json!("trace-42"), &json!(3)));
    assert_eq!(line["outcome"], "complete");
}

#[tokio::test(flavor = "multi_thread")]
async fn texts_are_logged_where_the_flags_ask_for_them_and_no_more_of_them() {
    let flags = ["--enable-log-requests", "--enable-log-outputs", "--max-log-len", "10"];
    let mut server = Logged::start(&flags).await;
    for extra in [json!({"max_tokens": 40}), json!({"max_tokens": 40, "stream": true})] {
        let answer = server.ask("trace-43", extra.clone()).await;
        let text: String = match extra["stream"] == true {
            true => {
                answer.events().iter().filter_map(|event| event["choices"][0]["delta"]["content"].as_str()).collect()
            }
            false => answer.json()["choices"][0]["message"]["content"].as_str().unwrap().to_owned(),
        };
        let prompt = server.line("prompt").await;
        assert_eq!(prompt["request"], "trace-43");
        assert_eq!(prompt["text"].as_str().unwrap().chars().count(), 10);
        let answer = server.line("answer").await;
        assert_eq!(answer["text"], text.chars().take(10).collect::<String>());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_log_that_nobody_reads_holds_up_nobody() {
    let server = Logged::start(&["--enable-log-requests"]).await;
    // Twenty times 10,000 bytes: three times what a pipe holds.
    let long = json!([{"role": "user", "content": "word ".repeat(2000)}]);
    for _ in 0..20 {
        let answer = within("an answer", server.ask("trace-44", json!({"messages": long}))).await;
        assert_eq!(answer.status, StatusCode::OK, "{}", answer.text());
    }
}

/// What a server says of a folder before it misses the weights.
async fn log_of_folder(config: &Value, embedding: &str) -> String {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
    let weights = SafetensorsBuilder::new().tensor_f32(embedding, &[8, 64], &[0.0; 8 * 64]).build();
    std::fs::write(folder.path().join("model.safetensors"), weights).unwrap();
    let server = tokio::process::Command::new(env!("CARGO_BIN_EXE_windlass-engine"))
        .args(["serve", folder.path().to_str().unwrap(), "--device", "cpu", "--host", "127.0.0.1"])
        .args(["--port", "0", "--admin-port", "0"])
        .kill_on_drop(true)
        .output();
    String::from_utf8(within("it misses the weights", server).await.unwrap().stderr).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_model_that_reads_images_is_served_with_a_word_of_warning() {
    const WARNING: &str = "the model reads images, too: its text is served and images are not";
    let text = json!({"model_type": "mistral", "vocab_size": 8, "hidden_size": 64, "intermediate_size": 64,
        "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64,
        "rms_norm_eps": 1e-6, "sliding_window": null});
    let whole = json!({"model_type": "mistral3", "text_config": text, "vision_config": {}});
    let log = log_of_folder(&whole, "language_model.model.embed_tokens.weight").await;
    assert!(log.contains(WARNING) && log.contains("is missing"), "{log}");
    let log = log_of_folder(&text, "model.embed_tokens.weight").await;
    assert!(!log.contains(WARNING) && log.contains("is missing"), "{log}");
}
