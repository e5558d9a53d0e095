//! Rates.

use std::time::Instant;

use half::{bf16, f16};
use windlass_engine_core::executor::Executor;
use windlass_kernels::cuda::ops::Output;
use windlass_kernels::cuda::weights::{Group, Grouped, LoadError};
use windlass_kernels::cuda::{Device, DriverError, Matrix, Region, Stream, View};

use crate::Outcome;
use crate::driver::{Job, generate};
use crate::scale::Scale;

/// Bytes read and written a second by a copy.
pub fn copy_bytes_per_second(device: &Device, scale: &Scale) -> Outcome<f64> {
    let (from, mut to) = (device.allocate::<u8>(scale.copy_bytes)?, device.allocate::<u8>(scale.copy_bytes)?);
    let stream = device.stream()?;
    let seconds = timed(&stream, scale.rounds, || Ok(stream.copy(to.view_mut(), from.view())?))?;
    Ok(2.0 * scale.copy_bytes as f64 / seconds)
}

/// A product of tokens with a matrix.
pub type Product = fn(&Stream, &Matrix, View<'_, bf16>, Output<'_>) -> Result<(), DriverError>;

/// Makes a matrix of so many rows and columns.
pub type Make = fn(&Device, usize, usize) -> Result<Matrix, LoadError>;

/// In bf16.
pub fn halves(device: &Device, rows: usize, cols: usize) -> Result<Matrix, LoadError> {
    Matrix::bf16(device, rows, cols, &vec![bf16::from_f32(0.01); rows * cols])
}

/// Of 4 bits, as GPTQ groups them.
pub fn codes(device: &Device, rows: usize, cols: usize) -> Result<Matrix, LoadError> {
    let (group, scale) = (Group::G128, (f16::from_f32(0.01), f16::from_f32(-0.08)));
    let scales = vec![scale; rows * cols.div_ceil(group.cols())];
    Matrix::grouped(device, &Grouped::new(rows, cols, group, vec![9; rows * cols], scales))
}

/// As many matrices as are measured.
pub fn matrices(device: &Device, scale: &Scale, make: Make) -> Result<Vec<Matrix>, LoadError> {
    let (rows, cols) = scale.matrix;
    (0..scale.matrices).map(|_| make(device, rows, cols)).collect()
}

/// Seconds of a product of so many tokens with each of some matrices.
pub fn product_seconds(
    device: &Device,
    tokens: usize,
    scale: &Scale,
    matrices: &[Matrix],
    product: Product,
) -> Outcome<f64> {
    let (rows, cols) = scale.matrix;
    let input = device.upload(&vec![bf16::ONE; tokens * cols])?;
    let mut out = device.allocate::<bf16>(tokens * rows)?;
    let stream = device.stream()?;
    timed(&stream, scale.rounds, || {
        for matrix in matrices {
            product(&stream, matrix, input.view(), Output::Bf16(out.view_mut()))?;
        }
        Ok(())
    })
}

/// Tokens a second that so many sequences get together, prompts and sampling included in none of it.
pub fn decode_tokens_per_second(executor: &mut dyn Executor, sequences: u32, scale: &Scale) -> Outcome<f64> {
    let vocabulary = executor.geometry().vocabulary;
    let job = |index: u32| Job::greedy(&[1 + index % (vocabulary - 1)]);
    let jobs: Vec<Job> = (0..sequences).map(job).collect();
    // The first time captures the graphs.
    generate(executor, &jobs, 4, 64, 2);
    let started = Instant::now();
    generate(executor, &jobs, scale.decoded, 64, 2);
    Ok((sequences as usize * scale.decoded) as f64 / started.elapsed().as_secs_f64())
}

/// Bytes of weights a second that come back from the host's memory when a sleeper wakes, in pieces as large as a layer's
/// matrices; none where the device maps no memory.
pub fn wake_bytes_per_second(device: &Device, scale: &Scale) -> Outcome<Option<f64>> {
    const PIECES: usize = 16;
    let Some(region) = Region::of(device)? else { return Ok(None) };
    let within = device.within(Some(&region));
    let _weights =
        (0..PIECES).map(|_| within.allocate::<u8>(scale.copy_bytes / PIECES)).collect::<Result<Vec<_>, _>>()?;
    region.keep()?;
    region.give_back()?;
    let started = Instant::now();
    region.take_back()?;
    Ok(Some(region.bytes() as f64 / started.elapsed().as_secs_f64()))
}

/// Seconds of one round of work, the mean of some after a first one. The stream is full of them, so that what issuing takes
/// is hidden.
fn timed(stream: &Stream, rounds: usize, mut issue: impl FnMut() -> Outcome<()>) -> Outcome<f64> {
    issue()?;
    stream.synchronize()?;
    let started = Instant::now();
    for _ in 0..rounds {
        issue()?;
    }
    stream.synchronize()?;
    Ok(started.elapsed().as_secs_f64() / rounds as f64)
}
