//! Graphs that are captured while the engine is idle, before the steps that need them; on the shim.

use std::slice;
use std::sync::Arc;
use std::thread;

use crate::common::driver::{Job, generate, sample_row};
use crate::common::rows::{plan, row};
use crate::common::tiny::Tiny;
use crate::cuda::{GENERATED, checkpoint, device, driver, jobs, loaded, options, tiny};
use crate::pipeline::{PATIENCE, gathering};
use windlass_cuda_shim::{HostDriver, HostMachine, Issued, Kernels};
use windlass_engine_core::executor::{Executor, Prepared};
use windlass_engine_core::plan::{InputToken, PlanRow, RowLogprobs, RowOutput, SampleRow};
use windlass_engine_core::request::Sampling;
use windlass_engine_model::cuda::{CudaLeader, CudaModel, Device, Node, Replay, SplitModel, work};
use windlass_engine_model::{KvBudget, LoadOptions};
use windlass_kernels::WeightType;

/// Steps of up to four sequences: sizes one, two and four.
const SIZES: u32 = 3;

const ALL: Prepared = Prepared { done: SIZES, all: SIZES, advanced: false };

/// Captures all graphs, one at a time.
fn prepare(executor: &mut dyn Executor) -> Prepared {
    loop {
        let prepared = executor.prepare().unwrap();
        if !prepared.advanced {
            return prepared;
        }
    }
}

/// Graphs and copies that were given to a device.
fn ran(driver: &HostDriver) -> usize {
    driver.issued().iter().filter(|work| matches!(work, Issued::Graph(_) | Issued::Copy(_))).count()
}

fn random() -> Sampling {
    Sampling { temperature: 0.8, top_p: 0.9, seed: 3, ..Sampling::GREEDY }
}

#[test]
fn a_step_after_idling_replays_what_was_captured_before_and_its_tokens_are_the_same() {
    let checkpoint = checkpoint(tiny(WeightType::BF16));
    let said = |ahead: bool| {
        let driver = driver();
        let mut executor = loaded(&checkpoint, &driver.device(), Replay::Graphs).executor;
        if ahead {
            let before = ran(&driver);
            let each = [1, 2, 3].map(|done| Prepared { done, all: SIZES, advanced: true });
            assert_eq!([(); 3].map(|()| executor.prepare().unwrap()), each, "one at a time");
            assert_eq!(executor.prepare().unwrap(), ALL);
            assert_eq!(ran(&driver), before, "what is captured does not run");
        }
        let text = [Sampling::GREEDY, random()].map(|how| generate(&mut executor, &jobs(&how), GENERATED, 32, 2));
        (text, ran(&driver), executor.decoder().graphs())
    };
    let (ahead, as_they_come) = (said(true), said(false));
    assert_eq!((&ahead.0, ahead.1), (&as_they_come.0, as_they_come.1));
    assert_eq!(ahead.2, SIZES as usize, "no step captured one");
    assert!(as_they_come.2 < SIZES as usize && as_they_come.1 > 0, "{} of {}", as_they_come.2, as_they_come.1);
}

/// Captures between the steps of a sequence do not change its K and V, penalties or random numbers.
#[test]
fn a_capture_between_steps_changes_nothing_of_the_next_one() {
    let checkpoint = checkpoint(tiny(WeightType::BF16));
    let said = |prepares: bool| -> Vec<(Vec<RowOutput>, Vec<RowLogprobs>)> {
        let mut executor = loaded(&checkpoint, &device(7), Replay::Graphs).executor;
        let asks = |position: u32| {
            let sample = SampleRow { logprobs: Some(2), ..sample_row(&random()) };
            PlanRow { sample: Some(sample), ..row(InputToken::Known(11 * position % 128), position) }
        };
        let mut step = |position| {
            if prepares {
                executor.prepare().unwrap();
            }
            let ticket = executor.submit(plan(vec![asks(position)])).unwrap();
            let output = executor.collect(ticket).unwrap();
            (output.rows, output.scores)
        };
        (0..6).map(&mut step).collect()
    };
    assert_eq!(said(true), said(false));
}

