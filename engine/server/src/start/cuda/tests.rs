//! From flags to an engine that has generated a token, on the stand-in for a GPU.

use super::*;
use crate::driver::{Depth, Event};
use crate::start::EngineThread;
use crate::start::open;
use crate::start::testing::{configured, file};
use std::net::TcpListener;
use std::thread;
use windlass_cuda_shim::{HostMachine, Kernels};
use windlass_engine_contract::memory::StepDefaults;
use windlass_engine_contract::termination::Termination;
use windlass_engine_core::request::Request;

fn device(bytes: usize) -> Device {
    HostMachine::new(Kernels::Run, 7).device(0, bytes)
}

/// What comes of these flags on a GPU with so many bytes.
fn started(flags: &str, device_bytes: usize) -> Result<Built, Failure> {
    let file = file();
    let (config, cpu) = configured(file.path(), flags)?;
    let clock = Clock::start();
    let monitor = Arc::new(Monitor::new(clock, "tiny").unwrap());
    Ok(start(&config, &cpu, &[device(device_bytes)], &monitor, clock)?.built)
}

/// Works for another node as these flags say, until that ends.
fn worked(flags: &str) -> Result<(), Failure> {
    let file = file();
    let (config, cpu) = configured(file.path(), flags)?;
    let monitor = Arc::new(Monitor::new(Clock::start(), "tiny").unwrap());
    work(&config, &cpu, cpu.pipeline.as_ref().unwrap(), &[device(1 << 28)], &monitor)
}

#[test]
fn nodes_with_gpus_share_the_layers() {
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    // So few sequences that each way has room for all of them.
    let sizes = "--max-num-seqs 64";
    let flags = format!("{sizes} --pipeline-parallel-size 2 --master-port {port}");
    let second = format!("{flags} --node-rank 1 --headless");
    let second = thread::spawn(move || worked(&second));
    let [alone, first] = [sizes, &flags].map(|flags| started(flags, 1 << 28).unwrap());
    second.join().unwrap().unwrap();
    assert_eq!((first.effective.device.as_str(), first.effective.pipeline_parallel), ("cuda", 2));
    assert_eq!(first.effective.kv_blocks, alone.effective.kv_blocks);
    assert_ne!(first.fingerprint, alone.fingerprint, "the host draws");
    let [first, alone] = [first, alone].map(|built| built.ledger.unwrap());
    assert_eq!(first.kv * 2, alone.kv, "the other half is on the other node");
}

/// It takes what the ledger says of a GPU on which nothing but the model was, and what is too large for the GPU is said to be its.
#[test]
fn a_draft_model_lies_on_the_gpu_beside_the_model() {
    let (file, small) =
        (file(), |draft: &str| format!("--max-num-seqs 8 --speculative-config {{\"model\":\"{draft}\"}}"));
    let with_draft = small(&file.path().display().to_string());
    let [alone, beside] = ["--max-num-seqs 8", &with_draft].map(|flags| started(flags, 1 << 28).unwrap());
    let [alone_ledger, ledger] = [&alone, &beside].map(|built| built.ledger.unwrap());
    assert!(ledger.weights >= 2 * alone_ledger.weights && ledger.kv > alone_ledger.kv, "{ledger:?}, {alone_ledger:?}");
    assert_eq!(beside.effective.kv_blocks, alone.effective.kv_blocks, "there is room for both");
    assert_eq!(beside.fingerprint, alone.fingerprint, "no token changes");
    let missing = started(&small("/nowhere.gguf"), 1 << 28).err().unwrap();
    assert!(missing.message.contains("/nowhere.gguf"), "{missing}");
}

#[test]
fn layers_stay_on_the_cpu_where_the_flag_says_so() {
    // So few sequences that each way has room for all of them.
    let [all, whole, split] = ["", "--n-gpu-layers 99", "--n-gpu-layers 3"]
        .map(|flags| started(&format!("--max-num-seqs 64 {flags}"), 1 << 28).unwrap());
    assert_eq!([&all, &whole].map(|built| built.effective.kernels.as_str()), ["sm_90"; 2]);
    assert!(split.effective.kernels.starts_with("sm_90 "), "{}", split.effective.kernels);
    assert_eq!(split.effective.device, "cuda");
    assert_eq!(all.fingerprint, whole.fingerprint);
    assert_ne!(all.fingerprint, split.fingerprint, "the CPU rounds otherwise");
    let [all, split] = [all, split].map(|built| built.ledger.unwrap());
    assert_eq!(split.weights, all.weights);
    // One more block than steps use, on each of the GPU's layers.
    assert!(split.kv < all.kv && split.kv > all.kv * 9 / 10, "{} of {}", split.kv, all.kv);
}

