//! The fork-join pool that all ops share.
//!
//! A region is one closure that the caller and the pool's workers run together. Work is taken from shared counters, not
//! divided by index, so a region needs no particular worker: one that is late because the host is busy finds the
//! region closed and is not waited for. Idle workers spin for a moment, because a decode step opens regions every few
//! microseconds, then sleep.

#![allow(unsafe_code)]

use std::any::Any;
use std::cell::UnsafeCell;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle, Thread};
use std::time::{Duration, Instant};

use crate::{Kernels, processors};

/// How long a thread waits actively before it sleeps: longer than the serial code between two regions of a step,
/// shorter than a scheduler's time slice.
const SPIN: Duration = Duration::from_micros(20);

/// A fixed set of threads that run one closure together, and the instruction set they run it with.
#[derive(Debug)]
pub struct Pool {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
    kernels: Kernels,
    /// Held during a region: one at a time.
    region: Mutex<()>,
}

/// Which of a region's workers this is.
#[derive(Clone, Copy, Debug)]
pub struct Worker {
    /// 0 for the calling thread, below `count` for all.
    pub index: usize,
    /// The most workers that the region can have.
    pub count: usize,
}

impl Pool {
    /// A pool of `threads` workers (at least one: the caller) on the fastest kernels of this processor.
    pub fn new(threads: usize) -> std::io::Result<Self> {
        Self::with_kernels(threads, Kernels::detect())
    }

    /// A pool of `threads` workers on the given kernels.
    pub fn with_kernels(threads: usize, kernels: Kernels) -> std::io::Result<Self> {
        let shared = Arc::new(Shared::default());
        let mut pool = Pool { shared, workers: Vec::new(), kernels, region: Mutex::new(()) };
        let processors = exclusive_processors(threads);
        for index in 1..threads {
            let shared = Arc::clone(&pool.shared);
            let processor = processors.get(index).copied();
            let worker = Worker { index, count: threads };
            let thread = thread::Builder::new().name(format!("kernels-{index}"));
            pool.workers.push(thread.spawn(move || {
                if let Some(processor) = processor {
                    processors::confine(&[processor]);
                }
                shared.work(worker);
            })?);
        }
        Ok(pool)
    }

    /// Workers, the calling thread included.
    pub fn threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// The instruction set in use.
    pub fn kernels(&self) -> Kernels {
        self.kernels
    }

    /// Calls `task` on the calling thread, as worker 0, and at most once on each other worker that comes before that
    /// call ends; returns when all calls have ended. So `task` must take its work from something shared.
    ///
    /// Regions of several callers run one after the other. A region must not open another of the same pool.
    ///
    /// # Panics
    /// When a call of `task` panicked, with its payload.
    pub fn run(&self, task: impl Fn(Worker) + Sync) {
        let caller = Worker { index: 0, count: self.threads() };
        if self.workers.is_empty() {
            return task(caller);
        }
        let _region = lock(&self.region);
        self.shared.open(&task);
        self.workers.iter().for_each(|worker| worker.thread().unpark());
        let outcome = catch_unwind(AssertUnwindSafe(|| task(caller)));
        self.shared.close();
        if let Some(payload) = outcome.err().or_else(|| lock(&self.shared.panic).take()) {
            resume_unwind(payload);
        }
    }

