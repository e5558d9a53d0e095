//! The stages, in order: what tells most of a card comes first, as time may be up. A share is the most that a stage may take;
//! together they are longer than the whole may be, as most take less.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use windlass_kernels::cuda::features::WITHOUT;

use crate::Outcome;
use crate::model::Model;
use crate::parts::Part;
use crate::stage::{Kind, Stage};

/// Modules of the kernels' tests that compute on the device under test; those of what Hopper has alone are last, as they are the
/// likeliest to break it. What stands in for a driver or for several GPUs is tested elsewhere.
const KERNELS: [&str; 17] = [
    "norm",
    "activation",
    "gather",
    "moves",
    "heads",
    "linear",
    "many",
    "sample",
    "sharing",
    "experts",
    "rounded",
    "w8a8",
    "attention",
    "hopper",
    "int4_hopper",
    "w8a8_hopper",
    "wide_experts",
];
/// The same of the executor's; `cuda_nodes` and `cuda_ranks` need several GPUs.
const EXECUTOR: [&str; 10] = [
    "cuda",
    "cuda_formats",
    "cuda_families",
    "cuda_steps",
    "cuda_sampling",
    "cuda_drafts",
    "cuda_ahead",
    "cuda_sharing",
    "cuda_memory",
    "cuda_split",
];
/// Tests of those modules that look behind the driver, at the shim alone: they have nothing to do on a card.
const OF_THE_SHIM: [&str; 43] = [
    "attention::prefill_takes_the_kernel_that_there_is",
    "attention::what_does_not_branch_gives_the_same_beside_what_does",
    "experts::experts_of_many_tokens_give_what_those_of_few_give",
    "hopper::clusters_are_checked_against_table_grid_and_chip",
    "hopper::later_chips_are_given_nothing_that_hopper_has_alone",
    "hopper::what_tile_copies_cannot_read_and_other_chips_have_not_is_refused",
    "int4_hopper::only_hopper_multiplies_four_bits_widely",
    "linear::a_library_multiplies_what_it_is_for_and_nothing_else",
    "linear::a_library_refuses_what_was_not_planned_and_what_a_graph_cannot_hold",
    "linear::files_of_two_to_five_bits_keep_their_values",
    "linear::files_of_superblocks_are_read_as_they_are",
    "many::warpgroups_give_the_bits_of_chips_without_them",
    "many::blocks_for_many_tokens_are_taken_where_there_are_enough_of_them",
    "rounded::products_match_the_reference_over_their_own_operands_by_blocks_for_few_tokens_and_for_many",
    "w8a8::products_match_the_reference_over_their_own_operands",
    "w8a8_hopper::integers_are_multiplied_as_on_chips_without_warpgroups",
    "wide_experts::only_hopper_multiplies_experts_widely",
    "cuda_formats::a_layer_of_several_types_gives_the_cpus_tokens",
    "cuda_formats::prompts_multiplied_by_wide_products_give_the_cpus_tokens",
    "cuda_formats::prompts_multiplied_by_blocks_for_many_tokens_give_what_those_for_few_give",
    "cuda_formats::floats_of_eight_bits_compute_what_the_cpu_computes_and_stay_what_they_are",
    "cuda_formats::inputs_are_rounded_to_8_bits_where_the_checkpoint_says_so",
    "cuda_formats::integers_of_a_file_are_multiplied_with_int8_activations_where_that_is_chosen",
    "cuda_steps::a_second_step_is_computed_before_the_token_is_known_that_its_draw_hangs_on",
    "cuda_steps::draws_of_the_host_are_made_when_their_step_is_collected_or_the_next_one_is_submitted",
    "cuda_steps::a_decoding_step_is_one_graph_and_allocates_nothing",
    "cuda_sampling::logits_leave_a_device_where_it_does_not_answer_alone",
    "cuda_sampling::a_constraint_is_asked_with_the_token_that_a_step_in_flight_draws",
    "cuda_sampling::a_constraint_that_panics_fails_its_own_row_alone",
    "cuda_ahead::a_step_after_idling_replays_what_was_captured_before_and_its_tokens_are_the_same",
    "cuda_ahead::graphs_are_captured_ahead_as_far_as_memory_goes_and_never_where_none_are_replayed",
    "cuda_ahead::steps_run_without_graphs_where_there_is_no_room_for_them",
    "cuda_ahead::ranks_capture_the_same_graphs",
    "cuda_ahead::the_rank_with_the_least_room_decides",
    "cuda_ahead::nodes_and_models_whose_first_layers_stay_on_the_cpu_capture_ahead_too",
    "cuda_memory::memory_of_keys_and_values_comes_and_goes_and_the_ledger_knows_all_of_it",
    "cuda_memory::a_device_that_maps_no_memory_computes_as_any_other_and_keeps_its_memory",
    "cuda_memory::what_the_kernels_do_not_compute_is_refused_by_name",
    "cuda_memory::a_device_that_is_too_small_says_how_small",
    "cuda_split::a_decoding_step_is_one_graph_on_the_gpu",
    "cuda_split::the_smaller_room_for_keys_and_values_decides_for_both",
    "cuda_split::a_model_that_the_gpu_has_no_room_for_is_computed_by_both",
    "cuda_split::a_device_that_is_lost_ends_the_executor_with_its_own_words",
];
/// Kernels for the memory checker, which takes long.
const CHECKED: [(&str, &[&str]); 3] = [
    ("warpgroups", &["hopper::", "in_steps_of_pages"]),
    (
        "products",
        &["linear::bf16_products", "linear::int4_products", "many::products_of", "experts::mixtures", "w8a8::tokens"],
    ),
    ("others", &["norm::", "heads::", "sample::", "gather::", "moves::", "sharing::", "attention::decoding"]),
];
/// A dry run shows that programs run; what they test has been tested on the shim.
const DRY: [&str; 1] = ["norm"];
const DRY_EXECUTOR: [&str; 1] = ["cuda_sampling"];
/// What the profiler counts of each kernel of a step: its time, the memory's bytes and what both units are used, and why warps wait.
const COUNTED: &str = "gpu__time_duration.sum,dram__bytes.sum,dram__throughput.avg.pct_of_peak_sustained_elapsed,\
sm__throughput.avg.pct_of_peak_sustained_elapsed,sm__warps_active.avg.pct_of_peak_sustained_active,\
launch__grid_size,launch__registers_per_thread,smsp__average_warps_issue_stalled_long_scoreboard_per_issue_active.ratio,\
smsp__average_warps_issue_stalled_barrier_per_issue_active.ratio";
/// Longest silence of a stage: of a test, and of what loads a model or is compiled at first use.
const SILENCE: Duration = Duration::from_secs(20);
const LONG_SILENCE: Duration = Duration::from_secs(60);

