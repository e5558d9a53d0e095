//! A model divided among nodes with a GPU each computes what one GPU computes: on the shim, over real sockets.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::thread::{self, JoinHandle};

use crate::common::driver::{generate, sample_row};
use crate::common::rows::{plan, row};
use crate::common::tiny::Tiny;
use crate::cuda::{
    BLOCKS, GENERATED, NEAR_TIE, checkpoint, driver, jobs, most_regret, options, step, tiny, whole_pieces,
};
use crate::cuda_steps::copied_blocks_are_read_alike;
use crate::pipeline::{PATIENCE, gathering, pass_frame};
use windlass_cuda_shim::{HostDriver, HostMachine, Issued, Kernels};
use windlass_engine_contract::memory::{KvDataType, Ledger};
use windlass_engine_core::draft::DraftTree;
use windlass_engine_core::executor::Executor;
use windlass_engine_core::plan::{BlockId, InputToken, PlanRow, RowOutput, SampleRow, StepPlan};
use windlass_engine_core::request::Sampling;
use windlass_engine_model::cuda::{CudaLeader, CudaModel, Device, LoadedCuda, Node, Replay, work};
use windlass_engine_model::{CpuExecutor, KvBudget, LoadError, LoadOptions, load, load_leader};
use windlass_kernels::WeightType;
use windlass_kernels::cuda::Kernel;

type Worker = JoinHandle<Result<(), LoadError>>;

/// Five layers, so that stages have different numbers of them.
fn deep() -> Tiny {
    Tiny { layers: 5, tied: false, ..tiny(WeightType::BF16) }
}

fn worker(tiny: Tiny, options: LoadOptions, devices: Vec<Device>, node_rank: u32, of: (u32, SocketAddr)) -> Worker {
    let (stages, leader) = (of.0, of.1.to_string());
    thread::spawn(move || {
        let node = Node { node_rank, stages, leader: &leader, patience: PATIENCE };
        work(&checkpoint(tiny), &options, &devices, node, Replay::Graphs)
    })
}

/// A model on as many nodes as there are drivers; the last one leads.
fn led(tiny: Tiny, drivers: &[Arc<HostDriver>], replay: Replay) -> (LoadedCuda<CpuExecutor>, Vec<Worker>) {
    let stages = drivers.len() as u32;
    let (gathering, leader) = gathering(stages, PATIENCE);
    let node = |(index, driver): (usize, &Arc<HostDriver>)| {
        worker(tiny, options(), vec![driver.device()], index as u32 + 1, (stages, leader))
    };
    let (last, others) = drivers.split_last().unwrap();
    let workers = others.iter().enumerate().map(node).collect();
    let model = CudaLeader::load(&checkpoint(tiny), &options(), &[last.device()], &gathering).unwrap();
    (model.start(options().kv, replay).unwrap(), workers)
}

fn drivers(nodes: usize) -> Vec<Arc<HostDriver>> {
    (0..nodes).map(|_| driver()).collect()
}

fn ended(workers: Vec<Worker>) {
    workers.into_iter().for_each(|worker| worker.join().unwrap().unwrap());
}

fn free(driver: &Arc<HostDriver>) -> u64 {
    driver.device().driver().memory().unwrap().free_bytes as u64
}

/// Activations are sent unrounded, so nodes give the tokens of one GPU. With a tied head, both the first and the last
/// node have the embedding.
#[test]
fn two_and_three_nodes_give_the_tokens_of_one_gpu_and_of_the_cpu() {
    for (tied, nodes, replay) in [(false, 2, Replay::Graphs), (false, 3, Replay::Graphs), (true, 2, Replay::Eager)] {
        let tiny = Tiny { tied, ..deep() };
        let jobs = jobs(&Sampling::GREEDY);
        let alone = CudaModel::load(&checkpoint(tiny), &options(), &[driver().device()]).unwrap();
        let alone = generate(&mut alone.start(options().kv, Replay::Eager).unwrap().executor, &jobs, GENERATED, 32, 2);
        let (LoadedCuda { mut executor, .. }, workers) = led(tiny, &drivers(nodes), replay);
        assert_eq!(generate(&mut executor, &jobs, GENERATED, 32, 2), alone, "tied: {tied}, {nodes} nodes, {replay:?}");
        drop(executor);
        ended(workers);
        let mut cpu = load(&checkpoint(tiny), &options()).unwrap().executor;
        for (job, answer) in jobs.iter().zip(&alone) {
            let regret = most_regret(&mut cpu, &job.prompt, answer);
            assert!(regret <= NEAR_TIE, "{answer:?} is {regret} from the CPU's choices");
        }
    }
}

