//! Any text as `tokenizer.json`, and what it makes of a prompt.
#![no_main]

mod common;

use std::cell::OnceCell;
use std::{fs, io};

use libfuzzer_sys::fuzz_target;
use tempfile::TempDir;
use windlass_checkpoint::HubFolder;
use windlass_checkpoint::testing::SafetensorsBuilder;
use windlass_engine::text::tokenizer::Tokenizer;

thread_local! {
    /// One for all inputs.
    static FOLDER: OnceCell<TempDir> = const { OnceCell::new() };
}

// A folder that cannot be written ends the target: nothing would be tried.
fuzz_target!(|text: &str| {
    FOLDER.with(|folder| {
        let folder = folder.get_or_init(|| begin().expect("a temporary folder can be written")).path();
        fs::write(folder.join("tokenizer.json"), text).expect("a file in it can be written");
        let Ok(folder) = HubFolder::open(folder) else { return };
        common::try_out(|| Tokenizer::from_folder(&folder));
    });
});

/// A folder of no weights.
fn begin() -> io::Result<TempDir> {
    let folder = tempfile::tempdir()?;
    fs::write(folder.path().join("model.safetensors"), SafetensorsBuilder::new().build())?;
    fs::write(folder.path().join("config.json"), "{}")?;
    Ok(folder)
}
