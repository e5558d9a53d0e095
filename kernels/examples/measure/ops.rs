//! Single ops in the shapes of SmolLM2-135M and of a 1B Llama.

use windlass_kernels::ops::{AttentionRow, RopePairing, RopeTable, Scoring};
use windlass_kernels::{ActivationType, Activations, KvCache, KvLayout, KvType, PackedMatrix, WeightType, ops};

use crate::bench::{Bench, Work};

/// Weight bytes that the products of one op rotate through, so that the last-level cache does not hold them.
const WORKING_SET: usize = 100 << 20;

/// `[rows, cols]`.
const SHAPES: [(&str, usize, usize); 6] = [
    ("135M q", 576, 576),
    ("135M gate", 1536, 576),
    ("135M down", 576, 1536),
    ("135M head", 49152, 576),
    ("1B gate", 8192, 2048),
    ("1B down", 2048, 8192),
];

pub fn matrix_products(bench: &Bench) -> Result<(), Box<dyn std::error::Error>> {
    for weight_type in WeightType::ALL {
        for (shape, rows, cols) in SHAPES {
            let Some(row_bytes) = weight_type.row_bytes(cols) else { continue };
            let name = format!("matmul {} {shape}", weight_type.name());
            if !bench.wants(&name) {
                continue;
            }
            // Bytes of 0x11 make small scales and non-trivial codes in every format.
            let bytes = vec![0x11; row_bytes * rows];
            let copies = (WORKING_SET / bytes.len()).max(1);
            let matrices: Vec<_> = (0..copies)
                .map(|_| PackedMatrix::pack(&bench.pool, weight_type, rows, cols, &bytes))
                .collect::<Result<_, _>>()?;
            for tokens in [1, 4, 16, 512] {
                product(
                    bench,
                    &format!("{name} × {tokens}"),
                    &matrices,
                    tokens,
                    Activations::new(ActivationType::Int8),
                );
            }
            let varying = Activations::new(ActivationType::Int8).varying();
            product(bench, &format!("{name} × 512 varying"), &matrices, 512, varying);
        }
    }
    Ok(())
}

fn product(bench: &Bench, name: &str, matrices: &[PackedMatrix], tokens: usize, mut activations: Activations) {
    let (rows, cols) = (matrices[0].rows(), matrices[0].cols());
    let input: Vec<f32> = (0..tokens * cols).map(|i| (i % 17) as f32 - 8.0).collect();
    let mut out = vec![0.0; tokens * rows];
    let mut turn = matrices.iter().cycle();
    let work = Work { bytes: matrices[0].bytes(), operations: 2 * rows * cols * tokens };
    bench.measure(name, work, || {
        if let Some(matrix) = turn.next() {
            activations.load(&bench.pool, &input, &[matrix]);
            ops::matmul(&bench.pool, &activations, matrix, &mut out);
        }
    });
}

/// Repacking a file's tensor at load.
pub fn packing(bench: &Bench) {
    for weight_type in WeightType::ALL {
        let (rows, cols) = (8192, 2048);
        let Some(row_bytes) = weight_type.row_bytes(cols) else { continue };
        let bytes = vec![0x11; row_bytes * rows];
        let work = Work { bytes: bytes.len(), operations: 0 };
        bench.measure(&format!("pack {} 1B gate", weight_type.name()), work, || {
            drop(PackedMatrix::pack(&bench.pool, weight_type, rows, cols, &bytes));
        });
    }
}

/// The ops whose work is one pass over the activations.
pub fn vectors(bench: &Bench) {
    for tokens in [1, 16, 512] {
        let (hidden, wide) = (tokens * 576, tokens * 1536);
        let (input, weight, mut out) = (vec![0.5; hidden], vec![1.5; 576], vec![0.0; hidden]);
        let work = |values: usize| Work { bytes: values * size_of::<f32>(), operations: 0 };
        bench.measure(&format!("add_rms_norm × {tokens}"), work(4 * hidden), || {
            let mut residual = std::mem::take(&mut out);
            let mut normed = vec![0.0; hidden];
            ops::add_rms_norm(&bench.pool, &mut residual, &input, &weight, 1e-5, &mut normed);
            out = normed;
        });
        let (gate, mut up) = (vec![0.5; wide], vec![0.0; wide]);
        bench.measure(&format!("silu_mul × {tokens}"), work(3 * wide), || {
            ops::silu_mul(&bench.pool, &gate, &input.repeat(3)[..wide], &mut up);
        });
        for weight_type in [WeightType::Q8_0, WeightType::Q4K] {
            conversion(bench, weight_type, tokens);
        }
        let (table, positions) = (RopeTable::new(64, 512, 1e4, None, 1.0), (0..tokens as u32).collect::<Vec<_>>());
        for pairing in [RopePairing::Adjacent, RopePairing::HalfSplit] {
            bench.measure(&format!("rope {pairing:?} × {tokens}"), work(2 * hidden), || {
                ops::rope(&bench.pool, &table, pairing, &positions, 64, &mut out);
            });
        }
    }
}

