//! A few of the faults of `tests/campaigns/faults.rs`, on real pods: killed after a write, the API server away. States end
//! as without them.

use anyhow::{Result, ensure};
use std::time::Duration;
use windlass_tests::chat::{self, Client};
use windlass_tests::fault::{Fault, Proxy};
use windlass_tests::host::Stage;
use windlass_tests::life;
use windlass_tests::load::Load;
use windlass_tests::namespace::with_namespace;
use windlass_tests::service::{self, Service};
use windlass_tests::sieve::Sieve;
use windlass_tests::wait::{self, Look};

const PATIENCE: Duration = Duration::from_secs(90);
/// How long the API server is away.
const AWAY: Duration = Duration::from_secs(8);

#[test]
fn a_kill_after_a_write_changes_nothing_in_the_end() -> Result<()> {
    with_namespace("killed", |namespace| {
        let stage = Stage::clear(namespace.cluster())?;
        let steps = life::steps().into_iter().take(2).collect();
        let sieve = Sieve::new(&stage, namespace, service::simulated(&[]), steps)?;
        let clean = sieve.run(Fault::None, None)?;
        ensure!(clean.writes >= 6 && clean.events >= 6, "{} writes, {} events", clean.writes, clean.events);
        let killed = sieve.run(Fault::LoseAnswer(clean.writes / 2), Some(&clean.end))?;
        ensure!(killed.is_met, "it was not killed");
        Ok(())
    })
}

#[test]
fn while_the_api_server_is_away_requests_are_answered_and_after_it_changes_are_made() -> Result<()> {
    with_namespace("away", |namespace| {
        let stage = Stage::clear(namespace.cluster())?;
        let api = stage.operators_api()?;
        let proxy = Proxy::start(api.address())?;
        let mut operator =
            stage.operator(&stage.plain_kubeconfig(proxy.address())?, &["--namespace", namespace.name()])?;
        operator.wait_ready()?;
        let service = Service::apply(namespace, "steady", &service::simulated(&[]))?;
        service.wait_ready(1, PATIENCE)?;
        let reach = service.reach()?;
        let load =
            Load::start(&Client::pooled(reach.url()), 2, |n| chat::request("steady", &format!("Request {n}"), 10));
        proxy.set(Fault::Away);
        service.scale(2)?;
        std::thread::sleep(AWAY);
        let alone = load.completed();
        ensure!(service.pods()?.len() == 1, "somebody has scaled");
        proxy.set(Fault::None);
        service.wait_ready(2, PATIENCE)?;
        wait::until("more requests are answered", PATIENCE, || {
            let more = load.completed() - alone;
            Ok(Look::when(more > 10, (), format!("{more}")))
        })?;
        let report = load.stop();
        ensure!(report.failures.is_empty() && alone > 10, "{alone} answered, {:?}", report.failures);
        Ok(())
    })
}
