//! Tests of a program, a module after the other: behind one that fails, those that come after it run again in a process of their
//! own, as nothing works on a device any more that a kernel has broken.

use std::process::Command;
use std::time::{Duration, Instant};

use crate::log::Log;
use crate::stage::{Ending, Failure, LEAST, Record, Stage, Tests};

/// Runs the tests that a stage names, until each has passed or failed by itself.
pub fn run(stage: &Stage, left: Duration, variables: &[(&str, &str)], log: &Log) -> Record {
    let (started, share) = (Instant::now(), stage.share.min(left));
    if share < LEAST {
        return Record::new(&stage.name, Ending::NotBegun);
    }
    let mut record = Record::new(&stage.name, Ending::Well);
    let mut pending = match listed(stage) {
        Ok(tests) => tests,
        Err(why) => return Record::new(&stage.name, Ending::Failed(why)),
    };
    if pending.is_empty() {
        return Record::new(&stage.name, Ending::Failed("it has no tests of these names".to_owned()));
    }
    while !pending.is_empty() {
        let left = share.saturating_sub(started.elapsed());
        let next = of(stage, &pending).run(left, variables, log);
        let (judged, before) = (judged(&next, &pending), pending.len());
        pending
            .retain(|name| !judged.passed.contains(name) && judged.failed.iter().all(|failure| failure.name != *name));
        record.tests.passed.extend(judged.passed);
        record.tests.failed.extend(judged.failed);
        record.findings.extend(next.findings);
        if pending.len() == before {
            record.ending = Ending::Failed("it runs other tests than it lists".to_owned());
            break;
        }
        if matches!(next.ending, Ending::NotBegun | Ending::OutOfTime(_)) {
            record.ending = Ending::OutOfTime(share.as_secs());
            record.tests.unfinished = pending.first().cloned();
            break;
        }
    }
    Record { seconds: started.elapsed().as_secs_f64(), ..record }
}

/// The stage with these tests alone.
fn of(stage: &Stage, tests: &[String]) -> Stage {
    let options = ["--test-threads", "1", "--nocapture", "--exact"].map(str::to_owned);
    Stage { arguments: options.into_iter().chain(tests.iter().cloned()).collect(), ..stage.clone() }
}

/// Names of the tests of a stage: its first argument is a module, the others are tests of it that are not meant.
fn listed(stage: &Stage) -> Result<Vec<String>, String> {
    let listed = Command::new(&stage.program).arg("--list").output();
    let output = listed.map_err(|error| format!("{}: {error}", stage.program.display()))?;
    let text = String::from_utf8_lossy(&output.stdout);
    let tests = text.lines().filter_map(|line| line.strip_suffix(": test")).map(str::to_owned);
    let Some((module, others)) = stage.arguments.split_first() else { return Ok(tests.collect()) };
    let module = format!("{module}::");
    Ok(tests.filter(|name| name.starts_with(&module) && !others.contains(name)).collect())
}

/// What a run shows of tests: those that passed, and those that failed while others still could pass, and the first behind them.
fn judged(run: &Record, pending: &[String]) -> Tests {
    let Tests { passed, failed, unfinished } = &run.tests;
    let place = |name: &String| pending.iter().position(|other| other == name);
    let last_passed = passed.iter().filter_map(place).max();
    let by_itself = |failure: &&Failure| place(&failure.name) < last_passed;
    let mut own: Vec<Failure> = failed.iter().filter(by_itself).cloned().collect();
    let unfinished = unfinished.as_ref().map(|name| Failure { name: name.clone(), why: why(&run.ending) });
    // One that began and did not end is the culprit only where none before it failed.
    let first = failed.iter().find(|failure| !own.contains(failure)).cloned().or(unfinished);
    // A process that ended before it began a test leaves nobody to blame but the first that it was to run.
    let nobody = || Failure { name: pending[0].clone(), why: why(&run.ending) };
    let stuck = first.is_none() && passed.is_empty() && own.is_empty();
    own.extend(first.or_else(|| stuck.then(nobody)));
    Tests { passed: passed.clone(), failed: own, unfinished: None }
}

fn why(ending: &Ending) -> String {
    match ending {
        Ending::Silent(seconds) => format!("it said nothing for {seconds} s"),
        Ending::OutOfTime(_) | Ending::NotBegun => "there was no time left".to_owned(),
        Ending::Failed(why) => format!("its process ended: {why}"),
        Ending::Well | Ending::Skipped(_) => "it did not run".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::fs;
    use std::os::unix::fs::PermissionsExt;
    use std::path::Path;

    use super::*;
    use crate::stage::Kind;

    /// A program that behaves as test programs do: it has the tests a to e, of which some do something else than to pass.
    fn program(folder: &Path, case: &str) -> Stage {
        let path = folder.join("tests");
        let script = format!(
            r#"#!/bin/sh
case "$*" in *--list*) for t in a b c d e; do echo "$t: test"; done; exit;; esac
lost=
while [ "$1" != --exact ]; do shift; done; shift
for t; do
  printf 'test %s ... ' $t
  case $t$lost in {case} *lost) printf "\nthread '%s' panicked at x.rs:1:1:\nthe device is lost\nFAILED\n" $t;; *) echo ok;; esac
done"#
        );
        fs::write(&path, script).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        Stage {
            name: "tests".into(),
            share: Duration::from_secs(30),
            silence: Duration::from_secs(1),
            program: path,
            arguments: Vec::new(),
            variables: BTreeMap::new(),
            kind: Kind::Tests,
        }
    }

    fn ran(case: &str) -> (Vec<String>, Vec<Failure>) {
        let folder = tempfile::tempdir().unwrap();
        let log = Log::open(folder.path()).unwrap();
        let Tests { passed, failed, .. } = run(&program(folder.path(), case), Duration::from_secs(30), &[], &log).tests;
        (passed, failed)
    }

    #[test]
    fn what_comes_behind_a_broken_device_runs_again() {
        let (passed, failed) = ran(r#"b) lost=lost; echo; echo "thread 'b' panicked at"; echo why; echo FAILED;;"#);
        assert_eq!(
            (passed, failed.len(), failed[0].name.as_str()),
            (["a", "c", "d", "e"].map(str::to_owned).into(), 1, "b")
        );
    }

    #[test]
    fn two_culprits_are_told_apart_from_those_between_them() {
        let (passed, failed) = ran("b|d) lost=lost; echo FAILED;;");
        assert_eq!(passed, ["a", "c", "e"]);
        assert_eq!(failed.iter().map(|failure| failure.name.as_str()).collect::<Vec<_>>(), ["b", "d"]);
    }

    #[test]
    fn a_test_that_hangs_and_one_that_is_killed_take_no_other_with_them() {
        let (passed, failed) = ran("b) sleep 1000;; c) kill -KILL $$;;");
        assert_eq!(passed, ["a", "d", "e"]);
        assert_eq!(failed[0], Failure { name: "b".into(), why: "it said nothing for 1 s".into() });
        assert!(failed[1].name == "c" && failed[1].why.contains("signal: 9"), "{failed:?}");
    }

    #[test]
    fn a_program_that_does_not_start_its_tests_ends() {
        let (passed, failed) = ran("a) exit 3;; *) exit 3;;");
        assert_eq!((passed.len(), failed.len()), (0, 5));
    }

    #[test]
    fn a_failed_test_says_why() {
        let (_, failed) = ran(r#"c) echo; echo "thread 'c' panicked at x.rs:1:1:"; echo left is 1; echo FAILED;;"#);
        assert_eq!(failed, [Failure { name: "c".into(), why: "left is 1".into() }]);
    }
}
