//! Sieve's and Acto's patterns on a real API server, on pods of KWOK: killed after each write of a service's life, each
//! watch event lost once, an older view after each restart, two operators at once, every field of the resource
//! changed. States end as without them, and nothing is left.

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::available_parallelism;
use std::time::Duration;
use windlass_tests::fault::{Fault, Proxy};
use windlass_tests::host::{HostOperator, Stage};
use windlass_tests::kwok::{self, Kwok, Responder};
use windlass_tests::namespace::{Namespace, skip, with_namespaces};
use windlass_tests::service::{Service, pod_name};
use windlass_tests::sieve::{Run, Sieve};
use windlass_tests::state::State;
use windlass_tests::subject::Subject;
use windlass_tests::wait::{self, Look};
use windlass_tests::{lanes, leaves, life};

const PATIENCE: Duration = Duration::from_secs(60);
/// An operator that writes nothing for so long has nothing to write: what a failed step is tried again after at first,
/// several times over.
const REST: Duration = Duration::from_secs(5);
/// A state that stays for so long is an end: the longest pause between two steps of a plan, and more.
const SETTLED: Duration = Duration::from_millis(1200);
/// Reasons for which something is about to come that the operator waits for.
const BEGINNINGS: [&str; 2] = ["AutoscalerStarting", "VerifyingConfiguration"];

