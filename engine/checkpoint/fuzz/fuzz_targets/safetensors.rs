//! Any bytes as the safetensors file of a folder.
#![no_main]

use libfuzzer_sys::fuzz_target;
use std::cell::OnceCell;
use std::fs;
use windlass_checkpoint::Checkpoint;

thread_local! {
    static FOLDER: OnceCell<tempfile::TempDir> = const { OnceCell::new() };
}

fuzz_target!(|bytes: &[u8]| {
    FOLDER.with(|folder| {
        let folder = folder.get_or_init(|| {
            let folder = tempfile::tempdir().expect("a folder");
            fs::write(folder.path().join("config.json"), "{}").expect("a file");
            folder
        });
        fs::write(folder.path().join("model.safetensors"), bytes).expect("a file");
        let Ok(checkpoint) = Checkpoint::open(folder.path()) else { return };
        for tensor in checkpoint.tensors() {
            std::hint::black_box(tensor.bytes.iter().fold(0_u8, |sum, byte| sum ^ byte));
        }
    });
});
