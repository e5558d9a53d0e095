//! Sieve's and Acto's patterns on a real API server, on pods of KWOK: killed after each write of a service's life, each
//! watch event lost once, an older view after each restart, two operators at once, every field of the resource
//! changed. States end as without them, and nothing is left.

use anyhow::{Result, ensure};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::time::Duration;
use windlass_tests::fault::{Fault, Proxy};
use windlass_tests::host::Stage;
use windlass_tests::kwok::{self, Kwok, Responder};
use windlass_tests::leaves;
use windlass_tests::life;
use windlass_tests::namespace::{Namespace, skip, with_namespace};
use windlass_tests::service::{RESOURCE, Service, pod_name};
use windlass_tests::sieve::Sieve;
use windlass_tests::wait::{self, Look};

const PATIENCE: Duration = Duration::from_secs(60);
/// An operator that writes nothing for so long has nothing to write: what a failed step is tried again after at first,
/// several times over.
const REST: Duration = Duration::from_secs(5);
/// A state that stays for so long is an end: the longest pause between two steps of a plan, and more.
const SETTLED: Duration = Duration::from_millis(1200);

/// Runs `test` with the installed operator away and pods that are ready at once.
fn on_kwok(name: &str, test: impl FnOnce(&Stage<'_>, &Namespace, Value) -> Result<()>) -> Result<()> {
    with_namespace(name, |namespace| {
        if !kwok::is_installed() || !namespace.cluster().is_own() {
            return skip("KWOK is not installed (tests/setup campaigns), or the cluster is not ours");
        }
        let stage = Stage::clear(namespace.cluster())?;
        let kwok = Kwok::start(namespace.cluster(), 2, stage.folder())?;
        let _responder = Responder::start(namespace.cluster())?;
        test(&stage, namespace, kwok.spec())
    })
}

/// Leads a life under each fault, and says all that went wrong.
fn each(sieve: &Sieve<'_>, clean: &Value, faults: impl Iterator<Item = Fault>) -> Result<()> {
    let (mut tried, mut wrong) = (0, Vec::new());
    for fault in faults.step_by(stride()) {
        tried += 1;
        match sieve.run(fault) {
            Ok(run) if run.end == *clean => {}
            Ok(run) => wrong.push(format!("{fault:?} ends otherwise: {:#}", run.end)),
            Err(error) => wrong.push(format!("{fault:?}: {error:#}")),
        }
    }
    println!("{tried} faults, {} of them changed the end", wrong.len());
    ensure!(wrong.is_empty(), "{}", wrong.join("\n\n"));
    Ok(())
}

/// `WINDLASS_FAULTS_STRIDE=n` tries every n-th fault, and every n-th change, alone.
fn stride() -> usize {
    std::env::var("WINDLASS_FAULTS_STRIDE").ok().and_then(|text| text.parse().ok()).filter(|n| *n > 0).unwrap_or(1)
}

#[test]
fn killed_after_each_write() -> Result<()> {
    on_kwok("killed", |stage, namespace, spec| {
        let sieve = Sieve::new(stage, namespace, spec, life::steps())?;
        let clean = sieve.run(Fault::None)?;
        println!("a life of {} steps has {} writes", life::steps().len(), clean.writes);
        each(&sieve, &clean.end, (1..=clean.writes).map(Fault::LoseAnswer))
    })
}

#[test]
fn each_event_lost_once() -> Result<()> {
    on_kwok("deaf", |stage, namespace, spec| {
        let sieve = Sieve::new(stage, namespace, spec, life::steps())?;
        let clean = sieve.run(Fault::None)?;
        println!("a life of {} steps has {} events", life::steps().len(), clean.events);
        // How events are bundled differs a little from life to life.
        each(&sieve, &clean.end, (1..=clean.events * 9 / 10).map(Fault::LoseEvent))
    })
}

#[test]
fn an_older_view_after_a_restart_deletes_nothing() -> Result<()> {
    on_kwok("stale", |stage, namespace, spec| {
        let (_api, address) = stage.plain_api()?;
        let proxy = Proxy::start(address)?;
        let kubeconfig = stage.plain_kubeconfig(proxy.address())?;
        let flags = ["--namespace", namespace.name()];
        // Lists are remembered as they are at this operator's start, before anything exists.
        let mut operator = stage.operator(&kubeconfig, &flags)?;
        operator.wait_ready()?;
        let service = Service::apply(namespace, "seen", &spec)?;
        service.wait_ready(1, PATIENCE)?;
        for (replicas, patch) in
            [(3, json!({"replicas": 3})), (3, json!({"drainTimeoutSeconds": 61})), (5, json!({"replicas": 5}))]
        {
            service.patch(&json!({"spec": patch}))?;
            service.wait_condition("Reconciling", "False", None, PATIENCE)?;
            service.wait_ready(replicas, PATIENCE)?;
            let (pods, state) = (names(&service)?, life::state(namespace)?);
            proxy.set(Fault::StaleLists);
            operator.kill();
            operator = stage.operator(&kubeconfig, &flags)?;
            operator.wait_ready()?;
            ensure!(proxy.is_done(), "no list was stale");
            wait::until_still("the operator has come to rest", PATIENCE, REST, || Ok(proxy.writes().len()))?;
            let deletes: Vec<_> = proxy.writes().into_iter().filter(|write| write.method == "DELETE").collect();
            ensure!(deletes.is_empty(), "an older view has deleted: {deletes:?}");
            ensure!(names(&service)? == pods, "pods were {pods:?} and are {:?}", names(&service)?);
            let after = life::state(namespace)?;
            ensure!(after == state, "{after:#} instead of {state:#}");
            // The next older view is the one that this operator has listed.
            proxy.set(Fault::None);
            proxy.forget_lists();
            operator.kill();
            operator = stage.operator(&kubeconfig, &flags)?;
            operator.wait_ready()?;
        }
        Ok(())
    })
}

#[test]
fn two_operators_end_where_one_does() -> Result<()> {
    on_kwok("two", |stage, namespace, spec| {
        let kubeconfig = stage.kubeconfig()?;
        let flags = ["--namespace", namespace.name()];
        let one = stage.operator(&kubeconfig, &flags)?;
        let alone = life::lead(namespace, &spec, &life::steps())?;
        let writes = one.metric("windlass_operator_writes_total")?;
        // Neither asks for a Lease: both act, as when a leader has not noticed yet that it is none.
        let other = stage.operator(&kubeconfig, &flags)?;
        let together = life::lead(namespace, &spec, &life::steps())?;
        ensure!(together == alone, "{together:#} instead of {alone:#}");
        let both =
            one.metric("windlass_operator_writes_total")? - writes + other.metric("windlass_operator_writes_total")?;
        println!("alone {writes} writes, two together {both}");
        ensure!(both < 10.0 * writes, "they fight: {both} writes instead of {writes}");
        Ok(())
    })
}

#[test]
fn every_field_changed_ends_as_if_it_had_always_been_so() -> Result<()> {
    on_kwok("fields", |stage, namespace, spec| {
        let kubeconfig = stage.kubeconfig()?;
        let mut operator = stage.operator(&kubeconfig, &["--namespace", namespace.name()])?;
        operator.wait_ready()?;
        let missing: Vec<_> = leaves::all()?.difference(&covered(&spec)).cloned().collect();
        ensure!(missing.is_empty(), "no change covers {missing:?}");
        let base = ended(namespace, &spec, &[])?;
        let (mut wrong, changes) = (Vec::new(), leaves::changes());
        let changes: Vec<_> = changes.iter().step_by(stride()).collect();
        for (name, patch) in &changes {
            let outcome = (|| {
                let fresh = ended(namespace, &spec, std::slice::from_ref(patch))?;
                let changed = ended(namespace, &spec, &[json!({}), patch.clone()])?;
                ensure!(changed == fresh, "changed to it: {changed:#}, made with it: {fresh:#}");
                let back = ended(namespace, &spec, &[patch.clone(), leaves::undone(patch, &spec)])?;
                ensure!(back == base, "changed back: {back:#}, never changed: {base:#}");
                ensure!(!operator.has_ended(), "the operator has ended: {}", operator.log());
                Ok(())
            })();
            wrong.extend(outcome.err().map(|error| format!("{name}: {error:#}")));
        }
        println!("{} changes of {} fields, {} end otherwise", changes.len() * 3, leaves::all()?.len(), wrong.len());
        ensure!(wrong.is_empty(), "{}", wrong.join("\n\n"));
        Ok(())
    })
}

fn covered(spec: &Value) -> BTreeSet<String> {
    let changes = leaves::changes();
    changes.iter().map(|(_, patch)| patch).chain([spec]).flat_map(leaves::of_value).collect()
}

/// The state after a service was made with the first of `patches` and changed by each of the others in turn.
fn ended(namespace: &Namespace, spec: &Value, patches: &[Value]) -> Result<Value> {
    let mut first = spec.clone();
    if let Some(patch) = patches.first() {
        leaves::merge(&mut first, patch);
    }
    let service = Service::apply(namespace, "changed", &first)?;
    settled(namespace, &service)?;
    for patch in patches.iter().skip(1) {
        service.patch(&json!({"spec": patch}))?;
        settled(namespace, &service)?;
    }
    let state = life::state(namespace)?;
    service.delete()?;
    wait::until("the service and its children are gone", PATIENCE, || {
        let left = namespace.run(&["get", &format!("{RESOURCE},deployments,pods,services"), "-o", "name"])?;
        Ok(Look::when(left.trim().is_empty(), (), left))
    })?;
    Ok(state)
}

/// Waits until the operator has seen the spec and nothing changes any more, nor is anything about to begin; whether it
/// can be served is another matter.
fn settled(namespace: &Namespace, service: &Service<'_>) -> Result<()> {
    wait::until("the operator has seen the spec", PATIENCE, || {
        let found = service.read()?;
        let status = found.status.unwrap_or_default();
        let begins = status.conditions.iter().any(|condition| condition.reason == "AutoscalerStarting");
        let (observed, newest) = (status.observed_generation, found.metadata.generation);
        Ok(Look::when(observed == newest && !begins, (), format!("{observed:?}, {:?}", status.conditions)))
    })?;
    wait::until_still("the state has settled", PATIENCE, SETTLED, || life::state(namespace)).map(drop)
}

fn names(service: &Service<'_>) -> Result<BTreeSet<String>> {
    Ok(service.pods()?.iter().map(|pod| pod_name(pod).to_owned()).collect())
}
