//! A stage of the proof: a program that runs for its share of the time at most, and what came of it.

use std::io::{self, BufRead, BufReader, PipeReader};
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus};
use std::time::{Duration, Instant};

use serde::Serialize;

use crate::finding::Finding;

/// Less than this is no time.
const LEAST: Duration = Duration::from_secs(1);
/// What a line begins with that says why there was nothing to do.
const SKIPPED: &str = "SKIPPED: ";
/// `timeout`'s exit code where there is no such program.
const NO_PROGRAM: i32 = 127;

/// A program to run.
#[derive(Clone, Debug)]
pub struct Stage {
    pub name: String,
    /// The most that it may take.
    pub share: Duration,
    pub program: PathBuf,
    pub arguments: Vec<String>,
    /// Whether it is no failure that the program is not here.
    pub may_be_absent: bool,
}

/// What came of a stage.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Record {
    pub name: String,
    pub seconds: f64,
    pub ending: Ending,
    pub tests: Tests,
    pub findings: Vec<Finding>,
}

/// How a stage ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "how", content = "why", rename_all = "camelCase")]
pub enum Ending {
    Well,
    /// With what it said last.
    Failed(String),
    /// After so many seconds.
    OutOfTime(u64),
    /// Before it began: there was no time left.
    NotBegun,
    /// What it needs is not here.
    Skipped(String),
}

/// Tests that a program ran.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Tests {
    pub passed: usize,
    pub failed: Vec<String>,
    /// Began, and did not end.
    pub unfinished: Option<String>,
}

impl Record {
    fn new(name: &str, ending: Ending) -> Record {
        Record { name: name.to_owned(), seconds: 0.0, ending, tests: Tests::default(), findings: Vec::new() }
    }

    /// Whether nothing of it speaks against the engine. What a machine lacks does not; what there was no time for does.
    pub fn passed(&self) -> bool {
        let checked = |finding: &Finding| !matches!(finding, Finding::Check { passed: false, .. });
        let ended = matches!(self.ending, Ending::Well | Ending::Skipped(_));
        ended && self.tests.failed.is_empty() && self.findings.iter().all(checked)
    }
}

impl Tests {
    /// Takes in a line of a test program. One that runs none was asked for tests that are called otherwise by now.
    fn read(&mut self, line: &str) {
        if line == "running 0 tests" {
            self.failed.push("there is none of these names".to_owned());
        }
        let Some((name, result)) = line.strip_prefix("test ").and_then(|rest| rest.split_once(" ... ")) else { return };
        self.unfinished = None;
        match result.trim() {
            "ok" => self.passed += 1,
            "FAILED" => self.failed.push(name.to_owned()),
            "" => self.unfinished = Some(name.to_owned()),
            _ => {}
        }
    }
}

impl Stage {
    /// Runs the program while there is time, with `variables` of the environment.
    pub fn run(&self, left: Duration, variables: &[(&str, &str)]) -> Record {
        let share = self.share.min(left);
        if share < LEAST {
            return Record::new(&self.name, Ending::NotBegun);
        }
        let started = Instant::now();
        let mut record = match self.spawn(share, variables) {
            Ok((child, output)) => self.follow(child, output),
            Err(error) => Record::new(&self.name, Ending::Failed(error.to_string())),
        };
        // Whatever it was killed by, and whatever it made of that.
        if matches!(record.ending, Ending::Failed(_)) && started.elapsed() >= share {
            record.ending = Ending::OutOfTime(share.as_secs());
        }
        Record { seconds: started.elapsed().as_secs_f64(), ..record }
    }

    /// Begins, with the end of the pipe into which the program and all that it starts write.
    fn spawn(&self, share: Duration, variables: &[(&str, &str)]) -> io::Result<(Child, PipeReader)> {
        let (output, writer) = io::pipe()?;
        let mut command = Command::new("timeout");
        command.args(["--kill-after=5", &share.as_secs_f64().to_string()]).arg(&self.program).args(&self.arguments);
        command.envs(variables.iter().copied()).stdout(writer.try_clone()?).stderr(writer);
        Ok((command.spawn()?, output))
    }

