//! Where the server is in its life, seen by everyone who acts on it. It only ever moves forward.

use std::sync::Arc;
use tokio::sync::watch;
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

/// The stage, shared. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Lifecycle(Arc<watch::Sender<Stage>>);

impl Default for Lifecycle {
    fn default() -> Lifecycle {
        Lifecycle(Arc::new(watch::Sender::new(Stage::Starting)))
    }
}

impl Lifecycle {
    /// Goes to `stage`, unless it is there already or further.
    pub fn advance(&self, stage: Stage) {
        self.0.send_if_modified(|now| {
            let forward = *now < stage;
            if forward {
                *now = stage;
            }
            forward
        });
    }

    /// The stage now.
    pub fn stage(&self) -> Stage {
        *self.0.borrow()
    }

    /// Returns once `stage` is reached.
    pub async fn reached(&self, stage: Stage) {
        // The sender lives as long as this value.
        let _ = self.0.subscribe().wait_for(|now| *now >= stage).await;
    }

    /// The stage as `/stats` names it.
    pub fn phase(&self) -> Phase {
        match self.stage() {
            Stage::Starting => Phase::Starting,
            Stage::Serving => Phase::Ready,
            Stage::Closing | Stage::Refusing => Phase::Draining,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_never_goes_back() {
        let lifecycle = Lifecycle::default();
        lifecycle.advance(Stage::Closing);
        lifecycle.advance(Stage::Serving);
        assert_eq!((lifecycle.stage(), lifecycle.phase()), (Stage::Closing, Phase::Draining));
    }
}
