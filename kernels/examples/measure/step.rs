//! All ops of a forward pass, in the order of a Llama decoder, on made-up weights.

use windlass_kernels::ops::{self, AttentionRow, Product, RopePairing, RopeTable, Scoring};
use windlass_kernels::{
    ActivationType, Activations, KvCache, KvLayout, KvType, PackedMatrix, Pool, ShapeError, WeightType,
};

use crate::bench::{Bench, Work};

struct Shape {
    name: &'static str,
    hidden: usize,
    wide: usize,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    layers: usize,
    vocabulary: usize,
}

const SMALL: Shape =
    Shape { name: "135M", hidden: 576, wide: 1536, heads: 9, kv_heads: 3, head_dim: 64, layers: 30, vocabulary: 49152 };

const LARGE: Shape = Shape {
    name: "1B",
    hidden: 2048,
    wide: 8192,
    heads: 32,
    kv_heads: 8,
    head_dim: 64,
    layers: 16,
    vocabulary: 128_256,
};

/// Shape, type of the layers' matrices, type of the head.
const MODELS: [(Shape, WeightType, WeightType); 4] = [
    (SMALL, WeightType::Q4_1, WeightType::Q8_0),
    (SMALL, WeightType::Q4_0, WeightType::Q8_0),
    (SMALL, WeightType::Q8_0, WeightType::Q8_0),
    (LARGE, WeightType::Q4K, WeightType::Q6K),
];

/// Name, sequences, first position, tokens of each.
const STEPS: [(&str, usize, usize, usize); 3] =
    [("decode", 1, 200, 1), ("decode of 16", 16, 200, 1), ("prefill of 512", 1, 0, 512)];

pub fn measure(bench: &Bench) -> Result<(), Box<dyn std::error::Error>> {
    for (shape, layers, head) in MODELS {
        let name = |step: &str| format!("step {} {} {step}", shape.name, layers.name());
        if !STEPS.iter().any(|(step, ..)| bench.wants(&name(step))) {
            continue;
        }
        let weights = Weights::new(&bench.pool, &shape, layers, head)?;
        for (step, sequences, first_position, tokens) in STEPS {
            let mut pass = Pass::new(&shape, sequences, first_position, tokens);
            let work = Work { bytes: weights.bytes(), operations: weights.operations(sequences, tokens) };
            let best = bench.measure(&name(step), work, || pass.run(&bench.pool, &shape, &weights));
            if bench.wants(&name(step)) {
                println!("{:>46.0} tokens/s", (sequences * tokens) as f64 / best.as_secs_f64());
            }
        }
    }
    Ok(())
}

struct Layer {
    q: PackedMatrix,
    k: PackedMatrix,
    v: PackedMatrix,
    o: PackedMatrix,
    gate: PackedMatrix,
    up: PackedMatrix,
    down: PackedMatrix,
}

struct Weights {
    layers: Vec<Layer>,
    head: PackedMatrix,
    norm: Vec<f32>,
    rope: RopeTable,
}

impl Weights {
    fn new(pool: &Pool, shape: &Shape, layers: WeightType, head: WeightType) -> Result<Self, ShapeError> {
        let pack = |weight_type: WeightType, rows: usize, cols: usize| {
            let bytes = vec![0x11; weight_type.row_bytes(cols).unwrap_or(0) * rows];
            PackedMatrix::pack(pool, weight_type, rows, cols, &bytes)
        };
        let Shape { hidden, wide, heads, kv_heads, head_dim, .. } = *shape;
        let layer = |_| {
            Ok(Layer {
                q: pack(layers, heads * head_dim, hidden)?,
                k: pack(layers, kv_heads * head_dim, hidden)?,
                v: pack(layers, kv_heads * head_dim, hidden)?,
                o: pack(layers, hidden, heads * head_dim)?,
                gate: pack(layers, wide, hidden)?,
                up: pack(layers, wide, hidden)?,
                down: pack(layers, hidden, wide)?,
            })
        };
        Ok(Weights {
            layers: (0..shape.layers).map(layer).collect::<Result<_, _>>()?,
            head: pack(head, shape.vocabulary, hidden)?,
            norm: vec![1.0; hidden],
            rope: RopeTable::new(head_dim, 4096, 1e4, None, 1.0),
        })
    }

    fn matrices(&self) -> impl Iterator<Item = &PackedMatrix> {
        self.layers.iter().flat_map(|l| [&l.q, &l.k, &l.v, &l.o, &l.gate, &l.up, &l.down])
    }

