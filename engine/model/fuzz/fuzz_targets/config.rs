//! Any text as `config.json`, and the model that it would be.
#![no_main]

use libfuzzer_sys::fuzz_target;
use windlass_checkpoint::Checkpoint;
use windlass_checkpoint_fuzz::in_folder;
use windlass_engine_model::{DecoderConfig, LoadOptions, build};

fuzz_target!(|text: &str| {
    in_folder("config.json", text.as_bytes(), |folder| {
        let Ok(checkpoint) = Checkpoint::open(folder) else { return };
        if DecoderConfig::read(&checkpoint).is_ok() {
            let _ = build(&checkpoint, &LoadOptions { threads: 1, ..LoadOptions::default() }).map(drop);
        }
    });
});