/// The more memory, the more layers, and all where there is enough. Where one more was reckoned than the driver leaves room for, it
/// stays on the CPU.
#[test]
fn as_many_layers_as_fit_are_on_the_gpu() {
    let flags = "--n-gpu-layers auto --max-num-seqs 2 --max-num-batched-tokens 64 --max-model-len 256";
    let layers = |bytes: usize| {
        let file = file();
        let (config, cpu) = configured(file.path(), flags).unwrap();
        let checkpoint = open(file.path()).unwrap();
        split_at(&config, &cpu, &checkpoint, 4, &device(bytes)).ok().map(|layers| layers.unwrap_or(4))
    };
    let sizes: Vec<usize> = (1..64).map(|step| step << 18).collect();
    let found: Vec<_> = sizes.iter().copied().map(layers).collect();
    assert!(found.is_sorted() && found[0].is_none() && found.contains(&Some(2)), "{found:?}");
    assert_eq!(found.last(), Some(&Some(4)), "{found:?}");
    let most = sizes[found.iter().rposition(|layers| *layers == Some(3)).unwrap()];
    let built = started(flags, most).unwrap();
    assert!(built.effective.kernels.starts_with("sm_90 "), "{}", built.effective.kernels);
}

/// Of half a GPU there is as much for keys and values, and for layers, as of a whole one with half the memory.
#[test]
fn an_engine_takes_the_share_of_a_gpu_that_it_is_given() {
    let flags = "--max-num-seqs 16 --max-num-batched-tokens 64";
    let blocks = |share: &str, bytes: usize| started(&format!("{flags} {share}"), bytes).unwrap().effective.kv_blocks;
    let (all, half) = (blocks("", 1 << 24), blocks("--gpu-memory-utilization 0.5", 1 << 24));
    assert!(half < all, "{half} of {all}");
    assert_eq!(half, blocks("", 1 << 23));
    assert_eq!(all, blocks("--gpu-memory-utilization 1", 1 << 24));
    let layers = |share: &str, bytes: usize| {
        let file = file();
        let flags =
            format!("--n-gpu-layers auto --max-num-seqs 2 --max-num-batched-tokens 64 --max-model-len 256 {share}");
        let (config, cpu) = configured(file.path(), &flags).unwrap();
        split::layers_that_fit(&config, &cpu, &open(file.path()).unwrap(), &device(bytes)).ok()
    };
    let sizes = (1..48).map(|step| step << 18);
    let [whole, halves] = [("", 1), ("--gpu-memory-utilization 0.5", 2)]
        .map(|(share, times)| sizes.clone().map(|bytes| layers(share, bytes * times)).collect::<Vec<_>>());
    assert!(whole.contains(&None) && whole.contains(&Some(4)), "{whole:?}");
    assert_eq!(halves, whole);
}

#[test]
fn wide_products_are_asked_for_by_a_flag_and_change_answers() {
    let [alike, wide] = ["--deterministic", "--no-deterministic"].map(|flags| {
        let file = file();
        let (config, cpu) = configured(file.path(), flags).unwrap();
        (cpu::asked(&config, &cpu, StepDefaults::CUDA).batch_invariant, started(flags, 1 << 28).unwrap().fingerprint)
    });
    assert_eq!((alike.0, wide.0), (true, false));
    assert_eq!(alike.1, started("", 1 << 28).unwrap().fingerprint);
    assert_ne!(alike.1, wide.1);
}

/// Bytes where they are asked for by name; what no kernel does is refused, but that layers on the CPU may be computed so.
#[test]
fn activations_are_bf16_unless_a_flag_says_int8() {
    let rounds = |flags: &str| {
        let file = file();
        let (config, cpu) = configured(file.path(), flags).unwrap();
        (cpu::asked(&config, &cpu, StepDefaults::CUDA).int8_activations, started(flags, 1 << 28).unwrap())
    };
    let (halves, bytes) = (rounds(""), rounds("--activation-dtype int8"));
    assert_eq!((halves.0, bytes.0), (false, true));
    assert_ne!(halves.1.fingerprint, bytes.1.fingerprint);
    let workspace = |built: &Built| built.ledger.unwrap().workspace;
    assert!(workspace(&bytes.1) > workspace(&halves.1), "codes and scales have room");
    let split = ["", "--activation-dtype int8", "--activation-dtype int16"].map(|flags| {
        let (rounds, built) = rounds(&format!("--n-gpu-layers 3 {flags}"));
        (rounds, built.fingerprint)
    });
    assert_eq!(split.each_ref().map(|(rounds, _)| *rounds), [false, true, false]);
    assert!(split[0].1 != split[1].1 && split[0].1 != split[2].1 && split[1].1 != split[2].1);
    let refused = started("--activation-dtype int16", 1 << 28).unwrap_err();
    assert_eq!(refused.reason, Reason::Unsupported);
    assert!(refused.message.contains("--activation-dtype int16 is not supported on a GPU"), "{}", refused.message);
}

