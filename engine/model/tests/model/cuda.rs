//! The executor on a GPU, mostly on the stand-in for one: the kernels run from their sources, and the rules are CUDA's.
//! With `WINDLASS_GPU` set it is this machine's first NVIDIA GPU where a test does not look behind the driver.

use std::slice;
use std::sync::Arc;

use crate::common::driver::{Job, generate, sample_row};
use crate::common::hub::{Family, config, llama_oracle};
use crate::common::rows::{plan, row, tables};
use crate::common::tiny::Tiny;
use crate::{coded, packed};
use serde_json::{Value, json};
use windlass_checkpoint::Checkpoint;
use windlass_cuda_shim::{HostDriver, HostMachine, Issued, Kernels, device_under_test};
use windlass_engine_contract::memory::KvDataType;
use windlass_engine_core::draft::{DraftTree, PromptLookup};
use windlass_engine_core::engine::{Engine, EngineConfig};
use windlass_engine_core::executor::{Executor, KvGroups};
use windlass_engine_core::plan::{BlockId, InputToken, Move, PlanRow, RowOutput, SampleRow, ScoreRow, StepPlan};
use windlass_engine_core::request::{Request, RequestId, Sampling};
use windlass_engine_model::cuda::{CudaExecutor, CudaModel, Device, LoadedCuda, Replay};
use windlass_engine_model::{
    ActivationType, DecoderConfig, KvBudget, LoadOptions, Quantization, SwapSpace, load, survey,
};
use windlass_kernels::WeightType;
use windlass_kernels::cuda::Kernel;

pub const GENERATED: usize = 12;
pub const VOCABULARY: u32 = 128;
/// Log probabilities that bf16 activations may confuse.
pub const NEAR_TIE: f32 = 0.06;
/// Log probabilities that they may give a token otherwise.
pub const APART: f32 = 0.08;
/// As much where attention is sharp and four layers pass it on.
const APART_IF_SHARP: f32 = 0.3;
/// As much where inputs of products are rounded to 8 bits.
const APART_IF_ROUNDED: f32 = 0.3;
/// As much where they are rounded to floats of 8 bits, which have three bits of fraction.
const APART_IF_FLOAT8: f32 = 0.45;
/// As many as the texts of a test take: none is left over for what is nobody's.
pub const BLOCKS: u32 = 4;

pub fn options() -> LoadOptions {
    LoadOptions {
        threads: 1,
        activations: ActivationType::Int16,
        block_tokens: 64,
        kv: KvBudget::Blocks(BLOCKS),
        max_sequences: 4,
        max_step_tokens: 32,
        max_model_tokens: Some(256),
        ..LoadOptions::default()
    }
}

pub fn tiny(kind: WeightType) -> Tiny {
    Tiny { vocabulary: VOCABULARY.into(), ..Tiny::of(kind) }
}

pub fn checkpoint(tiny: Tiny) -> Checkpoint {
    Checkpoint::from_bytes(tiny.build().build()).unwrap()
}

/// The stand-in's driver.
pub fn driver() -> Arc<HostDriver> {
    HostMachine::new(Kernels::Run, 7).driver(0, 1 << 28)
}

/// What so many bytes take where memory is mapped.
pub fn whole_pieces(driver: &Arc<HostDriver>, bytes: u64) -> u64 {
    bytes.next_multiple_of(driver.device().facts().map_granularity.unwrap() as u64)
}

/// A device whose kernels run in an order that `seed` decides.
pub fn device(seed: u64) -> Device {
    device_under_test(seed, 1 << 28).unwrap()
}

fn loaded(checkpoint: &Checkpoint, device: &Device, replay: Replay) -> LoadedCuda {
    CudaModel::load(checkpoint, &options(), slice::from_ref(device)).unwrap().start(options().kv, replay).unwrap()
}

fn executor(checkpoint: &Checkpoint, replay: Replay) -> CudaExecutor {
    loaded(checkpoint, &device(7), replay).executor
}

pub fn jobs(sampling: &Sampling) -> Vec<Job> {
    let prompt = |job: u32| (0..5 + 7 * job).map(|token| (token * 37 + job) % VOCABULARY).collect();
    (0..4).map(|job| Job { prompt: prompt(job), sampling: sampling.clone() }).collect()
}

pub fn step(executor: &mut dyn Executor, plan: StepPlan) -> Vec<RowOutput> {
    let ticket = executor.submit(plan).unwrap();
    executor.collect(ticket).unwrap().rows
}

