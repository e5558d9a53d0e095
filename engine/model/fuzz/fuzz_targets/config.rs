//! Any text as `config.json`, and the model that it makes of the weights of a small Llama.
#![no_main]

use std::sync::LazyLock;

use libfuzzer_sys::fuzz_target;
use windlass_checkpoint::testing::SafetensorsBuilder;
use windlass_checkpoint::{Checkpoint, HubFolder};
use windlass_engine_model::{KvBudget, LoadOptions, build};

static WEIGHTS: LazyLock<Vec<u8>> = LazyLock::new(weights);

fuzz_target!(|text: &str| {
    let Ok(folder) = HubFolder::from_bytes(text, WEIGHTS.clone()) else { return };
    let options = LoadOptions { threads: 1, kv: KvBudget::Blocks(8), ..LoadOptions::default() };
    let _ = build(&Checkpoint::from(folder), &options).map(drop);
});

/// One layer of the shape that the seeds describe, all zeros.
fn weights() -> Vec<u8> {
    let matrices: [(&str, u64, u64); 8] = [
        ("embed_tokens", 16, 32),
        ("layers.0.self_attn.q_proj", 32, 32),
        ("layers.0.self_attn.k_proj", 16, 32),
        ("layers.0.self_attn.v_proj", 16, 32),
        ("layers.0.self_attn.o_proj", 32, 32),
        ("layers.0.mlp.gate_proj", 64, 32),
        ("layers.0.mlp.up_proj", 64, 32),
        ("layers.0.mlp.down_proj", 32, 64),
    ];
    let norms = ["norm", "layers.0.input_layernorm", "layers.0.post_attention_layernorm"];
    let name = |part: &str| format!("model.{part}.weight");
    let file = norms.iter().fold(SafetensorsBuilder::new(), |file, norm| file.tensor_f32(&name(norm), &[32], &[0.0; 32]));
    let add = |file: SafetensorsBuilder, &(part, rows, cols): &(&str, u64, u64)| {
        file.tensor_f32(&name(part), &[rows, cols], &vec![0.0; (rows * cols) as usize])
    };
    matrices.iter().fold(file, add).build()
}