    /// Calls `task` on ranges of at most `chunk` that cover `0..count` once; idle workers take the next range.
    pub fn for_each_chunk(&self, count: usize, chunk: usize, task: impl Fn(Range<usize>) + Sync) {
        let chunk = chunk.max(1);
        if count <= chunk {
            if count > 0 {
                task(0..count);
            }
            return;
        }
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

    /// Calls `task` on each item of `items`, from whichever worker is idle.
    pub(crate) fn for_each<I: Iterator + Send>(&self, items: I, task: impl Fn(I::Item) + Sync) {
        let items = Mutex::new(items);
        let next = || lock(&items).next();
        self.run(|_| {
            while let Some(item) = next() {
                task(item);
            }
        });
    }
}

impl Pool {
    /// [`for_each`](Self::for_each) of `count` items; a single one stays on the calling thread.
    pub(crate) fn for_each_of<I: Iterator + Send>(&self, count: usize, items: I, task: impl Fn(I::Item) + Sync) {
        if count <= 1 {
            items.for_each(task);
        } else {
            self.for_each(items, task);
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.stopping.store(true, Ordering::SeqCst);
        for worker in self.workers.drain(..) {
            worker.thread().unpark();
            // A worker ends only by `stopping`; a panic inside it was caught and reported by its region.
            let _ = worker.join();
        }
    }
}

/// A poisoned lock guards nothing that a panic could have left half done.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What the caller and the workers share.
#[derive(Default)]
struct Shared {
    /// [`Phase`] as one word.
    phase: AtomicU64,
    /// The open region's task and its caller; written while no worker is inside.
    region: UnsafeCell<Option<Region>>,
    /// The first panic of a worker in the region.
    panic: Mutex<Option<Box<dyn Any + Send>>>,
    stopping: AtomicBool,
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Shared").field("phase", &Phase::from(self.phase.load(Ordering::Relaxed))).finish()
    }
}

// SAFETY: `region` is the only part that is not shareable by itself. `open` writes it while the phase is closed with
// no worker inside; workers read it only after they joined by a compare-and-swap on an open phase, which acquires the
// write; `close` returns only when all of them have left.
unsafe impl Sync for Shared {}
// SAFETY: as above; the task pointer inside is only used between `open` and `close`.
unsafe impl Send for Shared {}

struct Region {
    task: *const (dyn Fn(Worker) + Sync),
    caller: Thread,
}

/// The regions so far, whether the last is open to join, and how many workers are inside it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Phase {
    number: u32,
    open: bool,
    inside: u16,
}

impl From<u64> for Phase {
    fn from(word: u64) -> Self {
        Phase { number: (word >> 32) as u32, open: word >> 31 & 1 == 1, inside: word as u16 }
    }
}

impl From<Phase> for u64 {
    fn from(phase: Phase) -> Self {
        u64::from(phase.number) << 32 | u64::from(phase.open) << 31 | u64::from(phase.inside)
    }
}

impl Shared {
    fn phase(&self) -> Phase {
        self.phase.load(Ordering::Acquire).into()
    }