/// Log probability that an answer's tokens lack to the CPU's own choices after the same text, the most of them.
pub fn most_regret(cpu: &mut dyn Executor, prompt: &[u32], answer: &[u32]) -> f32 {
    let text = [prompt, answer].concat();
    let mut most = 0.0_f32;
    for (position, pair) in text.windows(2).enumerate() {
        let score = Some(ScoreRow { targets: vec![pair[1]], top: 1 });
        let (token, blocks) = (InputToken::Known(pair[0]), tables(cpu));
        let asked = PlanRow { sample: None, score, blocks, ..row(token, position as u32) };
        let ticket = cpu.submit(plan(vec![asked])).unwrap();
        let scores = &cpu.collect(ticket).unwrap().scores[0].prompt[0];
        if position + 1 >= prompt.len() {
            most = most.max(scores.top[0].logprob - scores.chosen.logprob);
        }
    }
    most
}

/// Every layout of weights that the kernels have, and one that becomes bf16. The head is not the embedding: what the layers
/// say decides. Where the CPU's first two choices are as near as bf16 activations are coarse, either may be taken.
#[test]
fn a_models_greedy_tokens_are_the_cpus() {
    for kind in [
        WeightType::BF16,
        WeightType::Q4_1,
        WeightType::Q8_0,
        WeightType::Q4K,
        WeightType::Q5K,
        WeightType::Q6K,
        WeightType::Q3K,
    ] {
        let checkpoint = checkpoint(Tiny { tied: false, ..tiny(kind) });
        let mut gpu = executor(&checkpoint, Replay::Graphs);
        let jobs = jobs(&Sampling::GREEDY);
        let found = generate(&mut gpu, &jobs, GENERATED, 32, 2);
        let mut cpu = load(&checkpoint, &options()).unwrap().executor;
        for (job, answer) in jobs.iter().zip(&found) {
            let regret = most_regret(&mut cpu, &job.prompt, answer);
            assert!(regret <= NEAR_TIE, "{}: {answer:?} is {regret} from the CPU's choices", kind.name());
        }
        assert!(gpu.decoder().graphs() > 0);
    }
}