/// From the host's memory it wakes without the file, with which it was read; else it reads that again.
#[test]
fn a_sleeper_gives_its_devices_memory_back_and_generates_when_it_wakes() {
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let mapping = HostMachine::new(Kernels::Run, 7);
    for (machine, depth, moves) in [
        (mapping.clone(), Depth::KeepsWeights, true),
        (mapping.clone(), Depth::DropsWeights, false),
        (mapping.without_mapping(), Depth::KeepsWeights, false),
    ] {
        let (driver, file) = (machine.driver(0, 1 << 28), file());
        let free = || driver.device().driver().memory().unwrap().free_bytes as u64;
        let (config, cpu) = configured(file.path(), "").unwrap();
        let clock = Clock::start();
        let monitor = Arc::new(Monitor::new(clock, "tiny").unwrap());
        let started = start(&config, &cpu, &[driver.device()], &monitor, clock).unwrap();
        let (engine, ledger, awake) = (started.engine.handle, started.built.ledger.unwrap(), free());
        let sleep = || assert!(runtime.block_on(engine.sleep(depth)).is_ok());
        sleep();
        let least = if moves { ledger.weights + ledger.kv } else { ledger.total() };
        assert!(free() - awake >= least, "{depth:?}: {} of {ledger:?}", free() - awake);
        runtime.block_on(engine.wake()).unwrap();
        assert_eq!(free(), awake, "{depth:?}");
        sleep();
        drop(file);
        let woken = runtime.block_on(engine.wake()).map_err(|failure| failure.reason);
        assert_eq!(woken, if moves { Ok(()) } else { Err(Reason::ModelUnavailable) }, "{depth:?}");
    }
}

/// A request is in service: its stream ends with the device's own words, and so does the process.
#[test]
fn a_gpu_that_is_lost_in_service_ends_the_engine_with_its_words() {
    const WORDS: &str = "CUDA_ERROR_ECC_UNCORRECTABLE: uncorrectable ECC error encountered";
    let (driver, file) = (HostMachine::new(Kernels::Run, 7).driver(0, 1 << 28), file());
    let (config, cpu) = configured(file.path(), "").unwrap();
    let clock = Clock::start();
    let monitor = Arc::new(Monitor::new(clock, "tiny").unwrap());
    let StartedModel { engine, .. } = start(&config, &cpu, &[driver.device()], &monitor, clock).unwrap();
    let EngineThread { handle, mut end } = engine;
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let mut stream = handle.submit(|id| Request::greedy(id, vec![1, 2, 3], 100)).unwrap();
    let failure = runtime.block_on(async {
        let mut told = Vec::new();
        while let Some(event) = stream.next().await {
            if matches!(event, Event::Update(_)) {
                driver.lose_after(5, WORDS);
            }
            told.push(event);
        }
        assert!(matches!(told.last(), Some(Event::GivenUp(why)) if why.ends_with(WORDS)), "{told:?}");
        end.failure().await
    });
    let log = tempfile::NamedTempFile::new().unwrap();
    failure.report(Some(log.path()));
    let told = Termination::parse(&std::fs::read_to_string(log.path()).unwrap()).unwrap();
    assert_eq!((told.reason, told.reason.exit_code()), (Reason::DeviceFailed, 15));
    assert!(told.message.ends_with(WORDS), "{told:?}");
}

#[test]
fn what_a_gpu_has_no_room_for_is_refused_with_the_flag_that_makes_room() {
    let refused = started("", 1 << 20).map(drop).unwrap_err();
    assert_eq!(refused.reason, Reason::OutOfMemory);
    assert!(refused.message.contains("--n-gpu-layers auto leaves the first layers to the CPU"), "{refused}");
    let refused = started("--n-gpu-layers auto", 1 << 20).map(drop).unwrap_err();
    assert_eq!(refused.reason, Reason::OutOfMemory);
    assert!(refused.message.contains("no room for one layer: use --device cpu"), "{refused}");
}

#[test]
fn what_layers_on_the_cpu_do_not_go_together_with_is_refused_by_name() {
    for (flags, named) in [
        ("--n-gpu-layers 3 --swap-space 1", "swap space"),
        ("--n-gpu-layers 3 --kv-cache-dtype int4", "a KV cache in int4"),
        ("--n-gpu-layers 3 --block-size 16", "a KV block of 16 tokens"),
        ("--n-gpu-layers 3 --num-gpu-blocks-override 1 --max-model-len 512", "fewer than the longest sequence"),
        ("--n-gpu-layers 3 --tensor-parallel-size 2", "--n-gpu-layers 3"),
    ] {
        let refused = started(flags, 1 << 28).map(drop).unwrap_err();
        assert!(refused.message.contains(named), "{flags}: {refused}");
    }
}
