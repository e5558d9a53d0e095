//! Lives led under faults: an operator behind a [`Proxy`], killed and started again as the fault has it.

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::fault::{Fault, Proxy};
use crate::host::{HostOperator, Stage};
use crate::life::{self, Step};
use crate::namespace::Namespace;
use crate::process::Running;
use crate::wait::{self, Look};

/// For a list after a watch has expired.
const PATIENCE: Duration = Duration::from_secs(60);
/// Between two looks at whether the fault has happened.
const LOOK: Duration = Duration::from_millis(20);

/// An operator behind a proxy, with a namespace to try it in.
#[derive(Debug)]
pub struct Sieve<'a> {
    stage: &'a Stage<'a>,
    namespace: &'a Namespace,
    spec: Value,
    steps: Vec<Step>,
    proxy: Proxy,
    kubeconfig: PathBuf,
    _api: Running,
}

/// What a run came to.
#[derive(Debug)]
pub struct Run {
    /// The state at the end.
    pub end: Value,
    /// Writes of the operator, if it was not killed.
    pub writes: usize,
    /// Watch events it was sent.
    pub events: usize,
}

impl<'a> Sieve<'a> {
    /// For lives of `spec` through `steps`.
    ///
    /// # Errors
    /// When the proxies do not start.
    pub fn new(stage: &'a Stage<'a>, namespace: &'a Namespace, spec: Value, steps: Vec<Step>) -> Result<Sieve<'a>> {
        let (api, address) = stage.plain_api()?;
        let proxy = Proxy::start(address)?;
        let kubeconfig = stage.plain_kubeconfig(proxy.address())?;
        Ok(Sieve { stage, namespace, spec, steps, proxy, kubeconfig, _api: api })
    }

    /// Leads one life under a fault.
    ///
    /// # Errors
    /// When the life does not come to its end, or the fault never happened.
    pub fn run(&self, fault: Fault) -> Result<Run> {
        self.proxy.set(fault);
        let mut operator = self.start()?;
        let is_over = AtomicBool::new(false);
        let end = std::thread::scope(|scope| {
            let keeper = scope.spawn(|| self.keep(fault, &mut operator, &is_over));
            let end = life::lead(self.namespace, &self.spec, &self.steps);
            is_over.store(true, Ordering::Relaxed);
            keeper.join().map_err(|_| anyhow::anyhow!("the keeper panicked"))??;
            end
        });
        let end = end.with_context(|| format!("{fault:?}; the operator's log:\n{}", operator.log()))?;
        ensure!(!operator.has_ended(), "the operator has ended: {}", operator.log());
        ensure!(fault == Fault::None || self.proxy.is_done(), "{fault:?} never happened");
        wait::until("what was lost is listed", PATIENCE, || {
            Ok(Look::when(self.proxy.has_listed_again(), (), "its collection was not listed since"))
        })?;
        Ok(Run { end, writes: self.proxy.writes().len(), events: self.proxy.events() })
    }

    fn start(&self) -> Result<HostOperator> {
        self.stage.operator(&self.kubeconfig, &["--namespace", self.namespace.name()])
    }

    /// Kills the operator where the fault is that it dies, and starts it again.
    fn keep(&self, fault: Fault, operator: &mut HostOperator, is_over: &AtomicBool) -> Result<()> {
        while !is_over.load(Ordering::Relaxed) {
            if matches!(fault, Fault::LoseAnswer(_)) && self.proxy.is_done() {
                operator.kill();
                self.proxy.resume();
                *operator = self.start()?;
                return Ok(());
            }
            std::thread::sleep(LOOK);
        }
        Ok(())
    }
}
