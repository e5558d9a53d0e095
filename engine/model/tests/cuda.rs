//! The GPU's executor on the stand-in for a GPU: the kernels run from their sources, and the rules are CUDA's.

#![allow(clippy::unwrap_used)] // in a test, a failed unwrap is the failure

mod common;

use common::driver::{Job, generate};
use common::tiny::Tiny;
use windlass_checkpoint::Checkpoint;
use windlass_cuda_shim::{HostMachine, Kernels};
use windlass_engine_core::executor::Executor;
use windlass_engine_core::plan::{BlockId, InputToken, PlanRow, RowOutput, StepPlan};
use windlass_engine_core::request::{RequestId, Sampling};
use windlass_engine_core::sampling::Penalties;
use windlass_engine_model::{CudaExecutor, KvBudget, LoadOptions, Replay, load, load_cuda};
use windlass_kernels::WeightType;

const GENERATED: usize = 12;

fn options() -> LoadOptions {
    LoadOptions {
        threads: 1,
        block_tokens: 64,
        kv: KvBudget::Blocks(8),
        max_sequences: 4,
        max_step_tokens: 32,
        max_model_tokens: Some(256),
        ..LoadOptions::default()
    }
}

fn checkpoint(kind: WeightType) -> Checkpoint {
    Checkpoint::from_bytes(Tiny { vocabulary: 128, ..Tiny::of(kind) }.build().build()).unwrap()
}

fn executor(checkpoint: &Checkpoint, kernels: Kernels, replay: Replay) -> CudaExecutor {
    let device = HostMachine::new(kernels, 7).device(0, 1 << 30);
    load_cuda(checkpoint, &options(), &device, replay).unwrap().executor
}

fn jobs(sampling: &Sampling) -> Vec<Job> {
    let prompt = |job: u32| (0..5 + 7 * job).map(|token| (token * 37 + job) % 128).collect();
    (0..3).map(|job| Job { prompt: prompt(job), sampling: sampling.clone() }).collect()
}

/// The first tokens of a job that two texts share.
fn shared(one: &[u32], other: &[u32]) -> usize {
    one.iter().zip(other).take_while(|(one, other)| one == other).count()
}

/// Activations are bf16 on one side and f32 on the other, so texts may part at a near tie; most do not.
#[test]
fn a_models_greedy_tokens_are_the_cpus() {
    for kind in [WeightType::BF16, WeightType::Q4_1] {
        let checkpoint = checkpoint(kind);
        let mut cpu = load(&checkpoint, &options()).unwrap().executor;
        let expected = generate(&mut cpu, &jobs(&Sampling::GREEDY), GENERATED, 32, 2);
        let mut gpu = executor(&checkpoint, Kernels::Run, Replay::Graphs);
        let found = generate(&mut gpu, &jobs(&Sampling::GREEDY), GENERATED, 32, 2);
        let same: Vec<usize> = expected.iter().zip(&found).map(|(one, other)| shared(one, other)).collect();
        println!("{}: {same:?} of {GENERATED} tokens are the same", kind.name());
        assert!(same.iter().all(|same| *same == GENERATED), "{}: {expected:?} {found:?}", kind.name());
        assert!(gpu.backend().graphs() > 0);
    }
}

#[test]
fn graphs_and_eager_steps_give_the_same_bits_in_any_order_of_chunks() {
    let checkpoint = checkpoint(WeightType::BF16);
    for sampling in [Sampling::GREEDY, Sampling { top_p: 0.9, top_k: 20, seed: 3, ..Sampling::RANDOM }] {
        let text = |replay, in_flight| {
            let mut executor = executor(&checkpoint, Kernels::Run, replay);
            generate(&mut executor, &jobs(&sampling), GENERATED, 9, in_flight)
        };
        let graphs = text(Replay::Graphs, 2);
        assert_eq!(graphs, text(Replay::Eager, 2));
        assert_eq!(graphs, text(Replay::Graphs, 1), "fed back on the device and through the host");
    }
}

