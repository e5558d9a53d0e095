//! Work on a thread of its own, for as long as it may take.

use crate::machine::ThreadTime;
use crate::text::renderer_process;
use std::thread;
use std::time::Duration;
use tokio::sync::oneshot;
use tokio::time::{Instant, timeout};

/// Between two looks at work that goes on.
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// Twice the stack of the process that did the same before.
const STACK_BYTES: usize = 2 * renderer_process::STACK_BYTES;

/// How long work may take.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    /// On a processor: what it takes whatever else the machine does.
    pub(super) time: Duration,
    /// By the clock, waiting for a processor included.
    pub(super) patience: Duration,
}

/// Why work is not waited for any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum GivenUp {
    /// It takes too much time, and would again.
    TooSlow,
    /// The machine has too little for it now.
    Busy,
    /// It panicked.
    Panicked,
}

/// What `work` gives, within limits. What is given up goes on until it ends by itself.
pub(super) async fn limited<T: Send + 'static>(
    limits: Limits,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, GivenUp> {
    let deadline = Instant::now() + limits.patience;
    let (begun, begins) = oneshot::channel();
    let (ended, mut ends) = oneshot::channel();
    let work = move || {
        let time = ThreadTime::of_this_thread();
        let before = time.spent();
        // Nobody waits for it any more, here and below.
        let _ = begun.send((time, before));
        let _ = ended.send(work());
    };
    thread::Builder::new().name("form".into()).stack_size(STACK_BYTES).spawn(work).map_err(|_| GivenUp::Busy)?;
    let begun = timeout(limits.patience, begins).await;
    let (time, before) = begun.map_err(|_| GivenUp::Busy)?.map_err(|_| GivenUp::Panicked)?;
    loop {
        match timeout(LOOK_EVERY, &mut ends).await {
            Ok(done) => return done.map_err(|_| GivenUp::Panicked),
            Err(_) if time.spent().saturating_sub(before) > limits.time => return Err(GivenUp::TooSlow),
            Err(_) if Instant::now() > deadline => return Err(GivenUp::Busy),
            Err(_) => (),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::thread::sleep;

    const MINUTE: Duration = Duration::from_secs(60);

    #[tokio::test]
    async fn only_time_on_a_processor_counts_against_the_work() {
        let short = Limits { time: Duration::from_millis(100), patience: MINUTE };
        // As on a machine that has no processor for it.
        let waits = || {
            sleep(Duration::from_millis(500));
            7
        };
        assert_eq!(limited(short, waits).await, Ok(7));
        let spins = || {
            let (time, began) = (ThreadTime::of_this_thread(), ThreadTime::of_this_thread().spent());
            while time.spent() < began + Duration::from_secs(1) {
                std::hint::black_box((0..100_000_u64).sum::<u64>());
            }
        };
        assert_eq!(limited(short, spins).await, Err(GivenUp::TooSlow));
        let impatient = Limits { time: MINUTE, patience: Duration::from_millis(100) };
        assert_eq!(limited(impatient, || sleep(Duration::from_secs(1))).await, Err(GivenUp::Busy));
        // To print where it was may take a while.
        let ample = Limits { time: MINUTE, patience: MINUTE };
        assert_eq!(limited(ample, || panic!("as llguidance may")).await, Err::<(), _>(GivenUp::Panicked));
    }
}
