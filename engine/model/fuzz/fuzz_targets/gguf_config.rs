//! Any bytes as a GGUF file, and the model that it holds.
#![no_main]

use libfuzzer_sys::fuzz_target;
use windlass_checkpoint::Checkpoint;
use windlass_engine_model::{KvBudget, LoadOptions, build};

fuzz_target!(|bytes: &[u8]| {
    let Ok(checkpoint) = Checkpoint::from_bytes(bytes.to_vec()) else { return };
    let options = LoadOptions { threads: 1, kv: KvBudget::Blocks(8), ..LoadOptions::default() };
    let _ = build(&checkpoint, &options).map(drop);
});