    /// Starts a region; the caller must [`close`](Self::close) it before `task` ends its life.
    fn open(&self, task: &(dyn Fn(Worker) + Sync)) {
        let Phase { number, .. } = self.phase();
        // SAFETY: only the lifetime changes; `Pool::run` closes the region before its borrow of `task` ends, on every
        // way out.
        let task: *const (dyn Fn(Worker) + Sync + 'static) = unsafe { std::mem::transmute(task) };
        // SAFETY: the region lock is held and the last region is closed and empty, so nobody else reads or writes.
        unsafe { *self.region.get() = Some(Region { task, caller: thread::current() }) };
        let opened = Phase { number: number.wrapping_add(1), open: true, inside: 0 };
        self.phase.store(opened.into(), Ordering::Release);
    }

    /// Ends the region: nobody joins from now on, and all who joined have left.
    fn close(&self) {
        self.phase.fetch_and(!(1 << 31), Ordering::AcqRel);
        wait_until(|| self.phase().inside == 0);
    }

    /// A worker's life.
    fn work(&self, worker: Worker) {
        let mut last = 0;
        loop {
            let stopping = || self.stopping.load(Ordering::SeqCst);
            let open = || Some(self.phase()).filter(|phase| phase.open && phase.number != last);
            wait_until(|| stopping() || open().is_some());
            if stopping() {
                return;
            }
            let Some(phase) = open() else { continue };
            if self.join(phase) {
                last = phase.number;
                self.participate(worker);
            }
        }
    }

    fn join(&self, phase: Phase) -> bool {
        let joined = Phase { inside: phase.inside + 1, ..phase };
        let (from, to) = (phase.into(), joined.into());
        self.phase.compare_exchange(from, to, Ordering::AcqRel, Ordering::Relaxed).is_ok()
    }

    fn participate(&self, worker: Worker) {
        // SAFETY: this worker has joined, so the region was written before and stays until it leaves.
        let Some(Region { task, caller }) = (unsafe { (*self.region.get()).as_ref() }) else {
            unreachable!("an open region has a task")
        };
        let caller = caller.clone();
        // SAFETY: `Pool::run` keeps the task alive until every worker that joined has left.
        let task = unsafe { &**task };
        if let Err(payload) = catch_unwind(AssertUnwindSafe(|| task(worker))) {
            lock(&self.panic).get_or_insert(payload);
        }
        let left: Phase = (self.phase.fetch_sub(1, Ordering::AcqRel) - 1).into();
        if !left.open && left.inside == 0 {
            caller.unpark();
        }
    }
}

/// Returns when `ready`; spins, yields, then sleeps until someone unparks this thread.
fn wait_until(ready: impl Fn() -> bool) {
    let start = Instant::now();
    loop {
        for _ in 0..64 {
            if ready() {
                return;
            }
            std::hint::spin_loop();
        }
        if start.elapsed() > SPIN {
            break;
        }
    }
    for _ in 0..3 {
        thread::yield_now();
        if ready() {
            return;
        }
    }
    while !ready() {
        thread::park();
    }
}

/// The processors to pin `threads` threads to: all that this thread may use, if they are exactly as many. With fewer
/// threads than processors others may be meant for someone else, and the kernel balances better than a fixed choice.
fn exclusive_processors(threads: usize) -> Vec<usize> {
    Some(processors::allowed()).filter(|allowed| allowed.len() == threads).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_cover_everything_once() {
        for threads in [1, 2, 5] {
            let pool = Pool::new(threads).unwrap();
            for (count, chunk) in [(0, 1), (1, 1), (7, 3), (1000, 1), (1000, 7), (5, 100)] {
                let seen: Vec<AtomicUsize> = (0..count).map(|_| AtomicUsize::new(0)).collect();
                pool.for_each_chunk(count, chunk, |range| {
                    assert!(range.len() <= chunk);
                    range.for_each(|i| {
                        seen[i].fetch_add(1, Ordering::Relaxed);
                    });
                });
                assert!(seen.iter().all(|times| times.load(Ordering::Relaxed) == 1), "{threads} {count} {chunk}");
            }
        }
    }

    #[test]
    fn regions_of_many_callers_keep_apart() {
        let pool = Pool::new(3).unwrap();
        thread::scope(|scope| {
            for caller in 0..4 {
                let pool = &pool;
                scope.spawn(move || {
                    for round in 0..500 {
                        let mut cells = [0; 16];
                        pool.for_each(cells.iter_mut().enumerate(), |(i, cell)| *cell = caller * round + i);
                        assert!(cells.iter().enumerate().all(|(i, cell)| *cell == caller * round + i));
                    }
                });
            }
        });
    }

    #[test]
    fn workers_take_part_also_after_they_slept() {
        let pool = Pool::new(2).unwrap();
        for _ in 0..3 {
            // The caller waits inside the region until the other worker has come: a pool that never wakes it hangs.
            let arrived = AtomicUsize::new(0);
            pool.run(|worker| {
                assert_eq!(worker.count, 2);
                arrived.fetch_add(1, Ordering::SeqCst);
                while arrived.load(Ordering::SeqCst) < 2 {
                    thread::yield_now();
                }
            });
            // Time enough to fall asleep; on a host too busy for that the test is only weaker.
            thread::sleep(100 * SPIN);
        }
    }

    #[test]
    fn a_panic_reaches_the_caller_and_leaves_the_pool_usable() {
        let pool = Pool::new(3).unwrap();
        for _ in 0..20 {
            let caught = catch_unwind(AssertUnwindSafe(|| {
                pool.for_each_chunk(64, 1, |range| assert_ne!(range.start, 33, "the guilty one"));
            }));
            assert!(caught.is_err());
        }
        let sum = AtomicUsize::new(0);
        pool.for_each_chunk(10, 1, |range| {
            sum.fetch_add(range.start, Ordering::Relaxed);
        });
        assert_eq!(sum.into_inner(), 45);
    }
}
