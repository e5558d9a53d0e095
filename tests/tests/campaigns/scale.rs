//! A thousand services with ten pods each, on nodes of KWOK: what the operator costs, and how soon it is done.
//!
//! `WINDLASS_SCALE_SERVICES` makes it smaller. Limits are those of the design; the table is for people.

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use std::time::{Duration, Instant};
use windlass_tests::audit::Mark;
use windlass_tests::host::{HostOperator, Stage};
use windlass_tests::kwok::{self, Kwok, Responder};
use windlass_tests::namespace::{Namespace, skip, with_namespace};
use windlass_tests::operator;
use windlass_tests::process::{Usage, usage};
use windlass_tests::service::RESOURCE;
use windlass_tests::wait::{self, Look};

const PATIENCE: Duration = Duration::from_secs(1800);
const REST: Duration = Duration::from_secs(120);
/// Longer than the pause between two readings of an idle engine.
const STILL: Duration = Duration::from_secs(35);
const PODS: usize = 10;
const NODES: usize = 20;
/// Objects in one `kubectl apply`.
const BATCH: usize = 250;
const MAX_MEMORY_BYTES: u64 = 150_000_000;
const MAX_IDLE_CORES: f64 = 0.1;
const MAX_CORES_PER_1000_READS: f64 = 1.0;

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
        let kubeconfig = stage.kubeconfig()?;
        // The name of the installed operator's Lease: its role allows no other.
        let flags = ["--leader-elect", "--lease-name", operator::RELEASE];
        let mut table = Table::default();
        let mut operator = stage.operator(&kubeconfig, &flags)?;
        operator.wait_ready()?;

        let spec = with(&kwok.spec(), json!({"replicas": PODS}));
        let beginning = (Mark::now(&log)?, Instant::now());
        (0..services).step_by(BATCH).try_for_each(|from| apply(namespace, &spec, from..services.min(from + BATCH)))?;
        table.say("created", format!("{services} services in {:.0} s", beginning.1.elapsed().as_secs_f64()));
        all_ready(namespace, services)?;
        let calls = beginning.0.acts()?.len();
        table.say("all Ready after", format!("{:.0} s", beginning.1.elapsed().as_secs_f64()));
        table.say("requests to the API server", format!("{calls}, {:.1} a service", calls as f64 / services as f64));

        let (rest, idle) = (Mark::now(&log)?, rested(&operator)?);
        let (reads, quiet) = (responder.given(), rest_of(&operator, idle)?);
        let writes: Vec<_> = rest.acts()?.into_iter().filter(|act| act.writes()).collect();
        let reads = (responder.given() - reads) as f64 / REST.as_secs_f64();
        table
            .say("memory at rest, most so far", format!("{}, {} MB", quiet.memory / 1_000_000, quiet.peak / 1_000_000));
        table.say("CPU at rest", format!("{:.3} core with {reads:.0} readings a second", quiet.cores));
        table.say("writes at rest, its Lease aside", format!("{} in {} s", writes.len(), REST.as_secs()));

        operator.terminate()?;
        let (mark, restarted) = (Mark::now(&log)?, Instant::now());
        operator = stage.operator(&kubeconfig, &flags)?;
        operator.wait_ready()?;
        settled(&operator, services)?;
        let again = restarted.elapsed().as_secs_f64();
        let writes_after = mark.acts()?.into_iter().filter(|act| act.writes()).count();
        table.say("a new operator has looked at all after", format!("{again:.1} s, {writes_after} writes"));

        let changed = Instant::now();
        let peer = json!([{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "gateway"}}}]);
        let spec = with(&spec, json!({"network": {"allowFrom": peer}}));
        (0..services).step_by(BATCH).try_for_each(|from| apply(namespace, &spec, from..services.min(from + BATCH)))?;
        let applied = changed.elapsed();
        wait::until("every NetworkPolicy has followed", PATIENCE, || {
            let found =
                namespace.run(&["get", "networkpolicies", "-o", "jsonpath={.items[*].spec.ingress[0].from}"])?;
            let followed = found.matches("gateway").count();
            Ok(Look::when(followed == services, (), format!("{followed} have")))
        })?;
        let done = changed.elapsed();
        table.say(
            "a change of every service",
            format!("{:.0} s to write, followed {:.1} s later", applied.as_secs_f64(), (done - applied).as_secs_f64()),
        );

        let builtin = json!({"mode": "Builtin", "minReplicas": PODS, "maxReplicas": PODS,
            "targets": [{"metric": "TimeToFirstToken", "percentile": 95, "milliseconds": 500}]});
        let spec = with(&spec, json!({"autoscaling": builtin}));
        (0..services).step_by(BATCH).try_for_each(|from| apply(namespace, &spec, from..services.min(from + BATCH)))?;
        all_ready(namespace, services)?;
        let idle = rested(&operator)?;
        let before = responder.given();
        let busy = rest_of(&operator, idle)?;
        let reads = (responder.given() - before) as f64 / REST.as_secs_f64();
        let per_1000 = busy.cores / reads * 1000.0;
        table.say(
            "mode Builtin",
            format!("{:.3} core, {reads:.0} readings a second: {per_1000:.2} core for 1,000", busy.cores),
        );
        table.say(
            "memory in mode Builtin, most so far",
            format!("{}, {} MB", busy.memory / 1_000_000, busy.peak / 1_000_000),
        );

        println!("{}", table.0);
        ensure!(writes.is_empty(), "writes at rest: {:?}", &writes[..writes.len().min(5)]);
        ensure!(quiet.memory <= MAX_MEMORY_BYTES, "{} bytes at rest", quiet.memory);
        ensure!(quiet.cores <= MAX_IDLE_CORES, "{:.3} core at rest", quiet.cores);
        ensure!(per_1000 <= MAX_CORES_PER_1000_READS, "{per_1000:.2} core for 1,000 readings");
        Ok(())
    })
}

