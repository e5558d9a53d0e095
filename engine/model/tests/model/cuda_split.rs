//! A model with its first layers on the CPU computes what it computes whole, on the shim.

use std::sync::Arc;

use crate::common::driver::generate;
use crate::common::rows::{plan, row};
use crate::common::tiny::Tiny;
use crate::cuda::{
    APART, BLOCKS, GENERATED, NEAR_TIE, VOCABULARY, apart, checkpoint, device, driver, family, jobs, most_regret,
    options, step, tiny, whole_pieces,
};
use crate::cuda_drafts::{branching_draft_tokens_are_accepted, draft_tokens_change_nothing};
use crate::cuda_steps::copied_blocks_are_read_alike;
use serde_json::json;
use windlass_checkpoint::Checkpoint;
use windlass_cuda_shim::{HostDriver, HostMachine, Issued, Kernels};
use windlass_engine_contract::memory::{KvDataType, Ledger};
use windlass_engine_core::executor::{Executor, KvGroups};
use windlass_engine_core::plan::{InputToken, StepPlan};
use windlass_engine_core::request::Sampling;
use windlass_engine_model::cuda::{CudaModel, Device, Replay, SplitModel};
use windlass_engine_model::{CpuExecutor, DecoderConfig, KvBudget, LoadError, LoadOptions, Loaded, SwapSpace, load};
use windlass_kernels::WeightType;
use windlass_kernels::cuda::Kernel;

const LAYERS: u32 = 4;

/// An untied head, so that the output depends on the layers.
fn deep(kind: WeightType) -> Tiny {
    Tiny { layers: LAYERS, tied: false, ..tiny(kind) }
}

fn loaded(checkpoint: &Checkpoint, options: &LoadOptions, gpu_layers: u32, device: &Device) -> Loaded {
    let model = SplitModel::load(checkpoint, options, gpu_layers, device).unwrap();
    model.start(options.kv, Replay::Graphs).unwrap()
}

fn executor(checkpoint: &Checkpoint, gpu_layers: u32) -> CpuExecutor {
    loaded(checkpoint, &options(), gpu_layers, &device(7)).executor
}

/// Compares log probabilities of both, and scores the other's greedy tokens on the CPU.
fn agrees_with_the_cpu(name: &str, checkpoint: &Checkpoint, gpu_layers: u32) {
    let shape = DecoderConfig::read(checkpoint).unwrap().shape(0);
    let groups = KvGroups::of(&shape, options().max_model_tokens.unwrap()).count();
    let alone = LoadOptions { kv: KvBudget::Blocks(groups * BLOCKS), ..options() };
    let (mut cpu, mut split) = (load(checkpoint, &alone).unwrap().executor, executor(checkpoint, gpu_layers));
    let worst = apart(&mut cpu, &mut split);
    let jobs = jobs(&Sampling::GREEDY);
    let found = generate(&mut split, &jobs, GENERATED, 32, 2);
    let regret = jobs.iter().zip(&found).map(|(job, answer)| most_regret(&mut cpu, &job.prompt, answer));
    let regret = regret.fold(0.0, f32::max);
    println!("{name}, {gpu_layers} layers on the GPU: log probabilities at most {worst} apart, choices {regret}");
    assert!(worst > 0.0, "{name}: it was computed on the CPU alone");
    assert!(
        worst < APART && regret <= NEAR_TIE,
        "{name}, {gpu_layers}: {worst} apart, {regret} from the CPU's choices"
    );
}

#[test]
fn however_many_layers_are_on_the_gpu_the_model_computes_what_the_cpu_computes() {
    for gpu_layers in 1..LAYERS {
        agrees_with_the_cpu("bf16", &checkpoint(deep(WeightType::BF16)), gpu_layers);
    }
    agrees_with_the_cpu("q4_1", &checkpoint(deep(WeightType::Q4_1)), 2);
    agrees_with_the_cpu("a tied head", &checkpoint(Tiny { tied: true, ..deep(WeightType::Q8_0) }), 2);
}

/// Layers on the GPU are counted from those on the CPU, which decides windows and rotary embeddings. Also a mixture of
/// experts, and a scaled embedding.
#[test]
fn families_are_divided_too() {
    let keys = json!({"hidden_act": null, "hidden_activation": "gelu_pytorch_tanh", "head_dim": 48,
        "query_pre_attn_scalar": 4096, "final_logit_softcapping": null, "sliding_window": 20,
        "sliding_window_pattern": 2, "rope_local_base_freq": 1000.0, "num_hidden_layers": 2});
    agrees_with_the_cpu("gemma3", &family("gemma3_text", true, keys), 1);
    agrees_with_the_cpu("mixtral", &mixture(), 1);
}

fn mixture() -> Checkpoint {
    let keys = json!({"num_local_experts": 4, "num_experts_per_tok": 2, "num_hidden_layers": 2,
        "tie_word_embeddings": false});
    family("mixtral", false, keys)
}

