//! Rates, by the device's own clock where there is one.

use std::time::Instant;

use half::bf16;
use windlass_engine_core::executor::Executor;
use windlass_engine_model::CudaExecutor;
use windlass_engine_model::cuda::ops::{self, Output};
use windlass_engine_model::cuda::weights::Matrix;
use windlass_engine_model::cuda::{Device, Event, Stream};

use crate::Outcome;
use crate::driver::{Job, generate};

const ROUNDS: usize = 20;
/// Of each of two buffers: many times any cache.
const COPY_BYTES: usize = 1 << 30;
/// Rows and columns of a matrix: 128 MiB, and so many matrices that each is gone from the cache when its turn comes.
const MATRIX: (usize, usize) = (8192, 8192);
const MATRICES: usize = 4;
const DECODED: usize = 64;

/// Bytes read and written a second by a copy.
pub fn copy_bytes_per_second(device: &Device) -> Outcome<f64> {
    let (from, mut to) = (device.allocate::<u8>(COPY_BYTES)?, device.allocate::<u8>(COPY_BYTES)?);
    let stream = device.stream()?;
    let seconds = timed(device, &stream, || Ok(stream.copy(to.view_mut(), from.view())?))?;
    Ok(2.0 * COPY_BYTES as f64 / seconds)
}

/// Bytes of weights read a second by products of so many tokens.
pub fn linear_bytes_per_second(device: &Device, tokens: usize) -> Outcome<f64> {
    let (rows, cols) = MATRIX;
    let values = vec![bf16::from_f32(0.01); rows * cols];
    let matrices = (0..MATRICES).map(|_| Matrix::bf16(device, rows, cols, &values)).collect::<Result<Vec<_>, _>>()?;
    let input = device.upload(&vec![bf16::ONE; tokens * cols])?;
    let mut out = device.allocate::<bf16>(tokens * rows)?;
    let stream = device.stream()?;
    let seconds = timed(device, &stream, || {
        for matrix in &matrices {
            ops::linear(&stream, matrix, input.view(), Output::Bf16(out.view_mut()))?;
        }
        Ok(())
    })?;
    Ok((2 * rows * cols * MATRICES) as f64 / seconds)
}

/// Tokens a second that so many sequences get together, prompts and sampling included in none of it.
pub fn decode_tokens_per_second(executor: &mut CudaExecutor, sequences: u32) -> Outcome<f64> {
    let vocabulary = executor.geometry().vocabulary;
    let job = |index: u32| Job::greedy(&[1 + index % (vocabulary - 1)]);
    let jobs: Vec<Job> = (0..sequences).map(job).collect();
    // The first time captures the graphs.
    generate(executor, &jobs, 4, 64, 2);
    let started = Instant::now();
    generate(executor, &jobs, DECODED, 64, 2);
    Ok((sequences as usize * DECODED) as f64 / started.elapsed().as_secs_f64())
}

/// Seconds of one round of work, the mean of some after a first one.
fn timed(device: &Device, stream: &Stream, mut issue: impl FnMut() -> Outcome<()>) -> Outcome<f64> {
    issue()?;
    let (from, to) = (Event::timed(device)?, Event::timed(device)?);
    stream.mark(&from)?;
    for _ in 0..ROUNDS {
        issue()?;
    }
    stream.mark(&to)?;
    to.synchronize()?;
    Ok(f64::from(to.elapsed_ms_since(&from)?) / 1e3 / ROUNDS as f64)
}