    /// Reads what the program says, to its end.
    fn follow(&self, mut child: Child, output: PipeReader) -> Record {
        let (mut record, mut last, mut why) = (Record::new(&self.name, Ending::Well), String::new(), None);
        for line in BufReader::new(output).split(b'\n').map_while(Result::ok) {
            let line = String::from_utf8_lossy(&line);
            let finding = Finding::read(&line);
            println!("{}", finding.as_ref().map_or(line.to_string(), Finding::to_string));
            record.tests.read(&line);
            why = line.strip_prefix(SKIPPED).map(str::to_owned).or(why);
            if finding.is_none() && !line.trim().is_empty() {
                last = line.trim().to_owned();
            }
            record.findings.extend(finding);
        }
        record.ending = match child.wait() {
            Ok(status) => self.ending(status, last, why),
            Err(error) => Ending::Failed(error.to_string()),
        };
        record
    }

    fn ending(&self, status: ExitStatus, last: String, why: Option<String>) -> Ending {
        match status.code() {
            Some(0) => why.map_or(Ending::Well, Ending::Skipped),
            Some(NO_PROGRAM) if self.may_be_absent => {
                Ending::Skipped(format!("{} is not here", self.program.display()))
            }
            _ => Ending::Failed(last),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONG: Duration = Duration::from_secs(60);

    fn shell(script: &str) -> Stage {
        Stage {
            name: "a stage".into(),
            share: LONG,
            program: "sh".into(),
            arguments: vec!["-c".into(), script.into()],
            may_be_absent: false,
        }
    }

    fn ending_of(stage: &Stage) -> Ending {
        stage.run(LONG, &[]).ending
    }

    #[test]
    fn what_a_program_says_before_it_fails_is_kept() {
        let line = Finding::check("this holds", true).line();
        let script =
            format!("echo '{line}'; echo 'test one ... ok'; echo 'test two ... FAILED'; echo why >&2; exit 101");
        let record = shell(&script).run(LONG, &[]);
        assert_eq!(record.findings, [Finding::check("this holds", true)]);
        assert_eq!(record.tests, Tests { passed: 1, failed: vec!["two".into()], unfinished: None });
        assert_eq!(record.ending, Ending::Failed("why".into()));
        assert!(!record.passed());
    }

    #[test]
    fn a_failed_test_or_check_fails_a_stage_that_ends_well() {
        let check = |passed| format!("echo '{}'", Finding::check("this holds", passed).line());
        for (script, passed) in [
            (check(true), true),
            (check(false), false),
            ("echo 'test one ... ok'".to_owned(), true),
            ("echo 'test one ... FAILED'".to_owned(), false),
            ("echo 'running 0 tests'".to_owned(), false),
        ] {
            let record = shell(&script).run(LONG, &[]);
            assert_eq!((record.ending.clone(), record.passed()), (Ending::Well, passed), "{script}");
        }
    }

    #[test]
    fn a_stage_ends_when_its_share_is_over_and_says_which_test_ran() {
        let endless = "printf 'test one ... ok\\ntest two ... '; sleep 1000";
        for (share, left) in [(LEAST, LONG), (LONG, LEAST)] {
            let record = Stage { share, ..shell(endless) }.run(left, &[]);
            assert_eq!(record.ending, Ending::OutOfTime(1));
            assert_eq!(record.tests, Tests { passed: 1, failed: vec![], unfinished: Some("two".into()) });
            assert!(!record.passed());
        }
    }

    #[test]
    fn a_stage_does_not_begin_without_time_and_that_is_no_pass() {
        let record = shell("exit 0").run(Duration::ZERO, &[]);
        assert_eq!((record.ending.clone(), record.passed()), (Ending::NotBegun, false));
    }

    #[test]
    fn what_is_not_here_is_skipped_where_it_may_be() {
        assert_eq!(ending_of(&shell("echo 'SKIPPED: no compiler'")), Ending::Skipped("no compiler".into()));
        let absent = |may_be_absent| Stage { program: "no-such-program".into(), may_be_absent, ..shell("") };
        assert_eq!(ending_of(&absent(true)), Ending::Skipped("no-such-program is not here".into()));
        assert!(matches!(ending_of(&absent(false)), Ending::Failed(why) if why.contains("no-such-program")));
    }

    #[test]
    fn variables_reach_the_program() {
        let record = shell("echo \"SKIPPED: $WHY\"").run(LONG, &[("WHY", "so")]);
        assert_eq!(record.ending, Ending::Skipped("so".into()));
    }
}
