//! Any bytes as a GGUF file: its header, its metadata, and all that its tensors hold.
#![no_main]

use libfuzzer_sys::fuzz_target;
use windlass_checkpoint::Checkpoint;

fuzz_target!(|bytes: &[u8]| {
    let Ok(checkpoint) = Checkpoint::from_bytes(bytes.to_vec()) else { return };
    for tensor in checkpoint.tensors() {
        std::hint::black_box(tensor.bytes.iter().fold(0_u8, |sum, byte| sum ^ byte));
    }
});
