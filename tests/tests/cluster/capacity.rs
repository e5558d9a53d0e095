//! What the autoscaler learns of an engine under a load that comes and goes is written down, for its successor.

use anyhow::{Context, Result, ensure};
use k8s_openapi::api::core::v1::ConfigMap;
use serde_json::json;
use std::time::Duration;
use windlass_tests::chat::{self, Client};
use windlass_tests::load::{Load, Tide};
use windlass_tests::namespace::{skip, with_namespace};
use windlass_tests::service::{self, Service};
use windlass_tests::wait::{self, Look};

const PATIENCE: Duration = Duration::from_secs(90);
/// For several tides.
const LEARNED: Duration = Duration::from_secs(300);

#[test]
fn what_tokens_cost_is_learned_and_kept() -> Result<()> {
    with_namespace("capacity", |namespace| {
        // One replica, so that what it takes on is the tide alone.
        let mut spec = service::simulated(&["--sim-mean-answer-tokens=0"]);
        spec["autoscaling"] = json!({
            "mode": "Builtin", "minReplicas": 1, "maxReplicas": 1,
            "targets": [{"metric": "TimeToFirstToken", "percentile": 95, "milliseconds": 500}],
        });
        let service = Service::apply(namespace, "learned", &spec)?;
        service.wait_ready(1, PATIENCE)?;
        let reach = service.reach()?;
        if !reach.is_balanced() {
            return skip("a port forward bears no load");
        }
        let load = Load::start(&Client::pooled(reach.url()), 2, |number| {
            chat::request("learned", &format!("A prompt of some words: {}", number % 4), 20)
        });
        let mut tide = Tide::new(reach.url(), "learned");
        let kept = wait::until("what was learned is kept", LEARNED, || {
            tide.turn();
            let found: ConfigMap = namespace.get(&["get", "configmap", "learned-capacity"])?;
            Ok(Look::Done(found.data.unwrap_or_default()))
        })?;
        let failures = [load.stop().failures, tide.end()].concat();
        ensure!(failures.is_empty(), "{failures:?}");
        let sums = kept.get("speed").context("no speed")?.split(' ').map(str::parse::<f64>);
        let sums: Vec<f64> = sums.collect::<Result<_, _>>()?;
        ensure!(sums.iter().any(|sum| *sum > 0.0) && kept.contains_key("coldStartSeconds"), "{kept:?}");
        Ok(())
    })
}
