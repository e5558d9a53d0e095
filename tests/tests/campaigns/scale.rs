//! A thousand services with ten pods each, on nodes of KWOK: what the operator costs, and how soon it is done.
//!
//! `WINDLASS_SCALE_SERVICES` makes it smaller. Limits are those of the design; the table is for people.

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use std::path::PathBuf;
use std::time::{Duration, Instant};
use windlass_tests::audit::{Act, Mark};
use windlass_tests::host::{HostOperator, Stage};
use windlass_tests::kwok::{self, Kwok, Responder};
use windlass_tests::namespace::{Namespace, skip, with_namespace};
use windlass_tests::operator;
use windlass_tests::process::usage;
use windlass_tests::service::RESOURCE;
use windlass_tests::wait::{self, Look};

const PATIENCE: Duration = Duration::from_secs(1800);
const REST: Duration = Duration::from_secs(120);
/// Longer than the pause between two readings of an idle engine.
const STILL: Duration = Duration::from_secs(35);
/// For a rate that is looked at.
const LOOK: Duration = Duration::from_secs(10);
const PODS: usize = 10;
const NODES: usize = 20;
/// Objects in one `kubectl apply`.
const BATCH: usize = 250;
const MAX_MEMORY_BYTES: u64 = 150_000_000;
const MAX_IDLE_CORES: f64 = 0.1;
const MAX_CORES_PER_1000_READS: f64 = 1.0;
/// The name of the installed operator's Lease: its role allows no other.
const FLAGS: [&str; 3] = ["--leader-elect", "--lease-name", operator::RELEASE];

#[test]
fn a_thousand_services_are_served_in_bounds() -> Result<()> {
    with_namespace("scale", |namespace| {
        let Some(log) = namespace.cluster().audit_log().filter(|_| kwok::is_installed()) else {
            return skip("KWOK is not installed (tests/setup campaigns), or the cluster is not ours");
        };
        let services = std::env::var("WINDLASS_SCALE_SERVICES").ok().and_then(|text| text.parse().ok()).unwrap_or(1000);
        let stage = Stage::clear(namespace.cluster())?;
        let kwok = Kwok::start(namespace.cluster(), NODES, stage.folder())?;
        let responder = Responder::start(namespace.cluster())?;
        let spec = with(&kwok.spec(), json!({"replicas": PODS}));
        let mut crowd = Crowd { namespace, services, log, responder, spec, table: String::new() };

        let kubeconfig = stage.kubeconfig()?;
        let mut operator = stage.operator(&kubeconfig, &FLAGS)?;
        operator.wait_ready()?;
        crowd.is_made()?;
        let rest = crowd.rests(&operator)?;
        operator.terminate()?;
        let mut operator = stage.operator(&kubeconfig, &FLAGS)?;
        crowd.is_taken_over(&mut operator)?;
        crowd.changes()?;
        let idle = crowd.is_scaled_by_load(&operator)?;
        let busy = crowd.has_traffic(&operator, &idle)?;

        println!("{}", crowd.table);
        ensure!(rest.memory <= MAX_MEMORY_BYTES, "{} bytes at rest", rest.memory);
        ensure!(rest.cores <= MAX_IDLE_CORES, "{:.3} core at rest", rest.cores);
        for cost in [idle, busy] {
            let per_1000 = cost.cores / cost.reads * 1000.0;
            ensure!(per_1000 <= MAX_CORES_PER_1000_READS, "{per_1000:.2} core for 1,000 readings");
        }
        Ok(())
    })
}

/// The services, all alike, and what was measured of them.
struct Crowd<'a> {
    namespace: &'a Namespace,
    services: usize,
    log: PathBuf,
    responder: Responder,
    spec: Value,
    table: String,
}

/// What the operator took.
struct Cost {
    memory: u64,
    cores: f64,
    /// Readings of engines a second.
    reads: f64,
}

