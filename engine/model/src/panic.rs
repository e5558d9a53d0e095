//! What a panic says.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Its message, where it has one.
pub(crate) fn message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "no message".into())
}

/// Does what a step needs, or says how that panicked: whatever it worked on is in no known state then.
pub(crate) fn guarded<T>(task: impl FnOnce() -> T) -> Result<T, String> {
    catch_unwind(AssertUnwindSafe(task)).map_err(|panic| format!("a step panicked: {}", message(panic.as_ref())))
}
