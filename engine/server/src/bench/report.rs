//! A run in figures.

use super::load::Arrivals;
use super::measure::{Measured, Percentiles, Sample, Targets};
use serde::Serialize;
use std::collections::BTreeMap;
use std::fmt::Write;

/// One run.
#[derive(Clone, Debug, Serialize)]
pub struct Run {
    /// Requests a second that were sent; absent at full load.
    pub offered_per_second: Option<f64>,
    /// Requests that were answered.
    pub answered: usize,
    /// Requests that were not, by reason.
    pub failures: BTreeMap<String, usize>,
    /// Seconds from the first request to the last answer.
    pub seconds: f64,
    /// Answers a second.
    pub requests_per_second: f64,
    /// Answers a second that met the targets.
    pub goodput_per_second: f64,
    /// Prompt tokens a second.
    pub prompt_tokens_per_second: f64,
    /// Generated tokens a second.
    pub tokens_per_second: f64,
    /// Events with text, a second.
    pub events_per_second: f64,
    /// Milliseconds to the first token.
    pub ttft_ms: Percentiles,
    /// Mean milliseconds between tokens of a request.
    pub tpot_ms: Percentiles,
    /// Milliseconds to the last token.
    pub end_to_end_ms: Percentiles,
}

/// Reasons that are told apart; a run fails in few ways.
const MAX_REASONS: usize = 8;

impl Run {
    /// Reckons the figures.
    pub fn new(arrivals: Arrivals, measured: Measured, targets: Targets) -> Run {
        let Measured { samples, failures, elapsed } = measured;
        let seconds = elapsed.as_secs_f64();
        let rate = |count: f64| if seconds > 0.0 { count / seconds } else { 0.0 };
        let sum = |of: fn(&Sample) -> u32| samples.iter().map(|sample| f64::from(of(sample))).sum::<f64>();
        let percentiles = |of: fn(&Sample) -> f64| Percentiles::of(samples.iter().map(of).collect());
        Run {
            offered_per_second: match arrivals {
                Arrivals::Closed => None,
                Arrivals::Poisson { per_second } => Some(per_second),
            },
            answered: samples.len(),
            failures: count(failures),
            seconds,
            requests_per_second: rate(samples.len() as f64),
            goodput_per_second: rate(samples.iter().filter(|sample| sample.is_good(targets)).count() as f64),
            prompt_tokens_per_second: rate(sum(|sample| sample.prompt_tokens)),
            tokens_per_second: rate(sum(|sample| sample.tokens)),
            events_per_second: rate(sum(|sample| sample.events)),
            ttft_ms: percentiles(Sample::ttft_ms),
            tpot_ms: percentiles(Sample::tpot_ms),
            end_to_end_ms: percentiles(|sample| sample.last.as_secs_f64() * 1000.0),
        }
    }

    /// For a person.
    pub fn table(&self) -> String {
        let load = self.offered_per_second.map_or_else(|| "full load".to_owned(), |rate| format!("{rate} requests/s"));
        let failed: usize = self.failures.values().sum();
        let mut text = format!("\n{load}: {} answered, {failed} failed in {:.1} s\n", self.answered, self.seconds);
        // Writing to memory does not fail.
        let mut line = |name: &str, values: &str| {
            let _ = writeln!(text, "  {name:<18} {values}");
        };
        line("requests/s", &format!("{:.2}, of them good {:.2}", self.requests_per_second, self.goodput_per_second));
        line(
            "tokens/s",
            &format!("{:.0} generated, {:.0} of prompts", self.tokens_per_second, self.prompt_tokens_per_second),
        );
        line("events/s", &format!("{:.0}", self.events_per_second));
        line("", &format!("{:>10} {:>10} {:>10}", "p50", "p95", "p99"));
        for (name, of) in [("TTFT ms", self.ttft_ms), ("TPOT ms", self.tpot_ms), ("end to end ms", self.end_to_end_ms)]
        {
            line(name, &format!("{:>10.1} {:>10.1} {:>10.1}", of.p50, of.p95, of.p99));
        }
        self.failures.iter().for_each(|(reason, times)| line("failed", &format!("{times} times: {reason}")));
        text
    }
}

fn count(reasons: Vec<String>) -> BTreeMap<String, usize> {
    let mut counted = BTreeMap::new();
    for reason in reasons {
        let full = counted.len() >= MAX_REASONS && !counted.contains_key(&reason);
        *counted.entry(if full { "other reasons".to_owned() } else { reason }).or_default() += 1;
    }
    counted
}