/// Three sequences are padded to four: the router sends the padding row to existing experts only.
#[test]
fn a_sequences_text_is_its_own_in_padded_and_in_eager_steps() {
    for checkpoint in [checkpoint(deep(WeightType::BF16)), mixture()] {
        let jobs = &jobs(&Sampling::GREEDY)[..3];
        let mut split = executor(&checkpoint, 1);
        let together = generate(&mut split, jobs, GENERATED, 32, 2);
        for (job, text) in jobs.iter().zip(&together) {
            let alone = generate(&mut split, std::slice::from_ref(job), GENERATED, 9, 1);
            assert_eq!(&alone[0], text);
        }
        let eager = SplitModel::load(&checkpoint, &options(), 1, &device(8)).unwrap();
        let mut eager = eager.start(options().kv, Replay::Eager).unwrap().executor;
        assert_eq!(generate(&mut eager, jobs, GENERATED, 32, 2), together);
    }
}

/// All kernels of the GPU are in the graph; the host does not sample.
#[test]
fn a_decoding_step_is_one_graph_on_the_gpu() {
    let (checkpoint, driver) = (checkpoint(deep(WeightType::BF16)), driver());
    let mut split = loaded(&checkpoint, &options(), 3, &driver.device()).executor;
    step(&mut split, plan(vec![row(InputToken::Known(1), 0)]));
    let (before, free) = (driver.issued().len(), free(&driver));
    step(&mut split, plan(vec![row(InputToken::Known(2), 1)]));
    let issued = driver.issued()[before..].to_vec();
    let of_kernels = |work: &&Issued| matches!(work, Issued::Graph(_) | Issued::Launch(_));
    let kernels: Vec<&Issued> = issued.iter().filter(of_kernels).collect();
    // Three layers of eight kernels, three kernels after them, and the draw.
    assert_eq!(kernels, [&Issued::Graph(3 * 8 + 3), &Issued::Launch(Kernel::Sample)]);
    assert_eq!(self::free(&driver), free, "nothing is allocated");
}

fn free(driver: &Arc<HostDriver>) -> u64 {
    driver.device().driver().memory().unwrap().free_bytes as u64
}

#[test]
fn a_copied_block_is_read_like_the_one_it_was_copied_from() {
    copied_blocks_are_read_alike(&mut executor(&checkpoint(deep(WeightType::BF16)), 2));
}

#[test]
fn texts_with_draft_tokens_are_those_without() {
    let checkpoint = checkpoint(deep(WeightType::BF16));
    // Room for a token and its draft tokens as rows of their own.
    let options = LoadOptions { max_sequences: 8, ..options() };
    draft_tokens_change_nothing(|| loaded(&checkpoint, &options, 2, &device(7)).executor);
}

/// K and V of accepted draft tokens are moved on both devices.
#[test]
fn branching_draft_tokens_change_no_token() {
    let checkpoint = checkpoint(deep(WeightType::BF16));
    branching_draft_tokens_are_accepted(&mut executor(&checkpoint, 2), VOCABULARY, &Sampling::GREEDY, 0);
}

/// The ledgers equal the memory in use: K and V of a layer are on the device that computes it.
#[test]
fn both_ledgers_know_what_each_device_holds() {
    let (checkpoint, driver) = (checkpoint(deep(WeightType::BF16)), driver());
    let before = free(&driver);
    let Loaded { mut executor, shape, ledgers, .. } = loaded(&checkpoint, &options(), 3, &driver.device());
    let [cpu, gpu]: [Ledger; 2] = ledgers.try_into().unwrap();
    let awake = free(&driver);
    let small = before - awake - gpu.total();
    assert!(small < 64 << 10, "{gpu:?} of {}", before - awake);
    let whole = load(&checkpoint, &options()).unwrap().ledgers[0];
    assert_eq!((cpu.weights + gpu.weights, shape.weight_bytes), (whole.weights, whole.weights));
    let crossing = 4 * u64::from(options().max_step_tokens) * u64::from(shape.hidden);
    assert_eq!(cpu.workspace, whole.workspace + crossing);
    // The GPU has one block more, for padding rows.
    let block = whole.kv / u64::from(BLOCKS * LAYERS);
    assert_eq!([cpu.kv, gpu.kv], [block * u64::from(BLOCKS), block * u64::from(BLOCKS + 1) * 3]);
    let jobs = jobs(&Sampling::GREEDY);
    let text = generate(&mut executor, &jobs, 3, 32, 2);
    executor.hold_kv(false).unwrap();
    step(&mut executor, StepPlan::default());
    assert_eq!(free(&driver) - awake, whole_pieces(&driver, gpu.kv));
    executor.hold_kv(true).unwrap();
    assert_eq!(generate(&mut executor, &jobs, 3, 32, 2), text);
    assert_eq!(free(&driver), awake);
    drop(executor);
    assert_eq!(free(&driver), before, "everything was given back");
}

