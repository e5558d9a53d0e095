//! Handles of every metric that the operator exports, and nothing that decides.

use prometheus::{
    Encoder, Gauge, GaugeVec, HistogramOpts, HistogramVec, IntCounterVec, IntGauge, IntGaugeVec, Opts, Registry,
    TextEncoder,
};
use std::time::Duration;

/// Metric handles; cloning shares them.
#[derive(Clone)]
pub struct Metrics {
    registry: Registry,
    reconciles: IntCounterVec,
    reconcile_errors: IntCounterVec,
    reconcile_seconds: HistogramVec,
    writes: IntCounterVec,
    scrapes: IntCounterVec,
    watch_errors: IntCounterVec,
    services: IntGaugeVec,
    desired: IntGaugeVec,
    ready: IntGaugeVec,
    spot_fallback: IntGaugeVec,
    spot_missing: IntGaugeVec,
    recommended: IntGaugeVec,
    load: GaugeVec,
    forecast: GaugeVec,
    planned_fill: GaugeVec,
    cold_start: GaugeVec,
    served: IntGaugeVec,
    leader: IntGauge,
    custom_metrics: IntGauge,
}

/// What one service looks like on `/metrics`.
pub struct ServiceReading {
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// Replicas it should have.
    pub desired: i64,
    /// Replicas that are ready.
    pub ready: i64,
    /// Of those, how many run on demand because no spot node came.
    pub spot_fallback: i64,
    /// Replicas for spot that are on no spot node.
    pub spot_missing: i64,
    /// What the autoscaler says, in mode Builtin.
    pub scaling: Option<ScalingReading>,
    /// Seconds of each phase of its slowest cold start.
    pub cold_start: Vec<(&'static str, f64)>,
    /// What serves, in a word of each kind of engine.
    pub fingerprints: Vec<String>,
    /// Condition types with their status, `True`, `False` or `Unknown`.
    pub conditions: Vec<(String, String)>,
}

/// What the autoscaler says of one service.
pub struct ScalingReading {
    /// Replicas it asks for, applied or not.
    pub recommended: i64,
    /// Full replicas' worth of tokens, now and at the end of a cold start, and how full a replica is planned to be.
    pub need: Option<[f64; 3]>,
}

/// Reconciles are milliseconds of planning and a few round trips to the API server.
const RECONCILE_BUCKETS: [f64; 10] = [0.001, 0.0025, 0.005, 0.01, 0.025, 0.1, 0.25, 1.0, 5.0, 30.0];

impl Metrics {
    /// Registers every metric under its name.
    ///
    /// # Errors
    /// Two metrics of one name: a defect of this file, found by its test.
    pub fn new() -> Result<Self, prometheus::Error> {
        let registry = Registry::new();
        let build = Gauge::with_opts(
            Opts::new("windlass_operator_build_info", "Always 1; the version is the label.")
                .const_label("version", env!("CARGO_PKG_VERSION")),
        )?;
        registry.register(Box::new(build.clone()))?;
        build.set(1.0);
        let counters = |name: &str, help: &str, labels: &[&str]| {
            let vector = IntCounterVec::new(Opts::new(format!("windlass_operator_{name}"), help), labels)?;
            registry.register(Box::new(vector.clone())).map(|()| vector)
        };
        let gauges = |name: &str, help: &str, labels: &[&str]| {
            let vector = IntGaugeVec::new(Opts::new(format!("windlass_operator_{name}"), help), labels)?;
            registry.register(Box::new(vector.clone())).map(|()| vector)
        };
        let autoscaler = |name: &str, help: &str| {
            let vector = GaugeVec::new(Opts::new(format!("windlass_autoscaler_{name}"), help), &["namespace", "name"])?;
            registry.register(Box::new(vector.clone())).map(|()| vector)
        };
        let cold_start = GaugeVec::new(
            Opts::new(
                "windlass_operator_cold_start_seconds",
                "Phases of the slowest cold start of a replica that serves.",
            ),
            &["namespace", "name", "phase"],
        )?;
        registry.register(Box::new(cold_start.clone()))?;
        let served = IntGaugeVec::new(
            Opts::new("windlass_operator_served_info", "Always 1; the label is what serves, in one word."),
            &["namespace", "name", "fingerprint"],
        )?;
        registry.register(Box::new(served.clone()))?;
        let recommended = IntGaugeVec::new(
            Opts::new("windlass_autoscaler_recommended_replicas", "Replicas asked for, in shadow mode too."),
            &["namespace", "name"],
        )?;
        registry.register(Box::new(recommended.clone()))?;
        let reconcile_seconds = HistogramVec::new(
            HistogramOpts::new("windlass_operator_reconcile_duration_seconds", "Duration of a reconcile.")
                .buckets(RECONCILE_BUCKETS.to_vec()),
            &["result"],
        )?;
        registry.register(Box::new(reconcile_seconds.clone()))?;
        let leader = IntGauge::new("windlass_operator_leader", "1 while this replica acts, 0 while it stands by.")?;
        registry.register(Box::new(leader.clone()))?;
        let custom_metrics = IntGauge::new(
            "windlass_operator_custom_metrics_served",
            "1 while this replica serves custom.metrics.k8s.io, 0 while it cannot, or is not asked to.",
        )?;
        registry.register(Box::new(custom_metrics.clone()))?;
        Ok(Metrics {
            reconciles: counters("reconciles_total", "Reconciles by result: ok or error.", &["result"])?,
            reconcile_errors: counters("reconcile_errors_total", "Failed reconciles by category.", &["category"])?,
            reconcile_seconds,
            writes: counters(
                "writes_total",
                "Writes to the API server by kind and result: done, refused or failed.",
                &["kind", "result"],
            )?,
            scrapes: counters("scrapes_total", "Readings of engines by result.", &["result"])?,
            watch_errors: counters("watch_errors_total", "Broken watches by kind; they are resumed.", &["kind"])?,
            services: gauges(
                "services",
                "InferenceServices by condition and its status.",
                &["namespace", "condition", "status"],
            )?,
            desired: gauges("desired_replicas", "Replicas a service should have.", &["namespace", "name"])?,
            ready: gauges("ready_replicas", "Replicas of a service that are ready.", &["namespace", "name"])?,
            spot_fallback: gauges(
                "spot_fallback_replicas",
                "Replicas that run on demand because no spot node came.",
                &["namespace", "name"],
            )?,
            spot_missing: gauges(
                "spot_missing_replicas",
                "Replicas for spot that wait for a spot node, or run on another.",
                &["namespace", "name"],
            )?,
            recommended,
            load: autoscaler("load_replicas", "Full replicas' worth of the tokens that arrive.")?,
            forecast: autoscaler(
                "forecast_replicas",
                "The same at the end of a cold start, as nine in ten of the latest were no longer.",
            )?,
            planned_fill: autoscaler("planned_fill_ratio", "How full a replica is planned to be.")?,
            cold_start,
            served,
            leader,
            custom_metrics,
            registry,
        })
    }

