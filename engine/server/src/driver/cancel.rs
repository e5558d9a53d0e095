//! How an HTTP task tells the engine's thread that a request is over: a word in memory that the thread looks at before
//! every step. It cannot be full, cannot overtake the request's submission, and needs no waiting on either side.

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicUsize, Ordering};
use windlass_engine_core::request::FinishReason;

const LIVE: u8 = 0;
const STOPPED: u8 = 1;
const ABANDONED: u8 = 2;

/// Counts signals over all requests, so that a step without any costs one load.
#[derive(Clone, Debug, Default)]
pub struct CancelCount(Arc<AtomicUsize>);

/// One request's signal, shared by its stream and the engine's thread.
#[derive(Clone, Debug)]
pub struct Cancel {
    signal: Arc<AtomicU8>,
    count: CancelCount,
}

impl CancelCount {
    /// A signal for a new request.
    pub fn new_request(&self) -> Cancel {
        Cancel { signal: Arc::default(), count: self.clone() }
    }

    /// Whether any request was cancelled since the last call.
    pub fn take(&self) -> bool {
        self.0.load(Ordering::Relaxed) > 0 && self.0.swap(0, Ordering::Acquire) > 0
    }
}

impl Cancel {
    /// A stop string was seen: the answer is complete.
    pub fn stop(&self) {
        self.set(STOPPED);
    }

    /// The client is gone.
    pub fn abandon(&self) {
        self.set(ABANDONED);
    }

    /// Why the request is to end, if it is.
    pub fn reason(&self) -> Option<FinishReason> {
        match self.signal.load(Ordering::Relaxed) {
            STOPPED => Some(FinishReason::Stop),
            ABANDONED => Some(FinishReason::Abort),
            _ => None,
        }
    }

    /// The first signal counts.
    fn set(&self, signal: u8) {
        if self.signal.compare_exchange(LIVE, signal, Ordering::Relaxed, Ordering::Relaxed).is_ok() {
            self.count.0.fetch_add(1, Ordering::Release);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_signal_counts_and_is_noticed_once() {
        let count = CancelCount::default();
        let cancel = count.new_request();
        assert!(!count.take() && cancel.reason().is_none());
        cancel.stop();
        cancel.abandon();
        assert_eq!(cancel.reason(), Some(FinishReason::Stop));
        assert!(count.take() && !count.take());
    }
}
