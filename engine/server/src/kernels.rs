//! `windlass-engine kernels build`: the CUDA kernels' machine code, ready before a start needs it.

use crate::cli::{BuildArgs, KernelsArgs, KernelsCommand};
use crate::failure::Failure;
use crate::machine;
use indicatif::ProgressBar;
use std::path::{Path, PathBuf};
use std::time::Duration;
use windlass_engine_contract::termination::Reason;
use windlass_engine_model::cuda::{DriverError, Nvidia, devices, kernel_image};

/// Where kernels that NVRTC compiled are kept.
pub fn cache() -> PathBuf {
    machine::cache_folder("kernels")
}

/// Does what was asked.
pub fn run(args: &KernelsArgs) -> Result<(), Failure> {
    let KernelsCommand::Build(args) = &args.command;
    build(args, &cache()).map_err(|error| {
        let next = match error {
            DriverError::NoDriver | DriverError::NoDevice { .. } => {
                "; say what to compile for: --compute-capability 9.0"
            }
            _ => "",
        };
        Failure::new(Reason::DeviceFailed, format!("{error}{next}"))
    })
}

fn build(args: &BuildArgs, cache: &Path) -> Result<(), DriverError> {
    if args.compute_capability.is_empty() {
        return for_gpus_here(cache);
    }
    for &capability in &args.compute_capability {
        let architecture = kernel_image::architecture(capability);
        let spinner = spinner(&architecture);
        let files = kernel_image::prepare(capability, cache)?;
        spinner.finish_and_clear();
        println!("{architecture}: kernels of {files} files are {}", whereabouts(cache));
    }
    Ok(())
}

/// Opening a GPU makes its kernels ready, and sees that they load.
fn for_gpus_here(cache: &Path) -> Result<(), DriverError> {
    let count = devices()?;
    if count == 0 {
        return Err(DriverError::NoDevice { ordinal: 0, count });
    }
    for ordinal in 0..count {
        let spinner = spinner(&format!("GPU {ordinal}"));
        Nvidia::open(ordinal, cache)?;
        spinner.finish_and_clear();
        println!("GPU {ordinal}: its kernels are {}", whereabouts(cache));
    }
    Ok(())
}

fn whereabouts(cache: &Path) -> String {
    if kernel_image::is_built_in() { "built in".into() } else { format!("in {}", cache.display()) }
}

fn spinner(what: &str) -> ProgressBar {
    let spinner = ProgressBar::new_spinner().with_message(format!("kernels for {what}"));
    spinner.enable_steady_tick(Duration::from_millis(100));
    spinner
}
