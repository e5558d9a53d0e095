//! Any bytes as the safetensors file of a folder.
#![no_main]

use libfuzzer_sys::fuzz_target;
use windlass_checkpoint::HubFolder;

fuzz_target!(|bytes: &[u8]| {
    let Ok(folder) = HubFolder::from_bytes("{}", bytes.to_vec()) else { return };
    for tensor in folder.tensors() {
        std::hint::black_box(tensor.bytes.iter().fold(0_u8, |sum, byte| sum ^ byte));
    }
});
