//! The executor on a GPU, mostly on the stand-in for one: the kernels run from their sources, and the rules are CUDA's.
//! With `WINDLASS_GPU` set it is this machine's first NVIDIA GPU where a test does not look behind the driver.

use std::slice;
use std::sync::Arc;

use crate::common::driver::{Job, generate};
use crate::common::hub::{Family, config, llama_oracle};
use crate::common::rows::{plan, row, tables};
use crate::common::tiny::Tiny;
use serde_json::Value;
use windlass_checkpoint::Checkpoint;
use windlass_cuda_shim::{HostDriver, HostMachine, Kernels, device_under_test};
use windlass_engine_core::executor::{Executor, KvGroups};
use windlass_engine_core::plan::{InputToken, PlanRow, PromptLogprobsRow, RowOutput, StepPlan};
use windlass_engine_core::request::Sampling;
use windlass_engine_model::cuda::{CudaExecutor, CudaModel, Device, LoadedCuda, Replay};
use windlass_engine_model::{ActivationType, DecoderConfig, KvBudget, LoadOptions, load};
use windlass_kernels::WeightType;

pub const GENERATED: usize = 12;
pub const VOCABULARY: u32 = 128;
/// Log probabilities that bf16 activations may confuse.
pub const NEAR_TIE: f32 = 0.06;
/// Log probabilities that they may give a token otherwise.
pub const APART: f32 = 0.08;
/// As much where attention is sharp and four layers pass it on.
pub const APART_IF_SHARP: f32 = 0.3;
/// As much where inputs of products are rounded to 8 bits.
pub const APART_IF_ROUNDED: f32 = 0.3;
/// As much where they are rounded to floats of 8 bits, which have three bits of fraction.
pub const APART_IF_FLOAT8: f32 = 0.45;
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

pub fn loaded(checkpoint: &Checkpoint, device: &Device, replay: Replay) -> LoadedCuda {
    CudaModel::load(checkpoint, &options(), slice::from_ref(device)).unwrap().start(options().kv, replay).unwrap()
}

pub fn executor(checkpoint: &Checkpoint, replay: Replay) -> CudaExecutor {
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
        let score = Some(PromptLogprobsRow { targets: vec![pair[1]], top: 1 });
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

/// Log probabilities of each of 30 tokens after those before it.
fn scored(executor: &mut dyn Executor) -> Vec<f32> {
    let tokens: Vec<u32> = (0..30).map(|token| token * 31 % VOCABULARY).collect();
    let score = PromptLogprobsRow { targets: tokens[1..].to_vec(), top: 0 };
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

/// A small random checkpoint of a family with what only some have.
pub fn family(model_type: &str, head_norms: bool, more: Value) -> Checkpoint {
    let config = config(model_type, more);
    let family = Family { config, biases: model_type.starts_with("qwen2"), head_norms, oracle: llama_oracle };
    family.open(&family.safetensors())
}

/// Asks both for log probabilities, which are at most `bound` apart, and the CPU for what it thinks of the GPU's greedy tokens.
pub fn agrees_with_the_cpu(name: &str, checkpoint: &Checkpoint, options: &LoadOptions, bound: f32) {
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

/// Every layout of weights that the kernels have, and types that become another. The head is not the embedding: what the layers
/// say decides. Where the CPU's first two choices are as near as bf16 activations are coarse, either may be taken.
#[test]
fn a_models_greedy_tokens_are_the_cpus() {
    for kind in [
        WeightType::BF16,
        WeightType::Q4_1,
        WeightType::Q8_0,
        WeightType::Q5_0,
        WeightType::Q5_1,
        WeightType::IQ4NL,
        WeightType::MXFP4,
        WeightType::Q2K,
        WeightType::Q3K,
        WeightType::Q4K,
        WeightType::Q5K,
        WeightType::Q6K,
        WeightType::IQ4XS,
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

/// A head of its own, and factors of the rotary frequencies.
#[test]
fn what_the_model_thinks_of_each_token_is_near_what_the_cpu_thinks() {
    let checkpoint = checkpoint(Tiny { tied: false, rope_factors: true, ..tiny(WeightType::BF16) });
    let worst = apart(&mut load(&checkpoint, &options()).unwrap().executor, &mut executor(&checkpoint, Replay::Graphs));
    println!("log probabilities are at most {worst} apart");
    assert!(worst < 0.05, "{worst}");
}
