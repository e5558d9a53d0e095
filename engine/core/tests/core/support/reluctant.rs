//! A constraint that allows every token, but whose mask is often not ready.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use windlass_engine_core::constraint::{Constraint, MaskUnavailable, TokenSet};

/// Number of times that a mask was waited for and was not ready.
pub static DEFERRED: AtomicU64 = AtomicU64::new(0);

/// Is not ready `late` times for each time that it is.
#[derive(Debug)]
pub struct Reluctant {
    late: u64,
    asked: AtomicU64,
}

impl Reluctant {
    pub fn new(late: u64) -> Reluctant {
        Reluctant { late, asked: AtomicU64::new(0) }
    }
}

impl Constraint for Reluctant {
    fn allowed(&self, _generated: &[u32], timeout: Duration) -> Result<TokenSet, MaskUnavailable> {
        // It is also called ahead of time, without waiting.
        if timeout.is_zero() {
            return Err(MaskUnavailable::NotReady);
        }
        if self.asked.fetch_add(1, Ordering::Relaxed) % (self.late + 1) < self.late {
            DEFERRED.fetch_add(1, Ordering::Relaxed);
            return Err(MaskUnavailable::NotReady);
        }
        Ok(TokenSet::from_words(vec![u32::MAX; 4]))
    }
}
