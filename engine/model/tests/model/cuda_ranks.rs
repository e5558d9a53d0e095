//! A decoder on several GPUs of one process computes what it computes on one GPU: on the shim, which runs the kernels
//! from their sources, each device at its own pace.

use std::sync::Arc;

use crate::common::driver::{Job, generate, sample_row};
use crate::common::hub::{Family, config, llama_oracle};
use crate::common::rows::{plan, row, tables};
use crate::common::tiny::Tiny;
use crate::cuda::{APART_IF_ROUNDED, whole_pieces};
use crate::cuda_drafts::branching_draft_tokens_are_accepted;
use crate::packed;
use serde_json::{Value, json};
use windlass_checkpoint::Checkpoint;
use windlass_cuda_shim::{HostDriver, HostMachine, Issued, Kernels};
use windlass_engine_contract::memory::{KvDataType, Ledger};
use windlass_engine_core::engine::{Engine, EngineConfig};
use windlass_engine_core::executor::{Executor, ExecutorError};
use windlass_engine_core::plan::{BlockId, BlockMove, InputToken, PlanRow, PromptLogprobsRow, SampleRow, StepPlan};
use windlass_engine_core::request::{Request, RequestId, Sampling};
use windlass_engine_core::sampling::TokenLogprobs;
use windlass_engine_model::cuda::{CudaExecutor, CudaModel, Device, Ground, LoadedCuda, Replay};
use windlass_engine_model::{ActivationType, KvBudget, LoadOptions, Quantization};
use windlass_kernels::WeightType;
use windlass_kernels::cuda::Kernel;

const GENERATED: usize = 5;
const VOCABULARY: u32 = 131;
/// How much log probabilities may change by sums of rounded parts: as much as by bf16 activations (`cuda.rs`).
const APART: f32 = 0.08;

fn options(ranks: usize) -> LoadOptions {
    LoadOptions {
        threads: 1,
        tensor_parallel: ranks as u32,
        activations: ActivationType::Int16,
        block_tokens: 64,
        kv: KvBudget::Blocks(4),
        max_sequences: 4,
        max_step_tokens: 32,
        max_model_tokens: Some(256),
        ..LoadOptions::default()
    }
}

/// Heads for two and four ranks, a vocabulary that neither number divides, and an untied head.
fn tiny(kind: WeightType) -> Tiny {
    Tiny { vocabulary: VOCABULARY.into(), tied: false, ..Tiny::of(kind) }
}

fn checkpoint(tiny: Tiny) -> Checkpoint {
    Checkpoint::from_bytes(tiny.build().build()).unwrap()
}

fn drivers(count: usize, seed: u64) -> Vec<Arc<HostDriver>> {
    drivers_of(&HostMachine::new(Kernels::Run, seed), count)
}

fn drivers_of(machine: &HostMachine, count: usize) -> Vec<Arc<HostDriver>> {
    (0..count).map(|ordinal| machine.driver(ordinal, 1 << 28)).collect()
}

fn devices(drivers: &[Arc<HostDriver>]) -> Vec<Device> {
    drivers.iter().map(HostDriver::device).collect()
}

fn loaded(checkpoint: &Checkpoint, options: &LoadOptions, devices: &[Device], replay: Replay) -> LoadedCuda {
    CudaModel::load(checkpoint, options, devices).unwrap().start(options.kv, replay).unwrap()
}

fn executor(checkpoint: &Checkpoint, ranks: usize) -> CudaExecutor {
    loaded(checkpoint, &options(ranks), &devices(&drivers(ranks, 7)), Replay::Graphs).executor
}

fn jobs(sampling: &Sampling) -> Vec<Job> {
    let prompt = |job: u32| (0..5 + 9 * job).map(|token| (token * 37 + job) % VOCABULARY).collect();
    (0..2).map(|job| Job { prompt: prompt(job), sampling: sampling.clone() }).collect()
}

