//! Layouts of weights on a GPU, and the products that each of them goes through.

use crate::common::driver::{Job, generate, sample_row};
use crate::common::rows::{plan, row};
use crate::common::tiny::Tiny;
use crate::cuda::{
    APART, APART_IF_FLOAT8, APART_IF_ROUNDED, GENERATED, NEAR_TIE, VOCABULARY, agrees_with_the_cpu, checkpoint, device,
    driver, family, loaded, most_regret, options, step, tiny,
};
use crate::{coded, packed};
use serde_json::json;
use windlass_cuda_shim::{HostMachine, Issued, Kernels};
use windlass_engine_core::executor::Executor;
use windlass_engine_core::plan::{InputToken, PlanRow, SampleRow};
use windlass_engine_core::request::Sampling;
use windlass_engine_model::cuda::{CudaModel, Replay};
use windlass_engine_model::{ActivationType, KvBudget, LoadOptions, Quantization, load, survey};
use windlass_kernels::WeightType;
use windlass_kernels::cuda::Kernel;

/// A layer's query and key in 6 bits, its value and what goes down in 4: a product of its own for each, none of them in bf16.
/// (The other way round, as files have it, random minimums of 4 bits make scores so sharp that rounding alone is 0.5 apart.)
#[test]
fn a_layer_of_several_types_gives_the_cpus_tokens() {
    let mixed = Tiny { other: Some(WeightType::Q4K), tied: false, ..tiny(WeightType::Q6K) };
    let checkpoint = checkpoint(mixed);
    agrees_with_the_cpu("Q6_K with Q4_K", &checkpoint, &options(), APART);
    let driver = driver();
    let mut executor = loaded(&checkpoint, &driver.device(), Replay::Eager).executor;
    step(&mut executor, plan(vec![row(InputToken::Known(1), 0)]));
    let issued = driver.issued();
    let kernels = [Kernel::LinearQ6KT8, Kernel::LinearQ4KT8, Kernel::LinearBf16T8];
    let found = kernels.map(|kernel| issued.iter().filter(|work| **work == Issued::Launch(kernel)).count());
    // Query and key, what attention gives, gate and up in each layer, and the head.
    assert_eq!(found, [2 * 3 + 1, 2 * 2, 0]);
}

/// A step with more tokens of prompts than a block of these products has, by warpgroups and where a chip has none; nothing of it
/// where no token may depend on what is computed beside it.
#[test]
fn prompts_multiplied_by_wide_products_give_the_cpus_tokens() {
    let [halves, codes] =
        [WeightType::BF16, WeightType::Q4_1].map(|kind| checkpoint(Tiny { tied: false, ..tiny(kind) }));
    // Together more than Hopper multiplies in the bits of few tokens even so; each with its answer a block.
    let prompt = |job: u32| (0..52).map(|token| (token * 37 + job) % VOCABULARY).collect::<Vec<u32>>();
    let jobs: Vec<Job> = (0..5).map(|job| Job::greedy(&prompt(job))).collect();
    let wide = [Kernel::GemmHopperBf16, Kernel::GemmBf16, Kernel::Int4Hopper];
    for (checkpoint, capability, batch_invariant, expected) in [
        (&halves, (9, 0), false, [2 * 4, 0, 0]),
        (&halves, (8, 0), false, [0, 2 * 4, 0]),
        (&halves, (10, 0), false, [0, 2 * 4, 0]),
        (&halves, (9, 0), true, [0, 0, 0]),
        (&codes, (9, 0), false, [0, 0, 2 * 4]),
        (&codes, (8, 0), false, [0, 0, 0]),
        (&codes, (12, 0), false, [0, 0, 0]),
    ] {
        let kv = KvBudget::Blocks(5);
        let options = LoadOptions { max_step_tokens: 320, max_sequences: 5, kv, batch_invariant, ..options() };
        let driver = HostMachine::new(Kernels::Run, 7).with_capability(capability).driver(0, 1 << 28);
        let model = CudaModel::load(checkpoint, &options, &[driver.device()]).unwrap();
        let mut gpu = model.start(options.kv, Replay::Graphs).unwrap().executor;
        let answers = generate(&mut gpu, &jobs, GENERATED, 64, 2);
        let issued = driver.issued();
        let found = wide.map(|kernel| issued.iter().filter(|work| **work == Issued::Launch(kernel)).count());
        assert_eq!(found, expected, "{capability:?}");
        let mut cpu = load(checkpoint, &options).unwrap().executor;
        for (job, answer) in jobs.iter().zip(&answers) {
            let regret = most_regret(&mut cpu, &job.prompt, answer);
            assert!(regret <= NEAR_TIE, "{capability:?}: {answer:?} is {regret} from the CPU's choices");
        }
    }
}