impl Crowd<'_> {
    fn is_made(&mut self) -> Result<()> {
        let (mark, began) = (Mark::now(&self.log)?, Instant::now());
        self.apply(json!({}))?;
        self.say("created", format!("{} services in {:.0} s", self.services, began.elapsed().as_secs_f64()));
        self.all_ready()?;
        let calls = mark.acts()?.len();
        self.say("all Ready after", format!("{:.0} s", began.elapsed().as_secs_f64()));
        self.say(
            "requests to the API server",
            format!("{calls}, {:.1} a service", calls as f64 / self.services as f64),
        );
        Ok(())
    }

    fn rests(&mut self, operator: &HostOperator) -> Result<Cost> {
        rested(operator)?;
        let mark = Mark::now(&self.log)?;
        let cost = self.watch("at rest", operator)?;
        let writes = writes_since(&mark)?;
        self.say("writes at rest, its Lease aside", format!("{} in {} s", writes.len(), REST.as_secs()));
        ensure!(writes.is_empty(), "writes at rest: {:?}", &writes[..writes.len().min(5)]);
        Ok(cost)
    }

    /// A new operator looks at every service, and finds nothing to do.
    fn is_taken_over(&mut self, operator: &mut HostOperator) -> Result<()> {
        let (mark, began) = (Mark::now(&self.log)?, Instant::now());
        operator.wait_ready()?;
        wait::until("every service was reconciled", PATIENCE, || {
            let reconciles = operator.metric("windlass_operator_reconciles_total").context("no metrics")?;
            Ok(Look::when(reconciles >= self.services as f64, (), format!("{reconciles} reconciles")))
        })?;
        let seconds = began.elapsed().as_secs_f64();
        let writes = writes_since(&mark)?;
        self.say("a new operator has looked at all after", format!("{seconds:.1} s, {} writes", writes.len()));
        ensure!(writes.is_empty(), "a new operator writes: {:?}", &writes[..writes.len().min(5)]);
        Ok(())
    }

    /// Every service at once lets a gateway in.
    fn changes(&mut self) -> Result<()> {
        let began = Instant::now();
        let peer = json!([{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "gateway"}}}]);
        self.apply(json!({"network": {"allowFrom": peer}}))?;
        let applied = began.elapsed();
        wait::until("every NetworkPolicy has followed", PATIENCE, || {
            let peers = "jsonpath={.items[*].spec.ingress[0].from}";
            let followed = self.namespace.run(&["get", "networkpolicies", "-o", peers])?.matches("gateway").count();
            Ok(Look::when(followed == self.services, (), format!("{followed} have")))
        })?;
        let (written, after) = (applied.as_secs_f64(), (began.elapsed() - applied).as_secs_f64());
        self.say("a change of every service", format!("{written:.0} s to write, followed {after:.1} s later"));
        Ok(())
    }

    fn is_scaled_by_load(&mut self, operator: &HostOperator) -> Result<Cost> {
        self.apply(json!({"autoscaling": {
            "mode": "Builtin", "minReplicas": PODS, "maxReplicas": PODS,
            "targets": [{"metric": "TimeToFirstToken", "percentile": 95, "milliseconds": 500}],
        }}))?;
        self.all_ready()?;
        rested(operator)?;
        self.watch("mode Builtin, idle engines", operator)
    }

    fn has_traffic(&mut self, operator: &HostOperator, idle: &Cost) -> Result<Cost> {
        self.responder.begin_traffic();
        wait::until("traffic is noticed", PATIENCE, || {
            let reads = self.readings_a_second();
            Ok(Look::when(reads > 1.5 * idle.reads, (), format!("{reads:.0} readings a second")))
        })?;
        let mark = Mark::now(&self.log)?;
        let cost = self.watch("mode Builtin, traffic in each engine", operator)?;
        self.say("writes in traffic", format!("{} in {} s", writes_since(&mark)?.len(), REST.as_secs()));
        Ok(cost)
    }

    fn readings_a_second(&self) -> f64 {
        let (given, since) = (self.responder.given(), Instant::now());
        std::thread::sleep(LOOK);
        (self.responder.given() - given) as f64 / since.elapsed().as_secs_f64()
    }

    /// Watches the operator for a while, and says what it took.
    fn watch(&mut self, when: &str, operator: &HostOperator) -> Result<Cost> {
        let (since, given, before) = (Instant::now(), self.responder.given(), usage(operator.id())?);
        std::thread::sleep(REST);
        let (seconds, after) = (since.elapsed().as_secs_f64(), usage(operator.id())?);
        let memory = after.memory_bytes;
        let cores = (after.cpu - before.cpu).as_secs_f64() / seconds;
        let reads = (self.responder.given() - given) as f64 / seconds;
        let [now, most] = [memory, after.peak_memory_bytes].map(|bytes| bytes / 1_000_000);
        self.say(when, format!("{cores:.3} core, {reads:.0} readings a second, {now} MB, {most} MB at most so far"));
        Ok(Cost { memory, cores, reads })
    }

    /// Gives every service what it has and `patch`.
    fn apply(&mut self, patch: Value) -> Result<()> {
        self.spec = with(&self.spec, patch);
        let object = |number| {
            json!({
                "apiVersion": "windlass.dev/v1alpha1", "kind": "InferenceService",
                "metadata": {"name": format!("service-{number}")}, "spec": self.spec,
            })
        };
        let objects: Vec<Value> = (0..self.services).map(object).collect();
        objects.chunks(BATCH).try_for_each(|batch| self.namespace.apply(batch).map(drop))
    }

    fn all_ready(&self) -> Result<()> {
        let path = "jsonpath={range .items[*]}{.metadata.generation}={.status.observedGeneration}{.status.conditions[?(@.type==\"Reconciling\")].status}{.status.conditions[?(@.type==\"Ready\")].status}{\"\\n\"}{end}";
        wait::until("every service is ready", PATIENCE, || {
            let found = self.namespace.run(&["get", RESOURCE, "-o", path])?;
            let is_ready = |line: &&str| {
                let seen = line.strip_suffix("FalseTrue").and_then(|rest| rest.split_once('='));
                seen.is_some_and(|(generation, observed)| generation == observed)
            };
            let ready = found.lines().filter(is_ready).count();
            Ok(Look::when(ready == self.services, (), format!("{ready} are")))
        })
    }

    fn say(&mut self, what: &str, figure: String) {
        eprintln!("{what}: {figure}");
        self.table += &format!("| {what} | {figure} |\n");
    }
}

fn with(spec: &Value, patch: Value) -> Value {
    let mut merged = spec.clone();
    for (name, value) in patch.as_object().into_iter().flatten() {
        merged[name] = value.clone();
    }
    merged
}

/// What the operator wrote since, its Lease aside.
fn writes_since(mark: &Mark) -> Result<Vec<Act>> {
    Ok(mark.acts()?.into_iter().filter(Act::writes).collect())
}

/// Waits until it has stopped working off what came before.
fn rested(operator: &HostOperator) -> Result<()> {
    let writes = || operator.metric("windlass_operator_writes_total");
    wait::until_still("the operator rests", PATIENCE, STILL, writes).map(drop)
}
