//! `windlass-engine bench`: load on a server, what it felt like, and a chart of it.

mod chart;
mod load;
mod measure;
mod prompts;
mod report;

use crate::cli::BenchArgs;
use crate::client::Client;
use crate::failure::Failure;
use load::{Arrivals, Load};
use measure::Targets;
use prompts::Shape;
use report::Run;
use std::sync::Arc;

/// One run for each rate, or one at full load; a table, and files where asked for.
pub async fn run(args: &BenchArgs) -> Result<(), Failure> {
    check(args)?;
    let client = Client::new(&args.url, args.server.key_file.as_deref(), args.server.ca_file.as_deref())?;
    let model = match &args.server.model_name {
        Some(model) => model.clone(),
        None => client.first_model().await?,
    };
    let shape = Shape::of(args);
    let targets = Targets { ttft_ms: args.ttft_target_ms, tpot_ms: args.tpot_target_ms };
    println!(
        "{} of {model}: prompts of about {} tokens, answers of {}",
        args.url, shape.prompt_tokens, shape.answer_tokens
    );
    println!("good: first token within {} ms, others within {} ms each", targets.ttft_ms, targets.tpot_ms);
    let mut runs = Vec::new();
    for arrivals in arrivals(args) {
        let load = Load { arrivals, requests: args.requests, concurrency: args.concurrency, seed: args.seed };
        let measured = load::put(&client, Arc::from(model.as_str()), shape, &load).await;
        let run = Run::new(arrivals, measured, targets);
        println!("{}", run.table());
        runs.push(run);
    }
    if let Some(file) = &args.json {
        write(file, &serde_json::to_string_pretty(&runs).map_err(Failure::internal)?)?;
    }
    if let Some(file) = &args.svg {
        write(file, &chart::svg(&runs))?;
    }
    Ok(())
}

fn arrivals(args: &BenchArgs) -> Vec<Arrivals> {
    match args.rates.is_empty() {
        true => vec![Arrivals::Closed],
        false => args.rates.iter().map(|rate| Arrivals::Poisson { per_second: *rate }).collect(),
    }
}

fn check(args: &BenchArgs) -> Result<(), Failure> {
    if let Some(rate) = args.rates.iter().find(|rate| !(**rate > 0.0 && **rate <= 1e5)) {
        return Err(Failure::configuration(format!("--rates has {rate}; a rate is greater than 0 and at most 100000")));
    }
    if args.concurrency == 0 || args.requests == 0 {
        return Err(Failure::configuration("--concurrency and --requests must be at least 1"));
    }
    Ok(())
}

fn write(file: &std::path::Path, text: &str) -> Result<(), Failure> {
    std::fs::write(file, text)
        .map_err(|error| Failure::configuration(format!("cannot write {}: {error}", file.display())))?;
    println!("wrote {}", file.display());
    Ok(())
}
