//! Every reason that conditions and events can have is documented with its remedy, and no other is.

use std::collections::BTreeSet;
use std::path::PathBuf;

use windlass_engine_contract::termination;
use windlass_operator_api::status::condition;

/// Files that give reasons, each as a word in quotes.
const SOURCES: [&str; 8] = [
    "core/src/cause.rs",
    "core/src/fitting.rs",
    "core/src/hpa.rs",
    "core/src/inspection.rs",
    "core/src/revision.rs",
    "core/src/status/conditions.rs",
    "core/src/status/events.rs",
    "controller/src/apply.rs",
];
/// Words in quotes there that are no reasons of ours: values of a condition's status, what is done, what others say.
const OTHERS: [&str; 37] = [
    "True",
    "False",
    "Unknown",
    "Assess",
    "Evacuate",
    "Place",
    "Read",
    "Scale",
    "Normal",
    "Warning",
    "Progressing",
    "ScalingActive",
    "PodScheduled",
    "ReplicaFailure",
    "Failed",
    "OOMKilled",
    "ErrImagePull",
    "ImagePullBackOff",
    "ErrImageNeverPull",
    "InvalidImageName",
    "RegistryUnavailable",
    "ContainerCreating",
    "PodInitializing",
    "CrashLoopBackOff",
    "InferenceService",
    "Deployment",
    "Service",
    "ServiceAccount",
    "NetworkPolicy",
    "PodDisruptionBudget",
    "ConfigMap",
    "Job",
    "ControllerRevision",
    "HorizontalPodAutoscaler",
    "ReplicaSet",
    "StatefulSet",
    "Pod",
];
/// Reasons that are passed on as the kubelet and the scheduler give them.
const PASSED_ON: [&str; 4] =
    ["SchedulingGated", "CreateContainerConfigError", "CreateContainerError", "RunContainerError"];

fn read(path: &str) -> String {
    let file = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("..").join(path);
    std::fs::read_to_string(&file).unwrap_or_else(|error| panic!("{}: {error}", file.display()))
}

fn is_word(text: &&str) -> bool {
    text.len() > 1 && text.starts_with(char::is_uppercase) && text.chars().all(char::is_alphabetic)
}

/// Every other part of `text` between `quote`s, where it is one word.
fn quoted(text: &str, quote: char) -> impl Iterator<Item = String> {
    text.split(quote).skip(1).step_by(2).filter(is_word).map(str::to_owned)
}

fn given() -> BTreeSet<String> {
    let mut given: BTreeSet<String> = PASSED_ON.map(str::to_owned).into();
    for path in SOURCES {
        let text = read(path);
        let code = text.split("#[cfg(test)]").next().unwrap_or_default();
        given.extend(code.lines().flat_map(|line| quoted(line, '"').collect::<Vec<_>>()));
    }
    let rule = read("core/src/autoscale/recommend.rs");
    let terms = rule.split("pub enum Reason {").nth(1).and_then(|rest| rest.split('}').next()).expect("the terms");
    given.extend(terms.lines().filter_map(|line| line.trim().strip_suffix(',')).filter(is_word).map(str::to_owned));
    given.extend(termination::Reason::ALL.map(|reason| format!("{reason:?}")));
    given.retain(|word| !OTHERS.contains(&word.as_str()));
    given
}

fn documented() -> BTreeSet<String> {
    let readme = read("README.md");
    let section = |from: &str| {
        let rest = readme.split(&format!("\n## {from}\n")).nth(1).expect("the section");
        rest.split("\n## ").next().unwrap_or_default().to_owned()
    };
    let tables = [section("Conditions"), section("Events")].concat();
    let types = tables.split("\n### ").next().unwrap_or_default().to_owned();
    let cells = tables[types.len()..].lines().filter_map(|line| line.strip_prefix("| ")?.split(" | ").next());
    cells.flat_map(|cell| quoted(cell, '`').collect::<Vec<_>>()).collect()
}

#[test]
fn each_reason_is_documented_and_no_other() {
    let (given, documented) = (given(), documented());
    assert!(given.len() > 50, "{given:?}");
    let undocumented: Vec<_> = given.difference(&documented).collect();
    let unknown: Vec<_> = documented.difference(&given).collect();
    assert!(undocumented.is_empty() && unknown.is_empty(), "undocumented: {undocumented:?}; unknown: {unknown:?}");
}

#[test]
fn each_condition_is_documented() {
    let readme = read("README.md");
    for kind in [
        condition::READY,
        condition::FITS,
        condition::SCALING_ACTIVE,
        condition::PROGRESSING,
        condition::RECONCILING,
        condition::STALLED,
    ] {
        assert!(readme.contains(&format!("\n| `{kind}` | ")), "{kind}");
    }
}
