//! Many requests at a time, until stopped, or coming and going like a tide; every failure is kept.

use serde_json::Value;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::chat::{self, Answer, Client};

/// Load in progress.
pub struct Load {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

#[derive(Default)]
struct Shared {
    stop: AtomicBool,
    started: AtomicU64,
    completed: AtomicU64,
    failures: Mutex<Vec<String>>,
}

/// What came of it.
#[derive(Debug)]
pub struct Report {
    /// Requests answered whole.
    pub completed: u64,
    /// Why the others were not.
    pub failures: Vec<String>,
}

impl Load {
    /// Keeps `concurrency` requests going through `client`; `request` makes the n-th.
    pub fn start(client: &Client, concurrency: usize, request: impl Fn(u64) -> Value + Clone + Send + 'static) -> Load {
        let shared = Arc::<Shared>::default();
        let worker = |_| {
            let (client, shared, request) = (client.clone(), shared.clone(), request.clone());
            std::thread::spawn(move || shared.work(&client, request))
        };
        let threads = (0..concurrency).map(worker).collect();
        Load { shared, threads }
    }

    /// Requests answered whole so far.
    pub fn completed(&self) -> u64 {
        self.shared.completed.load(Ordering::Relaxed)
    }

    /// Lets the requests in progress end and reports.
    pub fn stop(self) -> Report {
        self.shared.stop.store(true, Ordering::Relaxed);
        let panicked = self.threads.into_iter().filter_map(|thread| thread.join().err()).count();
        let mut failures = self.shared.failures.lock().map(|failures| failures.clone()).unwrap_or_default();
        failures.extend(std::iter::repeat_n("a client thread panicked".to_owned(), panicked));
        Report { completed: self.shared.completed.load(Ordering::Relaxed), failures }
    }
}

impl Shared {
    fn work(&self, client: &Client, request: impl Fn(u64) -> Value) {
        while !self.stop.load(Ordering::Relaxed) {
            let number = self.started.fetch_add(1, Ordering::Relaxed);
            match client.stream(&request(number), |_| {}) {
                Ok(_) => drop(self.completed.fetch_add(1, Ordering::Relaxed)),
                Err(error) => self.fail(format!("request {number}: {error:#}")),
            }
        }
    }

    fn fail(&self, failure: String) {
        if let Ok(mut failures) = self.failures.lock() {
            failures.push(failure);
        }
    }
}

/// Requests that come and stay away in turn: what tokens cost a replica shows only where there are more and fewer.
pub struct Tide {
    client: Client,
    model: String,
    high: Option<Load>,
    turned_at: Instant,
    failures: Vec<String>,
}

impl Tide {
    /// How long it stays: as long as the operator takes together for one observation, and a reading more.
    const STAYS: Duration = Duration::from_secs(20);
    const CLIENTS: usize = 12;

    /// For `model`, served at `url`; low at first.
    pub fn new(url: &str, model: &str) -> Tide {
        let client = Client::unpooled(url);
        Tide { client, model: model.to_owned(), high: None, turned_at: Instant::now(), failures: Vec::new() }
    }

    /// Turns it if its time has come.
    pub fn turn(&mut self) {
        if self.turned_at.elapsed() < Tide::STAYS {
            return;
        }
        self.turned_at = Instant::now();
        match self.high.take() {
            Some(high) => self.failures.extend(high.stop().failures),
            None => self.high = Some(self.rise()),
        }
    }

    fn rise(&self) -> Load {
        let model = self.model.clone();
        Load::start(&self.client, Tide::CLIENTS, move |number| {
            chat::request(&model, &format!("A wave of many words that differ: {number}"), 60)
        })
    }

    /// Why requests failed.
    pub fn end(mut self) -> Vec<String> {
        self.failures.extend(self.high.take().into_iter().flat_map(|high| high.stop().failures));
        self.failures
    }
}

/// Sends `requests` all at once and returns what came of each, in their order.
pub fn together(client: &Client, requests: Vec<Value>) -> Vec<anyhow::Result<Answer>> {
    let ask = |request: Value| {
        let client = client.clone();
        std::thread::spawn(move || client.stream(&request, |_| {}))
    };
    let threads: Vec<_> = requests.into_iter().map(ask).collect();
    let join =
        |thread: JoinHandle<_>| thread.join().unwrap_or_else(|_| Err(anyhow::anyhow!("a client thread panicked")));
    threads.into_iter().map(join).collect()
}
