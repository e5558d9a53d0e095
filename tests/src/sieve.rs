//! Lives led under faults: an operator behind a [`Proxy`], killed and started again as the fault has it.

use anyhow::{Result, anyhow, ensure};
use serde_json::Value;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::api::Api;
use crate::fault::{Fault, Proxy};
use crate::host::{HostOperator, Stage};
use crate::life::{self, Step};
use crate::namespace::Namespace;
use crate::state::State;
use crate::subject::Subject;
use crate::wait::{self, Look};

const NAME: &str = "life";
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
    _upstream: Api,
}

/// What a run came to.
#[derive(Debug)]
pub struct Run {
    /// The state at the end.
    pub end: State,
    /// Whether the fault has happened: no two lives have quite as many writes and events.
    pub is_met: bool,
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
        let upstream = stage.operators_api()?;
        let proxy = Proxy::start(upstream.address())?;
        let kubeconfig = stage.plain_kubeconfig(proxy.address())?;
        Ok(Sieve { stage, namespace, spec, steps, proxy, kubeconfig, _upstream: upstream })
    }

    /// Leads one life under a fault; it is to end as `clean`, if that is known.
    ///
    /// # Errors
    /// When it does not come to its end, or to another, with the operator's log.
    pub fn run(&self, fault: Fault, clean: Option<&State>) -> Result<Run> {
        self.proxy.set(fault);
        let mut operator = self.start()?;
        let end = self.lead(fault, &mut operator);
        let is_alive = !operator.has_ended();
        let end = operator.with_log(end.and_then(|end| {
            ensure!(is_alive, "the operator has ended");
            clean.map_or(Ok(()), |clean| end.ensure_is(clean)).map(|()| end)
        }))?;
        Ok(Run { end, is_met: self.proxy.is_done(), writes: self.proxy.writes().len(), events: self.proxy.events() })
    }

    fn lead(&self, fault: Fault, operator: &mut HostOperator) -> Result<State> {
        let subject = Subject::named(self.stage.api(), self.namespace, NAME);
        let is_over = AtomicBool::new(false);
        let end = std::thread::scope(|scope| {
            let keeper = scope.spawn(|| self.keep(fault, operator, &is_over));
            let end = life::lead(&subject, &self.spec, &self.steps);
            is_over.store(true, Ordering::Relaxed);
            keeper.join().map_err(|_| anyhow!("the keeper panicked"))?.and(end)
        })?;
        wait::until("what was lost is listed", PATIENCE, || {
            Ok(Look::when(self.proxy.has_listed_again(), (), "its collection was not listed since"))
        })?;
        Ok(end)
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
