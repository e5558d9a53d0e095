//! Checkpoints of random weights in the shape of a Llama, as the hub has them: as fast as any, and of no sense.
//!
//! A tensor repeats one block of noise, so that writing it costs what copying costs.

use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::Path;

use half::bf16;
use serde_json::{Map, Value, json};
use windlass_kernels::cuda::weights::EightBits;

use crate::noise;

/// Weights of a row are about this far from zero, so that sums of 4096 of them are about 1.
const DEVIATION: f32 = 1.0 / 64.0;
/// Bytes of the blocks that tensors repeat.
const BLOCK_BYTES: usize = 1 << 20;
/// Inputs that share a scale where weights have 4 bits.
const GROUP: usize = 128;

/// How many of everything.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    pub hidden: usize,
    pub feed_forward: usize,
    pub layers: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub vocabulary: usize,
}

/// What matrices of layers are; the embedding and the head are bf16.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    Bf16,
    /// e4m3 with a scale for each output, inputs to be rounded, too.
    Fp8,
    /// 4 bits around zero, with a scale for each 128 inputs.
    Int4,
}

impl Shape {
    /// Llama-3.1-8B (Grattafiori et al. 2024).
    pub const LLAMA_8B: Shape =
        Shape { hidden: 4096, feed_forward: 14_336, layers: 32, heads: 32, kv_heads: 8, vocabulary: 128_256 };
    pub const TINY: Shape = Shape { hidden: 128, feed_forward: 256, layers: 2, heads: 2, kv_heads: 1, vocabulary: 320 };

    /// Bytes of the embedding, of which a step reads a row for each token.
    pub fn embedding_bytes(&self) -> u64 {
        2 * (self.vocabulary * self.hidden) as u64
    }

    /// Operations of the matrices that each token of a prompt goes through: the head is for the last.
    pub fn operations(&self) -> f64 {
        let matrices = self.matrices().into_iter().map(|(_, [rows, cols])| rows * cols);
        2.0 * (self.layers * matrices.sum::<usize>()) as f64
    }

