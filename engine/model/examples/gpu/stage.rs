//! A stage of the proof: a program that runs for its share of the time at most, and what came of it.

use std::collections::BTreeMap;
use std::io::{self, BufRead, BufReader, PipeReader};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use serde::Serialize;

use crate::finding::Finding;
use crate::log::Log;

/// Less than this is no time.
pub const LEAST: Duration = Duration::from_secs(1);
/// What a line begins with that says why there was nothing to do.
const SKIPPED: &str = "SKIPPED: ";
/// How long a program that was killed may take to go. One that waits within the driver may never: it is left behind.
const GOING: Duration = Duration::from_secs(3);
/// Of what a failed test says, so many characters are for the report; the log has all.
const REASON_CHARACTERS: usize = 300;

/// A program to run.
#[derive(Clone, Debug)]
pub struct Stage {
    pub name: String,
    /// The most that it may take.
    pub share: Duration,
    /// The longest that it may say nothing.
    pub silence: Duration,
    pub program: PathBuf,
    pub arguments: Vec<String>,
    /// Of its environment, beside what all stages have.
    pub variables: BTreeMap<&'static str, String>,
    pub kind: Kind,
}

/// What is known of a stage's program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// It tells what it finds.
    Measurement,
    /// The same, and what it finds may hang on what Hopper has alone: it is tried again without that where it fails.
    Model,
    /// It runs tests, of which those behind a failed one run again in a process of their own.
    Tests,
    /// It may be absent.
    Peer,
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
    /// It said nothing for so many seconds.
    Silent(u64),
    /// Before it began: there was no time left.
    NotBegun,
    /// What it needs is not here.
    Skipped(String),
}

/// Tests that a program ran.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Tests {
    pub passed: Vec<String>,
    pub failed: Vec<Failure>,
    /// Began, and did not end.
    pub unfinished: Option<String>,
}

/// A test that failed.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Failure {
    pub name: String,
    pub why: String,
}

impl Record {
    pub fn new(name: &str, ending: Ending) -> Record {
        Record { name: name.to_owned(), seconds: 0.0, ending, tests: Tests::default(), findings: Vec::new() }
    }

    /// Whether nothing of it speaks against the engine. What a machine lacks does not; what there was no time for does.
    pub fn passed(&self) -> bool {
        let checked = |finding: &Finding| !matches!(finding, Finding::Check { passed: false, .. });
        let ended = matches!(self.ending, Ending::Well | Ending::Skipped(_));
        ended && self.tests.failed.is_empty() && self.findings.iter().all(checked)
    }

    /// Takes in a line.
    fn read(&mut self, line: &str, log: &Log) -> Option<Finding> {
        let finding = Finding::read(line);
        log.say(&finding.as_ref().map_or(line.to_string(), Finding::to_string));
        self.tests.read(line);
        self.findings.extend(finding.clone());
        finding
    }
}

impl Tests {
    /// Takes in a line of a test program that captures no output. One that runs none was asked for tests that are called otherwise
    /// by now.
    fn read(&mut self, line: &str) {
        if line == "running 0 tests" {
            self.failed.push(Failure { name: "there is none of these names".to_owned(), why: String::new() });
        }
        let begun = line.strip_prefix("test ").and_then(|rest| rest.split_once(" ... "));
        if let Some((name, result)) = begun {
            // A test that is to panic says so behind its name.
            self.unfinished = Some(name.trim_end_matches(" - should panic").to_owned());
            return self.end(result.trim());
        }
        self.end(line.trim());
    }

    /// Takes in the result of the test that runs, or something that it says.
    fn end(&mut self, said: &str) {
        let Some(name) = self.unfinished.clone() else { return };
        match said {
            // One that is to panic has said why it does.
            "ok" => {
                self.failed.retain(|failure| failure.name != name);
                self.passed.push(name);
            }
            "FAILED" => match self.failed.last_mut() {
                Some(failure) if failure.name == name => {}
                _ => self.failed.push(Failure { name, why: String::new() }),
            },
            _ => return self.explain(name, said),
        }
        self.unfinished = None;
    }

    /// Keeps why a test panics: what it says behind the place.
    fn explain(&mut self, name: String, said: &str) {
        if said.contains("' panicked at ") || said.contains(") panicked at ") {
            return self.failed.push(Failure { name, why: String::new() });
        }
        let Some(failure) = self.failed.last_mut().filter(|failure| failure.name == name) else { return };
        let room = REASON_CHARACTERS.saturating_sub(failure.why.len());
        if room > 0 && !said.is_empty() && !said.starts_with("note: ") {
            failure.why += if failure.why.is_empty() { "" } else { " " };
            failure.why.extend(said.chars().take(room));
        }
    }
}

