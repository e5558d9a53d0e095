//! The engine itself, asked over HTTP as its users ask it.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{self, Sender};
use std::thread;
use std::time::Instant;

use serde_json::{Value, json};
use windlass_engine_contract::metrics::SPEC_DECODE_ACCEPTED_TOKENS;

use crate::Outcome;
use crate::finding::{Figure, Finding};
use crate::model::Model;
use crate::parts::Tell;

/// What is continued by all whose answers are compared: it repeats itself, so that draft tokens hold.
const PROMPT: &str = "One, two, three, four, five, six. One, two, three, four, five, six. One, two, three,";
/// Tokens of every answer.
const TOKENS: usize = 64;
/// Clients at a time.
const CLIENTS: [usize; 3] = [1, 16, 64];
/// Seconds that an engine may serve.
const LONGEST_SECONDS: u32 = 55;
const SPECULATIVE_CONFIG: &str = r#"{"method": "ngram", "num_speculative_tokens": 4}"#;

/// Starts the program, asks it, has it sleep, and ends it; and again with draft tokens.
pub fn measure(program: &Path, model: &Model, tell: &mut Tell<'_>) -> Outcome<()> {
    if *model == Model::Generated {
        println!("SKIPPED: a server needs a model's file, with its tokenizer");
        return Ok(());
    }
    let engine = Engine::start(program, model, &[])?;
    tell(Figure::new("start to ready", engine.seconds, "s").into());
    let alone = engine.answer(PROMPT)?;
    for clients in CLIENTS {
        tell_streams(&engine, clients, tell)?;
    }
    tell(Finding::check("an answer beside others is what it is alone", engine.beside_others()? == alone));
    tell_device(&engine, model, tell)?;
    tell_rest(&engine, &alone, tell)?;
    tell(Finding::check("it ends when it is told to", engine.end()?.success()));
    let drafting = Engine::start(program, model, &["--speculative-config", SPECULATIVE_CONFIG])?;
    tell(Finding::check("an answer with draft tokens is what it is without", drafting.answer(PROMPT)? == alone));
    let accepted = drafting.accepted()?;
    tell(Figure::new("accepted draft tokens of that answer", accepted, "tokens").into());
    // The simulator has no text that would repeat itself.
    tell(Finding::check("some of its draft tokens were accepted", accepted > 0.0 || model.is_dry()));
    tell(Finding::check("with draft tokens it ends when it is told to", drafting.end()?.success()));
    Ok(())
}

/// Clients that all ask at once: what they get together, and how long the first word takes half of them.
fn tell_streams(engine: &Engine, clients: usize, tell: &mut Tell<'_>) -> Outcome<()> {
    let started = Instant::now();
    let mut streams = engine.all(clients, |index| engine.stream(&format!("{index}. {PROMPT}")))?;
    let seconds = started.elapsed().as_secs_f64();
    streams.sort_by(|one, other| one.first_seconds.total_cmp(&other.first_seconds));
    let tokens: usize = streams.iter().map(|stream| stream.tokens).sum();
    let name = format!("{clients} clients");
    tell(Figure::new(&name, tokens as f64 / seconds, "tokens/s").into());
    tell(Figure::new(format!("{name}, first token"), 1e3 * streams[clients / 2].first_seconds, "ms").into());
    Ok(())
}

/// What the management library says, which nothing but a card has.
fn tell_device(engine: &Engine, model: &Model, tell: &mut Tell<'_>) -> Outcome<()> {
    if model.is_dry() {
        return Ok(());
    }
    let stats = engine.admin_json("stats")?;
    let gpus = &stats["gpus"];
    for (name, key, unit) in [
        ("memory that is taken", "memoryUsedBytes", "bytes"),
        ("power", "powerWatts", "W"),
        ("temperature", "temperatureCelsius", "degrees Celsius"),
    ] {
        let value = gpus[key].as_f64().unwrap_or(0.0);
        tell(Figure::new(name, value, unit).into());
        tell(Finding::check(format!("{name}: more than none"), value > 0.0));
    }
    tell(Finding::check("no critical error of the device", gpus["xidErrors"] == 0));
    Ok(())
}

/// Weights go to the host and come back.
fn tell_rest(engine: &Engine, alone: &Answer, tell: &mut Tell<'_>) -> Outcome<()> {
    for (name, call) in [("falling asleep", "sleep?level=1"), ("waking up", "wake_up")] {
        let started = Instant::now();
        engine.tell_admin(call)?;
        tell(Figure::new(name, started.elapsed().as_secs_f64(), "s").into());
    }
    tell(Finding::check("an answer after sleep is what it was", engine.answer(PROMPT)? == *alone));
    Ok(())
}

/// A text, with what the model thought of its tokens.
#[derive(Debug, PartialEq)]
struct Answer {
    text: Value,
    logprobs: Value,
}

/// What came of a stream.
#[derive(Debug)]
struct Stream {
    first_seconds: f64,
    tokens: usize,
}

/// The program, and where it answers.
struct Engine {
    child: Child,
    /// From its start until it served.
    seconds: f64,
    api: String,
    admin: String,
}

