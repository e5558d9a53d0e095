//! The operator is upgraded, rolled back, confined, made to fail over and removed, while services serve on.

use anyhow::{Context, Result, ensure};
use k8s_openapi::api::apps::v1::Deployment;
use serde_json::json;
use std::collections::BTreeSet;
use std::time::Duration;
use windlass_tests::chat::{self, Client};
use windlass_tests::cluster::Cluster;
use windlass_tests::load::Load;
use windlass_tests::namespace::{Namespace, with_namespace, with_own_nodes};
use windlass_tests::operator::{self, Installation};
use windlass_tests::service::{self, Service};
use windlass_tests::wait::{self, Look};

use crate::guarded_metrics;

const PATIENCE: Duration = Duration::from_secs(90);

#[test]
fn upgrade_failover_and_rollback_touch_no_pod() -> Result<()> {
    with_namespace("upgrade", |namespace| {
        let service = Service::apply(namespace, "old", &service::simulated(&[]))?;
        service.wait_ready(1, PATIENCE)?;
        let before = Seen::of(namespace, &service)?;
        let installation = Installation::of(namespace.cluster())?;
        // Another version: other engine image by default, other flags, one replica more, and metrics that are guarded.
        let guarded = guarded_metrics::values(namespace);
        let other = ["engine.image.tag=of-another-version", "replicas=2", "scrape.idleSeconds=20"];
        installation.upgrade(&other.into_iter().chain(guarded.iter().map(String::as_str)).collect::<Vec<_>>())?;
        follow(&service, 2)?;
        ensure!(Seen::of(namespace, &service)?.keeps(&before), "the upgrade has touched a pod");
        if namespace.cluster().is_own() {
            guarded_metrics::are_for_readers_alone(namespace)?;
        }

        kill_leader(namespace.cluster())?;
        follow(&service, 1)?;
        follow(&service, 2)?;

        installation.roll_back()?;
        follow(&service, 1)?;
        let after = Seen::of(namespace, &service)?;
        ensure!(after.template == before.template, "the template has changed: {before:?}, then {after:?}");
        Ok(())
    })
}

#[test]
fn uninstalling_leaves_services_serving() -> Result<()> {
    with_namespace("uninstall", |namespace| {
        let service = Service::apply(namespace, "left", &service::simulated(&[]))?;
        service.wait_ready(1, PATIENCE)?;
        let before = Seen::of(namespace, &service)?;
        let reach = service.reach()?;
        let load = Load::start(&Client::pooled(reach.url()), 1, |_| chat::request("left", "Are you there?", 10));
        let installation = Installation::of(namespace.cluster())?;
        installation.remove()?;
        let alone = Seen::of(namespace, &service);
        let answered = load.completed();
        let served = wait::until("requests are answered without an operator", PATIENCE, || {
            let more = load.completed() - answered;
            Ok(Look::when(more >= 5, (), format!("{more} more")))
        });
        installation.restore()?;
        served?;
        follow(&service, 2)?;
        let report = load.stop();
        ensure!(report.failures.is_empty(), "{:?}", report.failures);
        ensure!(alone? == before, "removing the charts has touched a pod");
        ensure!(Seen::of(namespace, &service)?.keeps(&before), "installing them again has touched a pod");
        Ok(())
    })
}

#[test]
fn an_operator_of_one_namespace_has_a_role_there_and_leaves_others_alone() -> Result<()> {
    with_namespace("confined", |namespace| {
        let elsewhere = Namespace::create(namespace.cluster(), &format!("{}-not", namespace.name()))?;
        let installation = Installation::of(namespace.cluster())?;
        let outcome = (|| {
            installation.upgrade(&[&format!("watchNamespaces={{{}}}", namespace.name())])?;
            let roles = namespace.cluster().kubectl().run(&["get", "clusterrole,clusterrolebinding", "-o", "name"])?;
            let ours: Vec<_> = roles.lines().filter(|name| name.ends_with("/windlass")).collect();
            ensure!(ours.is_empty(), "rights on the whole cluster: {ours:?}");
            let ignored = Service::apply(&elsewhere, "ignored", &service::simulated(&[]))?;
            let served = Service::apply(namespace, "served", &service::simulated(&[]))?;
            served.wait_ready(1, PATIENCE)?;
            ensure!(ignored.read()?.status.is_none(), "a service of another namespace was touched");
            Ok(())
        })();
        installation.restore()?;
        elsewhere.delete()?;
        outcome
    })
}

