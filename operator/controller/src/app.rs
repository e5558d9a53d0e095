//! Wires the program: client, health port, leadership, and for each scope its watches, scraper and reconciles.

use crate::apply::Applier;
use crate::config::Config;
use crate::http::{self, Overview};
use crate::leader::Elector;
use crate::metrics::{Metrics, ScalingReading, ServiceReading};
use crate::observe::Observer;
use crate::reconcile::{Context, Endings, Failures, after_error, reconcile};
use crate::scopes::Scopes;
use crate::scrape::{Loads, Scraper};
use crate::shutdown::Shutdown;
use crate::watches::{Queue, Stores};
use crate::written::Writes;
use crate::{custom_metrics, guarded_metrics};
use anyhow::Context as _;
use axum::Router;
use futures::channel::mpsc;
use futures::{FutureExt, StreamExt};
use kube::runtime::controller::{Config as ControllerConfig, Error as QueueError};
use kube::{Client, ResourceExt};
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;
use windlass_operator_api::InferenceService;
use windlass_operator_api::status::{AutoscalingStatus, ColdStart};
use windlass_operator_core::observed::Defaults;

/// Bundles events that come together: a rollout changes a Deployment and several pods within milliseconds.
const DEBOUNCE: Duration = Duration::from_millis(50);
/// Services that readings may queue between two looks at the queue.
const QUEUED_BY_READINGS: usize = 1024;
/// How long running reconciles may take to finish after SIGTERM, within Kubernetes' 30 seconds.
const LAST_RECONCILES: Duration = Duration::from_secs(15);
/// How long the release of the lease may take.
const RELEASE: Duration = Duration::from_secs(5);

/// Runs until SIGTERM.
///
/// # Errors
/// The cluster or the port cannot be had.
pub async fn run(config: Config) -> anyhow::Result<()> {
    let shutdown = Shutdown::on_signal().context("signal handlers")?;
    let client = connect().await?;
    let operator = Arc::new(Operator::new(client, config)?);
    let listener = http::listen(operator.config.metrics_port).await.context("--metrics-port")?;
    tracing::info!(version = env!("CARGO_PKG_VERSION"), address = %listener.local_addr()?, "started");
    let probes = http::probes(operator.metrics.clone(), operator.clone());
    let exposition = http::exposition(operator.metrics.clone(), operator.clone());
    let is_guarded = operator.config.guarded_metrics.is_some();
    let open = if is_guarded { probes } else { probes.merge(exposition.clone()) };
    tokio::select! {
        never = http::serve_on(listener, open) => match never {},
        ended = operator.guard_metrics(exposition) => ended.map(|never| match never {}),
        never = operator.serve_custom_metrics() => match never {},
        () = operator.lead(&shutdown) => Ok(()),
    }
}

async fn connect() -> anyhow::Result<Client> {
    let config = kube::Config::infer().await.context(
        "no cluster: neither a service account nor a kubeconfig was found (set KUBECONFIG, or run it in a pod)",
    )?;
    Client::try_from(config).context("the cluster's address or credentials cannot be used")
}

/// What lives as long as the process.
struct Operator {
    client: Client,
    config: Config,
    defaults: Defaults,
    metrics: Metrics,
    /// What is served now: nothing on a standby.
    serving: Scopes,
}

impl Operator {
    fn new(client: Client, config: Config) -> anyhow::Result<Self> {
        let defaults = Defaults {
            engine_image: config.engine_image.clone(),
            image_pull_policy: config.image_pull_policy.map(|policy| policy.name().to_owned()),
            operator_namespace: config.operator_namespace.clone(),
            operator_pod_labels: config.operator_pod_labels.clone(),
            monitoring_namespace: config.monitoring_namespace.clone(),
            cluster_domain: config.cluster_domain.clone(),
            scrape_active: config.scrape.active,
            scrape_idle: config.scrape.idle,
            inspect_timeout: config.inspect_timeout,
        };
        Ok(Operator { client, config, defaults, metrics: Metrics::new()?, serving: Scopes::default() })
    }

    /// Serves the operator's own metrics behind a guard where that is asked for; returns only when that fails.
    async fn guard_metrics(&self, exposition: Router) -> anyhow::Result<Infallible> {
        let Some(config) = &self.config.guarded_metrics else { return std::future::pending().await };
        guarded_metrics::serve(self.client.clone(), config, exposition).await
    }

    /// Serves custom metrics, leading or not, where that is asked for.
    async fn serve_custom_metrics(&self) -> Infallible {
        let Some(config) = &self.config.custom_metrics else { return std::future::pending().await };
        let (client, scrape) = (self.client.clone(), self.config.scrape);
        custom_metrics::serve(client, config, &self.config.scopes, scrape, &self.metrics, custom_metrics::PAUSES).await
    }

    /// Serves, whenever this replica leads where a lease is asked for, until the shutdown.
    async fn lead(&self, shutdown: &Shutdown) {
        let Some(lease) = &self.config.lease else { return self.serve(shutdown).await };
        let mut elector = Elector::new(self.client.clone(), lease, &self.config.identity);
        while !shutdown.is_asked() {
            tokio::select! { () = elector.acquire() => {}, () = shutdown.asked() => return }
            tracing::info!(identity = self.config.identity, "leading");
            let lost = tokio::select! {
                () = self.serve(shutdown) => false,
                () = elector.hold() => true,
            };
            self.stand_by();
            if lost {
                tracing::warn!("leadership is lost; standing by");
            }
        }
        match tokio::time::timeout(RELEASE, elector.release()).await {
            Ok(Ok(())) => tracing::info!("the lease is released"),
            Ok(Err(error)) => tracing::warn!(%error, "the lease is not released and runs out"),
            Err(_elapsed) => tracing::warn!("the lease is not released in time and runs out"),
        }
    }