#[derive(Default)]
struct Table(String);

impl Table {
    fn say(&mut self, what: &str, figure: String) {
        eprintln!("{what}: {figure}");
        self.0 += &format!("| {what} | {figure} |\n");
    }
}

fn with(spec: &Value, patch: Value) -> Value {
    let mut merged = spec.clone();
    for (name, value) in patch.as_object().into_iter().flatten() {
        merged[name] = value.clone();
    }
    merged
}

fn apply(namespace: &Namespace, spec: &Value, numbers: std::ops::Range<usize>) -> Result<()> {
    let object = |number| {
        json!({
            "apiVersion": "windlass.dev/v1alpha1", "kind": "InferenceService",
            "metadata": {"name": format!("service-{number}")}, "spec": spec,
        })
    };
    namespace.apply(&numbers.map(object).collect::<Vec<_>>()).map(drop)
}

fn all_ready(namespace: &Namespace, services: usize) -> Result<()> {
    let path = "jsonpath={range .items[*]}{.metadata.generation}={.status.observedGeneration}{.status.conditions[?(@.type==\"Reconciling\")].status}{.status.conditions[?(@.type==\"Ready\")].status}{\"\\n\"}{end}";
    wait::until("every service is ready", PATIENCE, || {
        let found = namespace.run(&["get", RESOURCE, "-o", path])?;
        let is_ready = |line: &&str| {
            let seen = line.strip_suffix("FalseTrue").and_then(|rest| rest.split_once('='));
            seen.is_some_and(|(generation, observed)| generation == observed)
        };
        let ready = found.lines().filter(is_ready).count();
        Ok(Look::when(ready == services, (), format!("{ready} are")))
    })
}

/// Waits until it has stopped working off what came before.
fn rested(operator: &HostOperator) -> Result<(Instant, Usage)> {
    wait::until_still("the operator rests", PATIENCE, STILL, || operator.metric("windlass_operator_writes_total"))?;
    Ok((Instant::now(), usage(operator.id())?))
}

struct Cost {
    memory: u64,
    peak: u64,
    cores: f64,
}

fn rest_of(operator: &HostOperator, (since, before): (Instant, Usage)) -> Result<Cost> {
    std::thread::sleep(REST);
    let after = usage(operator.id())?;
    let cores = (after.cpu - before.cpu).as_secs_f64() / since.elapsed().as_secs_f64();
    Ok(Cost { memory: after.memory_bytes, peak: after.peak_memory_bytes, cores })
}

/// Waits until every service was reconciled once since the start.
fn settled(operator: &HostOperator, services: usize) -> Result<()> {
    wait::until("every service was reconciled", PATIENCE, || {
        let reconciles = operator.metric("windlass_operator_reconciles_total").context("no metrics")?;
        Ok(Look::when(reconciles >= services as f64, (), format!("{reconciles} reconciles")))
    })
}
