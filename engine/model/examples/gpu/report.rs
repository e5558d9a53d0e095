//! The report: what came of the stages, as tables for people and as JSON.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::Path;
use std::{fs, io};

use jiff::Timestamp;
use serde_json::{Value, json};

use crate::finding::{Ceiling, Figure, Finding, short};
use crate::stage::{Ending, Failure, Record, Tests};

/// What is there without a device that says more of itself.
const UNKNOWN: (&str, &str) = ("A GPU that could not be opened", "No stage got as far as to say what it is.");
const DRY_RUN: (&str, &str) = (
    "Dry run: no GPU",
    "Kernels ran from their sources on the CPU: the figures are the shim's and say nothing of a GPU.",
);

/// The commit that this was built from, where the build was told (`tests/gpu/run` tells it).
const COMMIT: &str = match option_env!("WINDLASS_COMMIT") {
    Some(commit) => commit,
    None => "unknown",
};
const VERSION: &str = env!("CARGO_PKG_VERSION");

/// What was found so far.
pub struct Report {
    is_dry_run: bool,
    model: String,
    /// When it was begun.
    began: Timestamp,
    records: Vec<Record>,
}

impl Report {
    pub fn new(model: &str, is_dry_run: bool) -> Report {
        Report { is_dry_run, model: model.to_owned(), began: Timestamp::now(), records: Vec::new() }
    }

    pub fn add(&mut self, record: Record) {
        self.records.push(record);
    }

    /// Whether every stage passed that could be run.
    pub fn passed(&self) -> bool {
        self.records.iter().all(Record::passed)
    }

    /// Writes `gpu-DATE.md` and `gpu-DATE.json`, of a dry run `dry-run-DATE`, such as `gpu-2026-01-31T235959Z.md`.
    pub fn write(&self, folder: &Path) -> io::Result<()> {
        fs::create_dir_all(folder)?;
        let kind = if self.is_dry_run { "dry-run" } else { "gpu" };
        let stem = folder.join(format!("{kind}-{}", self.began.strftime("%Y-%m-%dT%H%M%SZ")));
        fs::write(stem.with_extension("md"), self.markdown())?;
        fs::write(stem.with_extension("json"), format!("{:#}\n", self.json()))
    }

    pub fn markdown(&self) -> String {
        let ((title, about), verdict) = (self.device(), self.verdict());
        let (missed, began) = (self.missed().count(), self.began());
        let mut text = format!("# {title}\n\n{about} Model: {}. {verdict}", self.model);
        // Writing to a string does not fail.
        let _ = write!(text, " Figures that miss a number which is wanted of them: {missed}.\n\n");
        let _ = writeln!(text, "{began}, Windlass {VERSION}, commit {COMMIT}.\n");
        text += "| Stage | What came of it | Seconds |\n|---|---|---|\n";
        for record in &self.records {
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

    /// In UTC, by the second.
    fn began(&self) -> String {
        self.began.strftime("%Y-%m-%dT%H:%M:%SZ").to_string()
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

    /// Figures that miss what is wanted of them, each with its stage and the side on which it is.
    fn missed(&self) -> impl Iterator<Item = (&str, &Figure, &'static str)> {
        self.findings().filter_map(|(stage, finding)| match finding {
            Finding::Figure(figure) => self.misses(figure).map(|side| (stage, figure, side)),
            _ => None,
        })
    }

    fn misses(&self, figure: &Figure) -> Option<&'static str> {
        figure.bound?.missed(figure.value, self.share(figure))
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
                let missed = self.misses(figure).map(|side| format!(": **{side}**")).unwrap_or_default();
                let wanted = figure.wanted.clone().unwrap_or_default() + &missed;
                Some([figure.name.clone(), found, share, wanted])
            }
        }
    }

    fn json(&self) -> Value {
        let (device, about) = self.device();
        let ceiling =
            |(of, (rate, by)): (Ceiling, (f64, &str))| json!({"of": of, "rate": rate, "unit": of.unit(), "by": by});
        let missed =
            |(stage, figure, side): (&str, &Figure, &str)| json!({"stage": stage, "name": figure.name, "side": side});
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
            "date": self.began(),
            "version": VERSION,
            "commit": COMMIT,
            "passed": self.passed(),
            "ceilings": self.ceilings().into_iter().map(ceiling).collect::<Vec<_>>(),
            "shares": self.findings().filter_map(share).collect::<Vec<_>>(),
            "missed": self.missed().map(missed).collect::<Vec<_>>(),
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
        Ending::Silent(seconds) => format!("**stopped**: it said nothing for {seconds} s"),
        Ending::NotBegun => "**not begun**: the time was up".to_owned(),
        Ending::Skipped(why) => format!("skipped: {why}"),
    };
    let Tests { passed, failed, unfinished } = &record.tests;
    let mut words = Vec::new();
    if passed.len() + failed.len() > 0 {
        words.push(format!("{} tests passed", passed.len()));
    }
    if !failed.is_empty() {
        let failed_tests: Vec<_> = failed.iter().map(said).collect();
        words.push(format!("**{} failed**: {}", failed.len(), failed_tests.join(", ")));
    }
    words.extend(unfinished.as_ref().map(|name| format!("{name} was running")));
    words.extend(Some(ending).filter(|ending| !ending.is_empty()));
    if words.is_empty() { "done".to_owned() } else { words.join("; ") }
}

