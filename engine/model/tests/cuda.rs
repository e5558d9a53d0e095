//! The executor on a GPU, mostly on the stand-in for one: the kernels run from their sources, and the rules are CUDA's.
//! With `WINDLASS_GPU` set it is this machine's first NVIDIA GPU where a test does not look behind the driver.

#![allow(clippy::unwrap_used)] // in a test, a failed unwrap is the failure

mod common;

use std::sync::Arc;

use common::driver::{Job, generate, sample_row};
use common::hub::{Family, config, llama_oracle};
use common::tiny::Tiny;
use serde_json::{Value, json};
use windlass_checkpoint::Checkpoint;
use windlass_cuda_shim::{HostDriver, HostMachine, Issued, Kernels, device_under_test};
use windlass_engine_contract::memory::KvDataType;
use windlass_engine_core::draft::DraftTree;
use windlass_engine_core::executor::Executor;
use windlass_engine_core::plan::{BlockId, InputToken, Move, PlanRow, RowOutput, SampleRow, ScoreRow, StepPlan};
use windlass_engine_core::request::{RequestId, Sampling};
use windlass_engine_model::cuda::{CudaExecutor, CudaModel, Device, LoadedCuda, Replay};
use windlass_engine_model::{ActivationType, KvBudget, LoadOptions, Quantization, SwapSpace, load};
use windlass_kernels::WeightType;

const GENERATED: usize = 12;
const VOCABULARY: u32 = 128;
/// Log probabilities that bf16 activations may confuse.
const NEAR_TIE: f32 = 0.06;
/// As many as the texts of a test take: none is left over for what is nobody's.
const BLOCKS: u32 = 4;

