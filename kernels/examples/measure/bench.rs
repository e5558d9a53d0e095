//! Timing, and the ceilings it is compared with.

use std::time::{Duration, Instant};

use windlass_kernels::{Pool, machine};

/// How long each op is repeated.
const MEASURING: Duration = Duration::from_millis(200);

/// How often it is repeated at least.
const MINIMUM_ROUNDS: usize = 5;

pub struct Bench {
    pub pool: Pool,
    filter: String,
    bytes_per_second: f64,
    operations_per_second: f64,
}

/// What one call moves and computes.
#[derive(Clone, Copy, Default)]
pub struct Work {
    pub bytes: usize,
    pub operations: usize,
}

impl Bench {
    pub fn new(pool: Pool, filter: String) -> Self {
        let bytes_per_second = machine::read_bytes_per_second(&pool, 256 << 20);
        let operations_per_second = machine::int8_operations_per_second(&pool);
        println!(
            "{} on {} threads: reads {:.1} GB/s, int8 {:.0} Gop/s",
            pool.kernels().name(),
            pool.threads(),
            bytes_per_second / 1e9,
            operations_per_second / 1e9
        );
        Bench { pool, filter, bytes_per_second, operations_per_second }
    }

    pub fn wants(&self, name: &str) -> bool {
        name.contains(&self.filter)
    }

    /// Times `call` and prints its line; returns the best time.
    pub fn measure(&self, name: &str, work: Work, mut call: impl FnMut()) -> Duration {
        if !self.wants(name) {
            return Duration::MAX;
        }
        let mut best = Duration::MAX;
        let clock = machine::clock(&self.pool);
        call(); // touches pages and grows buffers
        let (end, mut rounds) = (Instant::now() + MEASURING, 0);
        while rounds < MINIMUM_ROUNDS || Instant::now() < end {
            let start = clock();
            call();
            best = best.min(clock() - start);
            rounds += 1;
        }
        let per_second = |amount: usize| amount as f64 / best.as_secs_f64();
        println!(
            "{name:<38} {:>9.1} µs {:>6.1} GB/s {:>4.0} % {:>6.0} Gop/s {:>4.0} %",
            best.as_secs_f64() * 1e6,
            per_second(work.bytes) / 1e9,
            100.0 * per_second(work.bytes) / self.bytes_per_second,
            per_second(work.operations) / 1e9,
            100.0 * per_second(work.operations) / self.operations_per_second
        );
        best
    }
}
