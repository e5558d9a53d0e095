//! A node that is drained by hand: pods are evicted one at a time, as the budget has it, and streams finish.

use anyhow::{Context, Result, ensure};
use k8s_openapi::api::core::v1::Pod;
use serde_json::json;
use std::thread::JoinHandle;
use std::time::Duration;
use windlass_tests::chat::{self, Answer, Client};
use windlass_tests::load;
use windlass_tests::namespace::{Namespace, with_own_nodes};
use windlass_tests::service::{self, Service, is_ready, pod_name};
use windlass_tests::wait::{self, Look};

const PATIENCE: Duration = Duration::from_secs(90);
/// So many that hardly ever none of them goes to one of two pods (1 in 2,000).
const STREAMS: usize = 12;
/// A token every 100 ms: each stream takes 15 s.
const TOKENS: u32 = 150;

#[test]
fn a_drained_node_breaks_no_stream_and_the_budget_is_kept() -> Result<()> {
    with_own_nodes("drain", |namespace| {
        let mut spec = service::simulated(&["--sim-step-us=100000", "--sim-mean-answer-tokens=0"]);
        spec["replicas"] = json!(2);
        let service = Service::apply(namespace, "moved", &spec)?;
        service.wait_ready(2, PATIENCE)?;
        let reach = service.reach()?;
        let requests = (0..STREAMS).map(|n| chat::request("moved", &format!("Stream {n}"), TOKENS)).collect();
        let client = Client::unpooled(reach.url());
        let streams = std::thread::spawn(move || load::together(&client, requests));
        let victim = wait::until("every stream runs", PATIENCE, || busiest(&service))?;
        let node = victim.spec.as_ref().and_then(|spec| spec.node_name.clone()).context("a pod without a node")?;

        namespace.cluster().kubectl().run(&["cordon", &node])?;
        let outcome = drained(&service, &victim, streams);
        // Whatever came of it, the node is given back to the other tests.
        namespace.cluster().kubectl().run(&["uncordon", &node])?;
        let other = outcome?;
        service.wait_ready(2, PATIENCE)?;
        evict_when_allowed(namespace, &other)?;
        service.wait_ready(2, PATIENCE)
    })
}

/// Evicts `victim` while its streams run; the other pod, which the budget has kept meanwhile.
fn drained(service: &Service<'_>, victim: &Pod, streams: JoinHandle<Vec<Result<Answer>>>) -> Result<Pod> {
    let namespace = service.namespace();
    evict_when_allowed(namespace, victim)?;
    let held = service.stats(victim)?.running;
    ensure!(held > 0, "{} had no stream left when it was evicted", pod_name(victim));
    let is_other = |pod: &Pod| is_ready(pod) && pod_name(pod) != pod_name(victim);
    let other = service.pods()?.into_iter().find(is_other).context("no other pod serves")?;
    let refusal = evict(namespace, &other).err().context("the budget let both pods go at once")?;
    ensure!(format!("{refusal:#}").contains("disruption budget"), "{refusal:#}");
    for (number, answer) in streams.join().ok().context("a client panicked")?.into_iter().enumerate() {
        let answer = answer.with_context(|| format!("stream {number} broke"))?;
        ensure!(answer.completion_tokens == Some(u64::from(TOKENS)), "stream {number}: {answer:?}");
    }
    println!("{} ended {held} streams after it was evicted; the other pod stayed", pod_name(victim));
    Ok(other)
}

/// The pod with most streams, once all run and both pods have some.
fn busiest(service: &Service<'_>) -> Result<Look<Pod>> {
    let mut pods = Vec::new();
    for pod in service.pods()? {
        pods.push((service.stats(&pod)?.running, pod));
    }
    pods.sort_by_key(|(running, _)| *running);
    let counts: Vec<u32> = pods.iter().map(|(running, _)| *running).collect();
    let all_run = counts.iter().sum::<u32>() as usize == STREAMS;
    let busiest = pods.pop().filter(|_| all_run);
    Ok(busiest.map_or_else(|| Look::NotYet(format!("{counts:?} run")), |(_, pod)| Look::Done(pod)))
}

/// Asks for an eviction until the budget, whose controller may lag, allows it.
fn evict_when_allowed(namespace: &Namespace, pod: &Pod) -> Result<()> {
    wait::until("the budget lets a pod go", PATIENCE, || {
        Ok(match evict(namespace, pod) {
            Ok(()) => Look::Done(()),
            Err(refusal) => Look::NotYet(format!("{refusal:#}")),
        })
    })
}

/// `POST …/eviction`, as `kubectl drain` sends it.
fn evict(namespace: &Namespace, pod: &Pod) -> Result<()> {
    let (name, within) = (pod_name(pod), namespace.name());
    let eviction = json!({
        "apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": name, "namespace": within},
    });
    let path = format!("/api/v1/namespaces/{within}/pods/{name}/eviction");
    let kubectl = namespace.cluster().kubectl();
    kubectl.run_with_input(&["create", "--raw", &path, "-f", "-"], &eviction.to_string()).map(drop)
}
