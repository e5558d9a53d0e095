//! Command for images and nodes: what a first start would compile, ready before it.

use super::ProcessArgs;
use clap::{Args, Subcommand};

/// Flags of `kernels`.
#[derive(Args, Clone, Debug)]
pub struct KernelsArgs {
    /// What to do with them.
    #[command(subcommand)]
    pub command: KernelsCommand,
}

/// What to do with the kernels.
#[derive(Clone, Debug, Subcommand)]
pub enum KernelsCommand {
    /// Compile them by NVRTC into the cache that `serve` reads; does nothing for what is built in or there
    Build(BuildArgs),
}

/// Flags of `kernels build`.
#[derive(Args, Clone, Debug)]
#[command(after_help = "\
Examples:
  windlass-engine kernels build
      For the GPUs of this machine.
  XDG_CACHE_HOME=/image/cache windlass-engine kernels build --compute-capability 9.0 8.9
      For H100 and H200, L4 and L40S, on a machine without any, into /image/cache/windlass/kernels.

Releases carry machine code and need no compiler: this is for builds of your own. It needs libnvrtc (CUDA 12.9 or later).")]
pub struct BuildArgs {
    /// Compute capability of the GPUs to compile for, as nvidia-smi --query-gpu=compute_cap tells it [default: theirs here]
    #[arg(long, value_name = "MAJOR.MINOR", num_args = 1.., value_parser = capability)]
    pub compute_capability: Vec<(u32, u32)>,
    /// The process.
    #[command(flatten)]
    pub process: ProcessArgs,
}

fn capability(text: &str) -> Result<(u32, u32), String> {
    let parts = text.split_once('.').and_then(|(major, minor)| Some((major.parse().ok()?, minor.parse().ok()?)));
    parts.ok_or_else(|| "a compute capability is two numbers with a point between them, such as 9.0".into())
}
