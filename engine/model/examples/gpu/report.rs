//! The report: what came of the stages, as tables for people and as JSON.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};
use std::{fs, io};

use serde_json::{Value, json};

use crate::finding::{Ceiling, Figure, Finding, short};
use crate::stage::{Ending, Record, Tests};

/// What is there without a device that says more of itself.
const UNKNOWN: (&str, &str) = ("A GPU that could not be opened", "No stage got as far as to say what it is.");
const DRY_RUN: (&str, &str) = (
    "Dry run: no GPU",
    "Kernels ran from their sources on the CPU: the figures are the shim's and say nothing of a GPU.",
);

/// What was found so far.
pub struct Report {
    is_dry_run: bool,
    model: String,
    unix_seconds: u64,
    records: Vec<Record>,
}

impl Report {
    pub fn new(model: &str, is_dry_run: bool) -> Report {
        let unix_seconds = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
        Report { is_dry_run, model: model.to_owned(), unix_seconds, records: Vec::new() }
    }

    pub fn add(&mut self, record: Record) {
        self.records.push(record);
    }

    /// Whether every stage passed that could be run.
    pub fn passed(&self) -> bool {
        self.records.iter().all(Record::passed)
    }

    /// Writes `gpu-SECONDS.md` and `gpu-SECONDS.json`, of a dry run `dry-run-SECONDS`.
    pub fn write(&self, folder: &Path) -> io::Result<()> {
        fs::create_dir_all(folder)?;
        let kind = if self.is_dry_run { "dry-run" } else { "gpu" };
        let stem = folder.join(format!("{kind}-{}", self.unix_seconds));
        fs::write(stem.with_extension("md"), self.markdown())?;
        fs::write(stem.with_extension("json"), format!("{:#}\n", self.json()))
    }

    pub fn markdown(&self) -> String {
        let ((title, about), verdict) = (self.device(), self.verdict());
        let mut text = format!("# {title}\n\n{about} Model: {}. {verdict}\n\n", self.model);
        text += "| Stage | What came of it | Seconds |\n|---|---|---|\n";
        for record in &self.records {
            // Writing to a string does not fail.
            let _ = writeln!(text, "| {} | {} | {:.0} |", record.name, cell(&outcome(record)), record.seconds);
        }
        text += "\n| Ceiling | Reached | By |\n|---|---|---|\n";
        for (of, (rate, by)) in self.ceilings() {
            let _ = writeln!(text, "| {} | {} {} | {} |", of.name(), short(rate), of.unit(), cell(by));
        }
        text += "\n| Stage | What | Found | Of its ceiling | Wanted |\n|---|---|---|---|---|\n";
        for (stage, finding) in self.findings() {
            if let Some([what, found, share, wanted]) = self.row(finding) {
                let _ = writeln!(text, "| {stage} | {what} | {found} | {share} | {wanted} |");
            }
        }
        text
    }

    fn verdict(&self) -> String {
        let failed: Vec<&str> =
            self.records.iter().filter(|record| !record.passed()).map(|record| record.name.as_str()).collect();
        match failed.is_empty() {
            true => "Every stage passed that could be run.".to_owned(),
            false => format!("**Not passed: {}.**", failed.join(", ")),
        }
    }

    /// What it is, and what more there is to say of it.
    fn device(&self) -> (&str, &str) {
        let said = self.findings().find_map(|(_, finding)| match finding {
            Finding::Device { name, about } => Some((name.as_str(), about.as_str())),
            _ => None,
        });
        if self.is_dry_run { DRY_RUN } else { said.unwrap_or(UNKNOWN) }
    }

    fn findings(&self) -> impl Iterator<Item = (&str, &Finding)> {
        self.records.iter().flat_map(|record| record.findings.iter().map(|finding| (record.name.as_str(), finding)))
    }

    /// The most that anything reached of each, and by what.
    fn ceilings(&self) -> BTreeMap<Ceiling, (f64, &str)> {
        let mut highest = BTreeMap::new();
        for (_, finding) in self.findings() {
            let Finding::Ceiling { of, rate, by } = finding else { continue };
            let found = highest.entry(*of).or_insert((*rate, by.as_str()));
            if *rate > found.0 {
                *found = (*rate, by);
            }
        }
        highest
    }

    /// Percent of the ceiling, where that was measured.
    fn share(&self, figure: &Figure) -> Option<f64> {
        let (of, rate) = figure.reaches?;
        Some(100.0 * rate / self.ceilings().get(&of)?.0)
    }

    /// What the table says of it: its name, value, share, and what is wanted. None of what has tables of its own.
    fn row(&self, finding: &Finding) -> Option<[String; 4]> {
        match finding {
            Finding::Device { .. } | Finding::Ceiling { .. } => None,
            Finding::Absent { name, why } => {
                Some([name.clone(), format!("not here: {why}"), String::new(), String::new()])
            }
            Finding::Check { name, passed } => {
                let found = if *passed { "yes" } else { "**no**" };
                Some([name.clone(), found.to_owned(), String::new(), "yes".to_owned()])
            }
            Finding::Figure(figure) => {
                let of = |(of, _): (Ceiling, f64)| of.name();
                let of = figure.reaches.map_or("", of);
                let share = self.share(figure).map(|share| format!("{share:.1} % of {of}")).unwrap_or_default();
                let found = format!("{} {}", short(figure.value), figure.unit);
                Some([figure.name.clone(), found, share, figure.wanted.clone().unwrap_or_default()])
            }
        }
    }

