//! Any text as `tokenizer.json`, and what it makes of a prompt.
#![no_main]

use libfuzzer_sys::fuzz_target;
use std::cell::OnceCell;
use std::fs;
use windlass_checkpoint::HubFolder;
use windlass_checkpoint::testing::SafetensorsBuilder;
use windlass_engine::text::tokenizer::Tokenizer;

thread_local! {
    static FOLDER: OnceCell<tempfile::TempDir> = const { OnceCell::new() };
}

fuzz_target!(|text: &str| {
    FOLDER.with(|folder| {
        let folder = folder.get_or_init(|| {
            let folder = tempfile::tempdir().expect("a folder");
            let file = SafetensorsBuilder::new().tensor_f32("model.norm.weight", &[8], &[1.0; 8]);
            fs::write(folder.path().join("model.safetensors"), file.build()).expect("a file");
            fs::write(folder.path().join("config.json"), "{}").expect("a file");
            folder
        });
        fs::write(folder.path().join("tokenizer.json"), text).expect("a file");
        let Ok(folder) = HubFolder::open(folder.path()) else { return };
        let Ok(tokenizer) = Tokenizer::from_folder(&folder) else { return };
        if let Ok(tokens) = tokenizer.encode("Hello,  wörld! 123\n<|im_end|>") {
            std::hint::black_box(tokenizer.decode(&tokens));
        }
    });
});