/// Log probabilities of each token of a text given those before it, and the distance of each to that of the best token.
fn scored(executor: &mut dyn Executor, text: &[u32]) -> Vec<[f32; 2]> {
    let blocks = tables(executor);
    let mut scores = Vec::new();
    for (chunk, tokens) in text[..text.len() - 1].chunks(30).enumerate() {
        let first = 30 * chunk;
        let score = Some(PromptLogprobsRow { targets: text[first + 1..=first + tokens.len()].to_vec(), top: 1 });
        let tokens = tokens.iter().copied().map(InputToken::Known).collect();
        let asked =
            PlanRow { tokens, sample: None, score, blocks: blocks.clone(), ..row(InputToken::Known(0), first as u32) };
        let ticket = executor.submit(plan(vec![asked])).unwrap();
        let prompt = executor.collect(ticket).unwrap().scores.remove(0).prompt;
        let logprobs = |token: &TokenLogprobs| [token.chosen.logprob, token.top[0].logprob - token.chosen.logprob];
        scores.extend(prompt.iter().map(logprobs));
    }
    scores
}

/// Compares log probabilities of both, which must be close, and scores the greedy tokens of many ranks on one rank.
fn agrees_with_one_rank(name: &str, checkpoint: &Checkpoint, options: &LoadOptions) {
    agrees_within(APART, name, checkpoint, options);
}

fn agrees_within(bound: f32, name: &str, checkpoint: &Checkpoint, options: &LoadOptions) {
    let ranks = options.tensor_parallel as usize;
    let [mut one, mut many] = [1, ranks].map(|ranks| {
        let options = LoadOptions { kv: KvBudget::Blocks(8), tensor_parallel: ranks as u32, ..options.clone() };
        loaded(checkpoint, &options, &devices(&drivers(ranks, 7)), Replay::Graphs).executor
    });
    assert_eq!(many.decoder().count(), ranks);
    let text: Vec<u32> = (0..30).map(|token| token * 31 % VOCABULARY).collect();
    let (alone, together) = (scored(&mut one, &text), scored(&mut many, &text));
    let apart = alone.iter().zip(&together).map(|(one, many)| (one[0] - many[0]).abs()).fold(0.0, f32::max);
    let mut regret = 0.0_f32;
    for (job, answer) in
        jobs(&Sampling::GREEDY).iter().zip(generate(&mut many, &jobs(&Sampling::GREEDY), GENERATED, 32, 2))
    {
        let text = [&job.prompt[..], &answer].concat();
        let of_answer = scored(&mut one, &text).split_off(job.prompt.len() - 1);
        regret = of_answer.iter().map(|score| score[1]).fold(regret, f32::max);
    }
    println!("{name} on {ranks}: log probabilities at most {apart} apart, choices {regret}");
    assert!(apart > 0.0 && apart < bound && regret <= bound, "{name} on {ranks}: {apart} apart, choices {regret}");
}

/// Formats with blocks of 1, 32 and 256 values, tied and untied heads, and more ranks than key heads.
#[test]
fn two_three_and_four_ranks_give_the_tokens_of_one() {
    let wide = Tiny { hidden: 512, heads: 8, kv_heads: 2, rope_dims: 64, feed_forward: 1024, ..tiny(WeightType::Q4K) };
    let three = Tiny { hidden: 384, heads: 6, kv_heads: 3, feed_forward: 224, ..tiny(WeightType::BF16) };
    for (tiny, counts) in [
        (tiny(WeightType::BF16), &[2, 4][..]),
        (Tiny { tied: true, ..tiny(WeightType::Q4_1) }, &[2, 4]),
        (tiny(WeightType::Q8_0), &[2]),
        (wide, &[2]),
        (three, &[3]),
    ] {
        let checkpoint = checkpoint(tiny);
        counts.iter().for_each(|&ranks| agrees_with_one_rank(tiny.kind.name(), &checkpoint, &options(ranks)));
    }
}

/// Each rank quantizes its own part.
#[test]
fn parts_that_are_quantized_at_load_give_the_tokens_of_the_whole() {
    for quantization in ["int8", "int4-g64-sym", "int4-g128"].map(Quantization::named) {
        let options = LoadOptions { quantization, ..options(2) };
        agrees_with_one_rank("bf16", &checkpoint(tiny(WeightType::BF16)), &options);
    }
}