/// Every stage. `programs` is where their programs are.
pub fn stages(programs: &Path, model: &Model) -> Outcome<Vec<Stage>> {
    let plan = Plan { own: std::env::current_exe()?, programs, model };
    let measure = |names: &[&str]| names.iter().map(|name| plan.measure(name)).collect::<Vec<_>>();
    Ok([
        measure(&["ceilings"]),
        vec![plan.bits()],
        plan.tests("kernels", if model.is_dry() { &DRY } else { &KERNELS }),
        measure(&["llama-int4", "llama-bf16"]),
        vec![plan.without("overlap", "decode-int4")],
        measure(&["llama-fp8", "small-model", "products", "attention"]),
        vec![plan.torch(), plan.profiled()],
        measure(&["sampler", "rows", "experts", "llama-bf16-wide"]),
        plan.tests("executor", if model.is_dry() { &DRY_EXECUTOR } else { &EXECUTOR }),
        vec![plan.served()],
        measure(&["other-products", "sleep", "llama-two-gpus"]),
        plan.checked(),
        vec![plan.transformers(), plan.llama_cpp()],
    ]
    .concat())
}

/// Whether the device still works.
pub fn probe(model: &Model) -> Outcome<Stage> {
    let plan = Plan { own: std::env::current_exe()?, programs: Path::new(""), model };
    Ok(plan.measure("probe"))
}

struct Plan<'a> {
    /// This program.
    own: PathBuf,
    programs: &'a Path,
    model: &'a Model,
}