/// More than a product of decoding has rows.
#[test]
fn many_query_heads_that_share_a_key_head_give_the_cpus_tokens() {
    let many = Tiny { heads: 32, kv_heads: 1, rope_dims: 8, tied: false, ..tiny(WeightType::BF16) };
    agrees_with_the_cpu("32 heads", &checkpoint(many), &options(), APART);
}

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
    let prompt = |job: u32| (0..50).map(|token| (token * 37 + job) % VOCABULARY).collect::<Vec<u32>>();
    let jobs: Vec<Job> = (0..3).map(|job| Job::greedy(&prompt(job))).collect();
    let wide = [Kernel::GemmHopperBf16, Kernel::GemmBf16, Kernel::Int4Hopper];
    for (checkpoint, capability, batch_invariant, expected) in [
        (&halves, (9, 0), false, [2 * 4, 0, 0]),
        (&halves, (8, 0), false, [0, 2 * 4, 0]),
        (&halves, (9, 0), true, [0, 0, 0]),
        (&codes, (9, 0), false, [0, 0, 2 * 4]),
        (&codes, (8, 0), false, [0, 0, 0]),
    ] {
        let options = LoadOptions { max_step_tokens: 160, batch_invariant, ..options() };
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

/// Log probabilities of each of 30 tokens after those before it.
fn scored(executor: &mut dyn Executor) -> Vec<f32> {
    let tokens: Vec<u32> = (0..30).map(|token| token * 31 % VOCABULARY).collect();
    let score = ScoreRow { targets: tokens[1..].to_vec(), top: 0 };
    let tokens = tokens.into_iter().map(InputToken::Known).collect();
    let row =
        PlanRow { tokens, sample: None, score: Some(score), blocks: tables(executor), ..row(InputToken::Known(0), 0) };
    let ticket = executor.submit(plan(vec![row])).unwrap();
    let output = executor.collect(ticket).unwrap();
    output.scores[0].prompt.iter().map(|token| token.chosen.logprob).collect()
}

/// The most that two executors' log probabilities are apart.
pub fn apart(one: &mut dyn Executor, other: &mut dyn Executor) -> f32 {
    let (one, other) = (scored(one), scored(other));
    assert_eq!(one.len(), 29);
    one.iter().zip(&other).map(|(one, other)| (one - other).abs()).fold(0.0, f32::max)
}

/// A head of its own, and factors of the rotary frequencies.
#[test]
fn what_the_model_thinks_of_each_token_is_near_what_the_cpu_thinks() {
    let checkpoint = checkpoint(Tiny { tied: false, rope_factors: true, ..tiny(WeightType::BF16) });
    let worst = apart(&mut load(&checkpoint, &options()).unwrap().executor, &mut executor(&checkpoint, Replay::Graphs));
    println!("log probabilities are at most {worst} apart");
    assert!(worst < 0.05, "{worst}");
}

/// A small random checkpoint of a family with what only some have.
pub fn family(model_type: &str, head_norms: bool, more: Value) -> Checkpoint {
    let config = config(model_type, more);
    let family = Family { config, biases: model_type.starts_with("qwen2"), head_norms, oracle: llama_oracle };
    family.open(&family.safetensors())
}

fn gemma(more: Value) -> Value {
    let mut keys = json!({"hidden_act": null, "hidden_activation": "gelu_pytorch_tanh", "head_dim": 48,
        "query_pre_attn_scalar": 48, "final_logit_softcapping": null});
    keys.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    keys
}

/// Windows of attention in all layers or in some, caps of scores and of logits, norms behind blocks, another activation,
/// scaled embeddings, heads of 48 and of 256, rotary embeddings of their own, and LongRoPE.
#[test]
fn families_with_more_than_llama_compute_what_the_cpu_computes() {
    let factors: Vec<f32> = (0..8).map(|pair| 1.0 + pair as f32 / 4.0).collect();
    let longrope =
        json!({"type": "longrope", "short_factor": factors, "long_factor": factors, "attention_factor": 1.2});
    let phi = json!({"partial_rotary_factor": 0.5, "original_max_position_embeddings": 64, "rope_scaling": longrope,
        "tie_word_embeddings": false});
    let sharp = json!({"sliding_window": 20, "sliding_window_pattern": 2, "rope_local_base_freq": 1000.0});
    // Few layers, and scores that are not large: in bf16 activations differ more where attention is sharp.
    let capped = json!({"final_logit_softcapping": 3.0, "num_hidden_layers": 1});
    let second = json!({"sliding_window": 20, "attn_logit_softcapping": 1.0, "final_logit_softcapping": 3.0,
        "head_dim": 256, "query_pre_attn_scalar": 4096, "num_hidden_layers": 2});
    let local = json!({"sliding_window": 20, "sliding_window_pattern": 2, "rope_local_base_freq": 1000.0,
        "query_pre_attn_scalar": 4096, "num_hidden_layers": 2});
    for (name, bound, checkpoint) in [
        ("mistral", APART, family("mistral", false, json!({"sliding_window": 20, "tie_word_embeddings": false}))),
        ("gemma", APART, family("gemma", false, gemma(capped))),
        ("gemma2", APART, family("gemma2", false, gemma(second))),
        ("gemma3", APART, family("gemma3_text", true, gemma(local))),
        ("gemma3, sharp", APART_IF_SHARP, family("gemma3_text", true, gemma(sharp))),
        ("phi3", APART, family("phi3", false, phi)),
    ] {
        agrees_with_the_cpu(name, &checkpoint, &options(), bound);
    }
}

/// Experts of which a token uses some or all, with one that every token goes through or without.
#[test]
fn mixtures_of_experts_compute_what_the_cpu_computes() {
    let qwen = |norm_topk_prob: bool, used: u32, more: Value| {
        let mut keys = json!({"num_experts": 6, "num_experts_per_tok": used, "moe_intermediate_size": 96,
            "norm_topk_prob": norm_topk_prob, "decoder_sparse_step": 1, "use_sliding_window": false,
            "tie_word_embeddings": false});
        keys.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        keys
    };
    let mixtral = json!({"num_local_experts": 4, "num_experts_per_tok": 2, "tie_word_embeddings": false});
    let shared = json!({"shared_expert_intermediate_size": 160});
    for (name, checkpoint) in [
        ("mixtral", family("mixtral", false, mixtral)),
        ("qwen2_moe", family("qwen2_moe", false, qwen(false, 6, shared))),
        ("qwen3_moe", family("qwen3_moe", true, qwen(true, 3, json!({"head_dim": 64, "mlp_only_layers": []})))),
    ] {
        agrees_with_the_cpu(name, &checkpoint, &options(), APART);
    }
}

/// Asks both for log probabilities, which are at most `bound` apart, and the CPU for what it thinks of the GPU's greedy tokens.
fn agrees_with_the_cpu(name: &str, checkpoint: &Checkpoint, options: &LoadOptions, bound: f32) {
    let shape = DecoderConfig::read(checkpoint).unwrap().shape(0);
    let groups = KvGroups::of(&shape, options.max_model_tokens.unwrap()).count();
    let options = LoadOptions { kv: KvBudget::Blocks(groups * BLOCKS), ..options.clone() };
    let model = CudaModel::load(checkpoint, &options, &[device(7)]).unwrap();
    let mut gpu = model.start(options.kv, Replay::Graphs).unwrap().executor;
    let mut cpu = load(checkpoint, &options).unwrap().executor;
    let worst = apart(&mut cpu, &mut gpu);
    let jobs = jobs(&Sampling::GREEDY);
    let found = generate(&mut gpu, &jobs, GENERATED, 32, 2);
    let regret = jobs.iter().zip(&found).map(|(job, answer)| most_regret(&mut cpu, &job.prompt, answer));
    let regret = regret.fold(0.0, f32::max);
    println!("{name}: log probabilities at most {worst} apart, choices {regret}");
    assert!(worst < bound && regret <= bound, "{name}: {worst} apart, and {regret} from the CPU's choices");
}

/// Floats become what they become on the CPU, and take what the header promised: symmetric groups of 32 have a minimum
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
    for (name, expected) in [(packed::ROUNDED, 4 * 4), ("compressed-tensors 8 bits", 0)] {
        let (options, driver) = (LoadOptions { max_step_tokens: 64, ..options() }, driver());
        let model = CudaModel::load(&packed::checkpoint(name), &options, &[driver.device()]).unwrap();
        let mut executor = model.start(options.kv, Replay::Eager).unwrap().executor;
        for (tokens, kernel) in [(1, Kernel::W8a8Int8Few), (40, Kernel::W8a8Int8Many)] {
            let before = driver.issued().len();
            let tokens = vec![InputToken::Known(1); tokens];
            step(&mut executor, plan(vec![PlanRow { tokens, ..row(InputToken::Known(1), 0) }]));
            let issued = driver.issued().split_off(before);
            let count = |kernel| issued.iter().filter(|work| **work == Issued::Launch(kernel)).count();
            assert_eq!([count(Kernel::QuantizeInt8), count(kernel)], [expected; 2], "{name}: {issued:?}");
        }
    }
}

