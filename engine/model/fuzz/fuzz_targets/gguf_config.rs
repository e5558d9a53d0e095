//! Any bytes as a GGUF file, and the model that its metadata describe.
#![no_main]

use libfuzzer_sys::fuzz_target;
use windlass_checkpoint::Checkpoint;
use windlass_engine_model::DecoderConfig;

fuzz_target!(|bytes: &[u8]| {
    if let Ok(checkpoint) = Checkpoint::from_bytes(bytes.to_vec()) {
        let _ = DecoderConfig::read(&checkpoint);
    }
});
