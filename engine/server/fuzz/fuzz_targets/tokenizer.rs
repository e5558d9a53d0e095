//! Any text as `tokenizer.json`, and what it makes of a prompt.
#![no_main]

use libfuzzer_sys::fuzz_target;
use windlass_checkpoint::HubFolder;
use windlass_checkpoint_fuzz::in_folder;
use windlass_engine::text::tokenizer::Tokenizer;

fuzz_target!(|text: &str| {
    in_folder("tokenizer.json", text.as_bytes(), |folder| {
        let Ok(folder) = HubFolder::open(folder) else { return };
        let Ok(tokenizer) = Tokenizer::from_folder(&folder) else { return };
        if let Ok(tokens) = tokenizer.encode("Hello,  wörld! 123\n<|im_end|>") {
            std::hint::black_box(tokenizer.decode(&tokens));
        }
    });
});