/// A KV budget covers all layers, on whichever device they are.
#[test]
fn the_smaller_room_for_keys_and_values_decides_for_both() {
    let (checkpoint, options) = (checkpoint(deep(WeightType::BF16)), options());
    let model = SplitModel::load(&checkpoint, &options, 3, &device(7)).unwrap();
    assert_eq!(model.kv_bytes(100, 1_000_000), 400);
    assert_eq!(model.kv_bytes(1_000_000, 300), 400);
    let free = model.free_bytes().unwrap();
    let taken = (1 << 28) - free;
    let weights = model.shape().weight_bytes - model.cpu_weight_bytes();
    assert!(taken > weights && taken < weights + (8 << 20), "{taken} with weights of {weights}");
    let budget = KvBudget::Bytes(2 * load(&checkpoint, &options).unwrap().ledgers[0].kv);
    let Loaded { executor, .. } = model.start(budget, Replay::Graphs).unwrap();
    assert_eq!(executor.geometry().blocks, 2 * BLOCKS);
}

#[test]
fn the_limit_of_memory_is_for_what_stays_on_the_cpu() {
    let checkpoint = checkpoint(deep(WeightType::BF16));
    let limited = |bytes: u64| -> Result<Loaded, LoadError> {
        let options = LoadOptions { memory_limit_bytes: Some(bytes), ..options() };
        SplitModel::load(&checkpoint, &options, 3, &device(7))?.start(options.kv, Replay::Graphs)
    };
    let cpu = limited(u64::MAX).unwrap().ledgers[0];
    assert!(limited(cpu.total()).is_ok());
    let refusal = limited(cpu.weights + cpu.kv).map(drop).unwrap_err().to_string();
    assert!(refusal.contains(&format!("weights {}, KV cache {},", cpu.weights, cpu.kv)), "{refusal}");
}

#[test]
fn what_cannot_be_divided_so_is_refused_by_name() {
    let device = HostMachine::new(Kernels::Record, 7).device(0, 1 << 28);
    let checkpoint = checkpoint(deep(WeightType::BF16));
    let refusal = |options: &LoadOptions, gpu_layers: u32| {
        SplitModel::load(&checkpoint, options, gpu_layers, &device).map(drop).unwrap_err().to_string()
    };
    for gpu_layers in [0, LAYERS] {
        assert!(refusal(&options(), gpu_layers).contains("4 layers cannot be divided"));
    }
    let swap = Some(SwapSpace { bytes: 1 << 20, folder: None });
    for (options, named) in [
        (LoadOptions { tensor_parallel: 2, ..options() }, "a group of 2 ranks with layers on the CPU"),
        (LoadOptions { block_tokens: 16, ..options() }, "a KV block of 16 tokens"),
        (LoadOptions { kv_data_type: KvDataType::Int4, ..options() }, "a KV cache in int4"),
        (LoadOptions { swap, ..options() }, "swap space"),
    ] {
        let refused = refusal(&options, 2);
        assert!(refused.contains(named) && refused.contains("CUDA"), "{refused}");
    }
}

/// A device that has no room for all layers has room for some.
#[test]
fn a_model_that_the_gpu_has_no_room_for_is_computed_by_both() {
    let (checkpoint, options) = (checkpoint(deep(WeightType::BF16)), options());
    let small = || HostMachine::new(Kernels::Run, 7).device(0, 8 << 20);
    let whole = CudaModel::load(&checkpoint, &options, &[small()]);
    let refused = whole.and_then(|model| model.start(options.kv, Replay::Graphs)).map(drop).unwrap_err().to_string();
    assert!(refused.contains("no room for"), "{refused}");
    step(&mut loaded(&checkpoint, &options, 1, &small()).executor, plan(vec![row(InputToken::Known(1), 0)]));
}

#[test]
fn a_device_that_is_lost_ends_the_executor_with_its_own_words() {
    const WORDS: &str = "CUDA_ERROR_ECC_UNCORRECTABLE: uncorrectable ECC error encountered";
    let (checkpoint, driver) = (checkpoint(deep(WeightType::BF16)), driver());
    let mut split = loaded(&checkpoint, &options(), 2, &driver.device()).executor;
    step(&mut split, plan(vec![row(InputToken::Known(1), 0)]));
    driver.lose_after(5, WORDS);
    let lost = (1..9).find_map(|position| {
        let ticket = split.submit(plan(vec![row(InputToken::Known(1), position)])).unwrap();
        split.collect(ticket).err()
    });
    let error = lost.unwrap().to_string();
    assert!(error.contains(WORDS), "{error}");
    assert!(split.submit(StepPlan::default()).and_then(|ticket| split.collect(ticket)).is_err());
}
