//! Threads on which masks are found.
//!
//! Two, so that masks that take long wait for each other alone. The one for those yields to the model's computing.

use crate::machine::ThreadTime;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, OnceLock};
use std::thread;
use std::time::Duration;

/// A mask that takes longer is slow: a hundred times what most do.
const SLOW: Duration = Duration::from_millis(5);
/// The least that a thread yields.
const YIELDING: i32 = 19;
/// Masks call no function that calls itself; this is for what those of `llguidance` keep on the stack.
const STACK_BYTES: usize = 8 << 20;

/// Finds a mask, on a thread whose time that is.
pub(super) type Job = Box<dyn FnOnce(&ThreadTime) + Send>;

/// Where masks of all forms are found.
#[derive(Debug, Default)]
pub(super) struct Lanes {
    quick: OnceLock<Option<Sender<Job>>>,
    slow: OnceLock<Option<Sender<Job>>>,
}

/// How long the masks of a form took last.
#[derive(Clone, Debug, Default)]
pub(super) struct Cost(Arc<AtomicU64>);

impl Cost {
    /// The last one took so long.
    pub(super) fn was(&self, time: Duration) {
        self.0.store(u64::try_from(time.as_micros()).unwrap_or(u64::MAX), Ordering::Relaxed);
    }

    fn is_slow(&self) -> bool {
        u128::from(self.0.load(Ordering::Relaxed)) > SLOW.as_micros()
    }
}

impl Lanes {
    /// Has a mask found of a form that costs so much, after those before it. `None` where there is no thread for it.
    pub(super) fn find(&self, cost: &Cost, job: Job) -> Option<()> {
        let lane = match cost.is_slow() {
            false => self.quick.get_or_init(|| start("masks", 0)),
            true => self.slow.get_or_init(|| start("slow-masks", YIELDING)),
        };
        lane.as_ref()?.send(job).ok()
    }
}

fn start(name: &str, yields: i32) -> Option<Sender<Job>> {
    let (sender, jobs) = channel();
    let thread = thread::Builder::new().name(name.into()).stack_size(STACK_BYTES);
    thread.spawn(move || work(&jobs, yields)).ok().map(|_| sender)
}

/// Until nobody can ask any more.
fn work(jobs: &Receiver<Job>, yields: i32) {
    // Where the machine does not let it, it takes its share like others.
    let _ = rustix::process::nice(yields);
    let time = ThreadTime::of_this_thread();
    jobs.iter().for_each(|job| job(&time));
}
