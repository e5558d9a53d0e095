//! Any text as `config.json`, and the model that it would be.
#![no_main]

use libfuzzer_sys::fuzz_target;
use windlass_checkpoint::testing::SafetensorsBuilder;
use windlass_checkpoint::{Checkpoint, HubFolder};
use windlass_engine_model::{DecoderConfig, LoadOptions, build};

fuzz_target!(|text: &str| {
    let weights = SafetensorsBuilder::new().tensor_f32("model.norm.weight", &[8], &[1.0; 8]).build();
    let Ok(folder) = HubFolder::from_bytes(text, weights) else { return };
    let checkpoint = Checkpoint::from(folder);
    if DecoderConfig::read(&checkpoint).is_ok() {
        let _ = build(&checkpoint, &LoadOptions { threads: 1, ..LoadOptions::default() }).map(drop);
    }
});
