//! The CUDA kernels on the shim, against references in f64, and the rules that the shim keeps.

// One test calls the driver itself; helpers may fail as tests do.
#![allow(unsafe_code, clippy::unwrap_used)]

mod activation;
mod attention;
mod carrier;
mod common;
mod experts;
mod gather;
mod heads;
mod hopper;
mod image;
mod int4_hopper;
mod linear;
mod many;
mod mapping;
mod moves;
mod norm;
mod reduce;
mod rounded;
mod rules;
mod sample;
mod sharing;
mod table;
mod upload;
mod w8a8;
mod w8a8_hopper;
mod wide_experts;