impl Plan<'_> {
    fn measure(&self, name: &str) -> Stage {
        let (seconds, kind) = Part::named(name).map_or((0, Kind::Measurement), |part| (part.seconds, part.kind));
        Stage { arguments: self.measured(name), kind, silence: LONG_SILENCE, ..stage(name, seconds, &self.own) }
    }

    fn measured(&self, part: &str) -> Vec<String> {
        vec!["measure".to_owned(), part.to_owned(), self.model.to_string()]
    }

    /// The same without something that the chip has: what that gains.
    fn without(&self, feature: &str, part: &str) -> Stage {
        self.measure(part).without(feature)
    }

    /// Whether products of warps and of warpgroups give the same bits.
    fn bits(&self) -> Stage {
        Stage { kind: Kind::Peer, ..stage("bits", 15, &self.programs.join("bits")) }
    }

    /// The engine, as its users have it.
    fn served(&self) -> Stage {
        let engine = self.programs.join("windlass-engine").to_string_lossy().into_owned();
        let arguments = vec!["serve".to_owned(), engine, self.model.to_string()];
        Stage { arguments, silence: LONG_SILENCE, kind: Kind::Model, ..stage("served", 60, &self.own) }
    }

    /// A stage for each module of a program's tests.
    fn tests(&self, program: &str, modules: &[&str]) -> Vec<Stage> {
        let of = |module: &&str| {
            let arguments = [&[*module][..], &OF_THE_SHIM].concat().into_iter().map(str::to_owned).collect();
            Stage {
                arguments,
                kind: Kind::Tests,
                ..stage(&format!("{program}-{module}"), 40, &self.programs.join(program))
            }
        };
        modules.iter().map(of).collect()
    }

    /// They have nothing to look at where there is no card.
    fn checked(&self) -> Vec<Stage> {
        let all = CHECKED.iter().map(|(kind, tests)| self.checker(kind, tests));
        all.filter(|_| !self.model.is_dry()).collect()
    }

    fn checker(&self, kind: &str, tests: &[&str]) -> Stage {
        let kernels = self.programs.join("kernels").to_string_lossy().into_owned();
        let options = ["--tool", "memcheck", "--error-exitcode", "1", &kernels, "--test-threads", "1"];
        let skipped = OF_THE_SHIM.iter().flat_map(|name| ["--skip", name]);
        let arguments = options.into_iter().chain(tests.iter().copied()).chain(skipped).map(str::to_owned).collect();
        let stage = stage(&format!("memcheck-{kind}"), 60, Path::new("compute-sanitizer"));
        Stage { arguments, kind: Kind::Peer, silence: LONG_SILENCE, ..stage }
    }

    /// Kernels of a few steps, one by one. A dry run has none that a profiler could see.
    fn profiled(&self) -> Stage {
        let options = [
            "--clock-control",
            "none",
            "--csv",
            "--page",
            "raw",
            "--launch-count",
            "70",
            "--kill",
            "on",
            "--metrics",
            COUNTED,
        ];
        let own = self.own.to_string_lossy().into_owned();
        let program = options.map(str::to_owned).into_iter().chain([own]).chain(self.measured("layers"));
        let (program, arguments) = match self.model.is_dry() {
            true => (self.own.clone(), self.measured("layers")),
            false => (PathBuf::from("ncu"), program.collect()),
        };
        Stage { arguments, kind: Kind::Peer, silence: LONG_SILENCE, ..stage("profile", 60, &program) }
    }

    /// What others reach on the same card.
    fn torch(&self) -> Stage {
        self.in_python("torch", "kernels")
    }

    fn transformers(&self) -> Stage {
        self.in_python("transformers", "model")
    }

    fn in_python(&self, name: &str, what: &str) -> Stage {
        let arguments = vec![self.programs.join("torch_peer.py").to_string_lossy().into_owned(), what.to_owned()];
        Stage { arguments, kind: Kind::Peer, silence: LONG_SILENCE, ..stage(name, 60, Path::new("python3")) }
    }

    fn llama_cpp(&self) -> Stage {
        let arguments = vec![self.model.to_string()];
        let stage = stage("llama.cpp", 400, &self.programs.join("llama_cpp_peer"));
        Stage { arguments, silence: LONG_SILENCE, ..stage }
    }
}

impl Stage {
    /// This stage where the chip's own `features` are not used.
    pub fn without(&self, features: &str) -> Stage {
        let name = format!("{} without {features}", self.name);
        Stage { name, variables: BTreeMap::from([(WITHOUT, features.to_owned())]), ..self.clone() }
    }
}

fn stage(name: &str, seconds: u64, program: &Path) -> Stage {
    Stage {
        name: name.to_owned(),
        share: Duration::from_secs(seconds),
        silence: SILENCE,
        program: program.to_owned(),
        arguments: Vec::new(),
        variables: BTreeMap::new(),
        kind: Kind::Measurement,
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::parts::PARTS;

    #[test]
    fn stages_have_names_of_their_own_and_dry_runs_no_memory_checker() {
        for (model, checkers) in [(Model::Generated, 3), (Model::Dry, 0)] {
            let stages = stages(Path::new("programs"), &model).unwrap();
            let names: BTreeSet<&str> = stages.iter().map(|stage| stage.name.as_str()).collect();
            assert_eq!(names.len(), stages.len(), "{names:?}");
            assert_eq!(names.iter().filter(|name| name.contains("memcheck-")).count(), checkers);
        }
    }

    #[test]
    fn every_part_is_measured_by_some_stage() {
        let stages = stages(Path::new("programs"), &Model::Generated).unwrap();
        let measured = |part: &str| stages.iter().any(|stage| stage.arguments.iter().any(|word| word == part));
        for Part { name, .. } in PARTS.into_iter().filter(|part| part.name != "probe") {
            assert!(measured(name), "{name}");
        }
    }
}
