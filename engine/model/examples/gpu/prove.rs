//! The proof: its stages one after the other, each in its share of the time, and a report of them whatever happens.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use tempfile::TempDir;

use crate::log::Log;
use crate::model::Model;
use crate::report::Report;
use crate::stage::{Ending, Kind, Record, Stage};
use crate::{Outcome, modules, plan};

/// What is proven, with what, and where that is told.
#[derive(Debug, PartialEq)]
pub struct Proof {
    pub model: Model,
    /// For all stages together.
    pub time: Duration,
    /// Names of the stages that are wanted; none for all.
    pub only: Vec<String>,
    /// Where the programs are that stages run.
    pub programs: PathBuf,
    pub reports: PathBuf,
}

/// As long as a machine is lent for one command, but for what it takes to begin and to end.
pub const TIME: Duration = Duration::from_secs(570);

impl Proof {
    /// Reads the words behind `prove`.
    pub fn read(words: &[String]) -> Outcome<Proof> {
        let (mut model, mut time, mut only, mut folders) = (Model::Generated, TIME, Vec::new(), Vec::new());
        let mut words = words.iter();
        while let Some(word) = words.next() {
            let mut value = || words.next().ok_or(format!("{word} needs a value"));
            match word.as_str() {
                "--dry-run" => model = Model::Dry,
                "--model" => model = Model::File(value()?.into()),
                "--seconds" => time = seconds(value()?)?,
                "--only" => only = value()?.split(',').map(str::to_owned).collect(),
                option if option.starts_with('-') => return Err(format!("{option} is no option of prove").into()),
                folder => folders.push(PathBuf::from(folder)),
            }
        }
        let [programs, reports] = <[PathBuf; 2]>::try_from(folders).map_err(|_| "prove needs PROGRAMS and REPORTS")?;
        Ok(Proof { model, time, only, programs, reports })
    }

    /// Runs every stage that is wanted.
    pub fn run(&self) -> Outcome<Report> {
        let (stages, probe) = (self.wanted(plan::stages(&self.programs, &self.model)?)?, plan::probe(&self.model)?);
        let (scratch, report) = (tempfile::tempdir()?, Report::new(&self.model.to_string(), self.model.is_dry()));
        let log = Log::open(&self.reports)?;
        let image_cache = scratch.path().join("kernels");
        // Tests and measurements compute on a GPU where this is named.
        let gpu = if self.model.is_dry() { None } else { image_cache.to_str() };
        let gpu: Vec<(&str, &str)> = gpu.map(|cache| ("WINDLASS_GPU", cache)).into_iter().collect();
        run((&stages, &probe), self.time, report, (&self.reports, &log), |stage, left| {
            // What a stage that was stopped has left goes with it.
            let own = TempDir::new_in(scratch.path())?;
            let own = own.path().to_string_lossy();
            let variables = [&gpu[..], &[("TMPDIR", &own)]].concat();
            Ok(match stage.kind {
                Kind::Tests => modules::run(stage, left, &variables, &log),
                _ => stage.run(left, &variables, &log),
            })
        })
    }

    fn wanted(&self, stages: Vec<Stage>) -> Outcome<Vec<Stage>> {
        // `kernels` is all of its modules.
        let is_of = |stage: &Stage, name: &str| stage.name == name || stage.name.starts_with(&format!("{name}-"));
        let is_known = |name: &&String| stages.iter().any(|stage| is_of(stage, name));
        if let Some(unknown) = self.only.iter().find(|name| !is_known(name)) {
            let names: Vec<&str> = stages.iter().map(|stage| stage.name.as_str()).collect();
            return Err(format!("--only {unknown}: the stages are {}", names.join(", ")).into());
        }
        let is_wanted = |stage: &Stage| self.only.is_empty() || self.only.iter().any(|name| is_of(stage, name));
        Ok(stages.into_iter().filter(is_wanted).collect())
    }
}

/// Without what a stage of a whole model is tried again where it fails: what only Hopper has, and then all that others lack.
const FALLBACKS: [&str; 2] = ["warpgroups", "warpgroups,clusters,overlap"];

/// Runs stages while there is time; behind one that fails, what shows whether the device still works, and of a whole model the same
/// without a part of the chip. The report is written after each of them.
fn run(
    (stages, probe): (&[Stage], &Stage),
    time: Duration,
    mut report: Report,
    (reports, log): (&Path, &Log),
    run: impl Fn(&Stage, Duration) -> Outcome<Record>,
) -> Outcome<Report> {
    let started = Instant::now();
    let one = |stage: &Stage, report: &mut Report| -> Outcome<bool> {
        log.say(&format!("== {}", stage.name));
        let record = run(stage, time.saturating_sub(started.elapsed()))?;
        let passed = record.passed() || record.ending == Ending::NotBegun;
        report.add(record);
        report.write(reports)?;
        Ok(passed)
    };
    for stage in stages {
        if one(stage, &mut report)? || started.elapsed() >= time {
            continue;
        }
        one(&Stage { name: format!("probe behind {}", stage.name), ..probe.clone() }, &mut report)?;
        for features in FALLBACKS.iter().filter(|_| stage.kind == Kind::Model) {
            if one(&stage.without(features), &mut report)? {
                break;
            }
        }
    }
    Ok(report)
}

