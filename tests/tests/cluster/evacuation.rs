//! A node's notice: pods drain within what is left of its life, streams end with an error event that says so, and
//! replacements are asked for within seconds.

use anyhow::{Context, Result, ensure};
use k8s_openapi::api::core::v1::Pod;
use std::time::{Duration, Instant};
use windlass_tests::chat::{self, Client};
use windlass_tests::load;
use windlass_tests::namespace::with_own_nodes;
use windlass_tests::service::{self, Service, pod_name};
use windlass_tests::wait::{self, Look};

const PATIENCE: Duration = Duration::from_secs(90);
/// GKE's: 15 seconds.
const NOTICE: &str = "cloud.google.com/impending-node-termination";
const BUDGET: Duration = Duration::from_secs(15);
/// A token every 100 ms for five minutes: no stream ends by itself.
const TOKENS: u32 = 3000;

#[test]
fn a_notice_replaces_pods_and_cuts_no_stream_silently() -> Result<()> {
    with_own_nodes("evacuation", |namespace| {
        let flags = ["--sim-step-us=100000", "--sim-mean-answer-tokens=0"];
        let service = Service::apply(namespace, "doomed", &service::simulated(&flags))?;
        service.wait_ready(1, PATIENCE)?;
        let before = service.pods()?.pop().context("no pod")?;
        let node = before.spec.as_ref().and_then(|spec| spec.node_name.clone()).context("a pod without a node")?;
        let reach = service.reach()?;
        let requests = (0..4).map(|n| chat::request("doomed", &format!("Stream {n}"), TOKENS)).collect();
        let client = Client::unpooled(reach.url());
        let streams = std::thread::spawn(move || load::together(&client, requests));
        wait::until("every stream runs", PATIENCE, || {
            let running = service.stats(&before)?.running;
            Ok(Look::when(running == 4, (), format!("{running} run")))
        })?;

        let noticed = Instant::now();
        namespace.cluster().kubectl().run(&["taint", "node", &node, &format!("{NOTICE}=:NoSchedule")])?;
        let outcome = evacuated(&service, &before, noticed, streams);
        // Whatever came of it, the node is given back to the other tests.
        namespace.cluster().kubectl().run(&["taint", "node", &node, &format!("{NOTICE}-")])?;
        outcome?;
        service.wait_ready(1, PATIENCE)
    })
}

fn evacuated(
    service: &Service<'_>,
    before: &Pod,
    noticed: Instant,
    streams: std::thread::JoinHandle<Vec<Result<chat::Answer>>>,
) -> Result<()> {
    wait::until("a replacement is asked for", PATIENCE, || {
        let others = service.pods()?.iter().filter(|pod| pod_name(pod) != pod_name(before)).count();
        Ok(Look::when(others > 0, (), "none"))
    })?;
    let asked_after = noticed.elapsed();
    println!("a replacement was asked for after {:.1} s", asked_after.as_secs_f64());
    ensure!(asked_after <= Duration::from_secs(5), "a replacement was asked for after {asked_after:?}");
    let answers = streams.join().ok().context("a client panicked")?;
    let ended_after = noticed.elapsed();
    println!("the streams ended after {:.1} s", ended_after.as_secs_f64());
    ensure!(ended_after < BUDGET, "streams ended after {ended_after:?}");
    for answer in answers {
        let error = answer.err().context("a stream came to its end")?;
        let text = format!("{error:#}");
        ensure!(text.contains("shut down before this answer was complete"), "a stream was cut: {text}");
        let event = text.split_once("error event: ").context("no error event")?.1;
        let event: serde_json::Value = serde_json::from_str(event).with_context(|| format!("not JSON: {event}"))?;
        ensure!(event["error"]["retry"] == true, "it does not say that it can be retried: {event}");
    }
    let nodes = service.read()?.status.map(|status| status.interrupted_nodes).unwrap_or_default();
    ensure!(nodes.iter().any(|node| node.contains(NOTICE)), "status does not tell the node: {nodes:?}");
    Ok(())
}