#[test]
fn services_that_ask_for_it_take_a_new_engine_one_after_the_other() -> Result<()> {
    with_own_nodes("engine-upgrade", |namespace| {
        let cluster = namespace.cluster();
        let old = operator::engine_image(cluster)?;
        let new = format!("{}:{LATER}", old.rsplit_once(':').context("an image without a tag")?.0);
        cluster.tag(&old, &new)?;
        let mut automatic = service::simulated(&[]);
        automatic["rollout"] = json!({"engineUpgrade": "Automatic"});
        let first = Service::apply(namespace, "first", &automatic)?;
        let second = Service::apply(namespace, "second", &automatic)?;
        let other = Service::apply(namespace, "third", &service::simulated(&[]))?;
        [&first, &second, &other].iter().try_for_each(|service| service.wait_ready(1, PATIENCE))?;
        let before = Seen::of(namespace, &other)?;
        let installation = Installation::of(cluster)?;
        let outcome = (|| {
            installation.upgrade(&["engine.image.tag=that-nobody-has"])?;
            first.wait_words("that-nobody-has cannot be pulled", PATIENCE)?;
            let engine = Engine::of(&second)?;
            ensure!(engine == Engine::settled(&old), "the second has not waited for the first: {engine:?}");
            installation.upgrade(&[&format!("engine.image.tag={LATER}")])?;
            take_turns(&first, &second, &new)
        })();
        installation.restore()?;
        outcome?;
        ensure!(Seen::of(namespace, &other)? == before, "a service that did not ask for it was touched");
        Ok(())
    })
}

/// Tag of an engine image by another name.
const LATER: &str = "of-a-later-version";

/// Waits until both services run `image`, and sees that the second did not begin before the first had ended.
fn take_turns(first: &Service<'_>, second: &Service<'_>, image: &str) -> Result<()> {
    let mut overtaken = None;
    wait::until("both services take the new engine", PATIENCE, || {
        // In this order: what the first has come to in between is no excuse.
        let (later, earlier) = (Engine::of(second)?, Engine::of(first)?);
        if later.image == image && earlier != Engine::settled(image) {
            overtaken.get_or_insert(format!("{earlier:?}"));
        }
        let have_it = [&earlier, &later].iter().all(|engine| **engine == Engine::settled(image));
        Ok(Look::when(have_it, (), format!("{earlier:?}, {later:?}")))
    })?;
    ensure!(overtaken.is_none(), "the second began while the first was at {overtaken:?}");
    Ok(())
}

/// The engine that a service's pods are made with, and how that goes.
#[derive(Debug, PartialEq, Eq)]
struct Engine {
    image: String,
    progress: String,
}

impl Engine {
    fn of(service: &Service<'_>) -> Result<Engine> {
        let status = service.read()?.status.context("there is no status")?;
        let progressing = status.conditions.into_iter().find(|condition| condition.type_ == "Progressing");
        let image = status.choices.and_then(|choices| choices.engine_image).context("no image is told")?;
        Ok(Engine { image, progress: progressing.context("no condition Progressing")?.reason })
    }

    fn settled(image: &str) -> Engine {
        Engine { image: image.to_owned(), progress: "Complete".to_owned() }
    }
}

/// What must not change.
#[derive(Debug, PartialEq, Eq)]
struct Seen {
    pods: BTreeSet<String>,
    template: String,
}

impl Seen {
    fn of(namespace: &Namespace, service: &Service<'_>) -> Result<Seen> {
        let pods = service.pods()?.into_iter().filter_map(|pod| pod.metadata.uid).collect();
        let workload: Deployment = namespace.get(&["get", "deployment", service.name()])?;
        let template = workload.spec.map(|spec| spec.template);
        Ok(Seen { pods, template: serde_json::to_string(&template)? })
    }

    /// Whether it has all of another's pods, and its template.
    fn keeps(&self, other: &Seen) -> bool {
        self.pods.is_superset(&other.pods) && self.template == other.template
    }
}

/// Proves that an operator acts: it brings the service to so many replicas.
fn follow(service: &Service<'_>, replicas: u32) -> Result<()> {
    service.scale(replicas)?;
    service.wait_ready(replicas as usize, PATIENCE)
}

/// Kills the replica that holds the Lease, without a word.
fn kill_leader(cluster: &Cluster) -> Result<()> {
    let holder = operator::leader(cluster)?;
    let pods = operator::pods(cluster)?;
    let leader = pods.iter().find(|pod| pod.metadata.name.as_ref() == Some(&holder));
    cluster.kill(leader.with_context(|| format!("{holder} leads, which is no pod"))?)
}