impl Engine {
    fn start(program: &Path, model: &Model, flags: &[&str]) -> Outcome<Engine> {
        let (name, executor) = (model.to_string(), if model.is_dry() { "--executor=sim" } else { "--device=cuda" });
        let own = [
            "serve",
            if model.is_dry() { "model" } else { &name },
            executor,
            "--max-num-seqs=64",
            "--drain-accept-seconds=0",
        ];
        let ports = ["--host", "127.0.0.1", "--port", "0", "--admin-port", "0", "--served-model-name", "model"];
        let started = Instant::now();
        // It has an end of its own, and none of this stage's output: where the stage is stopped, it holds nothing back.
        let mut command = Command::new("timeout");
        command.args(["--kill-after=5", &LONGEST_SECONDS.to_string()]).arg(program).args(own).args(ports).args(flags);
        let mut child = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn()?;
        let (say, said) = mpsc::channel();
        let log = child.stderr.take().ok_or("its log is not here")?;
        thread::spawn(move || follow(BufReader::new(log), say));
        // Ends with the log where it does not come so far.
        let [api, admin] = said.recv().map_err(|_| "the engine ended before it served")?;
        Ok(Engine { child, seconds: started.elapsed().as_secs_f64(), api, admin })
    }

    fn ask(&self, prompt: &str, more: &[(&str, Value)]) -> Outcome<ureq::Body> {
        let mut asked =
            json!({"model": "model", "prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": true});
        more.iter().for_each(|(key, value)| asked[*key] = value.clone());
        let request = ureq::post(format!("http://{}/v1/completions", self.api)).content_type("application/json");
        Ok(request.send(asked.to_string())?.into_body())
    }

    fn answer(&self, prompt: &str) -> Outcome<Answer> {
        let mut body = self.ask(prompt, &[("logprobs", json!(0))])?;
        let answer: Value = serde_json::from_str(&body.read_to_string()?)?;
        let choice = &answer["choices"][0];
        Ok(Answer { text: choice["text"].clone(), logprobs: choice["logprobs"]["token_logprobs"].clone() })
    }

    fn stream(&self, prompt: &str) -> Outcome<Stream> {
        let started = Instant::now();
        let options = [("stream", json!(true)), ("stream_options", json!({"include_usage": true}))];
        let (mut first_seconds, mut tokens) = (None, 0);
        for line in BufReader::new(self.ask(prompt, &options)?.into_reader()).lines() {
            let line = line?;
            let Some(event) = line.strip_prefix("data: ").filter(|event| *event != "[DONE]") else { continue };
            first_seconds.get_or_insert_with(|| started.elapsed().as_secs_f64());
            let event: Value = serde_json::from_str(event)?;
            tokens = event["usage"]["completion_tokens"].as_u64().map_or(tokens, |count| count as usize);
        }
        Ok(Stream { first_seconds: first_seconds.ok_or("a stream of nothing")?, tokens })
    }

    /// One answer of many at once.
    fn beside_others(&self) -> Outcome<Answer> {
        let asked = |index: usize| if index == 0 { PROMPT.to_owned() } else { format!("{index}. {PROMPT}") };
        let answers = self.all(CLIENTS[1], |index| self.answer(&asked(index)))?;
        answers.into_iter().next().ok_or_else(|| "nobody asked".into())
    }

    /// What as many clients get who all ask at once.
    fn all<T: Send>(&self, clients: usize, ask: impl Fn(usize) -> Outcome<T> + Sync) -> Outcome<Vec<T>> {
        let ask = |client| ask(client).map_err(|error| error.to_string());
        thread::scope(|scope| {
            let asking: Vec<_> = (0..clients).map(|client| scope.spawn(move || ask(client))).collect();
            let heard = |asked: thread::ScopedJoinHandle<'_, Result<T, String>>| {
                asked.join().map_err(|_| "a client failed")?.map_err(Into::into)
            };
            asking.into_iter().map(heard).collect()
        })
    }

    fn admin_json(&self, call: &str) -> Outcome<Value> {
        let text = ureq::get(format!("http://{}/{call}", self.admin)).call()?.into_body().read_to_string()?;
        Ok(serde_json::from_str(&text)?)
    }

    fn tell_admin(&self, call: &str) -> Outcome<()> {
        ureq::post(format!("http://{}/{call}", self.admin)).send_empty()?;
        Ok(())
    }

    /// Draft tokens that were accepted since it started.
    fn accepted(&self) -> Outcome<f64> {
        let metrics = ureq::get(format!("http://{}/metrics", self.admin)).call()?.into_body().read_to_string()?;
        let held = metrics
            .lines()
            .filter(|line| line.starts_with(SPEC_DECODE_ACCEPTED_TOKENS))
            .filter_map(|line| line.rsplit(' ').next());
        Ok(held.filter_map(|value| value.parse::<f64>().ok()).sum())
    }

    fn end(mut self) -> Outcome<ExitStatus> {
        Command::new("kill").args(["-TERM", &self.child.id().to_string()]).status()?;
        Ok(self.child.wait()?)
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        // It may have ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Reads a log to its end, hands it on, and tells where the engine serves once it does.
fn follow(log: impl BufRead, say: Sender<[String; 2]>) {
    let mut say = Some(say);
    for line in log.lines().map_while(Result::ok) {
        eprintln!("{line}");
        if let Some(addresses) = addresses(&line)
            && let Some(say) = say.take()
        {
            // Nobody waits any more where the stage has failed.
            let _ = say.send(addresses);
        }
    }
}

/// `… serving api=HOST:PORT admin=HOST:PORT …`.
fn addresses(line: &str) -> Option<[String; 2]> {
    let (_, said) = line.split_once(" serving ")?;
    let value = |key: &str| said.split(' ').find_map(|word| word.strip_prefix(key)).map(str::to_owned);
    Some([value("api=")?, value("admin=")?])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_log_tells_where_it_serves() {
        let line = "2026-01-01T00:00:00Z  INFO serving api=127.0.0.1:1 admin=127.0.0.1:2 seconds=0.04";
        assert_eq!(addresses(line), Some(["127.0.0.1:1".to_owned(), "127.0.0.1:2".to_owned()]));
        assert_eq!(addresses("start: load api=127.0.0.1:1"), None);
    }
}
