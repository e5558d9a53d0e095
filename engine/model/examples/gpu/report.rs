//! The report: what was found, as a table for people and as JSON.

use std::fmt::Write;
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};
use std::{fs, io};

use serde_json::{Value, json};
use windlass_engine_model::cuda::DeviceFacts;

/// Findings so far.
pub struct Report {
    device: String,
    driver: String,
    unix_seconds: u64,
    figures: Vec<(String, f64, String)>,
    checks: Vec<(String, bool)>,
}

impl Report {
    pub fn new(facts: &DeviceFacts) -> Report {
        let (major, minor) = facts.capability;
        let gibibytes = facts.memory_bytes >> 30;
        let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
        Report {
            device: format!("{}, sm_{major}{minor}, {} SMs, {gibibytes} GiB", facts.name, facts.multiprocessors),
            driver: facts.driver.clone(),
            unix_seconds: now,
            figures: Vec::new(),
            checks: Vec::new(),
        }
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
        let mut text = format!("# {}\n\nDriver {}.\n\n| What | Found |\n|---|---|\n", self.device, self.driver);
        for (name, value, unit) in &self.figures {
            // Writing to a string does not fail.
            let _ = writeln!(text, "| {name} | {value:.1} {unit} |");
        }
        for (name, passed) in &self.checks {
            let _ = writeln!(text, "| {name} | {} |", if *passed { "yes" } else { "**no**" });
        }
        text
    }

    /// Writes `gpu-SECONDS.md` and `gpu-SECONDS.json`.
    pub fn write(&self, folder: &Path) -> io::Result<()> {
        fs::create_dir_all(folder)?;
        let stem = folder.join(format!("gpu-{}", self.unix_seconds));
        fs::write(stem.with_extension("md"), self.markdown())?;
        fs::write(stem.with_extension("json"), format!("{:#}\n", self.json()))
    }

    fn json(&self) -> Value {
        let figure = |(name, value, unit): &(String, f64, String)| json!({"name": name, "value": value, "unit": unit});
        let check = |(name, passed): &(String, bool)| json!({"name": name, "passed": passed});
        json!({
            "device": self.device,
            "driver": self.driver,
            "unixSeconds": self.unix_seconds,
            "figures": self.figures.iter().map(figure).collect::<Vec<_>>(),
            "checks": self.checks.iter().map(check).collect::<Vec<_>>(),
        })
    }
}