/// The protocol of stages does not carry which draft tokens see each other.
#[test]
fn branching_draft_tokens_fail_by_name_and_nothing_else_does() {
    let (LoadedCuda { mut executor, .. }, workers) = led(deep(), &drivers(2), Replay::Graphs);
    let mut draft = DraftTree::default();
    [4, 5].iter().for_each(|&token| _ = draft.push(token, None));
    let sample = SampleRow { draft, ..sample_row(&Sampling::GREEDY) };
    let branching = PlanRow { sample: Some(sample), ..row(InputToken::Known(1), 0) };
    let other = PlanRow { blocks: [BlockId(2)].into(), ..row(InputToken::Known(1), 0) };
    let rows = step(&mut executor, plan(vec![branching, other]));
    assert!(
        matches!(&rows[..], [RowOutput::Failed(why), RowOutput::Sampled(_)]
            if why.to_string().contains("guesses that branch")),
        "{rows:?}"
    );
    drop(executor);
    ended(workers);
}

/// All kernels are in graphs: on the first node, on one between others, and on the one with the head. Only the draw is
/// launched outside.
#[test]
fn a_decoding_step_is_one_graph_on_every_node() {
    let drivers = drivers(3);
    let (LoadedCuda { mut executor, .. }, workers) = led(deep(), &drivers, Replay::Graphs);
    step(&mut executor, plan(vec![row(InputToken::Known(1), 0)]));
    let before: Vec<usize> = drivers.iter().map(|driver| driver.issued().len()).collect();
    step(&mut executor, plan(vec![row(InputToken::Known(2), 1)]));
    let kernels = drivers.iter().zip(before).map(|(driver, before)| {
        let of_kernels = |work: &Issued| matches!(work, Issued::Graph(_) | Issued::Launch(_));
        driver.issued()[before..].iter().filter(|work| of_kernels(work)).cloned().collect::<Vec<_>>()
    });
    // Eight kernels a layer; the nodes have one, two and two layers. One kernel embeds, three make logits, and one
    // draws.
    let mut expected = [1 + 8, 2 * 8, 2 * 8 + 3].map(|pieces| vec![Issued::Graph(pieces)]);
    expected[2].push(Issued::Launch(Kernel::Sample));
    assert_eq!(kernels.collect::<Vec<_>>(), expected);
    drop(executor);
    ended(workers);
}

#[test]
fn nodes_may_each_have_ranks() {
    let options = LoadOptions { tensor_parallel: 2, ..options() };
    let devices = |seed: u64| -> Vec<Device> {
        let machine = HostMachine::new(Kernels::Run, seed);
        (0..2).map(|ordinal| machine.device(ordinal, 1 << 28)).collect()
    };
    let jobs = &jobs(&Sampling::GREEDY)[..2];
    let alone = CudaModel::load(&checkpoint(deep()), &options, &devices(1)).unwrap();
    let alone = generate(&mut alone.start(options.kv, Replay::Graphs).unwrap().executor, jobs, 5, 32, 2);
    let (gathering, leader) = gathering(2, PATIENCE);
    let worker = worker(deep(), options.clone(), devices(2), 1, (2, leader));
    let model = CudaLeader::load(&checkpoint(deep()), &options, &devices(3), &gathering).unwrap();
    let mut executor = model.start(options.kv, Replay::Graphs).unwrap().executor;
    assert_eq!(generate(&mut executor, jobs, 5, 32, 2), alone);
    drop(executor);
    ended(vec![worker]);
}

#[test]
fn a_copied_block_is_read_like_the_one_it_was_copied_from() {
    let (LoadedCuda { mut executor, .. }, workers) = led(deep(), &drivers(2), Replay::Graphs);
    copied_blocks_are_read_alike(&mut executor);
    drop(executor);
    ended(workers);
}

