//! Any bytes as a GGUF file: its header, its metadata, and the model that it would be.
#![no_main]

use libfuzzer_sys::fuzz_target;
use windlass_checkpoint::Checkpoint;
use windlass_engine_model::DecoderConfig;

fuzz_target!(|bytes: &[u8]| {
    let Ok(checkpoint) = Checkpoint::from_bytes(bytes.to_vec()) else { return };
    for tensor in checkpoint.tensors() {
        std::hint::black_box(tensor.bytes.iter().fold(0_u8, |sum, byte| sum ^ byte));
    }
    let _ = DecoderConfig::read(&checkpoint);
});