/// Each rank rounds the inputs of its own columns, in the same blocks as a single rank. Sums over ranks are rounded to
/// bf16 before, so some inputs become another int8 value: within the bound for one device (`cuda.rs`).
#[test]
fn int8_activations_give_the_tokens_of_one_rank() {
    let wide = |kind| Tiny { hidden: 512, heads: 8, kv_heads: 2, rope_dims: 64, feed_forward: 1024, ..tiny(kind) };
    for tiny in [tiny(WeightType::Q4_0), tiny(WeightType::Q8_0), wide(WeightType::Q6K)] {
        let checkpoint = checkpoint(tiny);
        let in_bytes =
            |ranks| LoadOptions { activations: ActivationType::Int8, int8_activations: true, ..options(ranks) };
        agrees_within(APART_IF_ROUNDED, tiny.kind.name(), &checkpoint, &in_bytes(2));
        let drivers = drivers(2, 7);
        let mut executor = loaded(&checkpoint, &in_bytes(2), &devices(&drivers), Replay::Eager).executor;
        let ticket = executor.submit(plan(vec![row(InputToken::Known(1), 0)])).unwrap();
        executor.collect(ticket).unwrap();
        for driver in drivers {
            let issued = driver.issued();
            let roundings = issued.iter().filter(|work| **work == Issued::Launch(Kernel::RoundInputs)).count();
            assert_eq!(roundings, 2 * 4 + 1, "those of each layer and of the head: {issued:?}");
        }
    }
}

/// With four ranks, each has half a block of a group, which is padded.
#[test]
fn inputs_in_an_order_of_their_own_are_divided_too() {
    let checkpoint = packed::checkpoint(packed::SORTED);
    [2, 4].into_iter().for_each(|ranks| agrees_with_one_rank(packed::SORTED, &checkpoint, &options(ranks)));
}

fn family(model_type: &str, head_norms: bool, more: Value) -> Checkpoint {
    let mut keys = json!({"tie_word_embeddings": false, "num_hidden_layers": 2});
    keys.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    let config = config(model_type, keys);
    let family = Family { config, biases: model_type.starts_with("qwen2"), head_norms, oracle: llama_oracle };
    family.open(&family.safetensors())
}

/// Norms after blocks, which need the whole sum; windows in a group of their own; biases and norms of heads; experts of
/// two widths, the shared one among them.
#[test]
fn the_parts_of_other_families_are_divided_too() {
    let gemma = json!({"hidden_act": null, "hidden_activation": "gelu_pytorch_tanh", "head_dim": 64, "sliding_window": 20,
        "sliding_window_pattern": 2, "rope_local_base_freq": 1000.0, "query_pre_attn_scalar": 4096,
        "final_logit_softcapping": 3.0});
    let experts = json!({"num_experts": 3, "num_experts_per_tok": 3, "moe_intermediate_size": 96,
        "norm_topk_prob": false, "shared_expert_intermediate_size": 160, "decoder_sparse_step": 1});
    for (name, checkpoint, ranks) in [
        ("gemma3", family("gemma3_text", true, gemma), 2),
        ("qwen2", family("qwen2", false, json!({"use_sliding_window": false})), 4),
        ("qwen2_moe", family("qwen2_moe", false, experts), 2),
    ] {
        agrees_with_one_rank(name, &checkpoint, &options(ranks));
    }
}

/// Experts of 96 columns, which four ranks cannot divide, and a shared one of 160 if asked for.
fn mixture(count: u32, used: u32, shared: bool) -> Checkpoint {
    let mut keys = json!({"num_experts": count, "num_experts_per_tok": used, "moe_intermediate_size": 96,
        "norm_topk_prob": true, "decoder_sparse_step": 1, "head_dim": 64, "mlp_only_layers": []});
    if shared {
        keys["shared_expert_intermediate_size"] = 160.into();
    }
    family(if shared { "qwen2_moe" } else { "qwen3_moe" }, !shared, keys)
}

/// Ranks with different numbers of experts; tokens without experts on a rank; integers.
#[test]
fn experts_that_stay_whole_give_the_tokens_of_one_rank() {
    let int8 = Quantization::named("int8");
    for (count, used, shared, ranks, quantization) in
        [(3, 3, true, 2, None), (5, 1, true, 2, int8), (6, 2, false, 4, None)]
    {
        let options = LoadOptions { expert_parallel: true, quantization, ..options(ranks) };
        agrees_with_one_rank(&format!("{used} of {count} experts"), &mixture(count, used, shared), &options);
    }
}

