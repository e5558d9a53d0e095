//! What both targets do with a tokenizer.

use std::panic::{Location, set_hook, take_hook};
use std::sync::Once;

use windlass_engine::text::tokenizer::Tokenizer;

/// Builds a tokenizer, and has it encode a prompt and decode what it made of that.
pub fn try_out<E>(build: impl FnOnce() -> Result<Tokenizer, E>) {
    leave_caught_panics();
    let Ok(tokenizer) = build() else { return };
    if let Ok(tokens) = tokenizer.encode("Hello,  wörld! 123\n<|im_end|>") {
        std::hint::black_box(tokenizer.decode(&tokens));
    }
}

/// Panics of the tokenizers crate do not end the fuzzer at once, as the reader makes errors of them: those that it lets through
/// do.
fn leave_caught_panics() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let end = take_hook();
        set_hook(Box::new(move |panic| {
            let of_crate = |at: &Location<'_>| at.file().contains("/tokenizers-");
            if !panic.location().is_some_and(of_crate) {
                end(panic);
            }
        }));
    });
}