fn seconds(word: &str) -> Outcome<Duration> {
    let seconds: u64 = word.parse().map_err(|_| format!("--seconds {word}: it is a whole number of seconds"))?;
    Ok(Duration::from_secs(seconds))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    fn words(text: &str) -> Vec<String> {
        text.split(' ').map(str::to_owned).collect()
    }

    fn stage(name: &str, script: &str) -> Stage {
        Stage {
            name: name.into(),
            share: Duration::from_secs(60),
            silence: Duration::from_secs(60),
            program: "sh".into(),
            arguments: vec!["-c".into(), script.into()],
            variables: BTreeMap::new(),
            kind: Kind::Measurement,
        }
    }

    fn proven(stages: &[Stage], time: Duration, folder: &TempDir) -> Report {
        let (report, log) = (Report::new("none", false), Log::open(folder.path()).unwrap());
        let probe = stage("probe", "exit 0");
        run((stages, &probe), time, report, (folder.path(), &log), |stage, left| Ok(stage.run(left, &[], &log)))
            .unwrap()
    }

    fn written(folder: &TempDir) -> String {
        let files = std::fs::read_dir(folder.path()).unwrap().map(|file| file.unwrap().path());
        let found = files.filter(|path| path.extension().is_some_and(|kind| kind == "md")).collect::<Vec<_>>();
        std::fs::read_to_string(&found[0]).unwrap()
    }

    /// What the first one found is written before the second begins, which may end this program, too.
    #[test]
    fn a_stage_that_fails_hides_none_behind_it() {
        let folder = tempfile::tempdir().unwrap();
        let reads = format!("cat {}/*.md && echo 'test b ... ok'", folder.path().display());
        let stages = [stage("one", "echo 'test a ... FAILED'; exit 101"), stage("two", &reads)];
        assert!(!proven(&stages, TIME, &folder).passed());
        let text = written(&folder);
        assert!(text.contains("**Not passed: one.**") && text.contains("| two | 1 tests passed |"), "{text}");
    }

    /// And the device is looked at between.
    #[test]
    fn a_model_that_fails_is_tried_again_without_what_only_hopper_has() {
        let folder = tempfile::tempdir().unwrap();
        let script = "[ \"$WINDLASS_CUDA_WITHOUT\" = warpgroups ]";
        proven(&[Stage { kind: Kind::Model, ..stage("one", script) }, stage("two", "exit 0")], TIME, &folder);
        let text = written(&folder);
        let stages: Vec<_> =
            text.lines().filter_map(|line| line.strip_prefix("| ")?.split(" | ").next()).skip(1).take(4).collect();
        assert_eq!(stages, ["one", "probe behind one", "one without warpgroups", "two"], "{text}");
    }

    #[test]
    fn what_there_is_no_time_for_is_said() {
        let (folder, stages) = (tempfile::tempdir().unwrap(), [stage("one", "sleep 1000"), stage("two", "exit 0")]);
        assert!(!proven(&stages, Duration::from_secs(2), &folder).passed());
        let text = written(&folder);
        assert!(text.contains("| one | **stopped** after its"), "{text}");
        assert!(text.contains("| two | **not begun**: the time was up |"), "{text}");
    }

    #[test]
    fn words_are_read_and_wrong_ones_named() {
        let proof = Proof::read(&words("--seconds 60 --only kernels,model --model a.gguf programs reports")).unwrap();
        let only = vec!["kernels".to_owned(), "model".to_owned()];
        let (model, time) = (Model::File("a.gguf".into()), Duration::from_secs(60));
        assert_eq!(proof, Proof { model, time, only, programs: "programs".into(), reports: "reports".into() });
        for (text, named) in [
            ("programs", "PROGRAMS and REPORTS"),
            ("--seconds ten programs reports", "--seconds ten"),
            ("--fast programs reports", "--fast is no option"),
            ("programs reports --model", "--model needs a value"),
        ] {
            let error = Proof::read(&words(text)).unwrap_err().to_string();
            assert!(error.contains(named), "{error}");
        }
    }

    #[test]
    fn a_stage_that_is_not_there_is_refused_with_those_that_are() {
        let proof = Proof::read(&words("--dry-run --only kernel programs reports")).unwrap();
        let error = proof.run().map(drop).unwrap_err().to_string();
        assert!(error.contains("--only kernel: the stages are") && error.contains("kernels-norm, "), "{error}");
        assert!(!Path::new("reports").exists());
    }
}
