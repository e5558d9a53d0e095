//! Teacher-forced logits of the real model against candle-transformers' quantized Llama on the same file.

mod common;

use std::fs::File;

use candle_core::quantized::gguf_file;
use candle_core::{Device, Tensor};
use candle_transformers::models::quantized_llama::ModelWeights;
use common::{Agreement, harbour_tokens};
use windlass_checkpoint::GgufFile;
use windlass_checkpoint::testing::real_model;
use windlass_engine_core::plan::BlockId;
use windlass_engine_model::{Batch, Built, KvBudget, LoadOptions, Logits, build};

/// Tokens per step here, so that chunk borders lie within blocks of 16.
const CHUNK: usize = 56;

#[test]
fn logits_agree_with_candle_over_real_text() {
    let Some(path) = real_model() else { return };
    let tokens = harbour_tokens();
    let mut decoder = build(&GgufFile::open(&path).unwrap(), &options(tokens.len())).unwrap();
    let mut candle = candle_model(&path);
    let mut agreement = Agreement::default();
    for (index, chunk) in tokens.chunks(CHUNK).enumerate() {
        let found = forward(&mut decoder, chunk, index * CHUNK);
        for (at, (&token, found)) in chunk.iter().zip(found.chunks_exact(49_152)).enumerate() {
            agreement.add(&candle_logits(&mut candle, token, index * CHUNK + at), found);
        }
    }
    println!("{agreement}");
    assert!(tokens.len() >= 500 && agreement.mean_kl() <= 1e-3 && agreement.top_1() >= 0.99, "{agreement}");
}

fn options(tokens: usize) -> LoadOptions {
    LoadOptions {
        kv: KvBudget::Blocks(tokens.div_ceil(16) as u32),
        max_sequences: CHUNK as u32,
        max_step_tokens: CHUNK as u32,
        ..LoadOptions::default()
    }
}

/// Logits of every token of a chunk.
fn forward(model: &mut Built, tokens: &[u32], position: usize) -> Vec<f32> {
    let blocks: Vec<BlockId> = (0..model.geometry.blocks).rev().map(BlockId).collect();
    let mut batch = Batch::default();
    batch.push(tokens.iter().copied(), position as u32, &blocks, Logits::All);
    model.decoder.forward(&batch);
    model.decoder.logits(tokens.len())
}

fn candle_model(path: &std::path::Path) -> ModelWeights {
    let mut file = File::open(path).unwrap();
    let content = gguf_file::Content::read(&mut file).unwrap();
    ModelWeights::from_gguf(content, &mut file, &Device::Cpu).unwrap()
}

fn candle_logits(model: &mut ModelWeights, token: u32, position: usize) -> Vec<f32> {
    let input = Tensor::new(&[[token]], &Device::Cpu).unwrap();
    model.forward(&input, position).unwrap().flatten_all().unwrap().to_vec1().unwrap()
}