/// Every ledger equals the memory in use on its device, and a rank with an expert more uses more.
#[test]
fn memory_of_whole_experts_is_that_of_each_rank() {
    let (checkpoint, drivers) = (mixture(3, 2, false), drivers(2, 7));
    let devices = devices(&drivers);
    let free =
        || devices.iter().map(|device| device.driver().memory().unwrap().free_bytes as u64).collect::<Vec<u64>>();
    let before = free();
    let options = LoadOptions { expert_parallel: true, ..options(2) };
    let LoadedCuda { executor, ledgers, .. } = loaded(&checkpoint, &options, &devices, Replay::Graphs);
    for ((before, now), ledger) in before.iter().zip(free()).zip(&ledgers) {
        let small = before - now - ledger.total();
        assert!(small < 64 << 10, "{ledger:?} of {}", before - now);
    }
    let (layers, expert) = (2, 3 * 96 * 128 * 2);
    assert_eq!(ledgers[1].weights - ledgers[0].weights, layers * expert);
    drop(executor);
}

#[test]
fn graphs_steps_in_flight_and_the_order_of_threads_and_devices_change_no_token() {
    let checkpoint = checkpoint(tiny(WeightType::BF16));
    for sampling in
        [Sampling::GREEDY, Sampling { temperature: 0.8, top_p: 0.9, top_k: 20, seed: 3, ..Sampling::GREEDY }]
    {
        let text = |replay, seed, chunk, in_flight| {
            let mut executor = loaded(&checkpoint, &options(2), &devices(&drivers(2, seed)), replay).executor;
            let text = generate(&mut executor, &jobs(&sampling), GENERATED, chunk, in_flight);
            assert_eq!(executor.decoder().graphs() > 0, replay == Replay::Graphs);
            text
        };
        let graphs = text(Replay::Graphs, 7, 9, 2);
        assert_eq!(graphs, text(Replay::Eager, 8, 32, 2));
        assert_eq!(graphs, text(Replay::Graphs, 9, 9, 1), "fed back on the devices and through the host");
    }
}

/// Answers with the prefix cache, and beside others in few blocks, are those of each request alone.
#[test]
fn prefix_hits_and_few_blocks_change_no_token() {
    const ANSWER: usize = 16;
    let checkpoint = checkpoint(tiny(WeightType::BF16));
    let prompt = |id: u32, len: u32| (0..len).map(|token| (token * 11 + id) % VOCABULARY).collect::<Vec<u32>>();
    // The third prompt is the first with more tokens after it.
    let prompts = [prompt(0, 70), prompt(1, 58), prompt(0, 90), prompt(3, 55)];
    let alone: Vec<Vec<u32>> = prompts
        .iter()
        .map(|prompt| generate(&mut executor(&checkpoint, 2), &[Job::greedy(prompt)], ANSWER, 32, 2).remove(0))
        .collect();
    let config = EngineConfig { enable_prefix_cache: true, ..EngineConfig::PLAIN };
    // Each needs two blocks in the end, and there are three.
    let options = LoadOptions { kv: KvBudget::Blocks(3), max_model_tokens: Some(192), ..options(2) };
    let executor = loaded(&checkpoint, &options, &devices(&drivers(2, 7)), Replay::Graphs).executor;
    let mut engine = Engine::new(executor, config);
    let mut texts = vec![Vec::new(); prompts.len()];
    let mut run = |engine: &mut Engine<CudaExecutor>, ids: &[usize]| {
        for &id in ids {
            let request = Request::greedy(RequestId(id as u64), prompts[id].clone(), ANSWER as u32);
            engine.add(request, 0.0).unwrap();
        }
        while !engine.is_idle() {
            for update in engine.step(0.0).unwrap().updates {
                texts[update.request.0 as usize].extend(update.tokens);
            }
        }
    };
    run(&mut engine, &[0]);
    run(&mut engine, &[2]);
    run(&mut engine, &[1, 3]);
    let stats = engine.stats();
    assert!(stats.prefix_hit_tokens > 0, "{stats:?}");
    assert_eq!(texts, alone);
}