    fn json(&self) -> Value {
        let (device, about) = self.device();
        let ceiling =
            |(of, (rate, by)): (Ceiling, (f64, &str))| json!({"of": of, "rate": rate, "unit": of.unit(), "by": by});
        let share = |(stage, finding): (&str, &Finding)| match finding {
            Finding::Figure(figure) => {
                self.share(figure).map(|share| json!({"stage": stage, "name": figure.name, "percent": share}))
            }
            _ => None,
        };
        json!({
            "device": device,
            "about": about,
            "isDryRun": self.is_dry_run,
            "model": self.model,
            "unixSeconds": self.unix_seconds,
            "passed": self.passed(),
            "ceilings": self.ceilings().into_iter().map(ceiling).collect::<Vec<_>>(),
            "shares": self.findings().filter_map(share).collect::<Vec<_>>(),
            "stages": self.records,
        })
    }
}

/// What came of a stage, in words.
fn outcome(record: &Record) -> String {
    let ending = match &record.ending {
        Ending::Well => String::new(),
        Ending::Failed(why) => format!("**failed**: {why}"),
        Ending::OutOfTime(seconds) => format!("**stopped** after its {seconds} s"),
        Ending::NotBegun => "**not begun**: the time was up".to_owned(),
        Ending::Skipped(why) => format!("skipped: {why}"),
    };
    let Tests { passed, failed, unfinished } = &record.tests;
    let mut words = Vec::new();
    if *passed + failed.len() > 0 {
        words.push(format!("{passed} tests passed"));
    }
    if !failed.is_empty() {
        words.push(format!("**{} failed**: {}", failed.len(), failed.join(", ")));
    }
    words.extend(unfinished.as_ref().map(|name| format!("{name} was running")));
    words.extend(Some(ending).filter(|ending| !ending.is_empty()));
    if words.is_empty() { "done".to_owned() } else { words.join("; ") }
}

/// Text of a table's cell.
fn cell(text: &str) -> String {
    text.replace('|', "\\|")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(name: &str, ending: Ending, findings: Vec<Finding>) -> Record {
        Record { name: name.into(), seconds: 1.0, ending, tests: Tests::default(), findings }
    }

    fn report(records: Vec<Record>) -> Report {
        Report { is_dry_run: false, model: "a model".into(), unix_seconds: 1, records }
    }

    #[test]
    fn a_report_passes_if_every_stage_did_that_could_be_run() {
        let well = || record("one", Ending::Well, Vec::new());
        for (ending, passed) in [
            (Ending::Well, true),
            (Ending::Skipped("no compiler".into()), true),
            (Ending::Failed("exit".into()), false),
            (Ending::OutOfTime(3), false),
            (Ending::NotBegun, false),
        ] {
            let report = report(vec![well(), record("two", ending.clone(), Vec::new()), well()]);
            assert_eq!(report.passed(), passed, "{ending:?}");
            assert_eq!(report.markdown().contains("**Not passed: two.**"), !passed, "{ending:?}");
            assert_eq!(report.json()["passed"], passed);
        }
    }

    #[test]
    fn failed_tests_are_named() {
        let tests = Tests { passed: 4, failed: vec!["a::b".into()], unfinished: Some("c".into()) };
        let report = report(vec![Record { tests, ..record("kernels", Ending::OutOfTime(9), Vec::new()) }]);
        let expected = "| kernels | 4 tests passed; **1 failed**: a::b; c was running; **stopped** after its 9 s | 1 |";
        assert!(report.markdown().contains(expected), "{}", report.markdown());
    }

    /// Whichever stage measured it, before or behind.
    #[test]
    fn shares_are_of_the_most_that_anything_reached() {
        let ceiling = |rate, by: &str| Finding::Ceiling { of: Ceiling::Bf16, rate, by: by.into() };
        let figure = Figure::rate("prefill", Ceiling::Bf16, 4e14).wanted("half");
        let report = report(vec![
            record("own", Ending::Well, vec![ceiling(640.0, "ours"), figure.into()]),
            record("peer", Ending::Well, vec![ceiling(800.0, "a library"), ceiling(700.0, "another")]),
        ]);
        let text = report.markdown();
        assert!(text.contains("| products in bf16 | 800 TFLOP/s | a library |"), "{text}");
        assert!(text.contains("| own | prefill | 400 TFLOP/s | 50.0 % of products in bf16 | half |"), "{text}");
        assert_eq!(report.json()["shares"][0]["percent"], 50.0);
    }

    #[test]
    fn a_report_without_a_device_is_written_too() {
        let folder = tempfile::tempdir().unwrap();
        let report = report(vec![record("one", Ending::Failed("no driver | none".into()), Vec::new())]);
        report.write(folder.path()).unwrap();
        let text = fs::read_to_string(folder.path().join("gpu-1.md")).unwrap();
        assert!(text.starts_with("# A GPU that could not be opened") && text.contains("no driver \\| none"), "{text}");
        let json: Value = serde_json::from_slice(&fs::read(folder.path().join("gpu-1.json")).unwrap()).unwrap();
        assert_eq!(json["stages"][0]["ending"], json!({"how": "failed", "why": "no driver | none"}));
    }
}