impl Stage {
    /// Runs the program while there is time, with `variables` of the environment. Everything that it says is in the log at once.
    pub fn run(&self, left: Duration, variables: &[(&str, &str)], log: &Log) -> Record {
        let share = self.share.min(left);
        if share < LEAST {
            return Record::new(&self.name, Ending::NotBegun);
        }
        let started = Instant::now();
        let record = match self.spawn(variables) {
            Ok((child, output)) => self.follow(child, lines(output), share, log),
            Err(error) if error.kind() == io::ErrorKind::NotFound && self.kind == Kind::Peer => self.absent(),
            Err(error) => Record::new(&self.name, Ending::Failed(format!("{}: {error}", self.program.display()))),
        };
        Record { seconds: started.elapsed().as_secs_f64(), ..record }
    }

    fn absent(&self) -> Record {
        Record::new(&self.name, Ending::Skipped(format!("{} is not here", self.program.display())))
    }

    /// Begins in a process group of its own, with the end of the pipe into which the program and all that it starts write.
    fn spawn(&self, variables: &[(&str, &str)]) -> io::Result<(Child, PipeReader)> {
        let (output, writer) = io::pipe()?;
        let mut command = Command::new(&self.program);
        command.args(&self.arguments).envs(variables.iter().copied()).envs(&self.variables);
        command.stdin(Stdio::null()).stdout(writer.try_clone()?).stderr(writer).process_group(0);
        Ok((command.spawn()?, output))
    }

    /// Hears what the program says, to its end or until it is not to go on.
    fn follow(&self, mut child: Child, said: Receiver<String>, share: Duration, log: &Log) -> Record {
        let end = Instant::now() + share;
        let (mut record, mut last, mut why) = (Record::new(&self.name, Ending::Well), String::new(), None);
        let stopped = loop {
            let left = end.saturating_duration_since(Instant::now());
            match said.recv_timeout(left.min(self.silence)) {
                Ok(line) => {
                    why = line.strip_prefix(SKIPPED).map(str::to_owned).or(why);
                    if record.read(&line, log).is_none() && !line.trim().is_empty() {
                        last = line.trim().to_owned();
                    }
                }
                Err(RecvTimeoutError::Disconnected) => break None,
                Err(RecvTimeoutError::Timeout) if left <= self.silence => {
                    break Some(Ending::OutOfTime(share.as_secs()));
                }
                Err(RecvTimeoutError::Timeout) => break Some(Ending::Silent(self.silence.as_secs())),
            }
        };
        record.ending = match stopped {
            None => end_of(&mut child, end).map_or_else(Ending::Failed, |status| self.ending(status, last, why)),
            Some(ending) => {
                kill(&mut child, &said, &mut record, log);
                ending
            }
        };
        record
    }

    fn ending(&self, status: ExitStatus, last: String, why: Option<String>) -> Ending {
        match status.code() {
            Some(0) => why.map_or(Ending::Well, Ending::Skipped),
            Some(code) if last.is_empty() => Ending::Failed(format!("exit code {code}")),
            Some(_) => Ending::Failed(last),
            None => Ending::Failed(format!("{status}; it said last: {last}")),
        }
    }
}

/// Lines of a pipe, read beside whoever waits for them: a process that cannot be killed holds its end open for ever.
fn lines(output: PipeReader) -> Receiver<String> {
    let (say, said) = mpsc::channel();
    thread::spawn(move || {
        for line in BufReader::new(output).split(b'\n').map_while(Result::ok) {
            if say.send(String::from_utf8_lossy(&line).into_owned()).is_err() {
                break;
            }
        }
    });
    said
}

/// Waits for a program that says no more; what it started may still run.
fn end_of(child: &mut Child, end: Instant) -> Result<ExitStatus, String> {
    loop {
        match child.try_wait() {
            Ok(Some(status)) => return Ok(status),
            Ok(None) if Instant::now() > end => {
                signal(child);
                return Err("it closed its output and did not end".to_owned());
            }
            Ok(None) => thread::sleep(Duration::from_millis(5)),
            Err(error) => return Err(error.to_string()),
        }
    }
}

/// Ends a program with all that it started, and hears what they said until then.
fn kill(child: &mut Child, said: &Receiver<String>, record: &mut Record, log: &Log) {
    signal(child);
    let end = Instant::now() + GOING;
    while let Ok(line) = said.recv_timeout(end.saturating_duration_since(Instant::now())) {
        record.read(&line, log);
    }
    if !matches!(child.try_wait(), Ok(Some(_))) && Instant::now() >= end {
        log.say("it cannot be killed, and is left behind");
    }
}