/// When the call returns, every node has freed its K and V.
#[test]
fn nodes_sleep_and_wake_together_and_the_leaders_ledger_knows_its_own_device() {
    let drivers = drivers(2);
    let before: Vec<u64> = drivers.iter().map(free).collect();
    let (LoadedCuda { mut executor, ledgers, .. }, workers) = led(deep(), &drivers, Replay::Graphs);
    let awake: Vec<u64> = drivers.iter().map(free).collect();
    let ledger: Ledger = ledgers[0];
    let small = before[1] - awake[1] - ledger.total();
    assert!(small < 64 << 10, "{ledger:?} of {}", before[1] - awake[1]);
    let jobs = jobs(&Sampling::GREEDY);
    let text = generate(&mut executor, &jobs, 3, 32, 2);
    executor.hold_kv(false).unwrap();
    // The other node has two layers of five.
    let kv = [ledger.kv / 3 * 2, ledger.kv].map(|bytes| whole_pieces(&drivers[0], bytes));
    assert_eq!([0, 1].map(|node: usize| free(&drivers[node]) - awake[node]), kv);
    executor.hold_kv(true).unwrap();
    assert_eq!(drivers.iter().map(free).collect::<Vec<_>>(), awake);
    assert_eq!(generate(&mut executor, &jobs, 3, 32, 2), text);
    drop(executor);
    ended(workers);
    assert_eq!(drivers.iter().map(free).collect::<Vec<_>>(), before, "everything was given back");
}

/// All nodes have as many blocks as the one with least room.
#[test]
fn the_node_with_the_least_room_decides_how_many_blocks_there_are() {
    let (gathering, leader) = gathering(2, PATIENCE);
    let small = HostMachine::new(Kernels::Run, 7).driver(0, 6 << 20);
    let worker = worker(deep(), options(), vec![small.device()], 1, (2, leader));
    let model = CudaLeader::load(&checkpoint(deep()), &options(), &[driver().device()], &gathering).unwrap();
    let room = model.free_bytes().unwrap();
    // The driver needs some memory itself.
    let LoadedCuda { executor, .. } = model.start(KvBudget::Bytes(room / 10 * 9), Replay::Graphs).unwrap();
    let (blocks, left) = (executor.geometry().blocks, free(&small));
    assert!(blocks > BLOCKS && room < 6 << 20 && left < 1 << 20, "{blocks} in {room}, and {left} left");
    drop(executor);
    ended(vec![worker]);
}

#[test]
fn a_node_without_room_says_so_to_the_leader() {
    for (bytes, words) in [(1 << 20, "no room for"), (6 << 20, "no room for")] {
        let (gathering, leader) = gathering(2, PATIENCE);
        let small = HostMachine::new(Kernels::Run, 7).device(0, bytes);
        let worker = worker(deep(), options(), vec![small], 1, (2, leader));
        let model = CudaLeader::load(&checkpoint(deep()), &options(), &[driver().device()], &gathering);
        let started = model.and_then(|model| model.start(KvBudget::Blocks(1000), Replay::Graphs));
        let refusal = started.map(drop).unwrap_err().to_string();
        assert!(refusal.contains("node 1 of the pipeline") && refusal.contains(words), "{refusal}");
        assert!(worker.join().unwrap().unwrap_err().to_string().contains(words));
    }
}

#[test]
fn nodes_on_other_devices_and_with_other_models_are_refused_on_both_sides() {
    let (own, other) = (deep(), Tiny { feed_forward: 256, ..deep() });
    let led_by_the_cpu = gathering(2, PATIENCE);
    let on_a_gpu = worker(own, options(), vec![driver().device()], 1, (2, led_by_the_cpu.1));
    let refusal = load_leader(&checkpoint(own), &options(), &led_by_the_cpu.0).map(drop).unwrap_err().to_string();
    let told = on_a_gpu.join().unwrap().unwrap_err().to_string();
    assert!([&refusal, &told].iter().all(|text| text.contains("it computes on cuda, not cpu")), "{refusal}, {told}");
    let led_by_a_gpu = gathering(2, PATIENCE);
    let other = worker(other, options(), vec![driver().device()], 1, (2, led_by_a_gpu.1));
    let refusal = CudaLeader::load(&checkpoint(own), &options(), &[driver().device()], &led_by_a_gpu.0);
    let refusal = refusal.map(drop).unwrap_err().to_string();
    let told = other.join().unwrap().unwrap_err().to_string();
    assert!([&refusal, &told].iter().all(|text| text.contains("another model")), "{refusal}, {told}");
}

