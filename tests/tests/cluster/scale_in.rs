//! A scale-in breaks no stream, though the pod that goes holds many with long to run.

use anyhow::{Context, Result, ensure};
use k8s_openapi::api::core::v1::Pod;
use serde_json::json;
use std::time::Duration;
use windlass_engine_contract::stats::Stats;
use windlass_tests::chat::{self, Client};
use windlass_tests::load;
use windlass_tests::namespace::{skip, with_namespace};
use windlass_tests::service::{self, Service, pod_name};
use windlass_tests::wait::{self, Look};

const PATIENCE: Duration = Duration::from_secs(90);
/// So many that hardly ever fewer than [`LEAST_STREAMS`] of them go to one of two pods (1 in 1,000).
const STREAMS: u32 = 24;
const LEAST_STREAMS: u32 = 5;
/// A token every 100 ms: each stream takes 30 s.
const STEP: Duration = Duration::from_millis(100);
const TOKENS: u32 = 300;
const LEAST_LEFT: Duration = Duration::from_secs(12);

#[test]
fn a_scale_in_breaks_no_stream() -> Result<()> {
    with_namespace("scale-in", |namespace| {
        let step = format!("--sim-step-us={}", STEP.as_micros());
        let flags =
            [step.as_str(), "--sim-decode-sequence-us=0", "--sim-context-token-us=0", "--sim-mean-answer-tokens=0"];
        let mut spec = service::simulated(&flags);
        let undisturbed = Service::apply(namespace, "undisturbed", &spec)?;
        spec["replicas"] = json!(2);
        let disturbed = Service::apply(namespace, "disturbed", &spec)?;
        undisturbed.wait_ready(1, PATIENCE)?;
        disturbed.wait_ready(2, PATIENCE)?;
        let (reach, reference) = (disturbed.reach()?, undisturbed.reach()?);
        if !reach.is_balanced() {
            return skip("the Service's address is not reached from here, and a port forward leads to one pod only");
        }
        let requests =
            |model: &str| (0..STREAMS).map(|n| chat::request(model, &format!("Stream {n}"), TOKENS)).collect();
        let (ours, theirs) = (requests("disturbed"), requests("undisturbed"));
        let answers = std::thread::spawn(move || load::together(&Client::unpooled(reach.url()), ours));
        let expected = std::thread::spawn(move || load::together(&Client::unpooled(reference.url()), theirs));
        wait::until("every stream runs", PATIENCE, || {
            let running: u32 = all_stats(&disturbed)?.iter().map(|(_, stats)| stats.running).sum();
            Ok(Look::when(running == STREAMS, (), format!("{running} run")))
        })?;
        disturbed.scale(1)?;
        let (victim, stats) = wait::until("a pod is told to go", PATIENCE, || {
            let going = all_stats(&disturbed)?.into_iter().find(|(pod, _)| pod.metadata.deletion_timestamp.is_some());
            Ok(going.map_or_else(|| Look::NotYet("none".into()), Look::Done))
        })?;
        let left = STEP.mul_f64(stats.remaining_tokens as f64 / f64::from(stats.running.max(1)));
        println!("{} drains {} streams with {:.0} s left", pod_name(&victim), stats.running, left.as_secs_f64());
        ensure!(stats.running >= LEAST_STREAMS && left >= LEAST_LEFT, "the victim holds too little to prove anything");

        let join = |thread: std::thread::JoinHandle<_>| thread.join().ok().context("a client panicked");
        let (answers, expected): (Vec<Result<_>>, Vec<Result<_>>) = (join(answers)?, join(expected)?);
        for (number, (answer, expected)) in answers.into_iter().zip(expected).enumerate() {
            // An answer is whole: a finish reason, its usage and [DONE] have come.
            let (answer, expected) = (answer.with_context(|| format!("stream {number} broke"))?, expected?);
            ensure!(answer.completion_tokens == Some(u64::from(TOKENS)), "stream {number}: {answer:?}");
            ensure!(answer.text == expected.text, "stream {number} differs from its undisturbed run");
        }
        disturbed.wait_ready(1, PATIENCE)
    })
}

fn all_stats(service: &Service<'_>) -> Result<Vec<(Pod, Stats)>> {
    service.pods()?.into_iter().map(|pod| service.stats(&pod).map(|stats| (pod, stats))).collect()
}
