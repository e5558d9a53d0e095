//! A constraint that allows everything, and is often late to say so.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use windlass_engine_core::constraint::{Constraint, MaskUnavailable, TokenSet};

/// How often one of them was waited for and did not know.
pub static DEFERRED: AtomicU64 = AtomicU64::new(0);

/// Does not know in time, so many times of each time that it does.
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
        // It is asked beforehand, too, without being waited for.
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
