//! Models on the CPU and on the CUDA shim, against oracles: one program of tests, since each would link all kernels.

#![allow(clippy::unwrap_used)] // in a test, a failed unwrap is the failure

mod batching;
mod beams;
mod coded;
mod common;
mod cuda;
mod cuda_ahead;
mod cuda_drafts;
mod cuda_experts;
mod cuda_families;
mod cuda_formats;
mod cuda_library;
mod cuda_memory;
mod cuda_nodes;
mod cuda_ranks;
mod cuda_sampling;
mod cuda_sharing;
mod cuda_split;
mod cuda_steps;
mod determinism;
mod encoders;
mod families;
mod hostile;
mod hostile_packed;
mod llama_cpp;
mod loading;
mod outside;
mod packed;
mod pipeline;
mod ranks;
mod reference;
mod rotary;
mod sampling;
mod speculation;
mod types;
mod windows;
mod wrappers;
