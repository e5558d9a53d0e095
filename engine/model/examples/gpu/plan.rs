//! The stages, in order: what is right before what is fast, what matters most first. A share is the most that a stage may
//! take; together they are longer than the whole may be, as most take less.

use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::Outcome;
use crate::model::Model;
use crate::parts::{PARTS, Part};
use crate::stage::Stage;

/// What stands in for a driver or for several GPUs, or is for a first start without machine code.
const NOT_ON_A_CARD: [&str; 5] = ["rules::", "mapping::", "reduce::", "table::", "image::"];
/// What computes on the GPU under test; `cuda_nodes` and `cuda_ranks` need several.
const EXECUTOR: [&str; 9] = [
    "cuda::",
    "cuda_families::",
    "cuda_formats::",
    "cuda_guesses::",
    "cuda_memory::",
    "cuda_sampling::",
    "cuda_sharing::",
    "cuda_split::",
    "cuda_steps::",
];
/// Kernels by what their threads share: for the sanitizers, which take long.
const PRODUCTS: [&str; 5] = ["linear::", "many::", "experts::", "w8a8::", "activation::"];
const WARPGROUPS: [&str; 4] = ["hopper::", "int4_hopper::", "w8a8_hopper::", "in_steps_of_pages"];
const OTHERS: [&str; 7] = ["norm::", "heads::", "sample::", "gather::", "moves::", "sharing::", "attention::decoding"];
/// A dry run shows that programs run; what they test has been tested on the shim.
const DRY: [&str; 1] = ["norm::"];
const DRY_EXECUTOR: [&str; 1] = ["cuda_sampling::"];

/// Every stage. `programs` is where their programs are.
pub fn stages(programs: &Path, model: &Model) -> Outcome<Vec<Stage>> {
    let plan = Plan { own: std::env::current_exe()?, programs, model };
    let [ceilings, measured @ .., wide] = PARTS.map(|part| plan.measure(&part));
    let mut stages = vec![ceilings];
    stages.extend(plan.tests());
    stages.extend(measured);
    stages.push(plan.served());
    stages.extend(plan.sanitizers());
    stages.push(wide);
    stages.extend(plan.peers());
    Ok(stages)
}

struct Plan<'a> {
    /// This program.
    own: PathBuf,
    programs: &'a Path,
    model: &'a Model,
}

impl Plan<'_> {
    fn measure(&self, part: &Part) -> Stage {
        let arguments = vec!["measure".to_owned(), part.name.to_owned(), self.model.to_string()];
        Stage { arguments, ..stage(part.name, part.seconds, &self.own) }
    }

    /// The engine, as its users have it.
    fn served(&self) -> Stage {
        let engine = self.programs.join("windlass-engine").to_string_lossy().into_owned();
        Stage { arguments: vec!["serve".to_owned(), engine, self.model.to_string()], ..stage("served", 60, &self.own) }
    }

    fn tests(&self) -> [Stage; 2] {
        let [kernels, executor] = match self.model.is_dry() {
            true => [one_by_one(&DRY), one_by_one(&DRY_EXECUTOR)],
            false => [without(&NOT_ON_A_CARD), one_by_one(&EXECUTOR)],
        };
        [
            Stage { arguments: kernels, ..stage("kernels", 120, &self.programs.join("kernels")) },
            Stage { arguments: executor, ..stage("executor", 90, &self.programs.join("executor")) },
        ]
    }

    /// They have nothing to look at where there is no card.
    fn sanitizers(&self) -> Vec<Stage> {
        const TOOLS: [&str; 2] = ["memcheck", "racecheck"];
        let kinds = [("warpgroups", &WARPGROUPS[..]), ("products", &PRODUCTS), ("others", &OTHERS)];
        let all =
            TOOLS.iter().flat_map(|tool| kinds.iter().map(move |(kind, tests)| self.sanitizer(tool, kind, tests)));
        all.filter(|_| !self.model.is_dry()).collect()
    }

    fn sanitizer(&self, tool: &str, kind: &str, tests: &[&str]) -> Stage {
        let kernels = self.programs.join("kernels").to_string_lossy().into_owned();
        let options = ["--tool", tool, "--error-exitcode", "1", &kernels].map(str::to_owned);
        let arguments = options.into_iter().chain(one_by_one(tests)).collect();
        let stage = stage(&format!("{tool}-{kind}"), 60, Path::new("compute-sanitizer"));
        Stage { arguments, may_be_absent: true, ..stage }
    }

    /// What others reach on the same card.
    fn peers(&self) -> [Stage; 2] {
        let torch = vec![self.programs.join("torch_peer.py").to_string_lossy().into_owned()];
        let llama_cpp = stage("llama.cpp", 400, &self.programs.join("llama_cpp_peer"));
        [
            Stage { arguments: torch, may_be_absent: true, ..stage("torch", 90, Path::new("python3")) },
            Stage { arguments: vec![self.model.to_string()], ..llama_cpp },
        ]
    }
}

fn stage(name: &str, seconds: u64, program: &Path) -> Stage {
    Stage {
        name: name.to_owned(),
        share: Duration::from_secs(seconds),
        program: program.to_owned(),
        arguments: Vec::new(),
        may_be_absent: false,
    }
}

/// All tests but some, as [`one_by_one`].
fn without(filters: &[&str]) -> Vec<String> {
    let skipped: Vec<&str> = filters.iter().flat_map(|filter| ["--skip", filter]).collect();
    one_by_one(&skipped)
}

/// Tests one after the other: their output says which of them runs.
fn one_by_one(filters: &[&str]) -> Vec<String> {
    ["--test-threads", "1"].iter().chain(filters).map(|word| (*word).to_owned()).collect()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn stages_have_names_of_their_own_and_dry_runs_no_sanitizers() {
        for (model, sanitizers) in [(Model::Generated, 6), (Model::Dry, 0)] {
            let stages = stages(Path::new("programs"), &model).unwrap();
            let names: BTreeSet<&str> = stages.iter().map(|stage| stage.name.as_str()).collect();
            assert_eq!(names.len(), stages.len(), "{names:?}");
            assert_eq!(names.iter().filter(|name| name.contains("check-")).count(), sanitizers);
        }
    }
}