    /// Serves every scope until the shutdown, then lets running reconciles finish.
    async fn serve(&self, shutdown: &Shutdown) {
        self.metrics.leads(true);
        let watch = |scope| Stores::watch(&self.client, scope, &self.metrics);
        let watches: Vec<_> = self.config.scopes.iter().map(watch).collect();
        self.serving.set(watches.iter().map(|(stores, _)| stores.clone()).collect());
        let scopes = watches.into_iter().map(|(stores, queue)| self.scope(stores, queue, shutdown.clone()));
        let all = futures::future::join_all(scopes);
        let overdue = async {
            shutdown.asked().await;
            tokio::time::sleep(LAST_RECONCILES).await;
        };
        tokio::select! { _ = all => {}, () = overdue => tracing::warn!("reconciles were cut off") }
        self.stand_by();
    }

    fn stand_by(&self) {
        self.metrics.leads(false);
        self.serving.set(Vec::new());
    }

    /// Serves one scope: its watches and readings queue services, each is reconciled by one task at a time.
    async fn scope(&self, stores: Stores, mut queue: Queue, shutdown: Shutdown) {
        let loads = Loads::default();
        let (by_readings, read) = mpsc::channel(QUEUED_BY_READINGS);
        queue.push(read.boxed());
        let scraper =
            Scraper::new(self.config.scrape, stores.engines(), loads.clone(), self.metrics.clone(), by_readings);
        let context = Arc::new(self.context(stores.clone(), loads));
        tokio::select! {
            () = self.reconciles(stores, queue, context, shutdown) => {}
            () = scraper.run() => {}
        }
    }

    fn context(&self, stores: Stores, loads: Loads) -> Context {
        let writes = Arc::new(Writes::default());
        let (client, metrics) = (self.client.clone(), self.metrics.clone());
        let (all, image) = (self.serving.clone(), &self.config.engine_image);
        Context {
            observer: Observer::new(client.clone(), stores, all, writes.clone(), loads, image),
            applier: Applier::new(client, writes, metrics.clone(), &self.config.identity),
            defaults: self.defaults.clone(),
            metrics,
            failures: Failures::default(),
            endings: Endings::default(),
        }
    }

    /// Reconciles what is queued; at the shutdown the queue ends and what runs is finished.
    async fn reconciles(&self, stores: Stores, queue: Queue, context: Arc<Context>, shutdown: Shutdown) {
        let queue = queue.take_until(async move { shutdown.asked().await }).map(Ok::<_, Infallible>);
        let config = ControllerConfig::default().concurrency(self.config.concurrency).debounce(DEBOUNCE);
        let one = |service, context| reconcile(service, context).boxed();
        kube::runtime::applier(one, after_error, context.clone(), stores.services, queue, config)
            .for_each(|result| {
                if let Err(QueueError::ObjectNotFound(gone)) = result {
                    let key = (gone.namespace.clone().unwrap_or_default(), gone.name.clone());
                    context.failures.clear(&key);
                    context.endings.forget(&key);
                    context.observer.forget(&key);
                }
                std::future::ready(())
            })
            .await;
    }
}

impl Overview for Operator {
    fn missing(&self) -> Vec<&'static str> {
        self.serving.missing()
    }

    fn services(&self) -> Vec<ServiceReading> {
        self.serving.services().iter().map(reading).collect()
    }
}

fn reading(service: &InferenceService) -> ServiceReading {
    let status = service.status.clone().unwrap_or_default();
    ServiceReading {
        namespace: service.namespace().unwrap_or_default(),
        name: service.name_any(),
        desired: status.desired_replicas.into(),
        ready: status.ready_replicas.into(),
        spot_fallback: status.spot_fallback_replicas.unwrap_or(0).into(),
        spot_missing: status.spot_missing_replicas.unwrap_or(0).into(),
        scaling: status.autoscaling.as_ref().map(scaling),
        cold_start: status.cold_start.as_ref().map(phases).unwrap_or_default(),
        fingerprints: status.fingerprints,
        conditions: status.conditions.into_iter().map(|found| (found.type_, found.status)).collect(),
    }
}

fn phases(start: &ColdStart) -> Vec<(&'static str, f64)> {
    let phases = [
        ("schedule", start.schedule_milliseconds),
        ("pull", start.pull_milliseconds),
        ("download", Some(start.download_milliseconds)),
        ("load", Some(start.load_milliseconds)),
        ("warm", Some(start.warm_milliseconds)),
    ];
    phases.into_iter().filter_map(|(phase, milliseconds)| Some((phase, milliseconds? as f64 / 1000.0))).collect()
}

fn scaling(status: &AutoscalingStatus) -> ScalingReading {
    let ratio = |percent: i64| percent as f64 / 100.0;
    let need = status.need.as_ref();
    ScalingReading {
        recommended: status.recommended_replicas.into(),
        need: need.map(|need| [need.load_percent, need.forecast_percent, need.planned_fill_percent].map(ratio)),
    }
}
