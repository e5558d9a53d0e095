//! What a GPU makes of the engine, in a few minutes. `gpu MODEL.gguf FOLDER TESTS…` prints a table and writes it to a dated
//! JSON and Markdown report in FOLDER, which names what was tested before; `tests/gpu/run` calls it. `--generated`
//! instead of a model is one of random weights in the shape of SmolLM2-135M. `gpu --dry-run FOLDER TESTS…` goes the same way
//! with a tiny model on the CPU shim: it shows that the program works, and nothing of a GPU. `gpu --find` only says whether
//! there is a GPU.

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
use tiny::Tiny;
use windlass_checkpoint::Checkpoint;
use windlass_cuda_shim::{HostMachine, Kernels};
use windlass_engine_core::executor::Executor;
use windlass_engine_model::cuda::{CudaExecutor, CudaModel, Device, Nvidia, Replay, SplitModel, devices};
use windlass_engine_model::{CpuExecutor, KvBudget, LoadOptions, load, survey};
use windlass_kernels::WeightType;
use windlass_kernels::cuda::{Matrix, ops};

type Outcome<T> = Result<T, Box<dyn std::error::Error>>;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let report = match &arguments[..] {
        [flag] if flag == "--find" => find().map(|()| None),
        [flag, folder, tests @ ..] if flag == "--dry-run" => dry_run(Path::new(folder), tests).map(Some),
        [model, folder, tests @ ..] => prove(model, Path::new(folder), tests).map(Some),
        _ => {
            eprintln!("usage: gpu MODEL.gguf|--generated|--dry-run FOLDER TESTS... | gpu --find");
            return ExitCode::from(2);
        }
    };
    match report {
        Ok(None) => ExitCode::SUCCESS,
        Ok(Some(report)) => {
            println!("{}", report.markdown());
            if report.passed() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
        }
        Err(error) => {
            eprintln!("gpu: {error}");
            ExitCode::FAILURE
        }
    }
}

/// The shape of SmolLM2-135M.
const GENERATED: Tiny = Tiny {
    kind: WeightType::Q4_1,
    other: None,
    layers: 30,
    hidden: 576,
    feed_forward: 1536,
    heads: 9,
    kv_heads: 3,
    rope_dims: 64,
    vocabulary: 49_152,
    tied: true,
    rope_factors: false,
};

/// Says what there is to compute on, or why there is nothing.
fn find() -> Outcome<()> {
    match devices()? {
        0 => Err("the CUDA driver knows no GPU on this machine".into()),
        count => {
            println!("{count} GPUs; computing on the first");
            Ok(())
        }
    }
}

fn prove(model: &str, folder: &Path, tests: &[String]) -> Outcome<Report> {
    find()?;
    let cache = std::env::var_os("WINDLASS_GPU").map_or_else(std::env::temp_dir, PathBuf::from);
    let device = Device::new(Arc::new(Nvidia::open(0, &cache)?));
    let (checkpoint, named) = match model {
        "--generated" => (generated(&GENERATED)?, "random weights in the shape of SmolLM2-135M, q4_1"),
        path => (Checkpoint::open(Path::new(path))?, path),
    };
    let mut report = Report::of_gpu(device.facts(), named, tests);
    measure_all(&device, &checkpoint, &Scale::FULL, &mut report)?;
    report.write(folder)?;
    Ok(report)
}

fn dry_run(folder: &Path, tests: &[String]) -> Outcome<Report> {
    let device = HostMachine::new(Kernels::Run, 1).device(0, 1 << 28);
    let mut report = Report::of_dry_run("random weights, two layers", tests);
    // What a GPU would be given where no model is at hand.
    let bytes = survey(&generated(&GENERATED)?, None)?.shape.weight_bytes;
    report.figure("weights of the model that is made on the spot", bytes as f64 / 1e6, "MB");
    measure_all(&device, &generated(&Tiny::of(WeightType::Q4_1))?, &Scale::DRY, &mut report)?;
    report.write(folder)?;
    Ok(report)
}

fn generated(tiny: &Tiny) -> Outcome<Checkpoint> {
    Ok(Checkpoint::from_bytes(tiny.build().build())?)
}