/// No matrix of a GGUF file in these types becomes another: the minimums of those that have none, and bytes for scales of six bits,
/// are all that is added.
#[test]
fn quantized_files_take_about_what_they_take_on_disk() {
    use WeightType::{IQ4XS, Q2K, Q3K, Q4_0, Q4_1, Q4K, Q5_0, Q5_1, Q5K, Q6K, Q8_0};
    for kind in [Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2K, Q3K, Q4K, Q5K, Q6K, IQ4XS] {
        let checkpoint = checkpoint(Tiny { tied: false, ..tiny(kind) });
        let model = CudaModel::load(&checkpoint, &options(), &[device(7)]).unwrap();
        let surveyed = survey(&checkpoint, None).unwrap();
        let ratio = model.shape().weight_bytes as f64 / surveyed.shape.weight_bytes as f64;
        assert!((0.99..1.12).contains(&ratio), "{}: {ratio} of what was promised", kind.name());
    }
}

/// The same tokens, and the same log probability to the bit, whichever blocks a prompt's products have.
#[test]
fn prompts_multiplied_by_blocks_for_many_tokens_give_what_those_for_few_give() {
    let prompt: Vec<u32> = (0..50).map(|token| token * 37 % VOCABULARY).collect();
    use WeightType::{BF16, IQ4XS, Q2K, Q3K, Q4_1, Q4K, Q5_1, Q6K, Q8_0};
    let halves = [BF16, Q4_1, Q5_1, Q8_0, Q2K, Q3K, Q4K, Q6K, IQ4XS].map(|kind| (kind, false));
    for (kind, int8_activations) in halves.into_iter().chain([Q4_1, Q8_0, Q2K, Q6K].map(|kind| (kind, true))) {
        let checkpoint = checkpoint(Tiny { tied: false, ..tiny(kind) });
        let run = |multiprocessors: u32| {
            let options = LoadOptions { max_step_tokens: 64, int8_activations, ..options() };
            // Warpgroups, which multiply bf16 on Hopper, have blocks of their own.
            let capability = if kind == BF16 { (8, 0) } else { (9, 0) };
            let machine = HostMachine::new(Kernels::Run, 7).with_capability(capability);
            let machine = machine.with_multiprocessors(multiprocessors);
            let driver = machine.driver(0, 1 << 28);
            let model = CudaModel::load(&checkpoint, &options, &[driver.device()]).unwrap();
            let mut gpu = model.start(options.kv, Replay::Graphs).unwrap().executor;
            let found = (told(&mut gpu, &prompt), generate(&mut gpu, &[Job::greedy(&prompt)], GENERATED, 64, 2));
            let is_many =
                |work: &&Issued| matches!(work, Issued::Launch(kernel) if kernel.spec().file.starts_with("many"));
            (driver.issued().iter().filter(is_many).count(), found)
        };
        let ((many, found), (none, expected)) = (run(1), run(132));
        assert!(many >= 2 * 2 * 4 && none == 0, "{}: {many} launches, and {none}", kind.name());
        assert_eq!(found, expected, "{}", kind.name());
    }
}

