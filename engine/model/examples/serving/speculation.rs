//! With draft tokens and without.

use std::error::Error;

use super::{PLAIN, Run, median, prose, request, run};
use windlass_checkpoint::Checkpoint;
use windlass_engine_core::draft::{PromptLookup, Proposer, SuffixAutomaton};
use windlass_engine_core::engine::Engine;
use windlass_engine_core::request::{Request, Sampling, TokenId};
use windlass_engine_model::{CpuExecutor, KvBudget, LoadOptions, load};

const ROUNDS: usize = 3;
const TOKENS: u32 = 96;
const MAX_DRAFT_TOKENS: u32 = 8;

type Way = (&'static str, fn() -> Option<Box<dyn Proposer>>);
const WAYS: [Way; 3] = [
    ("none", || None),
    ("ngram", || Some(Box::new(PromptLookup::new(2, 4)))),
    ("suffix", || Some(Box::new(SuffixAutomaton::new(2)))),
];

/// Prints a row for each kind of text.
pub fn measure(file: &Checkpoint) -> Result<(), Box<dyn Error>> {
    let texts: [(&str, Vec<Request>); 5] = [
        ("repeats its prompt, greedy", repeating(1, Sampling::GREEDY)),
        ("repeats its prompt, temperature 0.7", repeating(1, Sampling { top_p: 0.9, ..Sampling::at_temperature(0.7) })),
        ("repeats its prompt, 8 sequences", repeating(8, Sampling::GREEDY)),
        ("prose, temperature 1", unlike(1)),
        ("prose, temperature 1, 8 sequences", unlike(8)),
    ];
    println!("{TOKENS} tokens an answer, up to {MAX_DRAFT_TOKENS} draft tokens a step, medians of {ROUNDS}\n");
    println!("| text | tok/s | ngram | suffix |\n|---|---|---|---|");
    for (name, requests) in &texts {
        let mut speeds = [const { Vec::new() }; WAYS.len()];
        let mut answers: Option<Vec<Vec<TokenId>>> = None;
        let engines: Result<Vec<_>, _> = WAYS.iter().map(|(_, proposer)| engine(file, proposer())).collect();
        let mut engines = engines?;
        for _ in 0..ROUNDS {
            for (engine, speeds) in engines.iter_mut().zip(&mut speeds) {
                let Run { answers: found, decode_seconds, .. } = run(engine, requests)?;
                let tokens: usize = found.iter().map(|answer| answer.len() - 1).sum();
                speeds.push(tokens as f64 / decode_seconds);
                if *answers.get_or_insert_with(|| found.clone()) != found {
                    return Err(format!("{name}: draft tokens changed an answer").into());
                }
            }
        }
        let [none, ngram, suffix] = speeds.map(median);
        println!("| {name} | {none:.1} | {:.2}× | {:.2}× |", ngram / none, suffix / none);
    }
    Ok(())
}

fn engine(file: &Checkpoint, proposer: Option<Box<dyn Proposer>>) -> Result<Engine<CpuExecutor>, Box<dyn Error>> {
    let options = LoadOptions { kv: KvBudget::Blocks(512), max_model_tokens: Some(2048), ..LoadOptions::default() };
    let engine = Engine::new(load(file, &options)?.executor, PLAIN);
    Ok(match proposer {
        Some(proposer) => engine.with_proposer(proposer, MAX_DRAFT_TOKENS),
        None => engine,
    })
}

/// A passage, and its beginning once more: the model goes on with the passage.
fn repeating(count: u64, sampling: Sampling) -> Vec<Request> {
    let prose = prose();
    let prompt = |id: u64| {
        let passage = &prose[id as usize * 60..][..220];
        [passage, passage, &passage[..40]].concat()
    };
    (0..count).map(|id| Request { sampling: sampling.clone(), ..request(id, prompt(id), TOKENS) }).collect()
}

/// Prose, gone on with at random.
fn unlike(count: u64) -> Vec<Request> {
    let prose = prose();
    let sampling = |seed| Sampling { seed, ..Sampling::RANDOM };
    let prompt = |id: u64| prose[id as usize * 60..][..300].to_vec();
    (0..count).map(|id| Request { sampling: sampling(id), ..request(id, prompt(id), TOKENS) }).collect()
}
