//! One signal, many listeners: the request to stop.

use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;

/// Resolves for every holder once the process is asked to end.
#[derive(Clone)]
pub struct Shutdown(watch::Receiver<bool>);

impl Shutdown {
    /// Listens for SIGTERM and SIGINT.
    ///
    /// # Errors
    /// The process may not install a handler.
    pub fn on_signal() -> std::io::Result<Self> {
        let (mut terminate, mut interrupt) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
        let (ask, asked) = watch::channel(false);
        tokio::spawn(async move {
            tokio::select! { _ = terminate.recv() => {}, _ = interrupt.recv() => {} }
            tracing::info!("asked to stop");
            ask.send_replace(true);
            ask.closed().await; // kept until the last listener is gone: a dropped sender would look like a signal
        });
        Ok(Shutdown(asked))
    }

    /// Waits for the request.
    pub async fn asked(&self) {
        let mut receiver = self.0.clone();
        // An error means that the listener task is gone, which only the end of the runtime brings about.
        let _ = receiver.wait_for(|stop| *stop).await;
    }

    /// Whether the request was made.
    pub fn is_asked(&self) -> bool {
        *self.0.borrow()
    }
}
