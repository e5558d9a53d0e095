//! Any text as a schema or a grammar: what the process that tries forms makes of it, on the stack that it has there.
#![no_main]

use std::thread;

use libfuzzer_sys::fuzz_target;
use windlass_engine::structure::{Source, try_out};
use windlass_engine::text::renderer_process::STACK_BYTES;

/// Longer ones have rules by the thousand, which overflow the stack and are let to.
const MAX_BYTES: usize = 4 << 10;

fuzz_target!(|text: &str| {
    let (kind, form) = text.split_at(text.char_indices().nth(1).map_or(text.len(), |(at, _)| at));
    if form.len() > MAX_BYTES {
        return;
    }
    let source = match kind {
        "{" => Source::Schema(text.to_owned()),
        _ => Source::Lark(form.to_owned()),
    };
    let tried = thread::Builder::new().stack_size(STACK_BYTES).spawn(move || try_out(&source));
    tried.expect("a thread can be started").join().expect("what panics is caught");
});
