//! A replica whose layers are divided over two nodes, each a pod: it answers, finishes its stream while it drains, and goes
//! whole.

use anyhow::{Context, Result, ensure};
use k8s_openapi::api::core::v1::Pod;
use serde_json::json;
use std::time::Duration;
use windlass_tests::chat::{self, Client};
use windlass_tests::namespace::{Namespace, with_namespace};
use windlass_tests::service::{self, Service, pod_name};
use windlass_tests::wait::{self, Look};

const PATIENCE: Duration = Duration::from_secs(180);
const WORKERS: &str = "app.kubernetes.io/name=windlass-worker";
const TOKENS: u32 = 120;

#[test]
fn two_nodes_serve_one_model_and_go_together() -> Result<()> {
    with_namespace("pipeline", |namespace| {
        let mut spec = service::real();
        spec["parallelism"] = json!({"pipeline": 2});
        // So slow that a stream of many tokens outlives the first moments of a drain.
        spec["resources"] =
            json!({"requests": {"cpu": "100m", "memory": "512Mi"}, "limits": {"cpu": "400m", "memory": "2Gi"}});
        let service = Service::apply(namespace, "divided", &spec)?;
        service.wait_ready(1, PATIENCE)?;
        let leader = service.pods()?.pop().context("no pod")?;
        let effective = service.stats(&leader)?.effective;
        ensure!(effective.as_ref().is_some_and(|built| built.pipeline_parallel == 2), "{effective:?}");
        let first = workers(namespace)?;
        ensure!(first.len() == 1, "{} workers", first.len());

        let whole = Service::apply(namespace, "whole", &service::real())?;
        whole.wait_ready(1, PATIENCE)?;
        let ask = |service: &Service<'_>| -> Result<_> {
            let request = chat::request(service.name(), "Tell me about the sea.", TOKENS);
            Client::unpooled(service.reach()?.url()).stream(&request, |_| {})
        };
        let (divided, alone) = (ask(&service)?, ask(&whole)?);
        ensure!(divided.text == alone.text, "divided: {:?}\nalone: {:?}", divided.text, alone.text);
        println!("two nodes answered as one does: {} tokens", TOKENS);

        rolls_without_a_broken_stream(&service, &leader)?;
        let second = workers(namespace)?;
        ensure!(second.iter().all(|pod| pod_name(pod) != pod_name(&first[0])), "the new leader has an old worker");
        service.delete()?;
        wait::until("no worker is left", PATIENCE, || {
            let left = workers(namespace)?;
            Ok(Look::when(left.is_empty(), (), format!("{} workers", left.len())))
        })
    })
}

/// Changes the spec while an answer streams: it is finished by the pods that began it.
fn rolls_without_a_broken_stream(service: &Service<'_>, leader: &Pod) -> Result<()> {
    let client = Client::unpooled(service.reach()?.url());
    let mut request = chat::request(service.name(), "Tell me about mountains.", 8 * TOKENS);
    request["ignore_eos"] = json!(true);
    let stream = std::thread::spawn(move || client.stream(&request, |_| {}));
    wait::until("the stream runs", PATIENCE, || {
        let running = service.stats(leader)?.running;
        Ok(Look::when(running == 1, (), format!("{running} run")))
    })?;
    service.patch(&json!({"spec": {"rollout": {"strategy": "Drain"}, "engine": {"maxSequences": 8}}}))?;
    let running = wait::until("the leader is told to go", PATIENCE, || {
        let going = service.pods()?.into_iter().find(|pod| pod.metadata.deletion_timestamp.is_some());
        going.map_or(Ok(Look::NotYet("not yet".into())), |pod| Ok(Look::Done(service.stats(&pod)?.running)))
    })?;
    ensure!(running == 1, "the stream was over before its pods had to go");
    let answer = stream.join().ok().context("a client panicked")?.context("the stream broke")?;
    ensure!(answer.completion_tokens == Some(u64::from(8 * TOKENS)), "{answer:?}");
    service.wait_ready(1, PATIENCE)?;
    let gone = service.pods()?.iter().all(|pod| pod_name(pod) != pod_name(leader));
    ensure!(gone, "the old leader is still there");
    wait::until("one worker is left", PATIENCE, || {
        let left = workers(service.namespace())?;
        Ok(Look::when(left.len() == 1, (), format!("{} workers", left.len())))
    })
}

fn workers(namespace: &Namespace) -> Result<Vec<Pod>> {
    namespace.list(&["get", "pods", "--selector", WORKERS])
}
