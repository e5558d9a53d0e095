//! What this machine can do at best: the ceilings that benchmarks compare against; and their clock.

#![allow(unsafe_code)]

use std::hint::black_box;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::Pool;
use crate::buffer::Buffer;
use crate::simd::{Kernel, LANES, Simd};

/// Products of vectors in one round of [`Dots`].
const DOTS_PER_ROUND: usize = 24;

/// Operations of one: 4 bytes a lane, a multiplication and an addition each.
const OPERATIONS_PER_DOT: u64 = (LANES * 4 * 2) as u64;

/// The processor time that the calling thread has used: on a busy host, a steadier measure than the time passed.
pub fn thread_time() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the call writes one timespec through a valid pointer.
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut time) };
    Duration::new(time.tv_sec.cast_unsigned(), time.tv_nsec as u32)
}

/// int8 operations per second (a multiplication and an addition are two) of all the pool's threads, in registers: the
/// best of five passes.
pub fn int8_operations_per_second(pool: &Pool) -> f64 {
    const ROUNDS: u64 = 1 << 18;
    let clock = clock(pool);
    let pass = |_| {
        let (operations, start) = (AtomicU64::new(0), clock());
        pool.run(|_| {
            black_box(pool.kernels().call(Dots { rounds: ROUNDS }));
            operations.fetch_add(ROUNDS * DOTS_PER_ROUND as u64 * OPERATIONS_PER_DOT, Ordering::Relaxed);
        });
        operations.into_inner() as f64 / (clock() - start).as_secs_f64()
    };
    (0..5).map(pass).fold(0.0, f64::max)
}

/// Bytes per second that all the pool's threads read from memory, `bytes` being well above the caches: the best of five
/// passes.
pub fn read_bytes_per_second(pool: &Pool, bytes: usize) -> f64 {
    let mut buffer = Buffer::<[f32; LANES]>::zeroed(bytes / size_of::<[f32; LANES]>());
    buffer.fill([1.0; LANES]);
    let clock = clock(pool);
    let pass = |_| {
        let start = clock();
        pool.for_each_chunk(buffer.len(), 4096, |range| {
            black_box(pool.kernels().call(Read { cells: &buffer[range] }));
        });
        (clock() - start).as_secs_f64()
    };
    size_of_val::<[_]>(&buffer) as f64 / (0..5).map(pass).fold(f64::INFINITY, f64::min)
}

/// What to time calls on `pool` with: processor time if the caller does all the work, else the time passed.
pub fn clock(pool: &Pool) -> impl Fn() -> Duration + use<> {
    let (alone, start) = (pool.threads() == 1, Instant::now());
    move || if alone { thread_time() } else { start.elapsed() }
}

struct Dots {
    rounds: u64,
}

impl Kernel for Dots {
    type Output = i32;

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) -> i32 {
        // As many as hide each other's latency, and no more than registers hold.
        match S::MANY_REGISTERS {
            true => dots::<S, 12>(simd, self.rounds),
            false => dots::<S, 3>(simd, self.rounds),
        }
    }
}

/// So many sums beside each other, each of codes of its own, in runs as long as codes of 4 bits allow.
#[inline(always)]
fn dots<S: Simd, const SUMS: usize>(simd: S, rounds: u64) -> i32 {
    let mut codes = [simd.load_bytes(black_box(&[3; 64])); SUMS];
    let mut sums = [simd.splat_i32(black_box(1)); SUMS];
    for i in 1..SUMS {
        codes[i] = simd.load_bytes(black_box(&[3; 64]));
    }
    for _ in 0..rounds {
        let mut products = [simd.open(sums[0]); SUMS];
        for i in 0..SUMS {
            products[i] = simd.open(sums[i]);
        }
        for _ in 0..DOTS_PER_ROUND / SUMS {
            let values = black_box([1, 2, 3, 4]);
            for i in 0..SUMS {
                products[i] = simd.multiply(products[i], codes[i], values);
            }
        }
        for i in 0..SUMS {
            sums[i] = simd.close(sums[i], products[i]);
        }
    }
    let mut total = sums[0];
    for i in 1..SUMS {
        total = simd.add_i32(total, sums[i]);
    }
    simd.sum_i32(total)
}

struct Read<'a> {
    cells: &'a [[f32; LANES]],
}

impl Kernel for Read<'_> {
    type Output = f32;

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) -> f32 {
        let mut sums = [simd.splat(0.0); 4];
        for four in self.cells.as_chunks::<4>().0 {
            for i in 0..4 {
                sums[i] = simd.add(sums[i], simd.load(&four[i]));
            }
        }
        simd.sum(simd.add(simd.add(sums[0], sums[1]), simd.add(sums[2], sums[3])))
    }
}