/// Rows that only the host samples (with a bias), log probabilities, and a copied block.
#[test]
fn what_the_host_samples_and_copied_blocks_are_those_of_all_ranks() {
    let checkpoint = checkpoint(tiny(WeightType::BF16));
    let mut jobs = jobs(&Sampling::GREEDY);
    jobs[1].sampling = Sampling { logit_bias: vec![(130, 100.0)], ..Sampling::GREEDY };
    let mut executor = executor(&checkpoint, 2);
    let together = generate(&mut executor, &jobs, 4, 32, 2);
    // The other rank has the last token of the vocabulary.
    assert_eq!(together[1], [130; 4]);
    assert_eq!(together[0], generate(&mut executor, &jobs[..1], 4, 32, 2)[0]);
    let told = || SampleRow { logprobs: Some(0), ..sample_row(&Sampling::GREEDY) };
    let asks =
        |block: u32| PlanRow { blocks: [BlockId(block)].into(), sample: Some(told()), ..row(InputToken::Known(3), 1) };
    let first = executor.submit(plan(vec![row(InputToken::Known(9), 0)])).unwrap();
    executor.collect(first).unwrap();
    let moves = vec![BlockMove::Copy { from: BlockId(1), to: BlockId(2) }];
    let ticket = executor.submit(StepPlan { moves, rows: vec![asks(1), asks(2)], ..StepPlan::default() }).unwrap();
    let scores = executor.collect(ticket).unwrap().scores;
    let [own, copied] = [0, 1].map(|row: usize| scores[row].sampled[0].chosen.logprob);
    assert_eq!(own, copied);
}

#[test]
fn memory_is_divided_and_every_ledger_knows_all_of_its_device() {
    let checkpoint = checkpoint(tiny(WeightType::BF16));
    let ledgers = |ranks: usize| {
        let drivers = drivers(ranks, 7);
        let devices = devices(&drivers);
        let free = || -> Vec<u64> {
            devices.iter().map(|device| device.driver().memory().unwrap().free_bytes as u64).collect()
        };
        let before = free();
        let LoadedCuda { mut executor, ledgers, .. } = loaded(&checkpoint, &options(ranks), &devices, Replay::Graphs);
        let awake = free();
        for ((before, awake), ledger) in before.iter().zip(&awake).zip(&ledgers) {
            let small = before - awake - ledger.total();
            assert!(small < 64 << 10, "{ledger:?} of {}", before - awake);
        }
        let text = generate(&mut executor, &jobs(&Sampling::GREEDY), 3, 32, 2);
        executor.hold_kv(false).unwrap();
        let given_back = |expected: &dyn Fn(&Ledger) -> u64| {
            for ((free, awake), ledger) in free().iter().zip(&awake).zip(&ledgers) {
                assert_eq!(free - awake, expected(ledger), "given back on every device");
            }
        };
        let pieces = |bytes| whole_pieces(&drivers[0], bytes);
        given_back(&|ledger| pieces(ledger.kv));
        executor.hold_weights(false).unwrap();
        given_back(&|ledger| pieces(ledger.kv) + pieces(ledger.weights));
        assert!(executor.submit(plan(vec![row(InputToken::Known(1), 0)])).is_err(), "there is nowhere to write");
        drop(executor);
        assert_eq!(free(), before, "everything was given back");
        let mut executor = loaded(&checkpoint, &options(ranks), &devices, Replay::Graphs).executor;
        let to_move: u64 = ledgers.iter().map(|ledger| pieces(ledger.weights)).sum();
        assert_eq!(executor.weights_to_move(), Some(to_move));
        executor.hold_kv(false).unwrap();
        executor.hold_weights(false).unwrap();
        executor.hold_weights(true).unwrap();
        executor.hold_kv(true).unwrap();
        assert_eq!(free(), awake);
        assert_eq!(generate(&mut executor, &jobs(&Sampling::GREEDY), 3, 32, 2), text);
        ledgers
    };
    let ([one], [first, other]) = (&ledgers(1)[..], &ledgers(2)[..]) else { panic!("a ledger for each rank") };
    assert_eq!(first.kv * 2, one.kv);
    let norms = 4 * 256 * (2 * 2 + 1);
    assert_eq!(first.weights + other.weights, one.weights + norms);
}

