//! A constraint that allows everything, and is often late to say so.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use windlass_engine_core::constraint::{Constraint, TokenSet, Withheld};

/// How often one of them was waited for and did not know.
pub static PUT_OFF: AtomicU64 = AtomicU64::new(0);

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
    fn allowed(&self, _generated: &[u32], patience: Duration) -> Result<TokenSet, Withheld> {
        // It is asked beforehand, too, without being waited for.
        if patience.is_zero() {
            return Err(Withheld::NotYet);
        }
        if self.asked.fetch_add(1, Ordering::Relaxed) % (self.late + 1) < self.late {
            PUT_OFF.fetch_add(1, Ordering::Relaxed);
            return Err(Withheld::NotYet);
        }
        Ok(TokenSet::from_words(vec![u32::MAX; 4]))
    }
}