/// Graphs for sequences of up to 2048 tokens, and for the longest.
#[test]
fn sequences_that_may_be_longer_have_graphs_of_their_own() {
    let small = Tiny { layers: 1, hidden: 64, feed_forward: 64, heads: 1, kv_heads: 1, ..tiny(WeightType::BF16) };
    let checkpoint = checkpoint(Tiny { longest_tokens: 4096, ..small });
    let kv = KvBudget::Blocks(40);
    let options = LoadOptions { kv, max_step_tokens: 512, max_model_tokens: Some(2500), ..options() };
    let job = Job { prompt: (0..2044).map(|token| token * token % 127).collect(), sampling: Sampling::GREEDY };
    let said = |ahead: bool| {
        let model = CudaModel::load(&checkpoint, &options, &[device(7)]).unwrap();
        let mut executor = model.start(kv, Replay::Graphs).unwrap().executor;
        if ahead {
            let all = 2 * SIZES;
            assert_eq!(prepare(&mut executor), Prepared { done: all, all, advanced: false });
        }
        let text = generate(&mut executor, slice::from_ref(&job), 8, 512, 2);
        (text, executor.decoder().graphs())
    };
    assert_eq!(said(true).0, said(false).0);
    assert_eq!([said(true).1, said(false).1], [2 * SIZES as usize, 2]);
}

/// Half of the free memory is left to graphs that steps capture and to the driver.
#[test]
fn graphs_are_captured_ahead_as_far_as_memory_goes_and_never_where_none_are_replayed() {
    let (checkpoint, driver) = (checkpoint(tiny(WeightType::BF16)), driver());
    let device = driver.device();
    let mut executor = loaded(&checkpoint, &device, Replay::Graphs).executor;
    assert!(executor.prepare().unwrap().advanced);
    let taken = device.allocate::<u8>(device.driver().memory().unwrap().free_bytes * 3 / 5).unwrap();
    assert_eq!(executor.prepare().unwrap(), Prepared { done: 1, all: SIZES, advanced: false });
    drop(taken);
    assert_eq!(prepare(&mut executor), ALL);
    let mut eager = loaded(&checkpoint, &driver.device(), Replay::Eager).executor;
    assert_eq!(eager.prepare().unwrap(), Prepared::default());
}

/// No graph has memory: steps run without, and existing graphs stay in use.
#[test]
fn steps_run_without_graphs_where_there_is_no_room_for_them() {
    let checkpoint = checkpoint(tiny(WeightType::BF16));
    let said = |is_full: bool| {
        let driver = driver();
        let device = driver.device();
        let mut executor = loaded(&checkpoint, &device, Replay::Graphs).executor;
        assert!(executor.prepare().unwrap().advanced);
        let free = device.driver().memory().unwrap().free_bytes;
        let taken = device.allocate::<u8>(if is_full { free } else { 1 }).unwrap();
        let jobs = jobs(&random());
        let text = [&jobs[..], &jobs[..1]].map(|jobs| generate(&mut executor, jobs, GENERATED, 32, 2));
        let graphs = driver.issued().iter().filter(|work| matches!(work, Issued::Graph(_))).count();
        drop(taken);
        let after = executor.prepare().unwrap();
        (text, executor.decoder().graphs(), graphs, after.advanced)
    };
    let (full, free) = (said(true), said(false));
    assert_eq!(full.0, free.0);
    assert_eq!((full.1, full.3), (1, false), "one that was captured before");
    assert!(full.2 > 0 && full.2 < free.2, "{} of {}", full.2, free.2);
    assert!(free.1 > 1);
}

#[test]
fn nothing_is_captured_while_memory_is_given_back() {
    let mut executor = loaded(&checkpoint(tiny(WeightType::BF16)), &device(7), Replay::Graphs).executor;
    executor.hold_kv(false).unwrap();
    assert!(executor.prepare().unwrap_err().to_string().contains("a capture"), "its memory may be another's");
    executor.hold_kv(true).unwrap();
    assert_eq!(prepare(&mut executor), ALL);
}

/// Graphs that no step has used are dropped while weights or K and V are freed, and captured again.
#[test]
fn graphs_that_no_step_used_are_given_back_with_keys_and_values() {
    let mut executor = loaded(&checkpoint(tiny(WeightType::BF16)), &device(7), Replay::Graphs).executor;
    assert_eq!(prepare(&mut executor), ALL);
    let ticket = executor.submit(plan(vec![row(InputToken::Known(1), 0)])).unwrap();
    executor.collect(ticket).unwrap();
    executor.hold_kv(false).unwrap();
    assert_eq!(executor.decoder().graphs(), 1);
    executor.hold_kv(true).unwrap();
    assert_eq!(prepare(&mut executor), ALL);
}