/// Activations of a 1B Llama made into what these weights multiply.
fn conversion(bench: &Bench, weight_type: WeightType, tokens: usize) {
    let (cols, bytes) = (2048, weight_type.row_bytes(2048).map(|bytes| vec![0x11; bytes]));
    let Some(Ok(matrix)) = bytes.map(|bytes| PackedMatrix::pack(&bench.pool, weight_type, 1, cols, &bytes)) else {
        return;
    };
    let input: Vec<f32> = (0..tokens * cols).map(|i| (i % 17) as f32 - 8.0).collect();
    let mut activations = Activations::new(ActivationType::Int8);
    let work = Work { bytes: size_of_val(input.as_slice()), operations: 0 };
    bench.measure(&format!("activations for {} × {tokens}", weight_type.name()), work, || {
        activations.load(&bench.pool, &input, &[&matrix]);
    });
}

/// Nine heads over three key-value heads of 64; of a 1B Llama 32 over eight, in sixteen layers that no cache holds.
pub fn attention(bench: &Bench) {
    let small = (KvLayout { block_tokens: 16, kv_heads: 3, head_dim: 64 }, 9, 1);
    let large = (KvLayout { block_tokens: 16, kv_heads: 8, head_dim: 64 }, 32, 16);
    for (name, shape, kind, sequences, first_position, tokens) in [
        ("attention decode at 500", small, KvType::Bf16, 1, 500_usize, 1),
        ("attention decode 16 at 500", small, KvType::Bf16, 16, 500, 1),
        ("attention decode at 4000", small, KvType::Bf16, 1, 4000, 1),
        ("attention int8 decode at 4000", small, KvType::Int8, 1, 4000, 1),
        ("attention prefill 512", small, KvType::Bf16, 1, 0, 512),
        ("attention prefill 512 at 2048", small, KvType::Bf16, 1, 2048, 512),
        ("attention 1B decode at 8000", large, KvType::Bf16, 1, 8000, 1),
        ("attention 1B int8 decode at 8000", large, KvType::Int8, 1, 8000, 1),
    ] {
        if !bench.wants(name) {
            continue;
        }
        let (layout, heads, layers) = shape;
        let blocks = (first_position + tokens).div_ceil(layout.block_tokens);
        let mut cache = KvCache::new(layout, kind, layers, sequences * blocks);
        let tables: Vec<Vec<u32>> =
            (0..sequences).map(|s| (s * blocks..(s + 1) * blocks).map(|b| b as u32).collect()).collect();
        let rows = |first_position: usize, tokens: usize| -> Vec<AttentionRow<'_>> {
            tables.iter().map(|table| AttentionRow { block_table: table, first_position, tokens, seen: &[] }).collect()
        };
        let values = vec![0.25; sequences * (first_position + tokens) * layout.kv_heads * layout.head_dim];
        for layer in 0..layers {
            ops::append_kv(&bench.pool, &mut cache, layer, &rows(0, first_position + tokens), &values, &values);
        }
        let rows = rows(first_position, tokens);
        let queries = vec![0.5; sequences * tokens * heads * layout.head_dim];
        let mut out = vec![0.0; queries.len()];
        let keys: usize = (first_position..first_position + tokens).map(|position| position + 1).sum();
        let work = Work { bytes: cache.bytes() / layers, operations: 4 * sequences * keys * heads * layout.head_dim };
        let mut turn = (0..layers).cycle();
        bench.measure(name, work, || {
            let layer = turn.next().unwrap_or_default();
            ops::paged_attention(&bench.pool, &cache, layer, heads, Scoring::scaled(0.125), &rows, &queries, &mut out);
        });
    }
}
