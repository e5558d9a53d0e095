//! A service's life, told in steps.

use anyhow::{Context, Result};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::time::Duration;

use crate::service::is_ready;
use crate::state::State;
use crate::subject::Subject;
use crate::wait::{self, Look};

/// How long a step may take, faults included.
const PATIENCE: Duration = Duration::from_secs(60);

/// One step: a change of the spec, and how many pods of each workload serve when it has come to its end.
#[derive(Clone, Debug)]
pub struct Step {
    /// Its name.
    pub name: &'static str,
    /// Merged into the spec.
    pub patch: Value,
    /// Pods on demand and on spot.
    pub pods: (usize, usize),
}

/// Create, scale out, roll, inspect the model and roll, move to spot and back, scale in, by load, by the cluster's own
/// autoscaler, and by hand again.
pub fn steps() -> Vec<Step> {
    let step = |name, patch, pods| Step { name, patch, pods };
    vec![
        step("create", json!({}), (1, 0)),
        step("scale out", json!({"replicas": 3}), (3, 0)),
        step("roll", json!({"drainTimeoutSeconds": 61}), (3, 0)),
        // An engine that is not simulated: a Job reads its model's header before its pods are made.
        step("inspect the model", json!({"engine": {"extraArgs": null}}), (3, 0)),
        step("move to spot", json!({"spot": {"mode": "Prefer", "onDemandBase": 1}}), (1, 2)),
        step("lose spot", json!({"spot": {"mode": "Never", "onDemandBase": null}}), (3, 0)),
        step("scale in", json!({"replicas": 1}), (1, 0)),
        step("scale by load", json!({"autoscaling": autoscaled("Builtin", 2)}), (2, 0)),
        // No metrics API is there: it keeps what it finds.
        step("scale by the cluster", json!({"replicas": 2, "autoscaling": autoscaled("HPA", 1)}), (2, 0)),
        step("scale by hand", json!({"replicas": 1, "autoscaling": null}), (1, 0)),
    ]
}

fn autoscaled(mode: &str, least: u32) -> Value {
    let target = json!({"metric": "TimeToFirstToken", "percentile": 95, "milliseconds": 500});
    json!({"mode": mode, "minReplicas": least, "maxReplicas": 3, "targets": [target]})
}

/// Leads a service of `spec` through `steps`, each to its end.
///
/// # Errors
/// When a step does not come to its end, with its name, or something is left in the end.
pub fn lead(subject: &Subject<'_>, spec: &Value, steps: &[Step]) -> Result<State> {
    subject.live(spec, || steps.iter().try_for_each(|step| take(subject, step)))
}

fn take(subject: &Subject<'_>, step: &Step) -> Result<()> {
    subject.change(&step.patch)?;
    settle(subject, step).with_context(|| format!("step `{}`", step.name))
}

fn settle(subject: &Subject<'_>, step: &Step) -> Result<()> {
    wait::until("the service has settled", PATIENCE, || {
        let found = subject.read()?;
        let status = found.status.unwrap_or_default();
        let holds = |kind: &str, value: &str| {
            status.conditions.iter().any(|condition| {
                condition.type_ == kind
                    && condition.status == value
                    && condition.observed_generation == found.metadata.generation
            })
        };
        let pods = subject.pods()?;
        let of = |workload: &str| {
            let is_it = |labels: &BTreeMap<String, String>| {
                labels.get("windlass.dev/workload").is_some_and(|found| found == workload)
            };
            pods.iter().filter(|pod| pod.metadata.labels.as_ref().is_some_and(is_it)).count()
        };
        let counted = (of("on-demand"), of("spot"));
        let ready = pods.iter().filter(|pod| is_ready(pod)).count();
        let is_settled = holds("Ready", "True") && holds("Reconciling", "False") && ready == pods.len();
        let seen = format!("pods {counted:?}, {ready} ready, {:?}", status.conditions);
        Ok(Look::when(is_settled && counted == step.pods, (), seen))
    })
}
