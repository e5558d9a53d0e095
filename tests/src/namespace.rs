//! A namespace of one test's own, in which Pod Security enforces *restricted*.

use anyhow::{Context, Result, anyhow};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use std::fs::File;
use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::cluster::Cluster;
use crate::{model, operator};

/// What is shown of a failed test's objects.
const DESCRIBED_PODS: usize = 20;
const DESCRIBED_LINES: usize = 2000;

/// A namespace, and kubectl in it.
#[derive(Debug)]
pub struct Namespace {
    cluster: Cluster,
    name: String,
}

impl Namespace {
    /// Makes the namespace, or takes it as it is.
    ///
    /// # Errors
    /// The API server's own words.
    pub fn create(cluster: &Cluster, name: &str) -> Result<Namespace> {
        let labels = json!({"pod-security.kubernetes.io/enforce": "restricted"});
        let object = json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}});
        cluster.kubectl().apply(&[object])?;
        Ok(Namespace { cluster: cluster.clone(), name: name.to_owned() })
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its cluster.
    pub fn cluster(&self) -> &Cluster {
        &self.cluster
    }

    /// `kubectl ARGUMENTS`, in this namespace.
    ///
    /// # Errors
    /// kubectl's own words.
    pub fn run(&self, arguments: &[&str]) -> Result<String> {
        self.cluster.kubectl().run(&self.inside(arguments))
    }

    /// As [`Namespace::run`], with a file on standard input.
    ///
    /// # Errors
    /// kubectl's own words.
    pub fn run_with_file(&self, arguments: &[&str], file: File) -> Result<String> {
        self.cluster.kubectl().run_with_file(&self.inside(arguments), file)
    }

    /// One object.
    ///
    /// # Errors
    /// kubectl's own words.
    pub fn get<T: DeserializeOwned>(&self, arguments: &[&str]) -> Result<T> {
        self.cluster.kubectl().get(&self.inside(arguments))
    }

    /// A list's items.
    ///
    /// # Errors
    /// kubectl's own words.
    pub fn list<T: DeserializeOwned>(&self, arguments: &[&str]) -> Result<Vec<T>> {
        self.cluster.kubectl().list(&self.inside(arguments))
    }

    /// Applies objects; those that name no namespace go into this one.
    ///
    /// # Errors
    /// The API server's own words.
    pub fn apply(&self, objects: &[Value]) -> Result<String> {
        let inside = |mut object: Value| {
            if object["metadata"]["namespace"].is_null() && object["kind"] != "PersistentVolume" {
                object["metadata"]["namespace"] = json!(self.name);
            }
            object
        };
        self.cluster.kubectl().apply(&objects.iter().cloned().map(inside).collect::<Vec<_>>())
    }

    fn inside<'a>(&'a self, arguments: &[&'a str]) -> Vec<&'a str> {
        [arguments, &["--namespace", &self.name]].concat()
    }

    /// What a person would look at first when a test in it has failed; of thousands of objects, the first ones.
    fn describe(&self) -> String {
        let pods = self.run(&["get", "pods", "-o", "name"]).unwrap_or_default();
        let pods: Vec<&str> = ["describe"].into_iter().chain(pods.lines().take(DESCRIBED_PODS)).collect();
        let looks: [&[&str]; 5] = [
            &["get", "inferenceservices.windlass.dev", "-o", "yaml"],
            &["get", "all,pvc", "-o", "wide"],
            &["get", "events", "--sort-by=.lastTimestamp"],
            &["logs", "--selector=app.kubernetes.io/name=windlass-engine", "--all-containers", "--prefix", "--tail=20"],
            &pods,
        ];
        let mut text = String::new();
        for look in looks {
            let seen = self.run(look).unwrap_or_else(|error| format!("{error:#}"));
            let seen: Vec<&str> = seen.lines().take(DESCRIBED_LINES).collect();
            text += &format!("--- kubectl {}\n{}\n", look.join(" "), seen.join("\n"));
        }
        let logs = ["logs", "deployment/windlass", "--namespace", operator::NAMESPACE, "--tail=30"];
        let seen = self.cluster.kubectl().run(&logs).unwrap_or_else(|error| format!("{error:#}"));
        text + &format!("--- operator's log\n{seen}\n")
    }

    /// Deletes it, without waiting for its end.
    ///
    /// # Errors
    /// kubectl's own words.
    pub fn delete(&self) -> Result<()> {
        self.cluster.kubectl().run(&["delete", "namespace", &self.name, "--wait=false"])?;
        let volume = format!("{}-models", self.name);
        self.cluster
            .kubectl()
            .run(&["delete", "persistentvolume", &volume, "--ignore-not-found", "--wait=false"])
            .map(drop)
    }
}