/// Runs `test` with the installed operator away and pods that are ready at once, in so many namespaces.
fn on_kwok(name: &str, count: usize, test: impl FnOnce(&Stage<'_>, &[Namespace], Value) -> Result<()>) -> Result<()> {
    with_namespaces(name, count, |namespaces| {
        let cluster = namespaces[0].cluster();
        if !kwok::is_installed() || !cluster.is_own() {
            return skip("KWOK is not installed (tests/setup campaigns), or the cluster is not ours");
        }
        let stage = Stage::clear(cluster)?;
        let kwok = Kwok::start(cluster, 2, stage.folder())?;
        let _responder = Responder::start(cluster)?;
        test(&stage, namespaces, kwok.spec())
    })
}

/// Leads a life under each of the faults that `of` a clean one follow.
fn lives(name: &str, of: impl FnOnce(&Run) -> Vec<Fault>) -> Result<()> {
    on_kwok(name, lanes()?, |stage, namespaces, spec| {
        let sieve = |namespace| Sieve::new(stage, namespace, spec.clone(), life::steps());
        let sieves: Vec<_> = namespaces.iter().map(sieve).collect::<Result<_>>()?;
        let clean = sieves[0].run(Fault::None, None)?;
        println!("a life of {} steps has {} writes and {} events", life::steps().len(), clean.writes, clean.events);
        let faults = chosen(of(&clean).into_iter().map(|fault| (format!("{fault:?}"), fault)))?;
        let unmet = AtomicUsize::new(0);
        lanes::each(&sieves, &faults, |sieve, fault| {
            let run = sieve.run(*fault, Some(&clean.end))?;
            unmet.fetch_add(usize::from(!run.is_met), Ordering::Relaxed);
            Ok(())
        })?;
        let unmet = unmet.into_inner();
        println!("{} faults changed no end, {unmet} lives were over before theirs", faults.len() - unmet);
        ensure!(unmet <= 1 + faults.len() / 10, "lives differ in how often they are written to, but not that much");
        Ok(())
    })
}

/// Of each of so many, and a few more: no two lives have quite as many.
fn of_each(count: usize, fault: impl Fn(usize) -> Fault) -> Vec<Fault> {
    (1..=count + count / 20).map(fault).collect()
}

/// `WINDLASS_FAULTS_LANES=n` leads so many lives side by side.
fn lanes() -> Result<usize> {
    let lanes = number("WINDLASS_FAULTS_LANES")?;
    Ok(lanes.unwrap_or(3 * available_parallelism()?.get()))
}

/// `WINDLASS_FAULTS_STRIDE=n` tries every n-th fault and every n-th change alone, `WINDLASS_FAULTS_ONLY=name,name` those
/// of that name.
fn chosen<T>(tasks: impl Iterator<Item = (String, T)>) -> Result<Vec<(String, T)>> {
    let only = std::env::var("WINDLASS_FAULTS_ONLY").ok();
    let is_asked = |name: &str| only.as_ref().is_none_or(|only| only.split(',').any(|asked| asked == name));
    let tasks = tasks.step_by(number("WINDLASS_FAULTS_STRIDE")?.unwrap_or(1));
    Ok(tasks.filter(|(name, _)| is_asked(name)).collect())
}

fn number(variable: &str) -> Result<Option<usize>> {
    let Ok(text) = std::env::var(variable) else { return Ok(None) };
    let number = text.parse().ok().filter(|number| *number > 0);
    number.map(Some).with_context(|| format!("{variable} is `{text}`; it is to be a number from 1"))
}

#[test]
fn killed_after_each_write() -> Result<()> {
    lives("killed", |clean| of_each(clean.writes, Fault::LoseAnswer))
}

#[test]
fn each_event_lost_once() -> Result<()> {
    lives("deaf", |clean| of_each(clean.events, Fault::LoseEvent))
}

#[test]
fn an_older_view_after_a_restart_deletes_nothing() -> Result<()> {
    on_kwok("stale", 1, |stage, namespaces, spec| {
        let namespace = &namespaces[0];
        let api = stage.operators_api()?;
        let proxy = Proxy::start(api.address())?;
        let kubeconfig = stage.plain_kubeconfig(proxy.address())?;
        let flags = ["--namespace", namespace.name()];
        // Lists are remembered as they are at this operator's start, before anything exists.
        let mut operator = stage.operator(&kubeconfig, &flags)?;
        operator.wait_ready()?;
        let service = Service::apply(namespace, "seen", &spec)?;
        let subject = Subject::named(stage.api(), namespace, "seen");
        service.wait_ready(1, PATIENCE)?;
        for (replicas, patch) in
            [(3, json!({"replicas": 3})), (3, json!({"drainTimeoutSeconds": 61})), (5, json!({"replicas": 5}))]
        {
            service.patch(&json!({"spec": patch}))?;
            service.wait_condition("Reconciling", "False", None, PATIENCE)?;
            service.wait_ready(replicas, PATIENCE)?;
            let (pods, state) = (names(&subject)?, subject.state()?);
            proxy.set(Fault::StaleLists);
            operator.kill();
            operator = stage.operator(&kubeconfig, &flags)?;
            operator.wait_ready()?;
            ensure!(proxy.is_done(), "no list was stale");
            wait::until_still("the operator has come to rest", PATIENCE, REST, || Ok(proxy.writes().len()))?;
            let deletes: Vec<_> = proxy.writes().into_iter().filter(|write| write.method == "DELETE").collect();
            ensure!(deletes.is_empty(), "an older view has deleted: {deletes:?}");
            let left = names(&subject)?;
            ensure!(left == pods, "pods were {pods:?} and are {left:?}");
            subject.state()?.ensure_is(&state)?;
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
    on_kwok("two", 1, |stage, namespaces, spec| {
        let namespace = &namespaces[0];
        let subject = Subject::named(stage.api(), namespace, "life");
        let kubeconfig = stage.kubeconfig()?;
        let flags = ["--namespace", namespace.name()];
        let one = stage.operator(&kubeconfig, &flags)?;
        let alone = life::lead(&subject, &spec, &life::steps())?;
        let writes = one.metric("windlass_operator_writes_total")?;
        // Neither asks for a Lease: both act, as when a leader has not noticed yet that it is none.
        let other = stage.operator(&kubeconfig, &flags)?;
        let together = life::lead(&subject, &spec, &life::steps())?;
        together.ensure_is(&alone)?;
        let both =
            one.metric("windlass_operator_writes_total")? - writes + other.metric("windlass_operator_writes_total")?;
        println!("alone {writes} writes, two together {both}");
        ensure!(both < 10.0 * writes, "they fight: {both} writes instead of {writes}");
        Ok(())
    })
}

#[test]
fn every_field_changed_ends_as_if_it_had_always_been_so() -> Result<()> {
    on_kwok("fields", lanes()?, |stage, namespaces, spec| {
        let lane = |namespace| Lane::start(stage, namespace, &spec);
        let lanes: Vec<_> = namespaces.iter().map(lane).collect::<Result<_>>()?;
        let base = lanes[0].ended(&[])?;
        let changes = chosen(leaves::changes().into_iter().map(|(name, patch)| (name.to_owned(), patch)))?;
        lanes::each(&lanes, &changes, |lane, patch| lane.change(patch, &base))?;
        println!("{} changes of {} fields end alike", changes.len() * 3, leaves::all()?.len());
        Ok(())
    })
}

/// A namespace and its operator, for services of `spec`.
struct Lane<'a> {
    subject: Subject<'a>,
    operator: HostOperator,
    spec: &'a Value,
}

impl<'a> Lane<'a> {
    fn start(stage: &'a Stage<'_>, namespace: &'a Namespace, spec: &'a Value) -> Result<Lane<'a>> {
        let mut operator = stage.operator(&stage.kubeconfig()?, &["--namespace", namespace.name()])?;
        operator.wait_ready()?;
        Ok(Lane { subject: Subject::named(stage.api(), namespace, "changed"), operator, spec })
    }

    /// A service changed to `patch` ends as one made with it, and one changed back as `base`, which never was changed. A
    /// patch that is refused leaves what there is.
    fn change(&self, patch: &Value, base: &State) -> Result<()> {
        let outcome = (|| {
            let fresh = self.ended(std::slice::from_ref(patch))?;
            let changed = self.ended(&[json!({}), patch.clone()])?;
            match fresh.has("deployments") {
                true => changed.ensure_is(&fresh).context("changed to it instead of made with it")?,
                false => changed.children().ensure_is(&base.children()).context("refused instead of never asked")?,
            }
            let back = self.ended(&[patch.clone(), leaves::undone(patch, self.spec)])?;
            back.ensure_is(base).context("changed back instead of never changed")
        })();
        self.operator.with_log(outcome)
    }

    /// The state after a service was made with the first of `patches` and changed by each of the others in turn.
    fn ended(&self, patches: &[Value]) -> Result<State> {
        let mut first = self.spec.clone();
        patches.first().into_iter().for_each(|patch| leaves::merge(&mut first, patch));
        let change = |patch| self.subject.change(patch).and_then(|()| self.settled());
        self.subject.live(&first, || self.settled().and_then(|()| patches.iter().skip(1).try_for_each(change)))
    }

    /// Waits until nothing changes any more where the operator has seen the spec and nothing is about to begin; whether it can
    /// be served is another matter.
    fn settled(&self) -> Result<()> {
        wait::until("the operator has seen the spec", PATIENCE, || {
            wait::until_still("the state has settled", PATIENCE, SETTLED, || self.subject.state())?;
            let found = self.subject.read()?;
            let status = found.status.unwrap_or_default();
            let begins = status.conditions.iter().any(|condition| BEGINNINGS.contains(&condition.reason.as_str()));
            let (observed, newest) = (status.observed_generation, found.metadata.generation);
            Ok(Look::when(observed == newest && !begins, (), format!("{observed:?}, {:?}", status.conditions)))
        })
    }
}

fn names(subject: &Subject<'_>) -> Result<BTreeSet<String>> {
    Ok(subject.pods()?.iter().map(|pod| pod_name(pod).to_owned()).collect())
}
