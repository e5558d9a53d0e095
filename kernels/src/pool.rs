//! The fork-join pool that all ops share.

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::Kernels;

/// A fixed set of threads that run one closure together, and the instruction set they run it with.
#[derive(Debug)]
pub struct Pool {
    threads: usize,
    kernels: Kernels,
}

/// Which of a region's workers this is.
#[derive(Clone, Copy, Debug)]
pub struct Worker {
    /// From 0 (the calling thread) to `count - 1`.
    pub index: usize,
    /// Workers in the region.
    pub count: usize,
}

impl Pool {
    /// A pool of `threads` workers (at least one: the caller) on the fastest kernels of this processor.
    pub fn new(threads: usize) -> std::io::Result<Self> {
        Self::with_kernels(threads, Kernels::detect())
    }

    /// A pool of `threads` workers on the given kernels.
    pub fn with_kernels(threads: usize, kernels: Kernels) -> std::io::Result<Self> {
        Ok(Pool { threads: threads.max(1), kernels })
    }

    /// Workers, the calling thread included.
    pub fn threads(&self) -> usize {
        self.threads
    }

    /// The instruction set in use.
    pub fn kernels(&self) -> Kernels {
        self.kernels
    }

    /// Calls `task` once per worker, the calling thread being worker 0, and returns when all calls have.
    ///
    /// # Panics
    /// When a call of `task` panicked.
    pub fn run(&self, task: impl Fn(Worker) + Sync) {
        for index in 0..self.threads {
            task(Worker { index, count: self.threads });
        }
    }

    /// Calls `task` on ranges of at most `chunk` that cover `0..count` once; idle workers take the next range.
    pub fn for_each_chunk(&self, count: usize, chunk: usize, task: impl Fn(Range<usize>) + Sync) {
        let chunk = chunk.max(1);
        let next = AtomicUsize::new(0);
        self.run(|_| {
            loop {
                let start = next.fetch_add(chunk, Ordering::Relaxed);
                if start >= count {
                    break;
                }
                task(start..count.min(start + chunk));
            }
        });
    }
}