    /// A reconcile ended; `failure` is the category of its error.
    pub fn reconciled(&self, failure: Option<&'static str>, took: Duration) {
        let result = if failure.is_some() { "error" } else { "ok" };
        self.reconciles.with_label_values(&[result]).inc();
        self.reconcile_seconds.with_label_values(&[result]).observe(took.as_secs_f64());
        if let Some(category) = failure {
            self.reconcile_errors.with_label_values(&[category]).inc();
        }
    }

    /// A request that changes an object was answered.
    pub fn wrote(&self, kind: &str, result: &'static str) {
        self.writes.with_label_values(&[kind, result]).inc();
    }

    /// An engine was read, or not: `ok` or an error's category.
    pub fn scraped(&self, result: &'static str) {
        self.scrapes.with_label_values(&[result]).inc();
    }

    /// A watch broke.
    pub fn watch_broke(&self, kind: &str) {
        self.watch_errors.with_label_values(&[kind]).inc();
    }

    /// This replica acts, or stands by.
    pub fn leads(&self, leads: bool) {
        self.leader.set(leads.into());
    }

    /// This replica serves custom metrics, or does not.
    pub fn serves_custom_metrics(&self, serves: bool) {
        self.custom_metrics.set(serves.into());
    }

    /// Whether this replica acts.
    pub fn is_leading(&self) -> bool {
        self.leader.get() == 1
    }