/// Log probability of what is chosen behind a prompt.
fn told(executor: &mut dyn Executor, prompt: &[u32]) -> f32 {
    let tokens = prompt.iter().copied().map(InputToken::Known).collect();
    let sample = Some(SampleRow { logprobs: Some(0), ..sample_row(&Sampling::GREEDY) });
    let asked = PlanRow { tokens, sample, ..row(InputToken::Known(0), 0) };
    let ticket = executor.submit(plan(vec![asked])).unwrap();
    executor.collect(ticket).unwrap().scores[0].sampled[0].chosen.logprob
}

/// Floats become what they become on the CPU, and take what the header promised: symmetric groups have a minimum
/// besides, which the kernels read of all codes of 4 bits, and eight-bit floats a scale for a row instead of each 32.
#[test]
fn what_is_quantized_at_load_computes_what_the_cpu_computes_and_takes_what_fit_says() {
    let experts = json!({"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 256,
        "num_hidden_layers": 2, "tie_word_embeddings": false});
    let dense = checkpoint(Tiny { tied: false, ..tiny(WeightType::BF16) });
    let tied = checkpoint(tiny(WeightType::F16));
    let all = Quantization::ALL.map(|quantization| (&dense, quantization));
    let mixture = family("mixtral", false, experts);
    let [int8, fp8, int4] = [Quantization::INT8, Quantization::FP8, Quantization::INT4];
    let others = [(&tied, int4), (&mixture, int8), (&mixture, fp8), (&mixture, int4)];
    for (checkpoint, quantization) in all.into_iter().chain(others) {
        let options = LoadOptions { quantization: Some(quantization), ..options() };
        let (bound, least, most) = match quantization.name() {
            "fp8" => (APART_IF_FLOAT8, 0.94, 0.99),
            "int4-sym" => (APART, 0.99, 5.0 / 4.5),
            "int4-g64-sym" => (APART, 0.99, 4.5 / 4.25),
            "int4-g128-sym" => (APART, 0.99, 4.25 / 4.125),
            _ => (APART, 0.99, 1.001),
        };
        agrees_with_the_cpu(quantization.name(), checkpoint, &options, bound);
        let model = CudaModel::load(checkpoint, &options, &[device(7)]).unwrap();
        let surveyed = survey(checkpoint, Some(quantization)).unwrap();
        let ratio = model.shape().weight_bytes as f64 / surveyed.shape.weight_bytes as f64;
        assert!((least..most).contains(&ratio), "{}: {ratio} of what was promised", quantization.name());
    }
}

/// Codes of 2 to 8 bits with zero points and without, groups of all widths, and inputs in an order of their own.
#[test]
fn what_other_tools_quantized_computes_what_the_cpu_computes() {
    for (name, checkpoint) in packed::checkpoints() {
        let bound = if name == packed::ROUNDED { APART_IF_ROUNDED } else { APART };
        agrees_with_the_cpu(name, &checkpoint, &options(), bound);
    }
}

/// Matrices of one decoder in three forms.
#[test]
fn a_checkpoint_of_several_groups_computes_what_the_cpu_computes() {
    agrees_with_the_cpu("several groups", &packed::mixed::checkpoint(), &options(), APART_IF_ROUNDED);
}

/// Eight-bit floats are multiplied as they are, where the CPU rounds them, and so are their inputs where the checkpoint says so;
/// tables become integers.
#[test]
fn floats_of_eight_bits_compute_what_the_cpu_computes_and_stay_what_they_are() {
    for (name, rounds, checkpoint, _) in coded::checkpoints() {
        let bound = match (name.contains("fp8"), rounds) {
            (false, _) => APART,
            (true, false) => APART_IF_ROUNDED,
            (true, true) => APART_IF_FLOAT8,
        };
        agrees_with_the_cpu(name, &checkpoint, &options(), bound);
        let driver = driver();
        let model = CudaModel::load(&checkpoint, &options(), &[driver.device()]).unwrap();
        step(&mut model.start(options().kv, Replay::Eager).unwrap().executor, plan(vec![row(InputToken::Known(1), 0)]));
        let issued = driver.issued();
        let count = |kernel| issued.iter().filter(|work| **work == Issued::Launch(kernel)).count();
        let found = [Kernel::LinearFp8T8, Kernel::W8a8Fp8Few].map(count);
        let expected = match (name.contains("fp8"), rounds) {
            (false, _) => [0, 0],
            (true, false) => [4 * 4, 0],
            (true, true) => [0, 4 * 4],
        };
        assert_eq!(found, expected, "{name}");
    }
}

