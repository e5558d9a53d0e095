//! Requests put on a server: at random times of a rate, or so many at once.

use super::measure::{Measured, Sample};
use super::prompts::Shape;
use crate::client::{Client, ClientError};
use indicatif::{ProgressBar, ProgressStyle};
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use serde::Deserialize;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep_until};

/// When requests are sent.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Arrivals {
    /// The next as soon as one has ended.
    Closed,
    /// Independently of each other, whatever the server does: what many users are like.
    Poisson {
        /// So many a second on average.
        per_second: f64,
    },
}

/// A run.
#[derive(Clone, Copy, Debug)]
pub struct Load {
    /// When.
    pub arrivals: Arrivals,
    /// How many.
    pub requests: usize,
    /// How many at once, at most.
    pub concurrency: usize,
    /// Where times and prompts are drawn from.
    pub seed: u64,
}

/// Sends everything and waits for all answers.
pub async fn put(client: &Client, model: Arc<str>, shape: Shape, load: &Load) -> Measured {
    let progress = progress(load);
    let places = Arc::new(Semaphore::new(load.concurrency));
    let mut random = SmallRng::seed_from_u64(load.seed);
    let (began, mut due, mut tasks) = (Instant::now(), Instant::now(), JoinSet::new());
    for number in 0..load.requests as u64 {
        if let Arrivals::Poisson { per_second } = load.arrivals {
            due += Duration::from_secs_f64(-(1.0 - random.random::<f64>()).ln() / per_second);
            sleep_until(due).await;
        }
        let (client, model, places, progress) = (client.clone(), model.clone(), places.clone(), progress.clone());
        let seed = load.seed;
        // A closed loop waits here for a place; at a rate, waiting for one counts as the server's time.
        let waited = match load.arrivals {
            Arrivals::Closed => places.clone().acquire_owned().await.ok(),
            Arrivals::Poisson { .. } => None,
        };
        let sent = Instant::now();
        tasks.spawn(async move {
            let place = match waited {
                Some(place) => Some(place),
                None => places.acquire_owned().await.ok(),
            };
            let sample = ask(&client, shape.body(&model, seed, number), sent).await;
            drop(place);
            progress.inc(1);
            sample
        });
    }
    let mut measured = Measured::default();
    while let Some(ended) = tasks.join_next().await {
        match ended {
            Ok(Ok(sample)) => measured.samples.push(sample),
            Ok(Err(error)) => measured.failures.push(error.to_string()),
            Err(error) => measured.failures.push(error.to_string()),
        }
    }
    measured.elapsed = began.elapsed();
    progress.finish_and_clear();
    measured
}

fn progress(load: &Load) -> ProgressBar {
    let bar = ProgressBar::new(load.requests as u64);
    if let Ok(style) = ProgressStyle::with_template("{bar:40} {pos}/{len} requests, {per_sec}, {eta} left") {
        bar.set_style(style);
    }
    bar
}

/// What a measurement needs of an event; everything else is parsed and passed over.
#[derive(Deserialize)]
struct Event {
    #[serde(default)]
    choices: Vec<Choice>,
    usage: Option<Usage>,
    error: Option<serde_json::Value>,
}

#[derive(Deserialize)]
struct Choice {
    #[serde(default)]
    text: String,
}

#[derive(Deserialize)]
struct Usage {
    prompt_tokens: u32,
    completion_tokens: u32,
}

async fn ask(client: &Client, body: axum::body::Bytes, sent: Instant) -> Result<Sample, ClientError> {
    let mut reply = client.post("/v1/completions", body).await?.succeeded().await?;
    let (mut sample, mut done) =
        (Sample { first: Duration::ZERO, last: Duration::ZERO, events: 0, prompt_tokens: 0, tokens: 0 }, false);
    while let Some(event) = reply.next_event().await? {
        if event == b"[DONE]" {
            done = true;
            continue;
        }
        let event: Event = serde_json::from_slice(event).map_err(|error| ClientError::Answer(error.to_string()))?;
        if let Some(error) = event.error {
            return Err(ClientError::Answer(error.to_string()));
        }
        if event.choices.iter().any(|choice| !choice.text.is_empty()) {
            sample.last = sent.elapsed();
            sample.events += 1;
            if sample.events == 1 {
                sample.first = sample.last;
            }
        }
        if let Some(usage) = event.usage {
            (sample.prompt_tokens, sample.tokens) = (usage.prompt_tokens, usage.completion_tokens);
        }
    }
    match done {
        true if sample.tokens > 0 => Ok(sample),
        true => Err(ClientError::Answer("the stream carries no usage".to_owned())),
        false => Err(ClientError::Answer("the stream broke off".to_owned())),
    }
}
