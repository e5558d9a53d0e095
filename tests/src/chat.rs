//! One request to a service: streamed, read event by event, and kept whole.

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};
use std::io::{BufRead, BufReader};
use std::time::{Duration, Instant};
use ureq::Agent;

/// Longest that anything may take, answer included. A stuck server must not make a test hang.
const LIMIT: Duration = Duration::from_secs(180);
/// Longest line of an answer that is read, bytes.
const MAX_LINE_BYTES: u64 = 1 << 20;

/// A client of one service.
#[derive(Clone, Debug)]
pub struct Client {
    agent: Agent,
    base: String,
}

/// A streamed answer, complete as far as it came.
#[derive(Clone, Debug, Default)]
pub struct Answer {
    /// All deltas together.
    pub text: String,
    /// As the last choice says.
    pub finish_reason: Option<String>,
    /// `usage.completion_tokens`, if usage came.
    pub completion_tokens: Option<u64>,
    /// `data: [DONE]` was the last event.
    pub done: bool,
    /// Request to first text.
    pub first_token: Duration,
    /// Request to end.
    pub total: Duration,
}

impl Client {
    /// Keeps connections and uses them again, as every client library does.
    pub fn pooled(base: &str) -> Client {
        Client::new(base, 64)
    }

    /// A connection for each request, so that each is balanced anew.
    pub fn unpooled(base: &str) -> Client {
        Client::new(base, 0)
    }

    fn new(base: &str, idle_connections: usize) -> Client {
        let config = Agent::config_builder()
            .http_status_as_error(false)
            .timeout_global(Some(LIMIT))
            .max_idle_connections(idle_connections)
            .max_idle_connections_per_host(idle_connections);
        Client { agent: config.build().into(), base: base.to_owned() }
    }

    /// Sends a chat request with streaming and usage switched on; `on_text` gets each piece as it comes.
    ///
    /// # Errors
    /// A status other than 200, with the body; an answer that breaks off, with what it lacks; an error event.
    pub fn stream(&self, request: &Value, mut on_text: impl FnMut(&str)) -> Result<Answer> {
        let started = Instant::now();
        let mut request = request.clone();
        request["stream"] = json!(true);
        request["stream_options"] = json!({"include_usage": true});
        let post = self.agent.post(format!("{}/v1/chat/completions", self.base)).content_type("application/json");
        let mut response = post.send(request.to_string()).context("no answer")?;
        if response.status() != 200 {
            bail!("status {}: {}", response.status(), response.body_mut().read_to_string().unwrap_or_default());
        }
        let mut answer = Answer::default();
        let mut lines = BufReader::new(response.into_body().into_reader());
        while let Some(data) = next_event(&mut lines).with_context(|| format!("broke off after: {:?}", answer.text))? {
            if data == "[DONE]" {
                answer.done = true;
                continue;
            }
            let text = answer.take(&data)?;
            if answer.text.is_empty() && !text.is_empty() {
                answer.first_token = started.elapsed();
            }
            on_text(&text);
            answer.text += &text;
        }
        answer.total = started.elapsed();
        answer.complete()
    }
}

impl Answer {
    /// Takes one event in; returns its text.
    fn take(&mut self, data: &str) -> Result<String> {
        let event: Value = serde_json::from_str(data).with_context(|| format!("not JSON: {data}"))?;
        if !event["error"].is_null() {
            bail!("error event: {data}");
        }
        let choice = &event["choices"][0];
        if let Some(reason) = choice["finish_reason"].as_str() {
            self.finish_reason = Some(reason.to_owned());
        }
        if let Some(tokens) = event["usage"]["completion_tokens"].as_u64() {
            self.completion_tokens = Some(tokens);
        }
        Ok(choice["delta"]["content"].as_str().unwrap_or_default().to_owned())
    }

    /// A whole answer has a reason, its usage and the end mark.
    fn complete(self) -> Result<Answer> {
        match (&self.finish_reason, self.completion_tokens, self.done) {
            (Some(_), Some(_), true) => Ok(self),
            _ => bail!("the stream ended early: {self:?}"),
        }
    }
}

/// Data of the next event of a stream, `None` at its end.
fn next_event(lines: &mut impl BufRead) -> Result<Option<String>> {
    loop {
        let mut line = String::new();
        let read = std::io::Read::take(&mut *lines, MAX_LINE_BYTES).read_line(&mut line)?;
        if read == 0 {
            return Ok(None);
        }
        if let Some(data) = line.trim_end().strip_prefix("data: ") {
            return Ok(Some(data.to_owned()));
        }
    }
}

/// A greedy chat request of one user message: asked twice, it is answered alike.
pub fn request(model: &str, message: &str, max_tokens: u32) -> Value {
    json!({"model": model, "messages": [{"role": "user", "content": message}], "max_tokens": max_tokens, "temperature": 0})
}
