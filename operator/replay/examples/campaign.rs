//! Every policy on every variant of a trace with every cold start: the tables by which the autoscaler is judged, and what it
//! did.
//!
//! `gzip -dc azure_code_2023.csv.gz | cargo run --release -p windlass-operator-replay --example campaign`
//! With arguments, only variants whose name contains one of them.

use std::error::Error;
use std::io::Write;

use windlass_operator_replay::campaign::{CASES, COLD_STARTS, Outcome};
use windlass_operator_replay::{report, trace};

fn main() -> Result<(), Box<dyn Error>> {
    let original = trace::read(std::io::stdin().lock())?;
    let only: Vec<String> = std::env::args().skip(1).collect();
    let chosen = CASES.iter().filter(|case| only.is_empty() || only.iter().any(|part| case.name.contains(part)));
    let mut left = 0;
    for case in chosen {
        let (name, trace) = (case.name, case.trace(&original));
        for cold_start in COLD_STARTS {
            let outcome = Outcome::of(&case.scenario(cold_start), &trace)?;
            let all = outcome.adaptive.iter().chain([&outcome.hindsight]);
            let named: Vec<_> = all.map(|(name, score)| (name.to_string(), score)).collect();
            println!("{name}: {} requests, cold start {cold_start} s", trace.len());
            print!("{}", report::table(named.iter().map(|(name, score)| (name.as_str(), *score))));
            let standing = outcome.standing();
            left += usize::from(!standing.holds());
            println!("dominated by {:?}; does not dominate {:?}", standing.dominated_by, standing.not_dominated);
            if let Some((name, score)) = outcome.adaptive.first() {
                println!("{name}\n{}", report::plot(&trace, score));
            }
            std::io::stdout().flush()?;
        }
    }
    println!("{left} scenarios in which a peer is not beaten");
    Ok(())
}