/// A key and a value of each token and head has a scale of its own, as on the CPU; copied blocks keep them.
#[test]
fn a_cache_in_bytes_gives_what_the_cpus_gives_and_takes_what_it_should() {
    for kind in [KvDataType::Fp8, KvDataType::Int8] {
        let options = LoadOptions { kv_data_type: kind, ..options() };
        let checkpoint = checkpoint(Tiny { tied: false, ..tiny(WeightType::BF16) });
        agrees_with_the_cpu(kind.name(), &checkpoint, &options, APART);
        let driver = driver();
        let free = || driver.device().driver().memory().unwrap().free_bytes as u64;
        let model = CudaModel::load(&checkpoint, &options, &[driver.device()]).unwrap();
        let loaded = model.start(options.kv, Replay::Graphs).unwrap();
        let (ledger, mut executor) = (loaded.ledger(), loaded.executor);
        copied_blocks_are_read_alike(&mut executor);
        let awake = free();
        executor.hold_kv(false).unwrap();
        assert_eq!(free() - awake, whole_pieces(&driver, ledger.kv), "{}", kind.name());
    }
    let odd = Tiny { hidden: 128, heads: 16, kv_heads: 16, rope_dims: 8, ..tiny(WeightType::BF16) };
    let options = LoadOptions { kv_data_type: KvDataType::Int8, ..options() };
    let refused = CudaModel::load(&checkpoint(odd), &options, &[device(7)]).map(drop).unwrap_err().to_string();
    assert!(refused.contains("a KV cache in bytes with heads of 8 values"), "{refused}");
}

/// What lies before the window is given up: its pages may hold anything.
#[test]
fn blocks_before_the_windows_are_given_up_and_no_token_changes() {
    let local = json!({"sliding_window": 20, "sliding_window_pattern": 2, "rope_local_base_freq": 1000.0,
        "query_pre_attn_scalar": 4096, "num_hidden_layers": 2});
    let windowed = KvGroups::one_windowed(20 + 63);
    // Four blocks of each group hold the sequence.
    for (checkpoint, groups, most) in [
        (family("mistral", false, json!({"sliding_window": 20, "num_hidden_layers": 2})), windowed, 3),
        (family("gemma3_text", true, gemma(local)), KvGroups { full: 1, ..windowed }, 4 + 3),
    ] {
        gives_up_what_is_before_its_windows(&checkpoint, groups, most);
    }
}