    /// The exposition, with one reading per existing service: a deleted one leaves no series behind.
    ///
    /// # Errors
    /// A value that the text format cannot carry.
    pub fn render(&self, services: &[ServiceReading]) -> Result<String, prometheus::Error> {
        let spot = [&self.spot_fallback, &self.spot_missing];
        for vector in
            [&self.services, &self.desired, &self.ready, &self.recommended, &self.served].into_iter().chain(spot)
        {
            vector.reset();
        }
        let needs = [&self.load, &self.forecast, &self.planned_fill];
        needs.iter().for_each(|vector| vector.reset());
        self.cold_start.reset();
        for service in services {
            let labels = [service.namespace.as_str(), service.name.as_str()];
            self.desired.with_label_values(&labels).set(service.desired);
            self.ready.with_label_values(&labels).set(service.ready);
            self.spot_fallback.with_label_values(&labels).set(service.spot_fallback);
            self.spot_missing.with_label_values(&labels).set(service.spot_missing);
            if let Some(scaling) = &service.scaling {
                self.recommended.with_label_values(&labels).set(scaling.recommended);
                let values = scaling.need.iter().flat_map(|values| needs.iter().zip(values));
                values.for_each(|(vector, value)| vector.with_label_values(&labels).set(*value));
            }
            for (phase, seconds) in &service.cold_start {
                self.cold_start.with_label_values(&[labels[0], labels[1], phase]).set(*seconds);
            }
            for word in &service.fingerprints {
                self.served.with_label_values(&[labels[0], labels[1], word]).set(1);
            }
            for (condition, status) in &service.conditions {
                self.services.with_label_values(&[&service.namespace, condition, status]).inc();
            }
        }
        let mut text = Vec::new();
        TextEncoder::new().encode(&self.registry.gather(), &mut text)?;
        Ok(String::from_utf8_lossy(&text).into_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn service(name: &str, ready: &str) -> ServiceReading {
        ServiceReading {
            namespace: "team".into(),
            name: name.into(),
            desired: 2,
            ready: 1,
            spot_fallback: 0,
            spot_missing: 4,
            scaling: Some(ScalingReading { recommended: 3, need: Some([1.5, 1.75, 0.7]) }),
            cold_start: vec![("load", 1.25)],
            fingerprints: vec!["fp_1".into()],
            conditions: vec![("Ready".into(), ready.into())],
        }
    }

    #[test]
    fn services_are_counted_by_condition_and_a_deleted_one_disappears() {
        let metrics = Metrics::new().expect("distinct names");
        let both = metrics.render(&[service("a", "True"), service("b", "True")]).expect("text");
        assert!(both.contains(r#"windlass_operator_services{condition="Ready",namespace="team",status="True"} 2"#));
        assert!(both.contains(r#"windlass_autoscaler_load_replicas{name="b",namespace="team"} 1.5"#), "{both}");
        assert!(both.contains(r#"cold_start_seconds{name="a",namespace="team",phase="load"} 1.25"#), "{both}");
        assert!(both.contains(r#"served_info{fingerprint="fp_1",name="b",namespace="team"} 1"#), "{both}");
        assert!(both.contains(r#"windlass_autoscaler_recommended_replicas{name="a",namespace="team"} 3"#), "{both}");
        assert!(both.contains(r#"spot_missing_replicas{name="a",namespace="team"} 4"#), "{both}");
        let one = metrics.render(&[service("a", "False")]).expect("text");
        assert!(!one.contains(r#"name="b""#), "{one}");
        assert!(!one.contains(r#"status="True""#), "{one}");
    }

    #[test]
    fn an_error_is_counted_under_its_category() {
        let metrics = Metrics::new().expect("distinct names");
        metrics.reconciled(Some("api"), Duration::from_millis(3));
        let text = metrics.render(&[]).expect("text");
        assert!(text.contains(r#"windlass_operator_reconcile_errors_total{category="api"} 1"#), "{text}");
        assert!(text.contains(r#"windlass_operator_reconciles_total{result="error"} 1"#), "{text}");
    }
}
