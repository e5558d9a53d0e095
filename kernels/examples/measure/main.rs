//! Measures every op: `cargo run --release -p windlass-kernels --example measure [-- FILTER [KERNELS [THREADS]]]`.
//!
//! Each line is the best of several rounds, with the share of what this machine reads from memory (GB/s) and
//! multiplies in int8 (Gop/s) at best, both measured first. `step` lines are all ops of a forward pass together.
//! One thread is timed by its processor time, several by the time passed: on a busy host measure one.

mod bench;
mod ops;
mod step;

use bench::Bench;
use windlass_kernels::{Kernels, Pool};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let filter = arguments.next().unwrap_or_default();
    let kernels = arguments.next().map_or(Ok(Kernels::detect()), |name| Kernels::named(&name))?;
    let threads = arguments.next().map_or(Ok(2), |threads| threads.parse())?;
    let bench = Bench::new(Pool::with_kernels(threads, kernels)?, filter);
    step::measure(&bench)?;
    ops::packing(&bench);
    ops::vectors(&bench);
    ops::attention(&bench);
    ops::matrix_products(&bench)
}