/// Penalties read the tokens before: such a step waits for the one in flight, and its token is fed to the next.
#[test]
fn what_only_the_host_samples_is_mixed_with_what_the_device_does() {
    let checkpoint = checkpoint(WeightType::BF16);
    let biased = Sampling { logit_bias: vec![(5, 100.0)], ..Sampling::GREEDY };
    let mut jobs = jobs(&Sampling::GREEDY);
    jobs[1].sampling = biased;
    let mut gpu = executor(&checkpoint, Kernels::Run, Replay::Graphs);
    let together = generate(&mut gpu, &jobs, 4, 32, 2);
    assert_eq!(together[1], [5; 4]);
    let alone = generate(&mut executor(&checkpoint, Kernels::Run, Replay::Graphs), &jobs[..1], 4, 32, 2);
    assert_eq!(together[0], alone[0]);
    assert_eq!(Penalties::NONE, jobs[0].sampling.penalties);
}

fn row(token: InputToken, position: u32) -> PlanRow {
    PlanRow {
        request: RequestId(0),
        tokens: vec![token],
        first_position: position,
        blocks: vec![BlockId(1)],
        sample: Some(common::driver::sample_row(&Sampling::GREEDY)),
        score: None,
    }
}

#[test]
fn a_wrong_row_fails_alone_and_its_followers_with_it() {
    let checkpoint = checkpoint(WeightType::BF16);
    let mut executor = executor(&checkpoint, Kernels::Run, Replay::Graphs);
    let wrong = PlanRow { blocks: vec![BlockId(99)], ..row(InputToken::Known(1), 0) };
    let rows = vec![row(InputToken::Known(1), 0), wrong];
    let first = executor.submit(StepPlan { copies: Vec::new(), rows }).unwrap();
    let follow = |row_index| row(InputToken::SampledBy { ticket: first, row: row_index }, 1);
    let plan = StepPlan { copies: Vec::new(), rows: vec![follow(0), follow(1)] };
    let second = executor.submit(plan).unwrap();
    assert!(executor.submit(StepPlan::default()).unwrap_err().to_string().contains("2 steps are in flight"));
    assert!(executor.collect(second).is_err(), "the first comes first");
    let rows = executor.collect(first).unwrap().rows;
    assert!(matches!(&rows[..], [RowOutput::Sampled(_), RowOutput::Failed(why)] if why.contains("block 99")), "{rows:?}");
    let rows = executor.collect(second).unwrap().rows;
    assert!(matches!(&rows[..], [RowOutput::Sampled(_), RowOutput::Failed(_)]), "{rows:?}");
}

#[test]
fn what_the_kernels_do_not_compute_is_refused_by_name() {
    let device = HostMachine::new(Kernels::Record, 7).device(0, 1 << 30);
    let refusal = |options: &LoadOptions, tiny: Tiny| {
        let checkpoint = Checkpoint::from_bytes(tiny.build().build()).unwrap();
        load_cuda(&checkpoint, options, &device, Replay::Graphs).map(drop).unwrap_err().to_string()
    };
    let tiny = Tiny::of(WeightType::BF16);
    assert!(refusal(&LoadOptions { block_tokens: 16, ..options() }, tiny).contains("blocks have 16 tokens"));
    assert!(refusal(&options(), Tiny { heads: 16, kv_heads: 16, rope_dims: 16, ..tiny }).contains("heads have 16 values"));
    assert!(refusal(&LoadOptions { tensor_parallel: 2, ..options() }, tiny).contains("2 ranks"));
    let small = HostMachine::new(Kernels::Record, 7).device(0, 1 << 20);
    let checkpoint = checkpoint(WeightType::BF16);
    let refusal = load_cuda(&checkpoint, &options(), &small, Replay::Graphs).map(drop).unwrap_err().to_string();
    assert!(refusal.contains("no room"), "{refusal}");
}
