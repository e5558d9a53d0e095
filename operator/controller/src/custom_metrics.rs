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

/// How long is waited for what.
#[derive(Clone, Copy)]
pub struct Pauses {
    /// Before it is tried again after a failure.
    pub retry: Duration,
    /// Between looks at whose the API service is.
    pub owner_check: Duration,
}

/// As the program waits.
pub const PAUSES: Pauses = Pauses { retry: Duration::from_secs(10), owner_check: Duration::from_secs(60) };

/// Reads engines and answers, as long as it is polled. Where it cannot, or may not any more, that is said, and tried again
/// after a pause: the rest of the operator goes on without.
pub async fn serve(
    client: Client,
    config: &CustomMetricsConfig,
    scopes: &[Scope],
    scrape: ScrapeConfig,
    metrics: &Metrics,
    pauses: Pauses,
) -> Infallible {
    loop {
        let Err(error) = attempt(&client, config, scopes, scrape, metrics, pauses.owner_check).await;
        metrics.serves_custom_metrics(false);
        tracing::error!(error = format!("{error:#}"), retry = ?pauses.retry, "custom metrics are not served");
        tokio::time::sleep(pauses.retry).await;
    }
}

/// # Errors
/// The port, the certificate or the cluster's authority cannot be had, or the API service goes to another server.
async fn attempt(
    client: &Client,
    config: &CustomMetricsConfig,
    scopes: &[Scope],
    scrape: ScrapeConfig,
    metrics: &Metrics,
    owner_check: Duration,
) -> anyhow::Result<Infallible> {
    while let Some(owner) = other_owner(client, config).await {
        tracing::error!(owner, "{API_SERVICE} belongs to another server: custom metrics are not served");
        tokio::time::sleep(owner_check).await;
    }
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
        owner = lost(client, config, owner_check) => anyhow::bail!("{API_SERVICE} belongs to {owner} now"),
    }
}

/// Returns the owner once the API service is another server's.
async fn lost(client: &Client, config: &CustomMetricsConfig, owner_check: Duration) -> String {
    loop {
        tokio::time::sleep(owner_check).await;
        if let Some(owner) = other_owner(client, config).await {
            return owner;
        }
    }
}

/// Whose the API service is: namespace and name of another Service than ours. `None` also where it may not be looked at, or
/// where there is none yet. The other server goes on as it is.
async fn other_owner(client: &Client, config: &CustomMetricsConfig) -> Option<String> {
    match Api::<APIService>::all(client.clone()).get_opt(API_SERVICE).await {
        Ok(found) => {
            let other = found.filter(|found| !is_ours(found, config))?;
            let owner = other.spec.and_then(|spec| spec.service).unwrap_or_default();
            Some(format!("{}/{}", owner.namespace.unwrap_or_default(), owner.name.unwrap_or_default()))
        }
        Err(error) => {
            tracing::warn!(error = %crate::error::chain(&error), "{API_SERVICE} cannot be looked at");
            None
        }
    }
}

fn is_ours(found: &APIService, config: &CustomMetricsConfig) -> bool {
    let Some(service) = found.spec.as_ref().and_then(|spec| spec.service.as_ref()) else { return false };
    service.name.as_deref() == Some(&config.service) && service.namespace == config.namespace
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Authority, FakeApi};
    use serde_json::{Value, json};
    use std::path::PathBuf;

    const AUTHENTICATION: &str = "/api/v1/namespaces/kube-system/configmaps/extension-apiserver-authentication";
    const REGISTRATION: &str = "/apis/apiregistration.k8s.io/v1/apiservices/v1beta2.custom.metrics.k8s.io";
    const SCRAPE: ScrapeConfig =
        ScrapeConfig { active: Duration::from_secs(5), idle: Duration::from_secs(30), timeout: Duration::from_secs(1) };
    const HASTE: Pauses = Pauses { retry: Duration::from_millis(1), owner_check: Duration::from_millis(1) };

    fn config(port: u16, certificates: PathBuf) -> CustomMetricsConfig {
        CustomMetricsConfig { port, certificates, service: "windlass".into(), namespace: Some("w".into()) }
    }

    fn authentication(authority: &str) -> Value {
        let data = json!({"requestheader-client-ca-file": authority});
        json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {}, "data": data})
    }

    fn registered(service: Value) -> Value {
        let spec = json!({"groupPriorityMinimum": 100, "versionPriority": 100, "service": service});
        json!({"apiVersion": "apiregistration.k8s.io/v1", "kind": "APIService", "metadata": {}, "spec": spec})
    }

    /// Waits until the gauge says whether custom metrics are served.
    async fn told(metrics: &Metrics, is_served: bool) {
        let line = format!("windlass_operator_custom_metrics_served {}\n", i32::from(is_served));
        while !metrics.render(&[]).expect("text").contains(&line) {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }

    #[tokio::test]
    async fn what_cannot_be_served_is_tried_again_and_ends_nothing() {
        let (api, metrics) = (FakeApi::default(), Metrics::new().expect("names"));
        metrics.serves_custom_metrics(true);
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
            api.put(AUTHENTICATION, authentication(""));
            tried(3).await;
            told(&metrics, false).await;
        };
        let config = config(0, "/nowhere".into());
        tokio::select! {
            never = serve(api.client(), &config, &[Scope::Cluster], SCRAPE, &metrics, HASTE) => match never {},
            () = enough => {}
        }
    }

    /// Nobody leads here: whoever follows answers too.
    #[tokio::test]
    async fn a_replica_that_does_not_lead_answers_while_the_api_service_is_ours() {
        let (api, metrics, authority) = (FakeApi::default(), Metrics::new().expect("names"), Authority::new());
        api.put(AUTHENTICATION, authentication(&authority.pem));
        api.put(REGISTRATION, registered(json!({"namespace": "w", "name": "windlass"})));
        let port = std::net::TcpListener::bind("127.0.0.1:0").expect("a port").local_addr().expect("bound").port();
        let (folder, address) = (authority.folder(), format!("127.0.0.1:{port}"));
        let config = config(port, folder.clone());
        let story = async {
            told(&metrics, true).await;
            let heard = authority.asks(&address, "/apis/custom.metrics.k8s.io/v1beta2", Some("front-proxy")).await;
            assert!(!metrics.is_leading() && heard.contains("pods/windlass_waiting_requests"), "{heard}");
            api.put(REGISTRATION, registered(json!({"namespace": "monitoring", "name": "prometheus-adapter"})));
            told(&metrics, false).await;
            let refused = tokio::net::TcpStream::connect(&address).await;
            assert!(refused.is_err(), "the port is open while another owns the API service");
            api.put(REGISTRATION, registered(json!({"namespace": "w", "name": "windlass"})));
            told(&metrics, true).await;
        };
        tokio::select! {
            never = serve(api.client(), &config, &[Scope::Cluster], SCRAPE, &metrics, HASTE) => match never {},
            () = story => {}
        }
        std::fs::remove_dir_all(folder).expect("removed");
    }

    #[test]
    fn an_api_service_of_another_server_is_not_ours() {
        let config = config(0, "/nowhere".into());
        let of =
            |service: Value| -> APIService { serde_json::from_value(registered(service)).expect("an API service") };
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
