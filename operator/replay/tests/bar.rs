//! The bar, bounded: in a part of the campaign no peer beats ours, and every good one is beaten.

use std::path::PathBuf;
use std::process::Command;

use windlass_operator_replay::campaign::{CASES, Case, Outcome};
use windlass_operator_replay::trace::{self, Request, Variant};

fn case(name: &str) -> &'static Case {
    CASES.iter().find(|case| case.name == name).expect("a case")
}

fn holds(case: &Case, cold_start: f64, trace: &[Request]) {
    let outcome = Outcome::of(&case.scenario(cold_start), trace).expect("valid bounds");
    let standing = outcome.standing();
    assert!(standing.holds(), "{} with {cold_start} s: {standing:?} {:?}", case.name, summary(&outcome));
    assert!(outcome.adaptive.iter().all(|(_, score)| score.broken == 0), "a stream broke");
}

fn summary(outcome: &Outcome) -> Vec<String> {
    let one = |(name, score): &(_, windlass_operator_replay::score::Score)| {
        format!("{name} {:.4} {:.2}", score.attainment(), score.gpu_hours())
    };
    outcome.adaptive.iter().map(one).collect()
}

#[test]
fn chats_that_come_in_bursts() {
    let trace = Variant::Bursty(2.0).of(&trace::chats(1800.0, 5.0));
    holds(case("chat-bursty"), 90.0, &trace);
}

#[test]
fn the_code_trace_as_it_is() {
    let Some(data) = std::env::var_os("WINDLASS_DATA") else {
        return eprintln!("SKIPPED: WINDLASS_DATA is not set, which names the folder of azure_code_2023.csv.gz");
    };
    let file = PathBuf::from(data).join("azure_code_2023.csv.gz");
    let unpacked = Command::new("gzip").arg("-dc").arg(&file).output().expect("gzip");
    assert!(unpacked.status.success(), "WINDLASS_DATA: {}", String::from_utf8_lossy(&unpacked.stderr));
    let trace = trace::read(unpacked.stdout.as_slice()).expect("a trace");
    assert_eq!(trace.len(), 8819);
    for cold_start in [30.0, 180.0] {
        holds(case("as-it-is"), cold_start, &trace);
    }
}