/// Inputs of every product of the layers, where the checkpoint says that they were meant to be: many tokens and few.
#[test]
fn inputs_are_rounded_to_8_bits_where_the_checkpoint_says_so() {
    for (name, layers) in [(packed::ROUNDED, 4), ("compressed-tensors 8 bits", 0)] {
        let (options, driver) = (LoadOptions { max_step_tokens: 64, ..options() }, driver());
        let model = CudaModel::load(&packed::checkpoint(name), &options, &[driver.device()]).unwrap();
        let mut executor = model.start(options.kv, Replay::Eager).unwrap().executor;
        for (tokens, kernel) in [(1, Kernel::W8a8Int8Few), (40, Kernel::W8a8Int8Many)] {
            let before = driver.issued().len();
            let tokens = vec![InputToken::Known(1); tokens];
            step(&mut executor, plan(vec![PlanRow { tokens, ..row(InputToken::Known(1), 0) }]));
            let issued = driver.issued().split_off(before);
            let count = |kernel| issued.iter().filter(|work| **work == Issued::Launch(kernel)).count();
            let rounding = [Kernel::RmsNormInt8, Kernel::QuantizeInt8, Kernel::SiluMulInt8].map(count);
            assert_eq!((rounding, count(kernel)), ([2 * layers, layers, layers], 4 * layers), "{name}: {issued:?}");
            // Of the head alone: a layer norms nothing that it does not round.
            assert!(layers == 0 || count(Kernel::RmsNorm) == 1, "{name}: {issued:?}");
        }
    }
}

/// Both sides round inputs, those of the head too, but here they were bf16 before, which now and then makes another byte of one: one
/// rounding and one product of integers for each.
#[test]
fn integers_of_a_file_are_multiplied_with_int8_activations_where_that_is_chosen() {
    use WeightType::{BF16, IQ4NL, IQ4XS, MXFP4, Q2K, Q3K, Q4_0, Q4_1, Q4K, Q5_0, Q5_1, Q5K, Q6K, Q8_0};
    let options =
        LoadOptions { activations: ActivationType::Int8, int8_activations: true, max_step_tokens: 64, ..options() };
    for kind in [Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, IQ4NL, MXFP4, Q2K, Q3K, Q4K, Q5K, Q6K, IQ4XS, BF16] {
        // Scales and minimums of sub-blocks that know nothing of each other make these 1.75 times as large as the others, and
        // attention so sharp that bf16 between the layers alone is 0.4 apart.
        let spread = if matches!(kind, Q4K | Q5K) { 1.0 / 1.75 } else { 1.0 };
        let checkpoint = checkpoint(Tiny { tied: false, spread, ..tiny(kind) });
        agrees_with_the_cpu(kind.name(), &checkpoint, &options, APART_IF_ROUNDED);
        let driver = driver();
        let model = CudaModel::load(&checkpoint, &options, &[driver.device()]).unwrap();
        let mut executor = model.start(options.kv, Replay::Eager).unwrap().executor;
        for tokens in [1, 40] {
            let before = driver.issued().len();
            let tokens = vec![InputToken::Known(1); tokens];
            step(&mut executor, plan(vec![PlanRow { tokens, ..row(InputToken::Known(1), 0) }]));
            let issued = driver.issued().split_off(before);
            let roundings = issued.iter().filter(|work| **work == Issued::Launch(Kernel::RoundInputs)).count();
            let of_bytes =
                |work: &&Issued| matches!(work, Issued::Launch(kernel) if kernel.spec().file == "rounded.cu");
            let products = issued.iter().filter(of_bytes).count() - roundings;
            let expected = if kind == BF16 { 0 } else { 2 * 4 + 1 };
            assert_eq!([roundings, products], [expected; 2], "{}: {issued:?}", kind.name());
        }
    }
}
