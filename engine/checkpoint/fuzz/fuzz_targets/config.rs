//! Any text as `config.json`, beside a file without tensors.
#![no_main]

use libfuzzer_sys::fuzz_target;
use std::cell::OnceCell;
use std::fs;
use windlass_checkpoint::Checkpoint;
use windlass_checkpoint::testing::SafetensorsBuilder;
use windlass_engine_model::{DecoderConfig, LoadOptions, build};

thread_local! {
    static FOLDER: OnceCell<tempfile::TempDir> = const { OnceCell::new() };
}

fuzz_target!(|text: &str| {
    FOLDER.with(|folder| {
        let folder = folder.get_or_init(|| {
            let folder = tempfile::tempdir().expect("a folder");
            let file = SafetensorsBuilder::new().tensor_f32("model.norm.weight", &[8], &[1.0; 8]);
            fs::write(folder.path().join("model.safetensors"), file.build()).expect("a file");
            folder
        });
        fs::write(folder.path().join("config.json"), text).expect("a file");
        let Ok(checkpoint) = Checkpoint::open(folder.path()) else { return };
        if DecoderConfig::read(&checkpoint).is_ok() {
            let _ = build(&checkpoint, &LoadOptions { threads: 1, ..LoadOptions::default() }).map(drop);
        }
    });
});
