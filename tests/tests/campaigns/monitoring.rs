//! A real Prometheus, set up by the chart's PodMonitors and rules, has data for every query of the dashboard.

use anyhow::{Result, ensure};
use serde_json::json;
use std::time::Duration;
use windlass_tests::chat::{self, Client};
use windlass_tests::load::{Load, Tide};
use windlass_tests::namespace::{skip, with_namespace};
use windlass_tests::prometheus::{self, Prometheus};
use windlass_tests::service::{self, Service};
use windlass_tests::wait::{self, Look};
use windlass_tests::{dashboard, operator};

const PATIENCE: Duration = Duration::from_secs(90);
/// For what has to be learned of several tides.
const LEARNED: Duration = Duration::from_secs(300);

#[test]
fn every_panel_and_every_measurement_has_data() -> Result<()> {
    with_namespace("monitoring", |namespace| {
        if !prometheus::is_installed() || !namespace.cluster().is_own() {
            return skip("Prometheus is not installed, or pods are not reached from here");
        }
        let mut spec = service::simulated(&["--sim-mean-answer-tokens=0"]);
        spec["autoscaling"] = json!({
            "mode": "Builtin", "minReplicas": 1, "maxReplicas": 2,
            "targets": [{"metric": "TimeToFirstToken", "percentile": 95, "milliseconds": 500}],
        });
        let service = Service::apply(namespace, "measured", &spec)?;
        service.wait_ready(1, PATIENCE)?;
        let prometheus = Prometheus::start(namespace.cluster())?;
        let reach = service.reach()?;
        let load = Load::start(&Client::pooled(reach.url()), 2, |number| {
            chat::request("measured", &format!("A prompt of some words, so that a block fills: {}", number % 4), 20)
        });
        let panels = dashboard::panels(&operator::chart("windlass"))?;
        let queries = panels.iter().flat_map(|panel| panel.queries.iter());
        let queries: Vec<&str> = queries.map(String::as_str).chain(MEASUREMENTS).collect();
        let mut tide = Tide::new(reach.url(), "measured");
        wait::until("every query has data", LEARNED, || {
            tide.turn();
            let mut empty = Vec::new();
            for query in &queries {
                let found = prometheus.query(query)?;
                if found.is_empty() || found.iter().all(|sample| sample.value.1 == "NaN") {
                    empty.push(*query);
                }
            }
            Ok(Look::when(empty.is_empty(), (), format!("nothing for {empty:?}")))
        })?;
        let failures = [load.stop().failures, tide.end()].concat();
        ensure!(failures.is_empty(), "{failures:?}");
        let firing = prometheus.query(r#"ALERTS{alertstate="firing"}"#)?;
        ensure!(firing.is_empty(), "{firing:?}");
        println!("{} queries of {} panels have data", queries.len() - MEASUREMENTS.len(), panels.len());
        Ok(())
    })
}

/// What the alerts compare, of the service under load.
const MEASUREMENTS: [&str; 9] = [
    r#"windlass:time_to_first_token_seconds:p99{windlass_dev_inference_service="measured"}"#,
    r#"windlass:inter_token_latency_seconds:p99{windlass_dev_inference_service="measured"}"#,
    r#"windlass:requests:rate5m{windlass_dev_inference_service="measured"}"#,
    r#"windlass:requests_failed:rate5m{windlass_dev_inference_service="measured"}"#,
    r#"windlass:generation_tokens:rate1m{windlass_dev_inference_service="measured"}"#,
    r#"windlass:requests_running:sum{windlass_dev_inference_service="measured"}"#,
    r#"windlass_operator_spot_fallback_replicas{name="measured"}"#,
    r#"windlass_operator_spot_missing_replicas{name="measured"}"#,
    "windlass:objective:error_ratio",
];