fn gives_up_what_is_before_its_windows(checkpoint: &Checkpoint, groups: KvGroups, most: u32) {
    const PROMPT: u32 = 200;
    let options = LoadOptions { max_sequences: 2, kv: KvBudget::Blocks(groups.count() * BLOCKS), ..options() };
    let executor = || {
        let model = CudaModel::load(checkpoint, &options, &[device(7)]).unwrap();
        model.start(options.kv, Replay::Graphs).unwrap().executor
    };
    let prompt: Vec<u32> = (0..PROMPT).map(|index| index * 11 % VOCABULARY).collect();
    let expected = generate(&mut executor(), &[Job::greedy(&prompt)], GENERATED, 32, 1);
    assert_eq!(executor().geometry().groups, groups);
    let mut engine = Engine::new(executor(), EngineConfig { enable_prefix_cache: false, ..EngineConfig::PLAIN });
    engine.add(Request::greedy(RequestId(0), prompt, GENERATED as u32), 0.0).unwrap();
    let (mut text, mut held) = (Vec::new(), u32::MAX);
    while !engine.is_idle() {
        text.extend(engine.turn(0.0).unwrap().updates.into_iter().flat_map(|update| update.tokens));
        if !text.is_empty() && !engine.is_idle() {
            held = engine.stats().kv.held.min(held);
        }
    }
    assert_eq!(text, expected[0]);
    assert!(held <= most, "{held} blocks of a sequence of four in {groups:?}");
}

#[test]
fn graphs_chunks_steps_in_flight_and_the_order_of_threads_change_no_token() {
    let checkpoint = checkpoint(tiny(WeightType::BF16));
    for sampling in
        [Sampling::GREEDY, Sampling { temperature: 0.8, top_p: 0.9, top_k: 20, seed: 3, ..Sampling::GREEDY }]
    {
        let text = |replay, seed, chunk, in_flight| {
            let mut executor = loaded(&checkpoint, &device(seed), replay).executor;
            generate(&mut executor, &jobs(&sampling), GENERATED, chunk, in_flight)
        };
        let graphs = text(Replay::Graphs, 7, 9, 2);
        assert_eq!(graphs, text(Replay::Eager, 8, 32, 2));
        assert_eq!(graphs, text(Replay::Graphs, 9, 9, 1), "fed back on the device and through the host");
    }
}

/// A bias is the host's affair: such a step waits for the one in flight, and its token is fed to the next.
#[test]
fn what_only_the_host_samples_is_mixed_with_what_the_device_does() {
    let checkpoint = checkpoint(tiny(WeightType::BF16));
    let mut jobs = jobs(&Sampling::GREEDY);
    jobs[1].sampling = Sampling { logit_bias: vec![(5, 100.0)], ..Sampling::GREEDY };
    let together = generate(&mut executor(&checkpoint, Replay::Graphs), &jobs, 4, 32, 2);
    assert_eq!(together[1], [5; 4]);
    let alone = generate(&mut executor(&checkpoint, Replay::Graphs), &jobs[..1], 4, 32, 2);
    assert_eq!(together[0], alone[0]);
}

#[test]
fn a_decoding_step_is_one_graph_and_allocates_nothing() {
    let (checkpoint, driver) = (checkpoint(tiny(WeightType::BF16)), driver());
    let mut executor = loaded(&checkpoint, &driver.device(), Replay::Graphs).executor;
    step(&mut executor, plan(vec![row(InputToken::Known(1), 0)]));
    let (before, free) = (driver.issued().len(), driver.device().driver().memory().unwrap());
    step(&mut executor, plan(vec![row(InputToken::Known(2), 1)]));
    let issued = driver.issued()[before..].to_vec();
    assert_eq!(driver.device().driver().memory().unwrap(), free);
    let graphs: Vec<usize> =
        issued.iter().filter_map(|work| if let Issued::Graph(pieces) = work { Some(*pieces) } else { None }).collect();
    // Two layers of ten kernels (a sequence may have two splits), and four around them.
    assert_eq!(graphs, [2 * 10 + 4], "{issued:?}");
    assert_eq!(issued.iter().filter(|work| matches!(work, Issued::Launch(_))).count(), 1, "the draw: {issued:?}");
}

#[test]
fn a_copied_block_is_read_like_the_one_it_was_copied_from() {
    copied_blocks_are_read_alike(&mut executor(&checkpoint(tiny(WeightType::BF16)), Replay::Graphs));
}

