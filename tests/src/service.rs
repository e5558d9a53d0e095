//! An InferenceService in a namespace: applied, watched, reached.

use anyhow::{Context, Result, ensure};
use k8s_openapi::api::core::v1::{Pod, Service as CoreService};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use serde_json::{Value, json};
use std::io::{BufRead, BufReader};
use std::net::{SocketAddr, TcpStream};
use std::process::{Child, Stdio};
use std::time::Duration;
use windlass_engine_contract::stats::Stats;
use windlass_engine_contract::{ADMIN_PORT, paths};
use windlass_operator_api::InferenceService;

use crate::model;
use crate::namespace::Namespace;
use crate::wait::{self, Look};

/// The resource's plural with its group, so that no other API's kind of the same name is meant.
pub const RESOURCE: &str = "inferenceservices.windlass.dev";
/// The same without it.
pub const PLURAL: &str = "inferenceservices";
/// Names the service on what belongs to it.
pub const SERVICE_LABEL: &str = "windlass.dev/inference-service";

/// A service by name.
#[derive(Debug)]
pub struct Service<'a> {
    namespace: &'a Namespace,
    name: String,
}

/// A spec that serves the model in the claim on real executors, small enough for two on a small node.
pub fn real() -> Value {
    json!({
        "model": {"source": model::SOURCE},
        "resources": {"requests": {"cpu": "500m", "memory": "512Mi"}, "limits": {"memory": "2Gi"}},
        "drainTimeoutSeconds": 60,
    })
}

/// How long engines of a test that lets no request meet a pod that goes may take to be forgotten by clients.
pub const PATIENT_DRAIN: &str = "--drain-accept-seconds=5";
/// In all other tests pods go at once.
const HASTY_DRAIN: &str = "--drain-accept-seconds=0";

/// A spec that simulates the model: 50m CPU a replica. `flags` are further flags of `serve`.
pub fn simulated(flags: &[&str]) -> Value {
    let drain = (!flags.contains(&PATIENT_DRAIN)).then_some(HASTY_DRAIN);
    let flags: Vec<&str> = ["--executor=sim"].into_iter().chain(drain).chain(flags.iter().copied()).collect();
    json!({
        "model": {"source": model::SOURCE},
        "engine": {"extraArgs": flags},
        "resources": {"requests": {"cpu": "50m", "memory": "64Mi"}, "limits": {"memory": "512Mi"}},
        "drainTimeoutSeconds": 60,
    })
}