fn signal(child: &Child) {
    // Where it has ended already there is nobody to kill.
    let _ = Command::new("kill").args(["-KILL", "--", &format!("-{}", child.id())]).stderr(Stdio::null()).status();
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONG: Duration = Duration::from_secs(60);

    fn shell(script: &str) -> Stage {
        Stage {
            name: "a stage".into(),
            share: LONG,
            silence: LONG,
            program: "sh".into(),
            arguments: vec!["-c".into(), script.into()],
            variables: BTreeMap::new(),
            kind: Kind::Measurement,
        }
    }

    fn run(stage: &Stage, left: Duration, variables: &[(&str, &str)]) -> Record {
        let folder = tempfile::tempdir().unwrap();
        stage.run(left, variables, &Log::open(folder.path()).unwrap())
    }

    fn failure(name: &str, why: &str) -> Failure {
        Failure { name: name.into(), why: why.into() }
    }

    #[test]
    fn what_a_program_says_before_it_fails_is_kept() {
        let line = Finding::check("this holds", true).line();
        let script =
            format!("echo '{line}'; echo 'test one ... ok'; echo 'test two ... FAILED'; echo why >&2; exit 101");
        let record = run(&shell(&script), LONG, &[]);
        assert_eq!(record.findings, [Finding::check("this holds", true)]);
        assert_eq!(
            record.tests,
            Tests { passed: vec!["one".into()], failed: vec![failure("two", "")], unfinished: None }
        );
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
            let record = run(&shell(&script), LONG, &[]);
            assert_eq!((record.ending.clone(), record.passed()), (Ending::Well, passed), "{script}");
        }
    }

    /// As tests say it whose output is not captured.
    #[test]
    fn results_behind_what_a_test_says_are_its_own() {
        let script = r#"echo "test one ... thread 'one' (7) panicked at x.rs:1:2:"; echo 'left is 1'; echo FAILED
            echo 'test two ... hello'; echo ok; echo 'test three - should panic ... '
            echo "thread 'three' (8) panicked at x.rs:1:2:"; echo refused; echo ok"#;
        let tests = run(&shell(script), LONG, &[]).tests;
        assert_eq!(
            (tests.passed, tests.failed),
            (["two", "three"].map(str::to_owned).into(), vec![failure("one", "left is 1")])
        );
    }

    #[test]
    fn a_stage_ends_when_its_share_is_over_and_says_which_test_ran() {
        let endless = "printf 'test one ... ok\ntest two ... \n'; sleep 1000";
        for (share, left) in [(LEAST, LONG), (LONG, LEAST)] {
            let record = run(&Stage { share, ..shell(endless) }, left, &[]);
            assert_eq!(record.ending, Ending::OutOfTime(1));
            assert_eq!(record.tests.unfinished.as_deref(), Some("two"));
            assert!(!record.passed());
        }
    }

    #[test]
    fn a_program_that_says_nothing_is_ended_with_all_that_it_started() {
        let marker = tempfile::tempdir().unwrap();
        let late = format!("(sleep 2; touch {}/late) & echo begun; sleep 1000", marker.path().display());
        let record = run(&Stage { silence: Duration::from_secs(1), ..shell(&late) }, LONG, &[]);
        assert_eq!(record.ending, Ending::Silent(1));
        // Its output is closed, which is when whoever held it is gone.
        assert!(record.seconds < 3.0, "{}", record.seconds);
    }

    #[test]
    fn what_outlives_a_program_and_holds_its_output_holds_nothing_up() {
        let record = run(&Stage { share: LEAST, ..shell("setsid sleep 6 & exit 0") }, LONG, &[]);
        assert!(record.seconds < 5.0, "{}", record.seconds);
    }

    #[test]
    fn a_stage_does_not_begin_without_time_and_that_is_no_pass() {
        let record = run(&shell("exit 0"), Duration::ZERO, &[]);
        assert_eq!((record.ending.clone(), record.passed()), (Ending::NotBegun, false));
    }

    #[test]
    fn what_is_not_here_is_skipped_where_it_may_be() {
        let ending = |stage: &Stage| run(stage, LONG, &[]).ending;
        assert_eq!(ending(&shell("echo 'SKIPPED: no compiler'")), Ending::Skipped("no compiler".into()));
        let absent = |kind| Stage { program: "no-such-program".into(), kind, ..shell("") };
        assert_eq!(ending(&absent(Kind::Peer)), Ending::Skipped("no-such-program is not here".into()));
        assert!(matches!(ending(&absent(Kind::Tests)), Ending::Failed(why) if why.contains("no-such-program")));
    }

    #[test]
    fn variables_reach_the_program_and_its_own_win() {
        let variables = BTreeMap::from([("WHY", "so".to_owned())]);
        let record =
            run(&Stage { variables, ..shell("echo \"SKIPPED: $WHY $HOW\"") }, LONG, &[("WHY", "no"), ("HOW", "well")]);
        assert_eq!(record.ending, Ending::Skipped("so well".into()));
    }
}