/// If devices cannot read each other's memory, ranks exchange by copies or through host memory: the bits are the same,
/// in graphs too.
#[test]
fn ranks_that_do_not_reach_each_other_say_what_others_say() {
    let checkpoint = checkpoint(tiny(WeightType::BF16));
    let said = |machine: HostMachine, ranks: usize| {
        let drivers = drivers_of(&machine, ranks);
        let free = || drivers[0].device().driver().memory().unwrap().free_bytes as u64;
        let (before, options) = (free(), options(ranks));
        let model = CudaModel::load(&checkpoint, &options, &devices(&drivers)).unwrap();
        let way = match model.ground() {
            Ground::Devices => "near",
            Ground::Carried(_) => "carried",
            Ground::Host(_) => "host",
        };
        let LoadedCuda { mut executor, ledgers, .. } = model.start(options.kv, Replay::Graphs).unwrap();
        let small = before - free() - ledgers[0].total();
        assert!(small < 64 << 10, "{:?} of {}", ledgers[0], before - free());
        let text: Vec<u32> = (0..30).map(|token| token * 31 % VOCABULARY).collect();
        let scores = scored(&mut executor, &text);
        let drawn = Sampling { temperature: 0.8, seed: 3, ..Sampling::GREEDY };
        let answers = [Sampling::GREEDY, drawn].map(|how| generate(&mut executor, &jobs(&how), GENERATED, 32, 2));
        assert!(executor.decoder().graphs() > 0);
        (way, (scores, answers))
    };
    for ranks in [2, 4] {
        let machine = HostMachine::new(Kernels::Run, 7);
        let apart = machine.clone().without_peer_access();
        let [near, carried, host] = [machine, apart.clone().with_carrier(), apart].map(|machine| said(machine, ranks));
        assert_eq!([near.0, carried.0, host.0], ["near", "carried", "host"]);
        assert_eq!(near.1, carried.1, "{ranks} ranks");
        assert_eq!(near.1, host.1, "{ranks} ranks");
    }
}

/// Only the draw is launched outside the graph.
#[test]
fn a_decoding_step_is_one_graph_on_every_device() {
    let (checkpoint, drivers) = (checkpoint(tiny(WeightType::BF16)), drivers(2, 7));
    let mut executor = loaded(&checkpoint, &options(2), &devices(&drivers), Replay::Graphs).executor;
    let mut step = |token, position| {
        let ticket = executor.submit(plan(vec![row(InputToken::Known(token), position)])).unwrap();
        executor.collect(ticket).unwrap();
    };
    step(1, 0);
    let before: Vec<usize> = drivers.iter().map(|driver| driver.issued().len()).collect();
    step(2, 1);
    for (driver, before) in drivers.iter().zip(before) {
        let issued = driver.issued()[before..].to_vec();
        let graphs = issued.iter().filter(|work| matches!(work, Issued::Graph(_)));
        let launches = issued.iter().filter(|work| matches!(work, Issued::Launch(_)));
        assert_eq!((graphs.count(), launches.count()), (1, 1), "{issued:?}");
    }
}

/// A device may be lost at any point of a step: the error names the rank and has the message of the device, and no rank
/// hangs.
#[test]
fn a_device_that_is_lost_ends_the_executor_with_its_own_words() {
    const WORDS: &str = "CUDA_ERROR_ECC_UNCORRECTABLE: uncorrectable ECC error encountered";
    let checkpoint = checkpoint(tiny(WeightType::BF16));
    let near = |seed| HostMachine::new(Kernels::Run, seed);
    let apart = |seed| HostMachine::new(Kernels::Run, seed).without_peer_access().with_carrier();
    let cases = [
        (1, 0, Replay::Graphs),
        (0, 3, Replay::Graphs),
        (1, 40, Replay::Eager),
        (0, 83, Replay::Graphs),
        (2, 130, Replay::Graphs),
    ];
    let machines: [&dyn Fn(u64) -> HostMachine; 2] = [&near, &apart];
    for ((rank, after, replay), machine) in cases.into_iter().flat_map(|case| machines.map(|machine| (case, machine))) {
        let ranks = if rank == 2 { 4 } else { 2 };
        let drivers = drivers_of(&machine(7 + after as u64), ranks);
        let mut executor = loaded(&checkpoint, &options(ranks), &devices(&drivers), replay).executor;
        drivers[rank].lose_after(after, WORDS);
        let error = lasting_error(&mut executor).to_string();
        let expected = format!("the executor failed: rank {rank} of {ranks} has left: ");
        assert!(error.starts_with(&expected) && error.ends_with(WORDS), "{error}");
        assert!(executor.submit(plan(vec![row(InputToken::Known(1), 0)])).is_err(), "nothing more is computed");
    }
}

