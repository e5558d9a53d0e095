//! What this machine can do at best: the ceilings that benchmarks compare against.

use std::hint::black_box;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use crate::Pool;
use crate::buffer::Buffer;
use crate::simd::{Kernel, LANES, Simd};

/// Multiply-add pairs of one [`Dots`] round per lane: 4 bytes, 2 operations each.
const OPERATIONS_PER_DOT: u64 = (LANES * 4 * 2) as u64;

/// int8 operations per second (a multiplication and an addition are two) of all the pool's threads, in registers.
pub fn int8_operations_per_second(pool: &Pool) -> f64 {
    const ROUNDS: u64 = 1 << 20;
    let operations = AtomicU64::new(0);
    let start = Instant::now();
    pool.run(|_| {
        black_box(pool.kernels().call(Dots { rounds: ROUNDS }));
        operations.fetch_add(ROUNDS * 16 * OPERATIONS_PER_DOT, Ordering::Relaxed);
    });
    operations.into_inner() as f64 / start.elapsed().as_secs_f64()
}

/// Bytes per second that all the pool's threads read from memory, `bytes` being well above the caches.
pub fn read_bytes_per_second(pool: &Pool, bytes: usize) -> f64 {
    let mut buffer = Buffer::<[f32; LANES]>::zeroed(bytes / size_of::<[f32; LANES]>());
    buffer.fill([1.0; LANES]);
    let start = Instant::now();
    pool.for_each_chunk(buffer.len(), 4096, |range| {
        black_box(pool.kernels().call(Read { cells: &buffer[range] }));
    });
    size_of_val::<[_]>(&buffer) as f64 / start.elapsed().as_secs_f64()
}

struct Dots {
    rounds: u64,
}

impl Kernel for Dots {
    type Output = i32;

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) -> i32 {
        let codes = simd.load_bytes(black_box(&[3; 64]));
        let mut sums = [simd.splat_i32(black_box(1)); 16];
        for _ in 0..self.rounds {
            let values = black_box([1, 2, 3, 4]);
            for sum in &mut sums {
                *sum = simd.dot(*sum, codes, values);
            }
        }
        let mut total = sums[0];
        for i in 1..16 {
            total = simd.add_i32(total, sums[i]);
        }
        simd.sum_i32(total)
    }
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
