//! Measures every op: `cargo run --release -p windlass-kernels --example measure [-- FILTER [KERNELS [THREADS]]]`.
//!
//! Each line is the best of several rounds, with the share of what this machine reads from memory (GB/s) and
//! multiplies in int8 (Gop/s) at best, both measured first.

use std::time::{Duration, Instant};

use windlass_kernels::{Activations, Kernels, PackedMatrix, Pool, WeightType, machine, ops};

/// How long each op is repeated.
const MEASURING: Duration = Duration::from_millis(150);

/// Weight bytes that the products of one op rotate through, so that the last-level cache does not hold them.
const WORKING_SET: usize = 100 << 20;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let filter = arguments.next().unwrap_or_default();
    let kernels = arguments.next().map_or(Ok(Kernels::detect()), |name| Kernels::named(&name))?;
    let threads = arguments.next().map_or(Ok(2), |threads| threads.parse())?;
    let bench = Bench::new(Pool::with_kernels(threads, kernels)?, filter);
    matrix_products(&bench)
}

/// `[rows, cols]` of SmolLM2-135M's and of a 1B Llama's matrices.
const SHAPES: [(&str, usize, usize); 6] = [
    ("135M q", 576, 576),
    ("135M gate", 1536, 576),
    ("135M down", 576, 1536),
    ("135M head", 49152, 576),
    ("1B gate", 8192, 2048),
    ("1B down", 2048, 8192),
];

fn matrix_products(bench: &Bench) -> Result<(), Box<dyn std::error::Error>> {
    for weight_type in WeightType::ALL {
        for (name, rows, cols) in SHAPES {
            let Some(row_bytes) = weight_type.row_bytes(cols) else { continue };
            if !bench.wants(&format!("matmul {} {name}", weight_type.name())) {
                continue;
            }
            // Bytes of 0x11 make small scales and non-trivial codes in every format.
            let bytes = vec![0x11; row_bytes * rows];
            let copies = (WORKING_SET / bytes.len()).max(1);
            let matrices: Vec<_> = (0..copies)
                .map(|_| PackedMatrix::pack(&bench.pool, weight_type, rows, cols, &bytes))
                .collect::<Result<_, _>>()?;
            for tokens in std::env::var("TOKENS").map_or(vec![1, 4, 16, 512], |v| vec![v.parse().unwrap()]) {
                let input: Vec<f32> = (0..tokens * cols).map(|i| (i % 17) as f32 - 8.0).collect();
                let mut activations = Activations::new();
                let mut out = vec![0.0; tokens * rows];
                let mut turn = matrices.iter().cycle();
                let work = Work { bytes: matrices[0].bytes(), operations: 2 * rows * cols * tokens };
                bench.measure(&format!("matmul {} {name} × {tokens}", weight_type.name()), work, || {
                    if let Some(matrix) = turn.next() {
                        activations.load(&bench.pool, &input, &[matrix]);
                        ops::matmul(&bench.pool, &activations, matrix, &mut out);
                    }
                });
            }
        }
    }
    Ok(())
}

struct Bench {
    pool: Pool,
    filter: String,
    bytes_per_second: f64,
    operations_per_second: f64,
}

/// What one call moves and computes.
struct Work {
    bytes: usize,
    operations: usize,
}

impl Bench {
    fn new(pool: Pool, filter: String) -> Self {
        let best = |measure: &dyn Fn() -> f64| (0..5).map(|_| measure()).fold(0.0, f64::max);
        let bytes_per_second = best(&|| machine::read_bytes_per_second(&pool, 256 << 20));
        let operations_per_second = best(&|| machine::int8_operations_per_second(&pool));
        println!(
            "{} on {} threads: reads {:.1} GB/s, int8 {:.0} Gop/s",
            pool.kernels().name(),
            pool.threads(),
            bytes_per_second / 1e9,
            operations_per_second / 1e9
        );
        Bench { pool, filter, bytes_per_second, operations_per_second }
    }

    fn wants(&self, name: &str) -> bool {
        name.contains(&self.filter)
    }

    fn measure(&self, name: &str, work: Work, mut call: impl FnMut()) {
        let mut best = Duration::MAX;
        let end = Instant::now() + MEASURING;
        while Instant::now() < end {
            let start = Instant::now();
            call();
            best = best.min(start.elapsed());
        }
        let per_second = |amount: usize| amount as f64 / best.as_secs_f64();
        println!(
            "{name:<34} {:>9.1} µs {:>7.1} GB/s {:>4.0} % {:>7.0} Gop/s {:>4.0} %",
            best.as_secs_f64() * 1e6,
            per_second(work.bytes) / 1e9,
            100.0 * per_second(work.bytes) / self.bytes_per_second,
            per_second(work.operations) / 1e9,
            100.0 * per_second(work.operations) / self.operations_per_second
        );
    }
}
