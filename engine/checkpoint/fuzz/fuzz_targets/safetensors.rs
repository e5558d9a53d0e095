//! Any bytes as the safetensors file of a folder.
#![no_main]

use libfuzzer_sys::fuzz_target;
use windlass_checkpoint::Checkpoint;
use windlass_checkpoint_fuzz::in_folder;

fuzz_target!(|bytes: &[u8]| {
    in_folder("model.safetensors", bytes, |folder| {
        let Ok(checkpoint) = Checkpoint::open(folder) else { return };
        for tensor in checkpoint.tensors() {
            std::hint::black_box(tensor.bytes.iter().fold(0_u8, |sum, byte| sum ^ byte));
        }
    });
});