/// A failed test, with why it failed as far as it said so.
fn said(Failure { name, why }: &Failure) -> String {
    if why.is_empty() { name.clone() } else { format!("{name} ({why})") }
}

/// Text of a table's cell.
fn cell(text: &str) -> String {
    text.replace('|', "\\|")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::finding::Bound;

    fn record(name: &str, ending: Ending, findings: Vec<Finding>) -> Record {
        Record { name: name.into(), seconds: 1.0, ending, tests: Tests::default(), findings }
    }

    fn report(records: Vec<Record>) -> Report {
        Report { is_dry_run: false, model: "a model".into(), began: Timestamp::UNIX_EPOCH, records }
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
        let failed = vec![Failure { name: "a::b".into(), why: "left is 1".into() }];
        let tests = Tests { passed: vec!["d".into(); 4], failed, unfinished: Some("c".into()) };
        let report = report(vec![Record { tests, ..record("kernels", Ending::OutOfTime(9), Vec::new()) }]);
        let expected = "| kernels | 4 tests passed; **1 failed**: a::b (left is 1); c was running; **stopped** after its 9 s | 1 |";
        assert!(report.markdown().contains(expected), "{}", report.markdown());
    }

    /// Whichever stage measured it, before or behind.
    #[test]
    fn shares_are_of_the_most_that_anything_reached() {
        let ceiling = |rate, by: &str| Finding::Ceiling { of: Ceiling::Bf16, rate, by: by.into() };
        let figure = Figure::rate("prefill", Ceiling::Bf16, 4e14).wanted("half", Bound::LeastShare(50.0));
        let report = report(vec![
            record("own", Ending::Well, vec![ceiling(640.0, "ours"), figure.into()]),
            record("peer", Ending::Well, vec![ceiling(800.0, "a library"), ceiling(700.0, "another")]),
        ]);
        let text = report.markdown();
        assert!(text.contains("| products in bf16 | 800 TFLOP/s | a library |"), "{text}");
        assert!(text.contains("| own | prefill | 400 TFLOP/s | 50.0 % of products in bf16 | half |"), "{text}");
        assert_eq!(report.json()["shares"][0]["percent"], 50.0);
    }

    /// Where its ceiling is known, and where there is a number at all.
    #[test]
    fn a_figure_that_misses_what_is_wanted_of_it_is_marked() {
        let ceiling = Finding::Ceiling { of: Ceiling::Bf16, rate: 800.0, by: "ours".into() };
        let share = |of| Figure::rate("share", of, 4e14).wanted("51 %", Bound::LeastShare(51.0));
        let value = |value: f64| Figure::new("value", value, "s");
        for (figure, expected, side) in [
            (share(Ceiling::Bf16), "| 51 %: **below** |", Some("below")),
            (share(Ceiling::Fp8), "| 51 % |", None),
            (value(2.0).wanted("much", Bound::Least(2.5)), "| much: **below** |", Some("below")),
            (value(2.5).wanted("much", Bound::Least(2.5)), "| much |", None),
            (value(5.5).wanted("little", Bound::Most(5.0)), "| little: **above** |", Some("above")),
            (value(5.0).wanted("little", Bound::Most(5.0)), "| little |", None),
            (value(9.0).wanted("about 1 s", None), "| about 1 s |", None),
        ] {
            let name = figure.name.clone();
            let report = report(vec![record("own", Ending::Well, vec![ceiling.clone(), figure.into()])]);
            let text = report.markdown();
            assert!(text.contains(expected), "{text}");
            assert!(text.contains(&format!("wanted of them: {}.", side.iter().count())), "{text}");
            let missed: Vec<_> = side.iter().map(|side| json!({"stage": "own", "name": name, "side": side})).collect();
            assert_eq!(report.json()["missed"], json!(missed));
            assert!(report.passed(), "it is no failure");
        }
    }

    #[test]
    fn a_report_says_when_it_was_begun_and_what_was_built() {
        let report = report(Vec::new());
        let (text, json) = (report.markdown(), report.json());
        assert!(text.contains(&format!("1970-01-01T00:00:00Z, Windlass {VERSION}, commit {COMMIT}.")), "{text}");
        assert_eq!([&json["date"], &json["version"], &json["commit"]], ["1970-01-01T00:00:00Z", VERSION, COMMIT]);
    }

    #[test]
    fn a_report_without_a_device_is_written_too() {
        let folder = tempfile::tempdir().unwrap();
        let report = report(vec![record("one", Ending::Failed("no driver | none".into()), Vec::new())]);
        report.write(folder.path()).unwrap();
        let text = fs::read_to_string(folder.path().join("gpu-1970-01-01T000000Z.md")).unwrap();
        assert!(text.starts_with("# A GPU that could not be opened") && text.contains("no driver \\| none"), "{text}");
        let json: Value =
            serde_json::from_slice(&fs::read(folder.path().join("gpu-1970-01-01T000000Z.json")).unwrap()).unwrap();
        assert_eq!(json["stages"][0]["ending"], json!({"how": "failed", "why": "no driver | none"}));
    }
}