/// Computes steps, two in flight, until one fails.
fn lasting_error(executor: &mut CudaExecutor) -> ExecutorError {
    let mut before = None;
    for position in 0..60 {
        let ticket = match executor.submit(plan(vec![row(InputToken::Known(1), position)])) {
            Ok(ticket) => ticket,
            Err(error) => return error,
        };
        if let Some(Err(error)) = before.replace(ticket).map(|ticket| executor.collect(ticket)) {
            return error;
        }
    }
    panic!("a lost device computed 60 steps")
}

#[test]
fn a_group_that_cannot_be_is_refused_with_what_would_work() {
    let machine = HostMachine::new(Kernels::Record, 7);
    let refusal = |machine: &HostMachine, tiny: Tiny, devices: usize, ranks: usize| {
        let devices: Vec<Device> = (0..devices).map(|ordinal| machine.device(ordinal, 1 << 28)).collect();
        CudaModel::load(&checkpoint(tiny), &options(ranks), &devices).map(drop).unwrap_err().to_string()
    };
    let plain = tiny(WeightType::BF16);
    assert_eq!(refusal(&machine, plain, 1, 2), "2 ranks need a GPU each, and there are 1: use one rank, or more GPUs");
    assert_eq!(
        refusal(&machine, plain, 2, 4),
        "4 ranks need a GPU each, and there are 2: use up to 2 ranks, or more GPUs"
    );
    assert_eq!(
        refusal(&machine, plain, 3, 3),
        "4 query heads and 2 key-value heads cannot be divided among 3 ranks: use 1, 2, 4"
    );
    assert_eq!(
        refusal(&machine, Tiny { feed_forward: 304, ..plain }, 2, 2),
        "a divided feed-forward block of 304 columns is not there on CUDA yet: use one rank, or a model with a multiple \
         of 32"
    );
    let refused = |checkpoint: &Checkpoint, options: &LoadOptions| {
        let devices: Vec<Device> = (0..4).map(|ordinal| machine.device(ordinal, 1 << 28)).collect();
        CudaModel::load(checkpoint, options, &devices).map(drop).unwrap_err().to_string()
    };
    assert_eq!(
        refused(&mixture(6, 2, false), &options(4)),
        "3 blocks of feed-forward columns cannot be divided among 4"
    );
    for ranks in [1, 2] {
        let refused =
            refused(&checkpoint(tiny(WeightType::BF16)), &LoadOptions { expert_parallel: true, ..options(ranks) });
        assert!(refused.contains("no mixture of experts: leave expert parallelism out"), "{refused}");
    }
}

/// Each rank moves K and V of its own heads: in layers of one group, of several groups, and in pages of 8 bits.
#[test]
fn branching_draft_tokens_change_no_token() {
    let gemma = json!({"hidden_act": null, "hidden_activation": "gelu_pytorch_tanh", "head_dim": 64, "sliding_window": 20,
        "sliding_window_pattern": 2, "rope_local_base_freq": 1000.0, "query_pre_attn_scalar": 4096,
        "final_logit_softcapping": null, "num_hidden_layers": 4});
    for (checkpoint, groups, kv_data_type, strayed) in [
        (checkpoint(tiny(WeightType::BF16)), 1, KvDataType::Bf16, 0),
        (family("gemma3_text", true, gemma), 2, KvDataType::Bf16, 0),
        (checkpoint(tiny(WeightType::BF16)), 1, KvDataType::Int8, 0),
    ] {
        let options = LoadOptions { kv: KvBudget::Blocks(4 * groups), kv_data_type, ..options(2) };
        let mut executor = loaded(&checkpoint, &options, &devices(&drivers(2, 7)), Replay::Graphs).executor;
        assert_eq!(executor.geometry().groups.count(), groups);
        let vocabulary = executor.geometry().vocabulary;
        branching_draft_tokens_are_accepted(&mut executor, vocabulary, &Sampling::GREEDY, strayed);
    }
}
