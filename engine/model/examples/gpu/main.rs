//! What a GPU makes of the engine, in a few minutes: `gpu MODEL.gguf FOLDER` prints a table and writes it to a dated
//! JSON and Markdown report in FOLDER. `tests/gpu/run` calls it.

#[path = "../../tests/common/driver.rs"]
#[allow(dead_code, clippy::unwrap_used)] // of the tests, for whom a failed unwrap is the failure
mod driver;
mod measure;
mod report;

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;

use driver::Job;
use report::Report;
use windlass_checkpoint::Checkpoint;
use windlass_engine_model::cuda::{self, Device, Nvidia};
use windlass_engine_model::{CudaExecutor, KvBudget, LoadOptions, Replay, load, load_cuda};

type Outcome<T> = Result<T, Box<dyn std::error::Error>>;

/// Tokens of each text that is compared.
const TEXT_TOKENS: usize = 64;
/// Times that one captured step is repeated.
const REPLAYS: usize = 100;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [model, folder] = &arguments[..] else {
        eprintln!("usage: gpu MODEL.gguf FOLDER");
        return ExitCode::from(2);
    };
    match run(Path::new(model), Path::new(folder)) {
        Ok(report) => {
            println!("{}", report.markdown());
            if report.passed() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
        }
        Err(error) => {
            eprintln!("gpu: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(model: &Path, folder: &Path) -> Outcome<Report> {
    let device = open()?;
    let mut report = Report::new(device.facts());
    let ceiling = measure::copy_bytes_per_second(&device)?;
    report.figure("copy on the device", ceiling / 1e9, "GB/s read and written");
    for tokens in [1, 8, 32] {
        let rate = measure::linear_bytes_per_second(&device, tokens)?;
        report.figure(&format!("bf16 product, {tokens} tokens"), 100.0 * rate / ceiling, "% of that");
    }
    let checkpoint = Checkpoint::open(model)?;
    compare_texts(&checkpoint, &device, &mut report)?;
    for sequences in [1, 8, 32, 64] {
        let mut executor = gpu(&checkpoint, &device, Replay::Graphs)?;
        let rate = measure::decode_tokens_per_second(&mut executor, sequences)?;
        report.figure(&format!("decode, {sequences} sequences"), rate, "tokens/s");
    }
    report.write(folder)?;
    Ok(report)
}

fn open() -> Outcome<Device> {
    let count = cuda::devices()?;
    println!("{count} GPUs; computing on the first");
    let cache = std::env::var_os("WINDLASS_KERNEL_CACHE").map_or_else(std::env::temp_dir, PathBuf::from);
    Ok(Device::new(Arc::new(Nvidia::open(0, &cache)?)))
}

fn options() -> LoadOptions {
    LoadOptions { block_tokens: 64, kv: KvBudget::Blocks(512), max_model_tokens: Some(2048), ..LoadOptions::default() }
}

fn gpu(checkpoint: &Checkpoint, device: &Device, replay: Replay) -> Outcome<CudaExecutor> {
    Ok(load_cuda(checkpoint, &options(), device, replay)?.executor)
}

/// Greedy texts of the GPU against the CPU's, of graphs against eager steps, and of one step over and over.
fn compare_texts(checkpoint: &Checkpoint, device: &Device, report: &mut Report) -> Outcome<()> {
    let job = |index: u32| Job::greedy(&(0..40 + 9 * index).map(|token| 100 + token * 37 % 5000).collect::<Vec<u32>>());
    let jobs: Vec<Job> = (0..4).map(job).collect();
    let cpu = driver::generate(&mut load(checkpoint, &options())?.executor, &jobs, TEXT_TOKENS, 64, 2);
    let mut executor = gpu(checkpoint, device, Replay::Graphs)?;
    let graphs = driver::generate(&mut executor, &jobs, TEXT_TOKENS, 64, 2);
    let eager = driver::generate(&mut gpu(checkpoint, device, Replay::Eager)?, &jobs, TEXT_TOKENS, 64, 2);
    let shared = |(one, other): (&Vec<u32>, &Vec<u32>)| one.iter().zip(other).take_while(|(a, b)| a == b).count();
    let same: usize = cpu.iter().zip(&graphs).map(shared).sum();
    // Activations are bf16 on one side: texts part at near ties, so this is told and not demanded.
    report.figure("greedy tokens as the CPU's", 100.0 * same as f64 / (4 * TEXT_TOKENS) as f64, "% before texts part");
    report.check("graphs and eager steps give the same tokens", graphs == eager);
    let again = (0..REPLAYS).map(|_| driver::generate(&mut executor, &jobs[..1], 4, 64, 2));
    let alike = again.collect::<Vec<_>>().windows(2).all(|pair| pair[0] == pair[1]);
    report.check(&format!("{REPLAYS} repetitions give the same tokens"), alike);
    Ok(())
}