    fn bytes(&self) -> usize {
        self.matrices().chain([&self.head]).map(PackedMatrix::bytes).sum()
    }

    fn operations(&self, sequences: usize, tokens: usize) -> usize {
        let values = |matrix: &PackedMatrix| matrix.rows() * matrix.cols();
        2 * sequences * (tokens * self.matrices().map(values).sum::<usize>() + values(&self.head))
    }
}

/// One forward pass' buffers.
struct Pass {
    tables: Vec<Vec<u32>>,
    cache: KvCache,
    first_position: usize,
    tokens: usize,
    activations: Activations,
    residual: Vec<f32>,
    normed: Vec<f32>,
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    gate: Vec<f32>,
    up: Vec<f32>,
    logits: Vec<f32>,
}

impl Pass {
    fn new(shape: &Shape, sequences: usize, first_position: usize, tokens: usize) -> Self {
        let layout = KvLayout { block_tokens: 16, kv_heads: shape.kv_heads, head_dim: shape.head_dim };
        let blocks = (first_position + tokens).div_ceil(layout.block_tokens);
        let table = |s: usize| (s * blocks..(s + 1) * blocks).map(|block| block as u32).collect();
        let all = |values: usize| vec![0.5; sequences * tokens * values];
        Pass {
            tables: (0..sequences).map(table).collect(),
            cache: KvCache::new(layout, KvType::Bf16, shape.layers, sequences * blocks),
            first_position,
            tokens,
            activations: Activations::new(ActivationType::Int8),
            residual: all(shape.hidden),
            normed: all(shape.hidden),
            q: all(shape.heads * shape.head_dim),
            k: all(shape.kv_heads * shape.head_dim),
            v: all(shape.kv_heads * shape.head_dim),
            gate: all(shape.wide),
            up: all(shape.wide),
            logits: vec![0.0; sequences * shape.vocabulary],
        }
    }

    fn run(&mut self, pool: &Pool, shape: &Shape, weights: &Weights) {
        let Pass { tables, cache, activations, residual, normed, q, k, v, gate, up, logits, .. } = self;
        let (first_position, tokens) = (self.first_position, self.tokens);
        let rows: Vec<_> =
            tables.iter().map(|table| AttentionRow { block_table: table, first_position, tokens, seen: &[] }).collect();
        let positions: Vec<u32> =
            rows.iter().flat_map(|_| first_position as u32..(first_position + tokens) as u32).collect();
        residual.fill(0.5);
        ops::rms_norm(pool, residual, &weights.norm, 1e-5, normed);
        for (index, layer) in weights.layers.iter().enumerate() {
            activations.load(pool, normed, &[&layer.q, &layer.k, &layer.v]);
            let products = &mut [
                Product { matrix: &layer.q, out: q },
                Product { matrix: &layer.k, out: k },
                Product { matrix: &layer.v, out: v },
            ];
            ops::matmul_many(pool, activations, products);
            ops::rope(pool, &weights.rope, RopePairing::Adjacent, &positions, shape.head_dim, q);
            ops::rope(pool, &weights.rope, RopePairing::Adjacent, &positions, shape.head_dim, k);
            ops::append_kv(pool, cache, index, &rows, k, v);
            let queries = q.clone();
            ops::paged_attention(pool, cache, index, shape.heads, Scoring::scaled(0.125), &rows, &queries, q);
            activations.load(pool, q, &[&layer.o]);
            ops::matmul(pool, activations, &layer.o, normed);
            let addend = normed.clone();
            ops::add_rms_norm(pool, residual, &addend, &weights.norm, 1e-5, normed);
            activations.load(pool, normed, &[&layer.gate, &layer.up]);
            let products = &mut [Product { matrix: &layer.gate, out: gate }, Product { matrix: &layer.up, out: up }];
            ops::matmul_many(pool, activations, products);
            let gated = gate.clone();
            ops::silu_mul(pool, &gated, up, gate);
            activations.load(pool, gate, &[&layer.down]);
            ops::matmul(pool, activations, &layer.down, normed);
            let addend = normed.clone();
            ops::add_rms_norm(pool, residual, &addend, &weights.norm, 1e-5, normed);
        }
        let last: Vec<f32> =
            normed.chunks(tokens * shape.hidden).flat_map(|row| &row[(tokens - 1) * shape.hidden..]).copied().collect();
        activations.load(pool, &last, &[&weights.head]);
        ops::matmul(pool, activations, &weights.head, logits);
    }
}
