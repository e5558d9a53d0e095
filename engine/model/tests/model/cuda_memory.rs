//! Memory of a GPU: what lies there, what comes and goes, and what is refused.

use std::slice;

use crate::common::driver::generate;
use crate::common::rows::{plan, row};
use crate::common::tiny::Tiny;
use crate::cuda::{
    APART, VOCABULARY, agrees_with_the_cpu, checkpoint, device, driver, executor, family, jobs, loaded, options, tiny,
    whole_pieces,
};
use crate::cuda_steps::copied_blocks_are_read_alike;
use crate::packed;
use serde_json::json;
use windlass_checkpoint::Checkpoint;
use windlass_cuda_shim::{HostMachine, Kernels};
use windlass_engine_contract::memory::KvDataType;
use windlass_engine_core::engine::{Engine, EngineConfig};
use windlass_engine_core::executor::Executor;
use windlass_engine_core::plan::InputToken;
use windlass_engine_core::request::{Request, RequestId, Sampling};
use windlass_engine_model::cuda::{CudaExecutor, CudaModel, Replay};
use windlass_engine_model::{LoadOptions, SwapSpace};
use windlass_kernels::WeightType;

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
    for (options, named) in [
        (LoadOptions { block_tokens: 16, ..options() }, "a KV block of 16 tokens"),
        (LoadOptions { tensor_parallel: 9, ..options() }, "a group of 9 ranks"),
        (LoadOptions { kv_data_type: KvDataType::F16, ..options() }, "a KV cache in f16"),
        (LoadOptions { kv_data_type: KvDataType::Int4, ..options() }, "a KV cache in int4"),
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

/// A prompt of two blocks, two others that take its place in the pool, and it again: in every type of keys and values.
#[test]
fn blocks_that_left_the_pool_come_back_as_they_were() {
    let checkpoint = checkpoint(Tiny { tied: false, ..tiny(WeightType::BF16) });
    let request = |id: u32, prompt: u32| {
        let tokens = (0..150).map(|index| (index * (11 + 2 * prompt) + prompt) % VOCABULARY).collect();
        Request { logprobs: Some(0), ..Request::greedy(RequestId(id.into()), tokens, 5) }
    };
    for kv_data_type in [KvDataType::Bf16, KvDataType::Fp8, KvDataType::Int8] {
        let engine = |swap: Option<SwapSpace>| {
            let options = LoadOptions { kv_data_type, swap, ..options() };
            let model = CudaModel::load(&checkpoint, &options, &[device(7)]).unwrap();
            let executor = model.start(options.kv, Replay::Graphs).unwrap().executor;
            Engine::new(executor, EngineConfig { enable_prefix_cache: true, ..EngineConfig::PLAIN })
        };
        let mut swapping = engine(Some(SwapSpace { bytes: 1 << 20, folder: None }));
        let answers: Vec<_> =
            [0, 1, 2, 0].into_iter().zip(0..).map(|(prompt, id)| told(&mut swapping, request(id, prompt))).collect();
        let stats = swapping.stats();
        assert!(stats.swap.hit_tokens >= 128, "{kv_data_type:?}: {stats:?}");
        // A prompt whose blocks are found is computed in other chunks: its last tokens alone.
        let mut keeping = engine(None);
        let first = told(&mut keeping, request(0, 0));
        assert_eq!((&first, &told(&mut keeping, request(1, 0))), (&answers[0], &answers[3]), "{kv_data_type:?}");
    }
}

/// Tokens with their log probabilities.
fn told(engine: &mut Engine<CudaExecutor>, request: Request) -> Vec<(u32, u32)> {
    engine.add(request, 0.0).unwrap();
    let mut told = Vec::new();
    while !engine.is_idle() {
        for update in engine.step(0.0).unwrap().updates {
            assert_eq!(update.failure, None);
            let logprobs = update.logprobs.iter().map(|scores| scores.chosen.logprob.to_bits());
            told.extend(update.tokens.iter().copied().zip(logprobs));
        }
    }
    told
}
