//! A small random model as a file, and what flags mean for it: for tests of the start.

#![allow(missing_docs)] // of tests

#[path = "../../../model/tests/model/common/tiny.rs"]
#[allow(dead_code, missing_docs)]
mod tiny;

use crate::cli::{Cli, Command};
use crate::config::{Config, CpuConfig, ExecutorConfig};
use crate::failure::Failure;
use clap::Parser;
use std::path::Path;
use tiny::Tiny;
use windlass_kernels::WeightType;

/// A file of four layers and a vocabulary of meaningless words.
pub fn file() -> tempfile::NamedTempFile {
    file_of(WeightType::Q4_1)
}

pub fn file_of(kind: WeightType) -> tempfile::NamedTempFile {
    let words: Vec<String> = (0..128).map(|token| format!("word{token}")).collect();
    let tiny = Tiny { layers: 4, vocabulary: 128, tied: false, ..Tiny::of(kind) };
    let model = tiny.build().str("tokenizer.ggml.model", "llama").str_array("tokenizer.ggml.tokens", &words);
    let file = tempfile::NamedTempFile::with_suffix(".gguf").unwrap();
    std::fs::write(file.path(), model.f32_array("tokenizer.ggml.scores", &[0.0; 128]).build()).unwrap();
    file
}

/// What these flags mean for the file.
pub fn configured(file: &Path, flags: &str) -> Result<(Config, CpuConfig), Failure> {
    let line = format!("windlass-engine serve {} --threads 1 {flags}", file.display());
    let Command::Serve(args) = Cli::try_parse_from(line.split_whitespace()).unwrap().command else { panic!("{line}") };
    let config = Config::from_args(&args)?;
    let ExecutorConfig::Cpu(cpu) = config.executor.clone() else { panic!("{line}") };
    Ok((config, cpu))
}