/// With peer access, and with exchange by a library: all ranks have the same sizes.
#[test]
fn ranks_capture_the_same_graphs() {
    let checkpoint = checkpoint(Tiny { tied: false, ..tiny(WeightType::BF16) });
    let options = LoadOptions { tensor_parallel: 2, ..options() };
    let near = HostMachine::new(Kernels::Run, 7);
    for machine in [near.clone(), near.without_peer_access().with_carrier()] {
        let said = |ahead: bool| {
            let drivers = [0, 1].map(|ordinal| machine.driver(ordinal, 1 << 28));
            let devices: Vec<Device> = drivers.iter().map(HostDriver::device).collect();
            let model = CudaModel::load(&checkpoint, &options, &devices).unwrap();
            let mut executor = model.start(options.kv, Replay::Graphs).unwrap().executor;
            if ahead {
                let issued = || drivers.each_ref().map(|driver| (ran(driver), driver.issued().len()));
                let before = issued();
                assert_eq!(prepare(&mut executor), ALL);
                let [first, other] = [0, 1].map(|rank: usize| issued()[rank].1 - before[rank].1);
                assert!(first > 0 && first == other, "{first} launches on one, {other} on the other");
                assert_eq!(issued().map(|(ran, _)| ran), before.map(|(ran, _)| ran));
            }
            let text = generate(&mut executor, &jobs(&random())[..3], 6, 32, 2);
            (text, drivers.each_ref().map(|driver| ran(driver)))
        };
        assert_eq!(said(true), said(false));
    }
}

/// If the device of one rank has no room, no rank captures: they replay together.
#[test]
fn the_rank_with_the_least_room_decides() {
    let checkpoint = checkpoint(Tiny { tied: false, ..tiny(WeightType::BF16) });
    let options = LoadOptions { tensor_parallel: 2, ..options() };
    let machine = HostMachine::new(Kernels::Run, 7);
    let devices = [0, 1].map(|ordinal| machine.device(ordinal, 1 << 28));
    let mut executor =
        CudaModel::load(&checkpoint, &options, &devices).unwrap().start(options.kv, Replay::Graphs).unwrap().executor;
    let taken = devices[1].allocate::<u8>(devices[1].driver().memory().unwrap().free_bytes * 3 / 5).unwrap();
    assert_eq!(executor.prepare().unwrap(), Prepared { done: 0, all: SIZES, advanced: false });
    drop(taken);
    assert_eq!(prepare(&mut executor), ALL);
}

/// Each node captures graphs of its own layers, when the leader is idle.
#[test]
fn nodes_and_models_whose_first_layers_stay_on_the_cpu_capture_ahead_too() {
    let deep = Tiny { layers: 3, tied: false, ..tiny(WeightType::BF16) };
    let drivers: [Arc<HostDriver>; 2] = [driver(), driver()];
    let (gathering, leader) = gathering(2, PATIENCE);
    let (other, leader) = (drivers[0].device(), leader.to_string());
    let worker = thread::spawn(move || {
        let node = Node { node_rank: 1, stages: 2, leader: &leader, patience: PATIENCE };
        work(&checkpoint(deep), &options(), &[other], node, Replay::Graphs)
    });
    let model = CudaLeader::load(&checkpoint(deep), &options(), &[drivers[1].device()], &gathering).unwrap();
    let nodes = model.start(options().kv, Replay::Graphs).unwrap().executor;
    let checkpoint = checkpoint(deep);
    let split = SplitModel::load(&checkpoint, &options(), 1, &device(7)).unwrap();
    let split = split.start(options().kv, Replay::Graphs).unwrap().executor;
    let jobs = jobs(&random());
    for mut executor in [nodes, split] {
        let as_they_come = generate(&mut executor, &jobs[..1], 4, 32, 2);
        assert_eq!(prepare(&mut executor), ALL);
        assert_eq!(generate(&mut executor, &jobs[..1], 4, 32, 2), as_they_come);
        generate(&mut executor, &jobs, 2, 32, 2);
    }
    worker.join().unwrap().unwrap();
}