fn options() -> LoadOptions {
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

fn tiny(kind: WeightType) -> Tiny {
    Tiny { vocabulary: VOCABULARY.into(), ..Tiny::of(kind) }
}

fn checkpoint(tiny: Tiny) -> Checkpoint {
    Checkpoint::from_bytes(tiny.build().build()).unwrap()
}

/// The stand-in's driver.
fn driver() -> Arc<HostDriver> {
    HostMachine::new(Kernels::Run, 7).driver(0, 1 << 28)
}

/// A device whose kernels run in an order that `seed` decides.
fn device(seed: u64) -> Device {
    device_under_test(seed, 1 << 28).unwrap()
}

fn loaded(checkpoint: &Checkpoint, device: &Device, replay: Replay) -> LoadedCuda {
    CudaModel::load(checkpoint, &options(), device).unwrap().start(options().kv, replay).unwrap()
}

fn executor(checkpoint: &Checkpoint, replay: Replay) -> CudaExecutor {
    loaded(checkpoint, &device(7), replay).executor
}

fn jobs(sampling: &Sampling) -> Vec<Job> {
    let prompt = |job: u32| (0..5 + 7 * job).map(|token| (token * 37 + job) % VOCABULARY).collect();
    (0..4).map(|job| Job { prompt: prompt(job), sampling: sampling.clone() }).collect()
}

/// A row of sequence 0, whose tokens all lie in block 1.
fn row(token: InputToken, position: u32) -> PlanRow {
    PlanRow {
        request: RequestId(0),
        tokens: vec![token],
        first_position: position,
        blocks: vec![BlockId(1)],
        sample: Some(sample_row(&Sampling::GREEDY)),
        score: None,
    }
}

fn step(executor: &mut dyn Executor, plan: StepPlan) -> Vec<RowOutput> {
    let ticket = executor.submit(plan).unwrap();
    executor.collect(ticket).unwrap().rows
}

fn plan(rows: Vec<PlanRow>) -> StepPlan {
    StepPlan { rows, ..StepPlan::default() }
}

/// Log probability that an answer's tokens lack to the CPU's own choices after the same text, the most of them.
fn most_regret(cpu: &mut dyn Executor, prompt: &[u32], answer: &[u32]) -> f32 {
    let text = [prompt, answer].concat();
    let mut most = 0.0_f32;
    for (position, pair) in text.windows(2).enumerate() {
        let score = Some(ScoreRow { targets: vec![pair[1]], top: 1 });
        let asked = PlanRow { sample: None, score, ..row(InputToken::Known(pair[0]), position as u32) };
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
    for kind in [WeightType::BF16, WeightType::Q4_1, WeightType::Q8_0, WeightType::Q4K, WeightType::Q6K] {
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

/// A head of its own, and factors of the rotary frequencies.
#[test]
fn what_the_model_thinks_of_each_token_is_near_what_the_cpu_thinks() {
    let checkpoint = checkpoint(Tiny { tied: false, rope_factors: true, ..tiny(WeightType::BF16) });
    let scored = |executor: &mut dyn Executor| -> Vec<f32> {
        let tokens: Vec<u32> = (0..30).map(|token| token * 31 % VOCABULARY).collect();
        let score = ScoreRow { targets: tokens[1..].to_vec(), top: 0 };
        let tokens = tokens.into_iter().map(InputToken::Known).collect();
        let row = PlanRow { tokens, sample: None, score: Some(score), ..row(InputToken::Known(0), 0) };
        let ticket = executor.submit(plan(vec![row])).unwrap();
        let output = executor.collect(ticket).unwrap();
        output.scores[0].prompt.iter().map(|token| token.chosen.logprob).collect()
    };
    let expected = scored(&mut load(&checkpoint, &options()).unwrap().executor);
    let found = scored(&mut executor(&checkpoint, Replay::Graphs));
    let apart: Vec<f32> = expected.iter().zip(&found).map(|(expected, found)| (expected - found).abs()).collect();
    let worst = apart.iter().copied().fold(0.0, f32::max);
    println!("log probabilities of {} tokens are at most {worst} apart", apart.len());
    assert!(apart.len() == 29 && worst < 0.05, "{apart:?}");
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
    let checkpoint = checkpoint(tiny(WeightType::BF16));
    let mut executor = executor(&checkpoint, Replay::Graphs);
    step(&mut executor, plan(vec![row(InputToken::Known(9), 0)]));
    let told = || SampleRow { logprobs: Some(0), ..sample_row(&Sampling::GREEDY) };
    let asks = |block: u32, position: u32| PlanRow {
        blocks: vec![BlockId(block)],
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
    let wrong = PlanRow { blocks: vec![BlockId(99)], ..row(InputToken::Known(1), 0) };
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

#[test]
fn guesses_fail_by_name_and_nothing_else_does() {
    let checkpoint = checkpoint(tiny(WeightType::BF16));
    let mut executor = executor(&checkpoint, Replay::Graphs);
    let sample = SampleRow { draft: DraftTree::chain([4]), ..sample_row(&Sampling::GREEDY) };
    let guessing = PlanRow { sample: Some(sample), ..row(InputToken::Known(1), 0) };
    let other = PlanRow { blocks: vec![BlockId(2)], ..row(InputToken::Known(1), 0) };
    let rows = step(&mut executor, plan(vec![guessing, other]));
    assert!(
        matches!(&rows[..], [RowOutput::Failed(why), RowOutput::Sampled(_)] if why.to_string().contains("guesses")),
        "{rows:?}"
    );
}

#[test]
fn memory_of_keys_and_values_comes_and_goes_and_the_ledger_knows_all_of_it() {
    let (checkpoint, driver) = (checkpoint(tiny(WeightType::BF16)), driver());
    let free = || driver.device().driver().memory().unwrap().free_bytes as u64;
    let before = free();
    let LoadedCuda { mut executor, ledger, .. } = loaded(&checkpoint, &driver.device(), Replay::Graphs);
    let awake = free();
    let small = before - awake - ledger.total();
    assert!(small < 64 << 10, "{ledger:?} of {}", before - awake);
    let jobs = jobs(&Sampling::GREEDY);
    let text = generate(&mut executor, &jobs, 3, 32, 2);
    executor.hold_kv(false).unwrap();
    assert_eq!(free() - awake, ledger.kv);
    assert!(executor.submit(plan(vec![row(InputToken::Known(1), 0)])).is_err(), "there is nowhere to write");
    executor.hold_kv(true).unwrap();
    assert_eq!(free(), awake);
    assert_eq!(generate(&mut executor, &jobs, 3, 32, 2), text);
}

#[test]
fn what_the_kernels_do_not_compute_is_refused_by_name() {
    let device = HostMachine::new(Kernels::Record, 7).device(0, 1 << 28);
    let refusal = |options: &LoadOptions, tiny: Tiny| {
        CudaModel::load(&checkpoint(tiny), options, &device).map(drop).unwrap_err().to_string()
    };
    let small = Tiny { heads: 16, kv_heads: 16, rope_dims: 16, ..tiny(WeightType::BF16) };
    assert_eq!(
        refusal(&options(), small),
        "a head of 16 values is not there on CUDA yet: use a model with heads of 32, 64, 96 or 128, or the CPU"
    );
    let swap = Some(SwapSpace { bytes: 1 << 20, folder: None });
    for (options, named) in [
        (LoadOptions { block_tokens: 16, ..options() }, "a KV block of 16 tokens"),
        (LoadOptions { tensor_parallel: 2, ..options() }, "2 ranks"),
        (LoadOptions { kv_data_type: KvDataType::Int8, ..options() }, "a KV cache in int8"),
        (LoadOptions { kv_data_type: KvDataType::F16, ..options() }, "a KV cache in f16"),
        (LoadOptions { kv_data_type: KvDataType::Fp8, ..options() }, "a KV cache in fp8"),
        (LoadOptions { kv_data_type: KvDataType::Int4, ..options() }, "a KV cache in int4"),
        (LoadOptions { swap, ..options() }, "swap space"),
        (LoadOptions { quantization: Quantization::named("int8"), ..options() }, "at load"),
    ] {
        let refused = refusal(&options, tiny(WeightType::BF16));
        assert!(refused.contains(named) && refused.contains("CUDA"), "{refused}");
    }
}

#[test]
fn what_only_some_families_have_is_refused_by_name() {
    let device = HostMachine::new(Kernels::Record, 7).device(0, 1 << 28);
    let refusal = |model_type: &str, more: Value| {
        let family =
            Family { config: config(model_type, more), biases: false, head_norms: false, oracle: llama_oracle };
        CudaModel::load(&family.open(&family.safetensors()), &options(), &device)
            .map(drop)
            .map_err(|why| why.to_string())
    };
    let gemma = |mut more: Value| {
        more["hidden_activation"] = "gelu_pytorch_tanh".into();
        more
    };
    let factors = [1.5; 16];
    let longrope = json!({"type": "longrope", "short_factor": factors, "long_factor": factors});
    assert_eq!(refusal("mistral", json!({"sliding_window": 512})), Ok(()), "the window has room for every sequence");
    for (model_type, more, named) in [
        ("mistral", json!({"sliding_window": 20}), "a window of attention"),
        ("mixtral", json!({"num_local_experts": 4, "num_experts_per_tok": 2}), "a mixture of experts"),
        ("gemma2", gemma(json!({"sliding_window": 512, "attn_logit_softcapping": 5.0})), "a soft cap"),
        ("gemma", gemma(json!({"final_logit_softcapping": 3.0})), "a soft cap"),
        ("gemma2", gemma(json!({"sliding_window": 512})), "a norm behind a block"),
        ("gemma", gemma(json!({})), "an activation other than SiLU"),
        ("phi3", json!({"original_max_position_embeddings": 64, "rope_scaling": longrope}), "LongRoPE"),
    ] {
        let refused = refusal(model_type, more).unwrap_err();
        assert!(refused.contains(named) && refused.contains("CUDA"), "{refused}");
    }
}

#[test]
fn a_device_that_is_too_small_says_how_small() {
    let device = HostMachine::new(Kernels::Record, 7).device(0, 1 << 20);
    let refused = CudaModel::load(&checkpoint(tiny(WeightType::BF16)), &options(), &device).map(drop).unwrap_err();
    assert!(refused.to_string().contains("no room for"), "{refused}");
}
