//! One function per op: checks shapes, chooses the kernel, launches it on a stream.
//!
//! Matrices are row-major, `[rows, cols]`. An op panics when shapes do not match: that is a bug of its caller. It fails
//! when the driver does.

mod gather;
mod norm;

pub use gather::{embed, gather_rows};
pub use norm::{add_rms_norm, rms_norm};

/// A size as kernels take it.
///
/// # Panics
/// When it does not fit, which no op's tensors reach.
fn word(size: usize) -> u32 {
    u32::try_from(size).unwrap_or_else(|_| panic!("{size} is more than kernels count"))
}