impl<'a> Service<'a> {
    /// Applies a service of that name and spec.
    ///
    /// # Errors
    /// The API server's own words.
    pub fn apply(namespace: &'a Namespace, name: &str, spec: &Value) -> Result<Service<'a>> {
        let object = json!({
            "apiVersion": "windlass.dev/v1alpha1", "kind": "InferenceService", "metadata": {"name": name}, "spec": spec,
        });
        namespace.apply(&[object])?;
        Ok(Service { namespace, name: name.to_owned() })
    }

    /// One that somebody else has made.
    pub fn named(namespace: &'a Namespace, name: &str) -> Service<'a> {
        Service { namespace, name: name.to_owned() }
    }

    /// Its namespace.
    pub fn namespace(&self) -> &Namespace {
        self.namespace
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Merges `patch` into the resource.
    ///
    /// # Errors
    /// The API server's own words.
    pub fn patch(&self, patch: &Value) -> Result<()> {
        self.namespace.run(&["patch", RESOURCE, &self.name, "--type=merge", "--patch", &patch.to_string()]).map(drop)
    }

    /// `kubectl scale`, that is, through `/scale`.
    ///
    /// # Errors
    /// The API server's own words.
    pub fn scale(&self, replicas: u32) -> Result<()> {
        self.namespace.run(&["scale", RESOURCE, &self.name, &format!("--replicas={replicas}")]).map(drop)
    }

    /// Deletes the resource and returns at once.
    ///
    /// # Errors
    /// The API server's own words.
    pub fn delete(&self) -> Result<()> {
        self.namespace.run(&["delete", RESOURCE, &self.name, "--wait=false"]).map(drop)
    }

    /// The resource as it is now.
    ///
    /// # Errors
    /// kubectl's own words.
    pub fn read(&self) -> Result<InferenceService> {
        self.namespace.get(&["get", RESOURCE, &self.name])
    }

    /// Waits until a condition has `status` for the current spec and, if one is given, `reason`; returns it.
    ///
    /// # Errors
    /// After `timeout`, with the conditions last seen.
    pub fn wait_condition(
        &self,
        kind: &str,
        status: &str,
        reason: Option<&str>,
        timeout: Duration,
    ) -> Result<Condition> {
        wait::until(&format!("condition {kind}={status} of {}", self.name), timeout, || {
            let service = self.read()?;
            let conditions = service.status.map(|status| status.conditions).unwrap_or_default();
            let is = |condition: &&Condition| {
                condition.type_ == kind
                    && condition.status == status
                    && condition.observed_generation == service.metadata.generation
                    && reason.is_none_or(|reason| condition.reason == reason)
            };
            Ok(match conditions.iter().find(is) {
                Some(condition) => Look::Done(condition.clone()),
                None => Look::NotYet(conditions.iter().map(shown).collect::<Vec<_>>().join("; ")),
            })
        })
    }

    /// Waits until a condition of the resource says `words`; returns it.
    ///
    /// # Errors
    /// After `timeout`, with the conditions last seen.
    pub fn wait_words(&self, words: &str, timeout: Duration) -> Result<Condition> {
        wait::until(&format!("a condition of {} that says {words:?}", self.name), timeout, || {
            let conditions = self.read()?.status.map(|status| status.conditions).unwrap_or_default();
            let found = conditions.iter().find(|condition| condition.message.contains(words));
            Ok(match found {
                Some(condition) => Look::Done(condition.clone()),
                None => Look::NotYet(conditions.iter().map(shown).collect::<Vec<_>>().join("; ")),
            })
        })
    }

    /// Waits until `replicas` replicas serve the current spec and no others are left.
    ///
    /// # Errors
    /// After `timeout`, with the status last seen.
    pub fn wait_ready(&self, replicas: usize, timeout: Duration) -> Result<()> {
        self.wait_condition("Ready", "True", None, timeout)?;
        wait::until(&format!("{replicas} replicas of {} serve", self.name), timeout, || {
            let status = self.read()?.status.context("there is no status")?;
            let pods = self.pods()?.len();
            let serving = usize::try_from(status.available_replicas).unwrap_or(0);
            let seen = format!("{serving} of {} replicas serve, {pods} pods exist", status.replicas);
            Ok(Look::when(serving == replicas && pods == replicas, (), seen))
        })
    }

    /// Its pods that are not gone, those that drain included.
    ///
    /// # Errors
    /// kubectl's own words.
    pub fn pods(&self) -> Result<Vec<Pod>> {
        self.namespace.list(&["get", "pods", "--selector", &format!("{SERVICE_LABEL}={}", self.name)])
    }

    /// What a pod's engine reports, through the API server's proxy.
    ///
    /// # Errors
    /// When the pod does not answer.
    pub fn stats(&self, pod: &Pod) -> Result<Stats> {
        let name = pod_name(pod);
        let path =
            format!("/api/v1/namespaces/{}/pods/{name}:{ADMIN_PORT}/proxy{}", self.namespace.name(), paths::STATS);
        let text = self.namespace.cluster().kubectl().run(&["get", "--raw", &path])?;
        serde_json::from_str(&text).with_context(|| format!("{name} answers no stats: {text}"))
    }

    /// A way to its API from here.
    ///
    /// # Errors
    /// When neither its cluster address nor a port forward answers.
    pub fn reach(&self) -> Result<Reach> {
        Reach::direct(self).or_else(|_| Reach::forwarded(self))
    }
}

fn shown(condition: &Condition) -> String {
    format!("{}={} {}: {}", condition.type_, condition.status, condition.reason, condition.message)
}

/// Name of a pod.
pub fn pod_name(pod: &Pod) -> &str {
    pod.metadata.name.as_deref().unwrap_or_default()
}

/// Whether a pod takes requests.
pub fn is_ready(pod: &Pod) -> bool {
    let conditions = pod.status.as_ref().and_then(|status| status.conditions.as_ref());
    conditions.is_some_and(|all| all.iter().any(|condition| condition.type_ == "Ready" && condition.status == "True"))
}

/// A way to a service's API from this machine, open as long as it lives.
#[derive(Debug)]
pub struct Reach {
    url: String,
    forward: Option<Child>,
}

impl Reach {
    /// Base URL, without `/v1`.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// Whether connections are spread over the service's pods; a port forward leads to one of them.
    pub fn is_balanced(&self) -> bool {
        self.forward.is_none()
    }

    /// The Service's own address: reached from nodes, and so from the machine that runs our own cluster.
    fn direct(service: &Service<'_>) -> Result<Reach> {
        let object: CoreService = service.namespace.get(&["get", "service", &service.name])?;
        let spec = object.spec.context("the Service has no spec")?;
        let port = spec.ports.unwrap_or_default().first().map(|port| port.port).context("the Service has no port")?;
        let address: SocketAddr =
            format!("{}:{port}", spec.cluster_ip.context("the Service has no address")?).parse()?;
        TcpStream::connect_timeout(&address, Duration::from_secs(2))?;
        Ok(Reach { url: format!("http://{address}"), forward: None })
    }

    fn forwarded(service: &Service<'_>) -> Result<Reach> {
        let mut kubectl = service.namespace.cluster().kubectl().command();
        kubectl.args([
            "port-forward",
            "--namespace",
            service.namespace.name(),
            &format!("service/{}", service.name),
            ":http",
        ]);
        let mut forward = kubectl.stdout(Stdio::piped()).spawn().context("cannot run kubectl port-forward")?;
        let mut line = String::new();
        BufReader::new(forward.stdout.take().context("kubectl has no output")?).read_line(&mut line)?;
        let address = line.split_whitespace().find(|word| word.starts_with("127.0.0.1:")).map(str::to_owned);
        let reach = Reach { url: format!("http://{}", address.as_deref().unwrap_or_default()), forward: Some(forward) };
        ensure!(address.is_some(), "kubectl port-forward says: {line}");
        Ok(reach)
    }
}

impl Drop for Reach {
    fn drop(&mut self) {
        if let Some(forward) = &mut self.forward {
            // It may have ended by itself, which is as good.
            let _ = forward.kill();
            let _ = forward.wait();
        }
    }
}
