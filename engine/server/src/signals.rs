//! SIGTERM and SIGINT: the first drains, the second ends.

use crate::failure::Failure;
use crate::lifecycle::{Lifecycle, Stage};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tracing::{info, warn};

/// Watches both signals from now on.
pub fn watch(lifecycle: Lifecycle) -> Result<(), Failure> {
    let mut terminate = listen(SignalKind::terminate())?;
    let mut interrupt = listen(SignalKind::interrupt())?;
    tokio::spawn(async move {
        let first = either(&mut terminate, &mut interrupt).await;
        info!(signal = first, "told to stop");
        lifecycle.advance(Stage::Closing);
        let second = either(&mut terminate, &mut interrupt).await;
        warn!(signal = second, "told twice: ending at once");
        // The shell's convention for a process that a signal ended.
        std::process::exit(128 + second);
    });
    Ok(())
}

fn listen(kind: SignalKind) -> Result<Signal, Failure> {
    signal(kind).map_err(|error| Failure::internal(format!("cannot listen for signals: {error}")))
}

async fn either(terminate: &mut Signal, interrupt: &mut Signal) -> i32 {
    tokio::select! {
        _ = terminate.recv() => SignalKind::terminate().as_raw_value(),
        _ = interrupt.recv() => SignalKind::interrupt().as_raw_value(),
    }
}
