//! `custom.metrics.k8s.io/v1beta2`: what HorizontalPodAutoscalers of mode HPA scale by, served through the API server's
//! aggregation layer. An option: nothing of it runs without its flags.
//!
//! Every replica reads the engines by itself here, whether it leads or not, and answers from what it read. Only the API
//! server may ask: its client certificate is checked against the authority and the names that the cluster publishes for
//! this purpose, and it has checked who asked, and for what, before.

mod answers;
mod front_proxy;

use crate::config::{CustomMetricsConfig, Scope, ScrapeConfig};
use crate::door::Door;
use crate::metrics::Metrics;
use crate::scrape::{Loads, Scraper};
use crate::watches::{Engines, Guarded};
use answers::Answers;
use futures::StreamExt;
use futures::channel::mpsc;
use futures::stream::FuturesUnordered;
use k8s_openapi::kube_aggregator::pkg::apis::apiregistration::v1::APIService;
use kube::runtime::reflector::ObjectRef;
use kube::{Api, Client};
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

/// The API service that the aggregation layer knows this API by. A cluster has one server of it.
const API_SERVICE: &str = "v1beta2.custom.metrics.k8s.io";
/// Between looks at whose the API service is, while it is not ours.
const OWNER_CHECK: Duration = Duration::from_secs(60);

/// Before it is tried again after a failure.
pub const RETRY: Duration = Duration::from_secs(10);

/// Reads engines and answers, as long as it is polled. Where it cannot, that is said, and tried again after `retry`: the rest
/// of the operator goes on without.
pub async fn serve(
    client: Client,
    config: &CustomMetricsConfig,
    scopes: &[Scope],
    scrape: ScrapeConfig,
    metrics: &Metrics,
    retry: Duration,
) -> Infallible {
    loop {
        let Err(error) = attempt(&client, config, scopes, scrape, metrics).await;
        metrics.serves_custom_metrics(false);
        tracing::error!(error = format!("{error:#}"), ?retry, "custom metrics are not served");
        tokio::time::sleep(retry).await;
    }
}

/// # Errors
/// The port, the certificate or the cluster's authority cannot be had, or are lost.
async fn attempt(
    client: &Client,
    config: &CustomMetricsConfig,
    scopes: &[Scope],
    scrape: ScrapeConfig,
    metrics: &Metrics,
) -> anyhow::Result<Infallible> {
    wait_for_ownership(client, config).await;
    let clients = front_proxy::published(client).await?;
    let door = Door::open(config.port, &config.certificates, clients).await?;
    let mut readers = FuturesUnordered::new();
    let mut answers = Vec::new();
    for scope in scopes {
        let (engines, changes) = Engines::watch(client, scope, metrics);
        let loads = Loads::default();
        // Nobody here waits for readings: the queue's other end is gone, and what is queued with it.
        let (nobody, _) = mpsc::channel::<ObjectRef<Guarded>>(1);
        let scraper = Scraper::new(scrape, engines.clone(), loads.clone(), metrics.clone(), nobody);
        answers.push(Answers { engines, loads });
        readers.push(async move { tokio::join!(changes.for_each(|()| std::future::ready(())), scraper.run()) });
    }
    tracing::info!(address = %door.address(), "serving custom metrics");
    metrics.serves_custom_metrics(true);
    tokio::select! {
        failed = door.serve(answers::router(Arc::new(answers))) => failed,
        _ = readers.next() => anyhow::bail!("the watches have ended"),
    }
}

/// Returns once the API service names our own Service, or may not be looked at. While it names another, that server
/// goes on as it is.
async fn wait_for_ownership(client: &Client, config: &CustomMetricsConfig) {
    let api = Api::<APIService>::all(client.clone());
    loop {
        match api.get_opt(API_SERVICE).await {
            Ok(Some(found)) if !is_ours(&found, config) => {
                let owner = found.spec.and_then(|spec| spec.service).unwrap_or_default();
                tracing::error!(
                    namespace = owner.namespace,
                    service = owner.name,
                    "{API_SERVICE} belongs to another server: custom metrics are not served"
                );
            }
            Ok(_) => return,
            Err(error) => {
                tracing::warn!(error = %crate::error::chain(&error), "{API_SERVICE} cannot be looked at");
                return;
            }
        }
        tokio::time::sleep(OWNER_CHECK).await;
    }
}

fn is_ours(found: &APIService, config: &CustomMetricsConfig) -> bool {
    let Some(service) = found.spec.as_ref().and_then(|spec| spec.service.as_ref()) else { return false };
    service.name.as_deref() == Some(&config.service) && service.namespace == config.namespace
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::FakeApi;
    use serde_json::json;

    fn config() -> CustomMetricsConfig {
        CustomMetricsConfig {
            port: 0,
            certificates: "/nowhere".into(),
            service: "windlass".into(),
            namespace: Some("w".into()),
        }
    }

    #[tokio::test]
    async fn what_cannot_be_served_is_tried_again_and_ends_nothing() {
        const AUTHENTICATION: &str = "/api/v1/namespaces/kube-system/configmaps/extension-apiserver-authentication";
        let (api, metrics) = (FakeApi::default(), Metrics::new().expect("names"));
        metrics.serves_custom_metrics(true);
        let scrape = ScrapeConfig {
            active: Duration::from_secs(5),
            idle: Duration::from_secs(30),
            timeout: Duration::from_secs(1),
        };
        let tried = |wanted: usize| {
            let api = &api;
            async move {
                let mut tried = 0;
                while tried < wanted {
                    tried += api.requests().iter().filter(|request| request.ends_with(AUTHENTICATION)).count();
                    tokio::time::sleep(Duration::from_millis(1)).await;
                }
            }
        };
        let enough = async {
            tried(3).await;
            // What is missing next is no end either.
            let data = json!({"requestheader-client-ca-file": ""});
            api.put(AUTHENTICATION, json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {}, "data": data}));
            tried(3).await;
        };
        let config = config();
        tokio::select! {
            never = serve(api.client(), &config, &[Scope::Cluster], scrape, &metrics, Duration::from_millis(1)) => match never {},
            () = enough => {}
        }
        let text = metrics.render(&[]).expect("text");
        assert!(text.contains("windlass_operator_custom_metrics_served 0\n"), "{text}");
    }

    #[test]
    fn an_api_service_of_another_server_is_not_ours() {
        let config = config();
        let of = |service: serde_json::Value| -> APIService {
            let object = json!({"spec": {"groupPriorityMinimum": 100, "versionPriority": 100, "service": service}});
            serde_json::from_value(object).expect("an API service")
        };
        assert!(is_ours(&of(json!({"namespace": "w", "name": "windlass"})), &config));
        for other in [
            json!({"namespace": "w", "name": "prometheus-adapter"}),
            json!({"namespace": "x", "name": "windlass"}),
            json!(null),
        ] {
            assert!(!is_ours(&of(other.clone()), &config), "{other}");
        }
    }
}