    /// Of a layer, `[outputs, inputs]`.
    fn matrices(&self) -> [(&'static str, [usize; 2]); 7] {
        let (hidden, wide, kv) = (self.hidden, self.feed_forward, self.hidden / self.heads * self.kv_heads);
        [
            ("self_attn.q_proj", [hidden, hidden]),
            ("self_attn.k_proj", [kv, hidden]),
            ("self_attn.v_proj", [kv, hidden]),
            ("self_attn.o_proj", [hidden, hidden]),
            ("mlp.gate_proj", [wide, hidden]),
            ("mlp.up_proj", [wide, hidden]),
            ("mlp.down_proj", [hidden, wide]),
        ]
    }

    fn config(&self, format: Format) -> Value {
        let mut config = json!({
            "model_type": "llama", "vocab_size": self.vocabulary, "hidden_size": self.hidden,
            "intermediate_size": self.feed_forward, "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads, "num_key_value_heads": self.kv_heads, "max_position_embeddings": 131_072,
            "rms_norm_eps": 1e-5, "rope_theta": 500_000.0, "hidden_act": "silu", "tie_word_embeddings": false,
        });
        if let Some(scheme) = format.scheme() {
            config["quantization_config"] = scheme;
        }
        config
    }

    fn tensors(&self, format: Format) -> Vec<Tensor> {
        let mut tensors = vec![Tensor::halves("model.embed_tokens.weight", [self.vocabulary, self.hidden])];
        for layer in 0..self.layers {
            let name = |part: &str| format!("model.layers.{layer}.{part}");
            tensors.extend(self.matrices().into_iter().flat_map(|(part, shape)| format.tensors(&name(part), shape)));
            for norm in ["input_layernorm.weight", "post_attention_layernorm.weight"] {
                tensors.push(Tensor::ones(&name(norm), self.hidden));
            }
        }
        tensors.push(Tensor::ones("model.norm.weight", self.hidden));
        tensors.push(Tensor::halves("lm_head.weight", [self.vocabulary, self.hidden]));
        tensors
    }
}

impl Format {
    /// As llm-compressor writes it.
    fn scheme(self) -> Option<Value> {
        let scheme = |format: &str, group: Value| json!({"quant_method": "compressed-tensors", "format": format, "config_groups": {"group_0": group}});
        match self {
            Format::Bf16 => None,
            Format::Fp8 => Some(scheme(
                "float-quantized",
                json!({
                    "weights": {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": true},
                    "input_activations": {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": true},
                }),
            )),
            Format::Int4 => {
                let weights =
                    json!({"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP, "symmetric": true});
                Some(scheme("pack-quantized", json!({"weights": weights})))
            }
        }
    }

    /// Of a matrix `[outputs, inputs]`.
    fn tensors(self, name: &str, shape @ [rows, cols]: [usize; 2]) -> Vec<Tensor> {
        let part = |part: &str| format!("{name}.{part}");
        // Codes are even: of 16 values they are 4.6 from the middle, of floats below 2 about 0.6.
        match self {
            Format::Bf16 => vec![Tensor::halves(&part("weight"), shape)],
            Format::Fp8 => vec![
                Tensor::new(&part("weight"), "F8_E4M3", shape, Contents::Float8),
                Tensor::new(&part("weight_scale"), "BF16", [rows, 1], Contents::Half(DEVIATION / 0.6)),
            ],
            Format::Int4 => vec![
                Tensor::new(&part("weight_packed"), "I32", [rows, cols / 8], Contents::Bits),
                Tensor::new(&part("weight_scale"), "BF16", [rows, cols / GROUP], Contents::Half(DEVIATION / 4.6)),
            ],
        }
    }
}

/// A tensor to be.
struct Tensor {
    name: String,
    dtype: &'static str,
    shape: Vec<usize>,
    contents: Contents,
}

#[derive(Clone, Copy)]
enum Contents {
    /// Numbers in bf16, as large as weights are.
    Halves,
    /// One number in bf16, everywhere.
    Half(f32),
    /// Any bits.
    Bits,
    /// Those of e4m3 that are numbers below 2.
    Float8,
}

impl Tensor {
    fn new(name: &str, dtype: &'static str, shape: impl Into<Vec<usize>>, contents: Contents) -> Tensor {
        Tensor { name: name.to_owned(), dtype, shape: shape.into(), contents }
    }

    fn halves(name: &str, shape: [usize; 2]) -> Tensor {
        Tensor::new(name, "BF16", shape, Contents::Halves)
    }

    fn ones(name: &str, length: usize) -> Tensor {
        Tensor::new(name, "BF16", [length], Contents::Half(1.0))
    }

    fn bytes(&self) -> usize {
        let width = match self.dtype {
            "F8_E4M3" => 1,
            "BF16" => 2,
            _ => 4,
        };
        width * self.shape.iter().product::<usize>()
    }
}

impl Contents {
    /// What a tensor repeats.
    fn block(self) -> Vec<u8> {
        // Even values up to 1 are 0.58 from zero.
        const EVEN: f32 = 0.58;
        let half = |value: f32| bf16::from_f32(value).to_le_bytes();
        match self {
            Contents::Halves => {
                noise::floats(BLOCK_BYTES / 2).into_iter().flat_map(|value| half(value * DEVIATION / EVEN)).collect()
            }
            Contents::Half(value) => noise::repeated_from(BLOCK_BYTES, &half(value)),
            Contents::Bits => noise::bytes(BLOCK_BYTES),
            Contents::Float8 => noise::codes(EightBits::E4m3, BLOCK_BYTES),
        }
    }
}

/// Writes a checkpoint into `folder`.
pub fn write(folder: &Path, shape: &Shape, format: Format) -> io::Result<()> {
    fs::write(folder.join("config.json"), shape.config(format).to_string())?;
    let (tensors, mut file) = (shape.tensors(format), BufWriter::new(File::create(folder.join("model.safetensors"))?));
    let header = header(&tensors).to_string();
    file.write_all(&(header.len() as u64).to_le_bytes())?;
    file.write_all(header.as_bytes())?;
    for tensor in &tensors {
        fill(&mut file, tensor.bytes(), &tensor.contents.block())?;
    }
    file.flush()
}

/// Where each tensor's data lies.
fn header(tensors: &[Tensor]) -> Value {
    let (mut entries, mut end) = (Map::new(), 0);
    for tensor in tensors {
        let (Tensor { name, dtype, shape, .. }, start) = (tensor, end);
        end += tensor.bytes();
        entries.insert(name.clone(), json!({"dtype": dtype, "shape": shape, "data_offsets": [start, end]}));
    }
    Value::Object(entries)
}

fn fill(file: &mut impl Write, bytes: usize, block: &[u8]) -> io::Result<()> {
    let (whole, rest) = (bytes / block.len(), bytes % block.len());
    (0..whole).try_for_each(|_| file.write_all(block))?;
    file.write_all(&block[..rest])
}

#[cfg(test)]
mod tests {
    use windlass_checkpoint::Checkpoint;
    use windlass_cuda_shim::{HostMachine, Issued, Kernels};
    use windlass_engine_model::cuda::{CudaModel, Replay};
    use windlass_engine_model::{KvBudget, LoadOptions};
    use windlass_kernels::cuda::Kernel;

    use super::*;
    use crate::driver::{Job, generate};

    /// What a step of one token launches, of a checkpoint in a format.
    fn launched(format: Format) -> Vec<Issued> {
        let (folder, driver) = (tempfile::tempdir().unwrap(), HostMachine::new(Kernels::Run, 7).driver(0, 1 << 26));
        write(folder.path(), &Shape::TINY, format).unwrap();
        let checkpoint = Checkpoint::open(folder.path()).unwrap();
        let kv = KvBudget::Blocks(2);
        let options = LoadOptions { block_tokens: 64, kv, max_model_tokens: Some(64), ..LoadOptions::default() };
        let model = CudaModel::load(&checkpoint, &options, &[driver.device()]).unwrap();
        let mut executor = model.start(kv, Replay::Eager).unwrap().executor;
        generate(&mut executor, &[Job::greedy(&[1])], 1, 1, 1);
        driver.issued()
    }

    /// Four in each of two layers; the head is bf16.
    #[test]
    fn every_format_goes_through_its_own_products() {
        const ALL: [Kernel; 3] = [Kernel::LinearBf16T8, Kernel::W8a8Fp8Few, Kernel::LinearInt4G128T8];
        for (format, expected) in [(Format::Bf16, [8 + 1, 0, 0]), (Format::Fp8, [1, 8, 0]), (Format::Int4, [1, 0, 8])] {
            let issued = launched(format);
            let count = |kernel| issued.iter().filter(|work| **work == Issued::Launch(kernel)).count();
            assert_eq!(ALL.map(count), expected, "{format:?}");
        }
    }

    #[test]
    fn the_large_shape_is_llamas() {
        let shape = Shape::LLAMA_8B;
        // The embedding's bytes are as many as values of it and of the head; norms have a quarter of a million more.
        let weights = shape.operations() / 2.0 + shape.embedding_bytes() as f64;
        assert!((weights / 8.03e9 - 1.0).abs() < 1e-4, "{weights}");
    }
}