fn measure_all(device: &Device, checkpoint: &Checkpoint, scale: &Scale, report: &mut Report) -> Outcome<()> {
    let ceiling = measure::copy_bytes_per_second(device, scale)?;
    report.figure("copy on the device", ceiling / 1e9, "GB/s read and written");
    let kinds: [(&str, measure::Make); 2] = [("bf16", measure::halves), ("4-bit", measure::codes)];
    for (kind, make) in kinds {
        measure_products(device, kind, &measure::matrices(device, scale, make)?, ceiling, scale, report)?;
    }
    if let Some(rate) = measure::wake_bytes_per_second(device, scale)? {
        report.figure("weights of a sleeper back from the host's memory", rate / 1e9, "GB/s");
    }
    compare_texts(checkpoint, device, scale, report)?;
    let mut executor = gpu(checkpoint, device, Replay::Graphs)?;
    for &sequences in scale.sequences {
        let rate = measure::decode_tokens_per_second(&mut executor, sequences, scale)?;
        report.figure(&format!("decode, {sequences} sequences"), rate, "tokens/s");
    }
    let mut split = split(checkpoint, device)?;
    let rate = measure::decode_tokens_per_second(&mut split, 1, scale)?;
    report.figure("decode, 1 sequence, all layers but one on the CPU", rate, "tokens/s");
    Ok(())
}

/// Products of few tokens as shares of `ceiling`, bytes read and written a second, and of many as they are.
fn measure_products(
    device: &Device,
    kind: &str,
    matrices: &[Matrix],
    ceiling: f64,
    scale: &Scale,
    report: &mut Report,
) -> Outcome<()> {
    let seconds =
        |tokens: usize, product: measure::Product| measure::product_seconds(device, tokens, scale, matrices, product);
    let bytes: usize = matrices.iter().map(Matrix::bytes).sum();
    for tokens in [1, 8, 32] {
        let rate = bytes as f64 / seconds(tokens, ops::linear)?;
        report.figure(&format!("{kind} product, {tokens} tokens"), 100.0 * rate / ceiling, "% of that");
    }
    let mut products: Vec<(&str, measure::Product)> = vec![("in any batch alike", ops::linear)];
    if ops::multiplies_widely(device.facts(), &matrices[0], usize::MAX) {
        products.push(("wide", ops::linear_wide));
    }
    for &tokens in scale.prompts {
        for &(name, product) in &products {
            let operations = 2 * tokens * matrices.iter().map(|matrix| matrix.rows() * matrix.cols()).sum::<usize>();
            let rate = operations as f64 / seconds(tokens, product)?;
            report.figure(&format!("{kind} product, {tokens} tokens, {name}"), rate / 1e12, "TFLOP/s");
        }
    }
    Ok(())
}

fn options() -> LoadOptions {
    LoadOptions { block_tokens: 64, kv: KvBudget::Blocks(512), max_model_tokens: Some(512), ..LoadOptions::default() }
}

fn gpu(checkpoint: &Checkpoint, device: &Device, replay: Replay) -> Outcome<CudaExecutor> {
    Ok(CudaModel::load(checkpoint, &options(), std::slice::from_ref(device))?.start(options().kv, replay)?.executor)
}

/// Only the last layer is on the GPU.
fn split(checkpoint: &Checkpoint, device: &Device) -> Outcome<CpuExecutor> {
    Ok(SplitModel::load(checkpoint, &options(), 1, device)?.start(options().kv, Replay::Graphs)?.executor)
}

/// Greedy texts of the GPU against the CPU's, of graphs against eager steps, and of one step over and over.
fn compare_texts(checkpoint: &Checkpoint, device: &Device, scale: &Scale, report: &mut Report) -> Outcome<()> {
    let tokens = scale.text_tokens;
    let mut cpu = load(checkpoint, &options())?.executor;
    let vocabulary = cpu.geometry().vocabulary;
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
    let parted = driver::generate(&mut split(checkpoint, device)?, &jobs, tokens, 64, 2);
    let same: usize = expected.iter().zip(&parted).map(shared).sum();
    report.figure("the same with the first layers on the CPU", 100.0 * same as f64 / (4 * tokens) as f64, "%");
    report.check("graphs and eager steps give the same tokens", graphs == eager);
    let again = (0..scale.replays).map(|_| driver::generate(&mut executor, &jobs[..1], 4, 64, 2));
    let alike = again.collect::<Vec<_>>().windows(2).all(|pair| pair[0] == pair[1]);
    report.check(&format!("{} repetitions give the same tokens", scale.replays), alike);
    for held in [false, true] {
        executor.hold_weights(held)?;
        executor.hold_kv(held)?;
    }
    report.check(
        "a sleeper gives the same tokens when it wakes",
        driver::generate(&mut executor, &jobs, tokens, 64, 2) == graphs,
    );
    Ok(())
}