pub fn copied_blocks_are_read_alike(executor: &mut dyn Executor) {
    step(executor, plan(vec![row(InputToken::Known(9), 0)]));
    let told = || SampleRow { logprobs: Some(0), ..sample_row(&Sampling::GREEDY) };
    let asks = |block: u32, position: u32| PlanRow {
        blocks: [BlockId(block)].into(),
        sample: Some(told()),
        ..row(InputToken::Known(3), position)
    };
    let moves = vec![Move::Copy { from: BlockId(1), to: BlockId(2) }];
    let ticket = executor.submit(StepPlan { moves, rows: vec![asks(1, 1), asks(2, 1), asks(3, 0)] }).unwrap();
    let scores = executor.collect(ticket).unwrap().scores;
    let [own, copied, alone] = [0, 1, 2].map(|row: usize| scores[row].sampled[0].chosen.logprob);
    assert_eq!(own, copied);
    assert_ne!(own, alone, "the token before matters");
}

#[test]
fn a_wrong_row_fails_alone_and_its_followers_with_it() {
    let checkpoint = checkpoint(tiny(WeightType::BF16));
    let mut executor = executor(&checkpoint, Replay::Graphs);
    let wrong = PlanRow { blocks: [BlockId(99)].into(), ..row(InputToken::Known(1), 0) };
    let first = executor.submit(plan(vec![row(InputToken::Known(1), 0), wrong])).unwrap();
    let follow = |index| row(InputToken::SampledBy { ticket: first, row: index }, 1);
    let second = executor.submit(plan(vec![follow(0), follow(1)])).unwrap();
    assert!(executor.submit(StepPlan::default()).unwrap_err().to_string().contains("2 steps are in flight"));
    assert!(executor.collect(second).is_err(), "the first comes first");
    let rows = executor.collect(first).unwrap().rows;
    assert!(
        matches!(&rows[..], [RowOutput::Sampled(_), RowOutput::Failed(why)] if why.to_string().contains("block 99")),
        "{rows:?}"
    );
    let rows = executor.collect(second).unwrap().rows;
    assert!(matches!(&rows[..], [RowOutput::Sampled(_), RowOutput::Failed(_)]), "{rows:?}");
}

/// Guesses that hold, that do not, and that do up to a place; drawn on the device and, with a bias, on the host.
#[test]
fn guesses_are_judged_by_what_is_drawn_without_them() {
    let checkpoint = checkpoint(Tiny { tied: false, ..tiny(WeightType::BF16) });
    let random = Sampling { temperature: 0.8, top_p: 0.9, top_k: 20, seed: 3, ..Sampling::GREEDY };
    let biased = Sampling { logit_bias: vec![(5, 0.5)], ..random.clone() };
    for sampling in [Sampling::GREEDY, random, biased] {
        let mut executor = executor(&checkpoint, Replay::Graphs);
        let job = Job { prompt: vec![1], sampling: sampling.clone() };
        let text = generate(&mut executor, slice::from_ref(&job), 4, 32, 1).remove(0);
        let wrong = |token: u32| (token + 1) % VOCABULARY;
        for (guesses, expected) in [
            (vec![text[0], text[1], text[2]], &text[..]),
            (vec![text[0], wrong(text[1]), text[2]], &text[..2]),
            (vec![wrong(text[0]), text[1]], &text[..1]),
        ] {
            let sample = SampleRow { draft: DraftTree::chain(guesses), ..sample_row(&sampling) };
            let guessing = PlanRow { sample: Some(sample), ..row(InputToken::Known(1), 0) };
            let other = PlanRow { blocks: [BlockId(2)].into(), ..row(InputToken::Known(1), 0) };
            let rows = step(&mut executor, plan(vec![guessing, other]));
            let RowOutput::Verified(found) = &rows[0] else { panic!("{rows:?}") };
            assert_eq!(found, expected);
            assert_eq!(rows[1], step(&mut executor, plan(vec![row(InputToken::Known(1), 0)]))[0]);
        }
    }
}

/// A whole text with guesses is one that the model gives: where the first two choices are as near as bf16 is coarse, attention
/// of several tokens may take the other one.
#[test]
fn texts_with_guesses_are_the_models() {
    let checkpoint = checkpoint(Tiny { tied: false, ..tiny(WeightType::BF16) });
    guesses_hold(executor(&checkpoint, Replay::Graphs), &checkpoint);
}

