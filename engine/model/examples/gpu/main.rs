//! What a GPU makes of the engine, in a few minutes. `gpu MODEL.gguf FOLDER` prints a table and writes it to a dated JSON
//! and Markdown report in FOLDER; `tests/gpu/run` calls it. `gpu --dry-run FOLDER` goes the same way with a tiny model on
//! the CPU shim: it shows that the program works, and nothing of a GPU.

#[path = "../../tests/model/common/driver.rs"]
#[allow(dead_code, missing_docs, clippy::unwrap_used)] // of the tests, for whom a failed unwrap is the failure
mod driver;
mod measure;
mod report;
mod scale;
#[path = "../../tests/model/common/tiny.rs"]
#[allow(dead_code, missing_docs)]
mod tiny;

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;

use driver::Job;
use report::Report;
use scale::Scale;
use windlass_checkpoint::Checkpoint;
use windlass_cuda_shim::{HostMachine, Kernels};
use windlass_engine_model::cuda::{CudaExecutor, CudaModel, Device, Nvidia, Replay, devices};
use windlass_engine_model::{KvBudget, LoadOptions, load};
use windlass_kernels::WeightType;
use windlass_kernels::cuda::ops;

type Outcome<T> = Result<T, Box<dyn std::error::Error>>;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let report = match &arguments[..] {
        [flag, folder] if flag == "--dry-run" => dry_run(Path::new(folder)),
        [model, folder] => prove(Path::new(model), Path::new(folder)),
        _ => {
            eprintln!("usage: gpu MODEL.gguf FOLDER | gpu --dry-run FOLDER");
            return ExitCode::from(2);
        }
    };
    match report {
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

fn prove(model: &Path, folder: &Path) -> Outcome<Report> {
    println!("{} GPUs; computing on the first", devices()?);
    let cache = std::env::var_os("WINDLASS_GPU").map_or_else(std::env::temp_dir, PathBuf::from);
    let device = Device::new(Arc::new(Nvidia::open(0, &cache)?));
    let report = run(&device, &Checkpoint::open(model)?, &Scale::FULL)?;
    report.write(folder)?;
    Ok(report)
}

fn dry_run(folder: &Path) -> Outcome<Report> {
    let device = HostMachine::new(Kernels::Run, 1).device(0, 1 << 28);
    let checkpoint = Checkpoint::from_bytes(tiny::Tiny::of(WeightType::Q4_1).build().build())?;
    let report = run(&device, &checkpoint, &Scale::DRY)?;
    report.write(folder)?;
    Ok(report)
}

fn run(device: &Device, checkpoint: &Checkpoint, scale: &Scale) -> Outcome<Report> {
    let mut report = Report::new(device.facts());
    let ceiling = measure::copy_bytes_per_second(device, scale)?;
    report.figure("copy on the device", ceiling / 1e9, "GB/s read and written");
    for tokens in [1, 8, 32] {
        let rate = measure::linear_bytes_per_second(device, tokens, scale)?;
        report.figure(&format!("bf16 product, {tokens} tokens"), 100.0 * rate / ceiling, "% of that");
    }
    let products: [(&str, measure::Product); 2] = [("in any batch alike", ops::linear), ("wide", ops::linear_wide)];
    for (&tokens, (name, product)) in scale.prompts.iter().flat_map(|tokens| products.map(|product| (tokens, product)))
    {
        let rate = measure::operations_per_second(device, tokens, scale, product)?;
        report.figure(&format!("bf16 product, {tokens} tokens, {name}"), rate / 1e12, "TFLOP/s");
    }
    compare_texts(checkpoint, device, scale, &mut report)?;
    let mut executor = gpu(checkpoint, device, Replay::Graphs)?;
    for &sequences in scale.sequences {
        let rate = measure::decode_tokens_per_second(&mut executor, sequences, scale)?;
        report.figure(&format!("decode, {sequences} sequences"), rate, "tokens/s");
    }
    Ok(report)
}

fn options() -> LoadOptions {
    LoadOptions { block_tokens: 64, kv: KvBudget::Blocks(512), max_model_tokens: Some(512), ..LoadOptions::default() }
}

fn gpu(checkpoint: &Checkpoint, device: &Device, replay: Replay) -> Outcome<CudaExecutor> {
    Ok(CudaModel::load(checkpoint, &options(), std::slice::from_ref(device))?.start(options().kv, replay)?.executor)
}

/// Greedy texts of the GPU against the CPU's, of graphs against eager steps, and of one step over and over.
fn compare_texts(checkpoint: &Checkpoint, device: &Device, scale: &Scale, report: &mut Report) -> Outcome<()> {
    let tokens = scale.text_tokens;
    let mut cpu = load(checkpoint, &options())?.executor;
    let vocabulary = windlass_engine_core::executor::Executor::geometry(&cpu).vocabulary;
    let prompt = |index: u32| (0..40 + 9 * index).map(|token| (100 + token * 37) % vocabulary).collect::<Vec<u32>>();
    let jobs: Vec<Job> = (0..4).map(|index| Job::greedy(&prompt(index))).collect();
    let expected = driver::generate(&mut cpu, &jobs, tokens, 64, 2);
    let mut executor = gpu(checkpoint, device, Replay::Graphs)?;
    let graphs = driver::generate(&mut executor, &jobs, tokens, 64, 2);
    let eager = driver::generate(&mut gpu(checkpoint, device, Replay::Eager)?, &jobs, tokens, 64, 2);
    let shared = |(one, other): (&Vec<u32>, &Vec<u32>)| one.iter().zip(other).take_while(|(a, b)| a == b).count();
    let same: usize = expected.iter().zip(&graphs).map(shared).sum();
    // Activations are bf16 on one side: texts part at near ties, so this is told and not demanded.
    report.figure("greedy tokens as the CPU's", 100.0 * same as f64 / (4 * tokens) as f64, "% before texts part");
    report.check("graphs and eager steps give the same tokens", graphs == eager);
    let again = (0..scale.replays).map(|_| driver::generate(&mut executor, &jobs[..1], 4, 64, 2));
    let alike = again.collect::<Vec<_>>().windows(2).all(|pair| pair[0] == pair[1]);
    report.check(&format!("{} repetitions give the same tokens", scale.replays), alike);
    Ok(())
}
