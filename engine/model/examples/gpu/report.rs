//! The report: what was found, as a table for people and as JSON.

use std::fmt::Write;
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};
use std::{fs, io};

use serde_json::{Value, json};
use windlass_engine_model::cuda::DeviceFacts;

/// Findings so far.
pub struct Report {
    /// Where they were found, for people.
    title: String,
    /// How much they say.
    preface: String,
    is_dry_run: bool,
    model: String,
    /// What was tested before, as `kernels: 90 passed`.
    tests: Vec<String>,
    unix_seconds: u64,
    figures: Vec<(String, f64, String)>,
    checks: Vec<(String, bool)>,
}

impl Report {
    pub fn of_gpu(facts: &DeviceFacts, model: &str, tests: &[String]) -> Report {
        let (major, minor) = facts.capability;
        let gibibytes = facts.memory_bytes >> 30;
        let title = format!("{}, sm_{major}{minor}, {} SMs, {gibibytes} GiB", facts.name, facts.multiprocessors);
        Report::new(title, format!("Driver {}.", facts.driver), false, model, tests)
    }

    pub fn of_dry_run(model: &str, tests: &[String]) -> Report {
        let preface = "Kernels ran from their sources on the CPU: the figures are the shim's and say nothing of a GPU.";
        Report::new("Dry run: no GPU".to_owned(), preface.to_owned(), true, model, tests)
    }

    fn new(title: String, preface: String, is_dry_run: bool, model: &str, tests: &[String]) -> Report {
        let unix_seconds = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
        let (model, tests, figures, checks) = (model.to_owned(), tests.to_vec(), Vec::new(), Vec::new());
        Report { title, preface, is_dry_run, model, tests, unix_seconds, figures, checks }
    }

    pub fn figure(&mut self, name: &str, value: f64, unit: &str) {
        println!("{name}: {value:.1} {unit}");
        self.figures.push((name.to_owned(), value, unit.to_owned()));
    }

    pub fn check(&mut self, name: &str, passed: bool) {
        println!("{name}: {}", if passed { "yes" } else { "NO" });
        self.checks.push((name.to_owned(), passed));
    }

    pub fn passed(&self) -> bool {
        self.checks.iter().all(|(_, passed)| *passed)
    }

    pub fn markdown(&self) -> String {
        let Report { title, preface, model, .. } = self;
        let mut text = format!("# {title}\n\n{preface} Model: {model}.\n\n| What | Found |\n|---|---|\n");
        for tests in &self.tests {
            // Writing to a string does not fail.
            let _ = writeln!(text, "| tests | {tests} |");
        }
        for (name, value, unit) in &self.figures {
            let _ = writeln!(text, "| {name} | {value:.1} {unit} |");
        }
        for (name, passed) in &self.checks {
            let _ = writeln!(text, "| {name} | {} |", if *passed { "yes" } else { "**no**" });
        }
        text
    }

    /// Writes `gpu-SECONDS.md` and `gpu-SECONDS.json`, of a dry run `dry-run-SECONDS`.
    pub fn write(&self, folder: &Path) -> io::Result<()> {
        fs::create_dir_all(folder)?;
        let kind = if self.is_dry_run { "dry-run" } else { "gpu" };
        let stem = folder.join(format!("{kind}-{}", self.unix_seconds));
        fs::write(stem.with_extension("md"), self.markdown())?;
        fs::write(stem.with_extension("json"), format!("{:#}\n", self.json()))
    }

    fn json(&self) -> Value {
        let figure = |(name, value, unit): &(String, f64, String)| json!({"name": name, "value": value, "unit": unit});
        let check = |(name, passed): &(String, bool)| json!({"name": name, "passed": passed});
        json!({
            "device": self.title,
            "about": self.preface,
            "isDryRun": self.is_dry_run,
            "model": self.model,
            "tests": self.tests,
            "unixSeconds": self.unix_seconds,
            "figures": self.figures.iter().map(figure).collect::<Vec<_>>(),
            "checks": self.checks.iter().map(check).collect::<Vec<_>>(),
        })
    }
}