pub fn guesses_hold(executor: impl Executor, checkpoint: &Checkpoint) {
    let prompt: Vec<u32> = [7, 3, 9, 4, 8].repeat(4);
    let proposer = Box::new(PromptLookup::new(1, 3));
    let mut engine = Engine::new(executor, EngineConfig::PLAIN).with_proposer(proposer, 4);
    engine.add(Request::greedy(RequestId(0), prompt.clone(), 40), 0.0).unwrap();
    let mut text = Vec::new();
    while !engine.is_idle() {
        text.extend(engine.turn(0.0).unwrap().updates.into_iter().flat_map(|update| update.tokens));
    }
    let stats = engine.stats().drafts;
    println!("{} of {} guesses held", stats.accepted, stats.tokens);
    assert!(text.len() == 40 && stats.accepted > 0, "{stats:?}");
    let regret = most_regret(&mut load(checkpoint, &options()).unwrap().executor, &prompt, &text);
    assert!(regret <= NEAR_TIE, "{text:?} is {regret} from the CPU's choices");
}

#[test]
fn guesses_that_branch_fail_by_name_and_nothing_else_does() {
    let checkpoint = checkpoint(tiny(WeightType::BF16));
    let mut executor = executor(&checkpoint, Replay::Graphs);
    let mut draft = DraftTree::default();
    [4, 5].iter().for_each(|&token| _ = draft.push(token, None));
    let sample = SampleRow { draft, ..sample_row(&Sampling::GREEDY) };
    let branching = PlanRow { sample: Some(sample), ..row(InputToken::Known(1), 0) };
    let sample = SampleRow { draft: DraftTree::chain([VOCABULARY]), ..sample_row(&Sampling::GREEDY) };
    let outside = PlanRow { sample: Some(sample), blocks: [BlockId(3)].into(), ..row(InputToken::Known(1), 0) };
    let other = PlanRow { blocks: [BlockId(2)].into(), ..row(InputToken::Known(1), 0) };
    let rows = step(&mut executor, plan(vec![branching, outside, other]));
    assert!(
        matches!(&rows[..], [RowOutput::Failed(one), RowOutput::Failed(two), RowOutput::Sampled(_)]
            if one.to_string().contains("guesses that branch") && two.to_string().contains("outside the vocabulary")),
        "{rows:?}"
    );
}

/// Which of a row's tokens is its last is known when its guesses are judged.
#[test]
fn nothing_follows_a_row_with_guesses_before_they_are_judged() {
    let checkpoint = checkpoint(tiny(WeightType::BF16));
    let mut executor = executor(&checkpoint, Replay::Graphs);
    let sample = SampleRow { draft: DraftTree::chain([4]), ..sample_row(&Sampling::GREEDY) };
    let guessing = PlanRow { sample: Some(sample), ..row(InputToken::Known(1), 0) };
    let first = executor.submit(plan(vec![guessing])).unwrap();
    let second = executor.submit(plan(vec![row(InputToken::SampledBy { ticket: first, row: 0 }, 1)])).unwrap();
    executor.collect(first).unwrap();
    let rows = executor.collect(second).unwrap().rows;
    assert!(matches!(&rows[..], [RowOutput::Failed(why)] if why.to_string().contains("guesses")), "{rows:?}");
}

#[test]
fn memory_of_keys_and_values_comes_and_goes_and_the_ledger_knows_all_of_it() {
    let sorted_and_rounded = [packed::SORTED, packed::ROUNDED].map(packed::checkpoint);
    for checkpoint in sorted_and_rounded.into_iter().chain([checkpoint(tiny(WeightType::BF16))]) {
        comes_and_goes_and_is_known(&checkpoint);
    }
}

