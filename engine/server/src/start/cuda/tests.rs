//! From flags to an engine that has generated a token, on the stand-in for a GPU.

#[path = "../../../../model/tests/model/common/tiny.rs"]
#[allow(dead_code, missing_docs)]
mod tiny;

use super::*;
use crate::cli::{Cli, Command};
use crate::config::ExecutorConfig;
use clap::Parser;
use tiny::Tiny;
use windlass_cuda_shim::{HostMachine, Kernels};
use windlass_kernels::WeightType;

/// A file of four layers and a vocabulary of meaningless words.
fn file() -> tempfile::NamedTempFile {
    let words: Vec<String> = (0..128).map(|token| format!("word{token}")).collect();
    let tiny = Tiny { layers: 4, vocabulary: 128, tied: false, ..Tiny::of(WeightType::Q4_1) };
    let model = tiny.build().str("tokenizer.ggml.model", "llama").str_array("tokenizer.ggml.tokens", &words);
    let file = tempfile::NamedTempFile::with_suffix(".gguf").unwrap();
    std::fs::write(file.path(), model.f32_array("tokenizer.ggml.scores", &[0.0; 128]).build()).unwrap();
    file
}

/// What comes of these flags on a GPU with so many bytes.
fn started(flags: &str, device_bytes: usize) -> Result<Built, Failure> {
    let file = file();
    let line = format!("windlass-engine serve {} --threads 1 {flags}", file.path().display());
    let Command::Serve(args) = Cli::try_parse_from(line.split_whitespace()).unwrap().command else { panic!("{line}") };
    let config = Config::from_args(&args)?;
    let ExecutorConfig::Cpu(cpu) = &config.executor else { panic!("{line}") };
    let devices = [HostMachine::new(Kernels::Run, 7).device(0, device_bytes)];
    let clock = Clock::start();
    let monitor = Arc::new(Monitor::new(clock, "tiny").unwrap());
    Ok(start(&config, cpu, &devices, &monitor, clock)?.built)
}

#[test]
fn layers_stay_on_the_cpu_where_the_flag_says_so() {
    let [all, whole, split] =
        ["", "--n-gpu-layers 99", "--n-gpu-layers 3"].map(|flags| started(flags, 1 << 28).unwrap());
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

#[test]
fn what_a_gpu_has_no_room_for_is_refused_with_the_flag_that_makes_room() {
    let refused = started("", 1 << 20).map(drop).unwrap_err();
    assert_eq!(refused.reason, Reason::OutOfMemory);
    assert!(refused.message.contains("--n-gpu-layers N leaves all layers but the last N to the CPU"), "{refused}");
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
