//! Where the server is in its life, seen by everyone who acts on it. Its stages only ever move forward; between them it
//! may sleep and wake.

use crate::driver::Depth;
use std::sync::Arc;
use tokio::sync::watch;
use tokio::time::{Instant, sleep_until};
use windlass_engine_contract::stats::Phase;

/// Stages in their order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Stage {
    /// Loading, or no token was generated yet.
    Starting,
    /// Serving.
    Serving,
    /// Told to stop; requests that still arrive are served, and their connections closed.
    Closing,
    /// New requests are refused; what streams goes on.
    Refusing,
}

/// Whether a serving server has its memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rest {
    /// It does.
    Awake,
    /// It is about to give some back, once nothing streams; new requests are refused.
    FallingAsleep(Depth),
    /// It gave some back, or takes it again; new requests are refused.
    Asleep(Depth),
}

/// Stage and rest, shared, and until when a drain may take. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Lifecycle {
    stage: Arc<watch::Sender<Stage>>,
    rest: Arc<watch::Sender<Rest>>,
    /// Set from outside, where less time is left than this server was configured with.
    limit: Arc<watch::Sender<Option<Instant>>>,
}

impl Default for Lifecycle {
    fn default() -> Lifecycle {
        let (stage, limit) = (watch::Sender::new(Stage::Starting), watch::Sender::new(None));
        let rest = Arc::new(watch::Sender::new(Rest::Awake));
        Lifecycle { stage: Arc::new(stage), rest, limit: Arc::new(limit) }
    }
}

impl Lifecycle {
    /// Goes to `stage`, unless it is there already or further.
    pub fn advance(&self, stage: Stage) {
        self.stage.send_if_modified(|now| {
            let forward = *now < stage;
            if forward {
                *now = stage;
            }
            forward
        });
    }

    /// The stage now.
    pub fn stage(&self) -> Stage {
        *self.stage.borrow()
    }

    /// Whether it has its memory.
    pub fn rest(&self) -> Rest {
        *self.rest.borrow()
    }

    /// Goes from `from` to `to`; false where it was not at `from`.
    pub fn change_rest(&self, from: Rest, to: Rest) -> bool {
        self.rest.send_if_modified(|now| {
            let there = *now == from;
            if there {
                *now = to;
            }
            there
        })
    }

    /// Returns once it is at rest in another way than `rest`.
    pub async fn left(&self, rest: Rest) {
        // The sender lives as long as this value.
        let _ = self.rest.subscribe().wait_for(|now| *now != rest).await;
    }

    /// Returns once `stage` is reached.
    pub async fn reached(&self, stage: Stage) {
        // The sender lives as long as this value.
        let _ = self.stage.subscribe().wait_for(|now| *now >= stage).await;
    }

    /// A drain, begun or to come, ends by `deadline`; of several, the earliest counts.
    pub fn limit(&self, deadline: Instant) {
        self.limit.send_modify(|limit| *limit = Some(limit.map_or(deadline, |before| before.min(deadline))));
    }

    /// When a drain that would end at `own` ends.
    pub fn deadline(&self, own: Instant) -> Instant {
        self.limit.borrow().map_or(own, |limit| limit.min(own))
    }

    /// Returns at the deadline, also when that is brought forward meanwhile.
    pub async fn passed(&self, own: Instant) {
        let mut limit = self.limit.subscribe();
        loop {
            let deadline = limit.borrow_and_update().map_or(own, |limit| limit.min(own));
            tokio::select! {
                () = sleep_until(deadline) => return,
                // The sender lives as long as this value.
                _ = limit.changed() => (),
            }
        }
    }

    /// The stage as `/stats` names it.
    pub fn phase(&self) -> Phase {
        match self.stage() {
            Stage::Starting => Phase::Starting,
            Stage::Serving if self.rest() != Rest::Awake => Phase::Asleep,
            Stage::Serving => Phase::Ready,
            Stage::Closing | Stage::Refusing => Phase::Draining,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_drain_can_be_brought_forward_while_it_goes_on_and_never_put_off() {
        let (lifecycle, now) = (Lifecycle::default(), Instant::now());
        let after = move |seconds: u64| now + std::time::Duration::from_secs(seconds);
        let passed = tokio::spawn({
            let lifecycle = lifecycle.clone();
            async move { lifecycle.passed(after(3600)).await }
        });
        tokio::task::yield_now().await;
        lifecycle.limit(now);
        lifecycle.limit(after(60));
        // Of the three deadlines the first was meant: this would else take an hour.
        passed.await.unwrap();
        assert_eq!(lifecycle.deadline(after(3600)), now);
    }

    #[test]
    fn it_never_goes_back() {
        let lifecycle = Lifecycle::default();
        lifecycle.advance(Stage::Closing);
        lifecycle.advance(Stage::Serving);
        assert_eq!((lifecycle.stage(), lifecycle.phase()), (Stage::Closing, Phase::Draining));
    }
}
