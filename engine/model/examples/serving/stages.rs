//! Nodes that share a model's layers, each with a thread: on this machine, over its loopback.

use std::error::Error;
use std::net::TcpListener;
use std::thread;
use std::time::Duration;

use super::{PLAIN, median, prose, request, run};
use windlass_checkpoint::Checkpoint;
use windlass_engine_core::engine::Engine;
use windlass_engine_core::request::Request;
use windlass_engine_model::{CpuExecutor, Gathering, KvBudget, LoadOptions, load, load_leader, work};

const ROUNDS: usize = 5;
const PATIENCE: Duration = Duration::from_secs(60);
/// Tokens of a long prompt, of one that fits a step, and of those before answers.
const PROMPT_TOKENS: usize = 2048;
const STEP_TOKENS: usize = 512;
const SHORT_TOKENS: usize = 64;
const ANSWER_TOKENS: u32 = 64;
const SEQUENCES: u64 = 16;

/// Prints a row for one process with a thread, one with two, and two with a thread each.
pub fn measure(file: &Checkpoint) -> Result<(), Box<dyn Error>> {
    let prompts = format!("prompt of {PROMPT_TOKENS}, tok/s | prompt of {STEP_TOKENS}");
    println!("| processes | threads of each | {prompts} | one answer | {SEQUENCES} answers |");
    println!("|---|---|---|---|---|---|");
    thread::scope(|scope| {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let leader = listener.local_addr()?.to_string();
        let node = scope.spawn(move || work(file, &options(1), 1, 2, &leader, PATIENCE).map_err(|why| why.to_string()));
        let gathering = Gathering { listener, stages: 2, patience: PATIENCE };
        let executors = [
            load(file, &options(1))?.executor,
            load(file, &options(2))?.executor,
            load_leader(file, &options(1), &gathering)?.executor,
        ];
        let mut engines = executors.map(|executor| Engine::new(executor, PLAIN));
        let mut rates = [const { Vec::new() }; 3];
        for _ in 0..ROUNDS {
            for (engine, rates) in engines.iter_mut().zip(&mut rates) {
                rates.push(once(engine)?);
            }
        }
        for (way, rates) in [(1, 1), (1, 2), (2, 1)].into_iter().zip(rates) {
            let rates = [0, 1, 2, 3].map(|what| median(rates.iter().map(|rates: &[f64; 4]| rates[what]).collect()));
            let rates = rates.map(|rate| format!("{rate:.0}")).join(" | ");
            println!("| {} | {} | {rates} |", way.0, way.1);
        }
        drop(engines);
        node.join().map_err(|_| "the node panicked")?.map_err(Into::into)
    })
}

fn options(threads: usize) -> LoadOptions {
    LoadOptions {
        threads,
        kv: KvBudget::Blocks(256),
        max_model_tokens: Some(PROMPT_TOKENS as u32 + ANSWER_TOKENS),
        ..LoadOptions::default()
    }
}

/// Tokens per second of both prompts, of an answer alone behind its prompt, and of several with theirs.
fn once(engine: &mut Engine<CpuExecutor>) -> Result<[f64; 4], Box<dyn Error>> {
    let long = run(engine, &[of(0, PROMPT_TOKENS, 1)])?;
    let short = run(engine, &[of(0, STEP_TOKENS, 1)])?;
    let one = run(engine, &[of(0, SHORT_TOKENS, ANSWER_TOKENS)])?;
    let requests: Vec<Request> = (0..SEQUENCES).map(|id| of(id, SHORT_TOKENS, ANSWER_TOKENS)).collect();
    let many = run(engine, &requests)?;
    let answered = f64::from(ANSWER_TOKENS - 1);
    Ok([
        PROMPT_TOKENS as f64 / long.first_seconds,
        STEP_TOKENS as f64 / short.first_seconds,
        answered / one.decode_seconds,
        f64::from(ANSWER_TOKENS) * SEQUENCES as f64 / (many.first_seconds + many.decode_seconds),
    ])
}

/// A request for so many tokens behind a prompt of its own.
fn of(id: u64, prompt_tokens: usize, answer_tokens: u32) -> Request {
    let prompt = prose().into_iter().cycle().skip(7 * id as usize).take(prompt_tokens).collect();
    request(id, prompt, answer_tokens)
}
