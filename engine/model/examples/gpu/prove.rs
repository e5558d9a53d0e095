//! The proof: its stages one after the other, each in its share of the time, and a report of them whatever happens.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use tempfile::TempDir;

use crate::Outcome;
use crate::model::Model;
use crate::plan;
use crate::report::Report;
use crate::stage::{Record, Stage};

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
        let stages = self.wanted(plan::stages(&self.programs, &self.model)?)?;
        let (scratch, report) = (tempfile::tempdir()?, Report::new(&self.model.to_string(), self.model.is_dry()));
        let image_cache = scratch.path().join("kernels");
        // Tests and measurements compute on a GPU where this is named.
        let gpu = if self.model.is_dry() { None } else { image_cache.to_str() };
        let gpu: Vec<(&str, &str)> = gpu.map(|cache| ("WINDLASS_GPU", cache)).into_iter().collect();
        run(&stages, self.time, report, &self.reports, |stage, left| {
            // What a stage that was stopped has left goes with it.
            let own = TempDir::new_in(scratch.path())?;
            let own = own.path().to_string_lossy();
            Ok(stage.run(left, &[&gpu[..], &[("TMPDIR", &own)]].concat()))
        })
    }

    fn wanted(&self, stages: Vec<Stage>) -> Outcome<Vec<Stage>> {
        let is_known = |name: &&String| stages.iter().any(|stage| stage.name == **name);
        if let Some(unknown) = self.only.iter().find(|name| !is_known(name)) {
            let names: Vec<&str> = stages.iter().map(|stage| stage.name.as_str()).collect();
            return Err(format!("--only {unknown}: the stages are {}", names.join(", ")).into());
        }
        let is_wanted = |stage: &Stage| self.only.is_empty() || self.only.contains(&stage.name);
        Ok(stages.into_iter().filter(is_wanted).collect())
    }
}

/// Runs stages while there is time. The report is written after each of them.
fn run(
    stages: &[Stage],
    time: Duration,
    mut report: Report,
    reports: &Path,
    run: impl Fn(&Stage, Duration) -> Outcome<Record>,
) -> Outcome<Report> {
    let started = Instant::now();
    for stage in stages {
        println!("== {}", stage.name);
        report.add(run(stage, time.saturating_sub(started.elapsed()))?);
        report.write(reports)?;
    }
    Ok(report)
}

fn seconds(word: &str) -> Outcome<Duration> {
    let seconds: u64 = word.parse().map_err(|_| format!("--seconds {word}: it is a whole number of seconds"))?;
    Ok(Duration::from_secs(seconds))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(text: &str) -> Vec<String> {
        text.split(' ').map(str::to_owned).collect()
    }

    fn stage(name: &str, script: &str) -> Stage {
        Stage {
            name: name.into(),
            share: Duration::from_secs(60),
            program: "sh".into(),
            arguments: vec!["-c".into(), script.into()],
            may_be_absent: false,
        }
    }

    fn proven(stages: &[Stage], time: Duration, folder: &TempDir) -> Report {
        let report = Report::new("none", false);
        run(stages, time, report, folder.path(), |stage, left| Ok(stage.run(left, &[]))).unwrap()
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
        assert!(error.contains("--only kernel: the stages are") && error.contains("kernels, "), "{error}");
        assert!(!Path::new("reports").exists());
    }
}
