//! The `tokenizers` crate where it panics: at files that contradict themselves, such as by merges whose whole is no token.

use std::panic::{AssertUnwindSafe, catch_unwind};

/// What `work` gives, and a sentence where it fails or panics. A panic leaves nothing half done that is used again: what was
/// being built is dropped, and a tokenizer's caches take whole entries.
pub fn guarded<T>(work: impl FnOnce() -> tokenizers::Result<T>) -> Result<T, String> {
    match catch_unwind(AssertUnwindSafe(work)) {
        Ok(result) => result.map_err(|error| error.to_string()),
        Err(_) => Err("it contradicts itself: the tokenizers library panicked".to_owned()),
    }
}
