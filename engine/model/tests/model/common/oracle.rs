//! candle-transformers' quantized Llama as the reference, computing without rounding activations: it reads a copy of a
//! file with every matrix widened to f32, and a matrix of floats is not quantized again on the way.

use std::io::Cursor;

use candle_core::quantized::gguf_file::Content;
use candle_core::{Device, Tensor};
use candle_transformers::models::quantized_llama::ModelWeights;
use windlass_checkpoint::testing::GgufBuilder;
use windlass_checkpoint::{Checkpoint, GgufFile, Metadata};
use windlass_engine_core::plan::BlockId;
use windlass_engine_model::{Agreement, Batch, KvBudget, LoadOptions, Logits, build};
use windlass_kernels::{PackedMatrix, Pool, WeightType};

/// The file with every tensor in f32, dequantized by candle. A file with types that candle does not know is dequantized
/// by the kernels, whose own tests hold each type against its definition.
pub fn widen(bytes: &[u8]) -> Vec<u8> {
    let file = GgufFile::from_bytes(bytes.to_vec()).unwrap();
    let mut reader = Cursor::new(bytes);
    let content = Content::read(&mut reader).ok();
    let builder = file.tensors().fold(copy_config(file.metadata()), |builder, tensor| {
        let values = match &content {
            Some(content) => {
                let values = content.tensor(&mut reader, tensor.name, &Device::Cpu).unwrap();
                values.dequantize(&Device::Cpu).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap()
            }
            None => dequantize(&tensor),
        };
        builder.tensor_f32(tensor.name, tensor.dims, &values)
    });
    builder.build()
}

fn dequantize(tensor: &windlass_checkpoint::Tensor<'_>) -> Vec<f32> {
    let named = |kind: &WeightType| kind.name() == tensor.kind.name();
    let kind = WeightType::ALL.into_iter().find(named).unwrap();
    let (cols, rows) = (tensor.dims[0] as usize, tensor.dims[1..].iter().product::<u64>() as usize);
    let matrix = PackedMatrix::pack(&Pool::new(1).unwrap(), kind, rows, cols, &tensor.bytes).unwrap();
    let mut values = vec![0.0; rows * cols];
    values.chunks_exact_mut(cols).enumerate().for_each(|(row, out)| matrix.dequantize_row(row, out));
    values
}

/// The decoder's configuration, without the tokenizer.
fn copy_config(metadata: Metadata<'_>) -> GgufBuilder {
    let keys = metadata.keys().filter(|(key, _)| key.starts_with("llama."));
    keys.fold(GgufBuilder::new().str("general.architecture", "llama"), |builder, (key, _)| {
        match (metadata.u32(key), metadata.f32(key)) {
            (Ok(Some(number)), _) => builder.u32(key, number),
            (_, Ok(Some(number))) => builder.f32(key, number),
            _ => panic!("{key} is neither an integer nor a float"),
        }
    })
}

/// candle's logits at every position.
pub fn candle_logits(file: &[u8], tokens: &[u32]) -> Vec<Vec<f32>> {
    let mut reader = Cursor::new(file);
    let content = Content::read(&mut reader).unwrap();
    let mut model = ModelWeights::from_gguf(content, &mut reader, &Device::Cpu).unwrap();
    let logits_at = |(position, &token): (usize, &u32)| {
        let input = Tensor::new(&[[token]], &Device::Cpu).unwrap();
        model.forward(&input, position).unwrap().flatten_all().unwrap().to_vec1().unwrap()
    };
    tokens.iter().enumerate().map(logits_at).collect()
}

/// Our logits at every position, in steps of `chunk` tokens, on blocks that are not in order.
pub fn our_logits(checkpoint: &Checkpoint, tokens: &[u32], chunk: usize) -> Vec<Vec<f32>> {
    our_logits_with(checkpoint, tokens, chunk, &LoadOptions::default())
}

/// The same of a model that is loaded in some other way.
pub fn our_logits_with(checkpoint: &Checkpoint, tokens: &[u32], chunk: usize, options: &LoadOptions) -> Vec<Vec<f32>> {
    let options = LoadOptions {
        kv: KvBudget::Blocks(tokens.len().div_ceil(16) as u32),
        max_sequences: chunk as u32,
        max_step_tokens: chunk as u32,
        ..options.clone()
    };
    let mut model = build(checkpoint, &options).unwrap();
    let blocks: Vec<BlockId> = (0..model.geometry.blocks).rev().map(BlockId).collect();
    let (mut batch, mut logits) = (Batch::default(), Vec::new());
    for (index, tokens) in tokens.chunks(chunk).enumerate() {
        batch.clear();
        batch.push(tokens.iter().copied(), (index * chunk) as u32, &blocks, Logits::leading(tokens.len()));
        model.decoder.forward(&batch);
        let step = model.decoder.logits(tokens.len());
        logits.extend(step.chunks_exact(model.geometry.vocabulary as usize).map(<[f32]>::to_vec));
    }
    logits
}

/// Compares logits of all positions.
pub fn compare(reference: &[Vec<f32>], found: &[Vec<f32>]) -> Agreement {
    assert_eq!(reference.len(), found.len());
    let mut agreement = Agreement::default();
    reference.iter().zip(found).for_each(|(reference, found)| agreement.add(reference, found));
    agreement
}