fn comes_and_goes_and_is_known(checkpoint: &Checkpoint) {
    let (options, driver) = (LoadOptions { max_step_tokens: 1024, ..options() }, driver());
    let free = || driver.device().driver().memory().unwrap().free_bytes as u64;
    let before = free();
    let model = CudaModel::load(checkpoint, &options, &[driver.device()]).unwrap();
    let loaded = model.start(options.kv, Replay::Graphs).unwrap();
    let (ledger, mut executor) = (loaded.ledger(), loaded.executor);
    let awake = free();
    let small = before - awake - ledger.total();
    assert!(small < 64 << 10, "{ledger:?} of {}", before - awake);
    let jobs = jobs(&Sampling::GREEDY);
    let text = generate(&mut executor, &jobs, 3, 32, 2);
    let captured = executor.decoder().graphs();
    let refused = |executor: &mut CudaExecutor| {
        let why = executor.submit(plan(vec![row(InputToken::Known(1), 0)])).unwrap_err().to_string();
        assert!(why.contains("its memory was given back"), "{why}");
    };
    executor.hold_kv(false).unwrap();
    assert_eq!(free() - awake, whole_pieces(&driver, ledger.kv));
    refused(&mut executor);
    assert_eq!(executor.weights_to_move(), Some(whole_pieces(&driver, ledger.weights)));
    for _ in 0..2 {
        executor.hold_weights(false).unwrap();
        let both = whole_pieces(&driver, ledger.kv) + whole_pieces(&driver, ledger.weights);
        assert_eq!(free() - awake, both);
        assert_eq!(executor.weights_to_move(), Some(0), "the host keeps them");
        refused(&mut executor);
        executor.hold_weights(true).unwrap();
        refused(&mut executor);
    }
    executor.hold_kv(true).unwrap();
    assert_eq!(free(), awake);
    assert_eq!(generate(&mut executor, &jobs, 3, 32, 2), text);
    assert_eq!(executor.decoder().graphs(), captured, "graphs know where everything is");
    drop(executor);
    assert_eq!(free(), before);
}

/// It gives its memory back with the executor alone.
#[test]
fn a_device_that_maps_no_memory_computes_as_any_other_and_keeps_its_memory() {
    let checkpoint = checkpoint(tiny(WeightType::BF16));
    let driver = HostMachine::new(Kernels::Run, 7).without_mapping().driver(0, 1 << 28);
    let mut found = loaded(&checkpoint, &driver.device(), Replay::Graphs).executor;
    let jobs = jobs(&Sampling::GREEDY);
    let text = generate(&mut found, &jobs, 3, 32, 2);
    assert_eq!(text, generate(&mut executor(&checkpoint, Replay::Graphs), &jobs, 3, 32, 2));
    assert_eq!(found.weights_to_move(), None);
    let free = || driver.device().driver().memory().unwrap().free_bytes;
    let awake = free();
    found.hold_kv(false).unwrap();
    found.hold_kv(true).unwrap();
    assert_eq!((free(), generate(&mut found, &jobs, 3, 32, 2)), (awake, text));
    drop(found);
    assert_eq!(free(), 1 << 28);
}

#[test]
fn what_the_kernels_do_not_compute_is_refused_by_name() {
    let device = HostMachine::new(Kernels::Record, 7).device(0, 1 << 28);
    let refusal = |options: &LoadOptions, tiny: Tiny| {
        CudaModel::load(&checkpoint(tiny), options, slice::from_ref(&device)).map(drop).unwrap_err().to_string()
    };
    let small = Tiny { heads: 64, kv_heads: 64, rope_dims: 4, ..tiny(WeightType::BF16) };
    assert_eq!(
        refusal(&options(), small),
        "a head of 4 values is not there on CUDA yet: use a model with heads of a multiple of 8 up to 256, or the CPU"
    );
    let experts = json!({"num_local_experts": 40, "num_experts_per_tok": 33, "intermediate_size": 32});
    let experts = family("mixtral", false, experts);
    let refused = CudaModel::load(&experts, &options(), slice::from_ref(&device)).map(drop).unwrap_err().to_string();
    assert!(refused.contains("a mixture of 40 experts of which a token uses 33"), "{refused}");
    let swap = Some(SwapSpace { bytes: 1 << 20, folder: None });
    for (options, named) in [
        (LoadOptions { block_tokens: 16, ..options() }, "a KV block of 16 tokens"),
        (LoadOptions { tensor_parallel: 9, ..options() }, "a group of 9 ranks"),
        (LoadOptions { kv_data_type: KvDataType::F16, ..options() }, "a KV cache in f16"),
        (LoadOptions { kv_data_type: KvDataType::Int4, ..options() }, "a KV cache in int4"),
        (LoadOptions { swap, ..options() }, "swap space"),
    ] {
        let refused = refusal(&options, tiny(WeightType::BF16));
        assert!(refused.contains(named) && refused.contains("CUDA"), "{refused}");
    }
}

#[test]
fn a_device_that_is_too_small_says_how_small() {
    let device = HostMachine::new(Kernels::Record, 7).device(0, 1 << 20);
    let refused = CudaModel::load(&checkpoint(tiny(WeightType::BF16)), &options(), slice::from_ref(&device))
        .map(drop)
        .unwrap_err();
    assert!(refused.to_string().contains("no room for"), "{refused}");
}