/// Runs a test in a namespace of its own that has the model, and removes the namespace afterwards.
///
/// Without a prepared cluster the test is skipped, out loud; with `CI=true` that is a failure.
///
/// # Errors
/// The test's own, after printing the state of the namespace. `WINDLASS_KEEP=1` keeps the namespace then.
pub fn with_namespace(name: &str, test: impl FnOnce(&Namespace) -> Result<()>) -> Result<()> {
    with_namespaces(name, 1, |namespaces| test(&namespaces[0]))
}

/// [`with_namespace`] for a test that uses so many of them side by side.
///
/// # Errors
/// As [`with_namespace`].
pub fn with_namespaces(name: &str, count: usize, test: impl FnOnce(&[Namespace]) -> Result<()>) -> Result<()> {
    let Some(cluster) = prepared_cluster()? else { return Ok(()) };
    let full_name = |number| format!("test-{name}-{}-{number}", std::process::id());
    let namespaces = (0..count).map(|number| Namespace::create(&cluster, &full_name(number)));
    let namespaces = namespaces.collect::<Result<Vec<_>>>()?;
    let outcome =
        catch_unwind(AssertUnwindSafe(|| namespaces.iter().try_for_each(give_model).and_then(|()| test(&namespaces))));
    let outcome = outcome.unwrap_or_else(|_| Err(anyhow!("the test panicked")));
    if outcome.is_err() {
        namespaces.iter().for_each(|namespace| eprintln!("{}", namespace.describe()));
    }
    if outcome.is_ok() || std::env::var_os("WINDLASS_KEEP").is_none() {
        namespaces.iter().try_for_each(Namespace::delete)?;
    }
    outcome
}

/// [`with_namespace`] for a test that changes nodes: skipped on a user's cluster.
///
/// # Errors
/// As [`with_namespace`].
pub fn with_own_nodes(name: &str, test: impl FnOnce(&Namespace) -> Result<()>) -> Result<()> {
    with_namespace(name, |namespace| match namespace.cluster().is_own() {
        true => test(namespace),
        false => skip("the nodes of this cluster are not ours to change"),
    })
}

/// The cluster with the operator installed; `None`, said out loud, if there is none and none is demanded.
///
/// # Errors
/// With `CI=true`, when there is none.
pub fn prepared_cluster() -> Result<Option<Cluster>> {
    let prepared = Cluster::attach().and_then(|cluster| operator::engine_image(&cluster).map(|_| cluster));
    match prepared {
        Ok(cluster) => Ok(Some(cluster)),
        Err(error) => skip(&format!("no prepared cluster ({error:#}); see ./tests/run --help")).map(|()| None),
    }
}

/// Says that something is not tested here, and why.
///
/// # Errors
/// With `CI=true`.
pub fn skip(reason: &str) -> Result<()> {
    if std::env::var("CI").is_ok_and(|value| value == "true") {
        return Err(anyhow!("{reason}")).context("CI=true allows no skipped test");
    }
    eprintln!("SKIPPED: {reason}");
    Ok(())
}

fn give_model(namespace: &Namespace) -> Result<()> {
    let file = model::file()?;
    if namespace.cluster().is_own() { model::share(namespace, &file) } else { model::upload(namespace, &file) }
}
