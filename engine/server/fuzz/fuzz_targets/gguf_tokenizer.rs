//! Any bytes as a GGUF file, and what the tokenizer in it makes of a prompt.
#![no_main]

mod common;

use libfuzzer_sys::fuzz_target;
use windlass_checkpoint::GgufFile;
use windlass_engine::text::tokenizer::Tokenizer;

fuzz_target!(|bytes: &[u8]| {
    let Ok(file) = GgufFile::from_bytes(bytes.to_vec()) else { return };
    common::try_out(|| Tokenizer::from_metadata(file.metadata()));
});
