//! Everything the decoder computes, each op with its reference and its shape checks: on the CPU with `std::arch`, and on
//! a GPU with the kernels of [`cuda`].
//!
//! A caller makes one [`Pool`] (threads and the instruction set they use), packs each weight tensor once into a
//! [`PackedMatrix`], and calls the functions of [`ops`] on plain slices. Nothing here knows a model family, a file
//! format beyond its weight blocks, a scheduler or a clock.
//!
//! Every op's result for one token depends on that token alone: not on the other tokens of the call, how a prompt was
//! cut into chunks, or the number of threads. README.md has the map, the tile formats and how to measure.

// Register tiles are small arrays indexed alike; iterator adaptors would carry vectors out of their target features.
#![allow(clippy::needless_range_loop)]

mod activations;
mod buffer;
pub mod cuda;
mod fp8;
mod kv_cache;
pub mod machine;
pub mod ops;
mod pool;
pub mod processors;
mod refused;
mod simd;
#[cfg(test)]
mod testing;
mod weights;

pub use activations::{ActivationType, Activations};
pub use fp8::Fp8;
pub use kv_cache::{KvCache, KvLayout, KvType, RUN_TOKENS as KV_RUN_TOKENS};
pub use pool::{Pool, Worker};
pub use refused::{Noting, refused_bytes};
pub use simd::{Kernels, UnknownKernels};
pub use weights::{Group, Integer, NO_INPUT, PackedMatrix, ShapeError, WeightType, floats};
