//! The program windlass-operator: watches, observes, applies, scrapes. It decides nothing.
//!
//! The way of one change: a watch event or a reading queues a service ([`watches`], [`scrape`]); [`reconcile`] lets
//! [`observe`] read, the core's `plan` decide, [`apply`] write, and the core's `status::compute` tell. What is to be
//! done is never decided in this crate, and nothing is kept that a restart could not find again in the API server.
//! [`replay`] stands apart: it asks no cluster.

mod app;
mod apply;
mod children;
mod config;
mod custom_metrics;
mod door;
mod error;
mod guarded_metrics;
mod http;
mod leader;
mod metrics;
mod observe;
mod reconcile;
mod replay;
mod scopes;
mod scrape;
mod shutdown;
mod strip;
mod telemetry;
#[cfg(test)]
mod testing;
mod watches;
mod written;

use clap::Parser;
use config::{Cli, Command};
use std::io::Write;

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> anyhow::Result<()> {
    match Cli::parse().command {
        Command::Crd => print_crd(),
        Command::Replay(args) => replay::run(&args),
        Command::Run(args) => {
            let config = args.into_config(rand::random());
            let _log = telemetry::start(config.log_format, &config.log_level)?;
            tokio::runtime::Builder::new_multi_thread().enable_all().build()?.block_on(app::run(config))
        }
    }
}

/// Prints the definition. A reader that has seen enough, as `head`, ends it without an error.
fn print_crd() -> anyhow::Result<()> {
    match std::io::stdout().write_all(windlass_operator_api::crd::yaml()?.as_bytes()) {
        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => Ok(()),
        written => Ok(written?),
    }
}