/// The error names the flag and the values of both.
#[test]
fn a_node_that_would_round_otherwise_is_refused_on_both_sides() {
    let bytes = LoadOptions { int8_activations: true, ..options() };
    let wide = LoadOptions { batch_invariant: false, ..options() };
    let keys = LoadOptions { kv_data_type: KvDataType::Fp8, ..options() };
    for (of_node, words) in [
        (bytes, "--activation-dtype int8, not bf16: give all nodes the same"),
        (wide, "--deterministic false, not true"),
        (keys, "--kv-cache-dtype fp8, not bf16"),
    ] {
        let led = gathering(2, PATIENCE);
        let node = worker(deep(), of_node, vec![driver().device()], 1, (2, led.1));
        let refusal = CudaLeader::load(&checkpoint(deep()), &options(), &[driver().device()], &led.0);
        let refusal = refusal.map(drop).unwrap_err().to_string();
        let told = node.join().unwrap().unwrap_err().to_string();
        assert!(refusal.contains("node 1 of the pipeline"), "{refusal}");
        assert!([&refusal, &told].iter().all(|text| text.contains(words)), "{refusal}, {told}");
    }
}

/// The lost device may be on the leader or on another node, whose message is reported with its name.
#[test]
fn a_device_that_is_lost_ends_the_executor_with_its_own_words() {
    const WORDS: &str = "CUDA_ERROR_ECC_UNCORRECTABLE: uncorrectable ECC error encountered";
    for lost in [0, 1] {
        let drivers = drivers(2);
        let (LoadedCuda { mut executor, .. }, mut workers) = led(deep(), &drivers, Replay::Graphs);
        step(&mut executor, plan(vec![row(InputToken::Known(1), 0)]));
        drivers[lost].lose_after(5, WORDS);
        let error = (1..9).find_map(|position| {
            let ticket = executor.submit(plan(vec![row(InputToken::Known(1), position)])).unwrap();
            executor.collect(ticket).err()
        });
        let error = error.unwrap().to_string();
        assert!(error.contains(WORDS) && error.contains("node 1 of the pipeline") == (lost == 0), "{error}");
        assert!(executor.submit(StepPlan::default()).and_then(|ticket| executor.collect(ticket)).is_err());
        drop(executor);
        let worker = workers.remove(0).join().unwrap();
        assert_eq!(worker.is_err_and(|error| error.to_string().contains(WORDS)), lost == 0);
    }
}

/// A fake node: it joins with the messages of a real one, and disconnects before its first step.
#[test]
fn a_node_that_is_gone_ends_the_step_with_its_name() {
    let (gathering, leader) = gathering(2, PATIENCE);
    let proxy = TcpListener::bind("127.0.0.1:0").unwrap();
    let worker = worker(deep(), options(), vec![driver().device()], 1, (2, proxy.local_addr().unwrap()));
    let cut = thread::spawn(move || {
        let (mut worker, mut leader) = (proxy.accept().unwrap().0, TcpStream::connect(leader).unwrap());
        // It joins, reports its room, gets its sizes, and reports that it is built.
        pass_frame(&mut worker, &mut leader).unwrap();
        pass_frame(&mut worker, &mut leader).unwrap();
        pass_frame(&mut leader, &mut worker).unwrap();
        pass_frame(&mut worker, &mut leader).unwrap();
    });
    let model = CudaLeader::load(&checkpoint(deep()), &options(), &[driver().device()], &gathering).unwrap();
    let mut executor = model.start(options().kv, Replay::Graphs).unwrap().executor;
    cut.join().unwrap();
    let ticket = executor.submit(plan(vec![row(InputToken::Known(1), 0)])).unwrap();
    let error = executor.collect(ticket).unwrap_err().to_string();
    assert!(error.contains("node 1 of the pipeline, at 127.0.0.1"), "{error}");
    let error = worker.join().unwrap().unwrap_err().to_string();
    assert!(error.contains("the leader of the pipeline") && error.contains("closed"), "{error}");
}

/// Requests of a leader are checked, whoever it is.
#[test]
fn blocks_that_are_no_pages_of_the_kernels_are_refused() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let worker = worker(deep(), options(), vec![driver().device()], 1, (2, listener.local_addr().unwrap()));
    let (mut node, _) = listener.accept().unwrap();
    let assignment = r#"{"version":4,"stage":0,"stages":2,"blockTokens":16,"blocks":4,"maxSequenceTokens":64,"maxStepRows":4,
        "maxStepTokens":32,"maxStepLogits":32,"vocabulary":128}"#;
    let length = (assignment.len() as u32).to_le_bytes();
    // The third kind of frame is an assignment.
    node.write_all(&[&[2], &length[..], assignment.as_bytes()].concat()).unwrap();
    let refusal = worker.join().unwrap().unwrap_err().to_string();
    assert!(refusal.contains("a KV block of 16 tokens"), "{refusal}");
    let mut told = Vec::new();
    node.read_to_end(&mut told).unwrap();
    assert!(String::from_utf8_lossy(&told).contains("a KV block of 16 tokens"), "the leader is told");
}
