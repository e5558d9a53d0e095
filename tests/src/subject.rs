//! A service that has a namespace to itself, made, changed and looked at in plain HTTP: lives are led many at a time.

use anyhow::Result;
use k8s_openapi::api::core::v1::Pod;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::time::Duration;
use windlass_operator_api::InferenceService;

use crate::api::Api;
use crate::namespace::Namespace;
use crate::service::{PLURAL, SERVICE_LABEL};
use crate::state::{self, State};
use crate::wait::{self, Look};

const PATIENCE: Duration = Duration::from_secs(60);
const SERVICES: &str = "apis/windlass.dev/v1alpha1";
/// Kinds that the operator makes, and those that follow from them.
const KINDS: [(&str, &str); 11] = [
    (SERVICES, PLURAL),
    (APPS, "deployments"),
    (APPS, "replicasets"),
    (APPS, "statefulsets"),
    (CORE, "services"),
    (CORE, "serviceaccounts"),
    (CORE, "configmaps"),
    ("apis/networking.k8s.io/v1", "networkpolicies"),
    ("apis/policy/v1", "poddisruptionbudgets"),
    ("apis/batch/v1", "jobs"),
    ("apis/autoscaling/v2", "horizontalpodautoscalers"),
];
/// What else nothing of a service may be left of: how it came to be so, and what others make.
const TRACES: [(&str, &str); 3] =
    [(APPS, "controllerrevisions"), (CORE, "pods"), ("apis/discovery.k8s.io/v1", "endpointslices")];
const APPS: &str = "apis/apps/v1";
const CORE: &str = "api/v1";

/// The service.
#[derive(Clone, Copy, Debug)]
pub struct Subject<'a> {
    api: &'a Api,
    namespace: &'a Namespace,
    name: &'a str,
}

impl<'a> Subject<'a> {
    /// One of that name; it need not be there.
    pub fn named(api: &'a Api, namespace: &'a Namespace, name: &'a str) -> Subject<'a> {
        Subject { api, namespace, name }
    }

    /// Makes it of `spec`, lets `live` lead it, and returns the state at the end; then deletes it, and nothing is left,
    /// neither here nor of a life that failed to the next one.
    ///
    /// # Errors
    /// Those of `live`, or when something is left.
    pub fn live(&self, spec: &Value, live: impl FnOnce() -> Result<()>) -> Result<State> {
        let before = self.names()?;
        let end = self.create(spec).and_then(|()| live()).and_then(|()| self.state());
        let ended = self.end(&before);
        let end = end?;
        ended.map(|()| end)
    }

    fn create(&self, spec: &Value) -> Result<()> {
        let (kind, metadata) = ("InferenceService", json!({"name": self.name}));
        let object = json!({"apiVersion": "windlass.dev/v1alpha1", "kind": kind, "metadata": metadata, "spec": spec});
        self.api.create(&self.path(SERVICES, PLURAL), &object)
    }

    fn end(&self, before: &BTreeSet<String>) -> Result<()> {
        self.api.delete(&self.own_path())?;
        wait::until("nothing of the service is left", PATIENCE, || {
            let names = self.names()?;
            let left: Vec<_> = names.difference(before).collect();
            Ok(Look::when(left.is_empty(), (), format!("{left:?}")))
        })
    }

    /// Merges `patch` into its spec.
    ///
    /// # Errors
    /// The API server's own words.
    pub fn change(&self, patch: &Value) -> Result<()> {
        self.api.merge(&self.own_path(), &json!({"spec": patch}))
    }

    /// As it is now.
    ///
    /// # Errors
    /// The API server's own words.
    pub fn read(&self) -> Result<InferenceService> {
        self.api.get(&self.own_path())
    }

    /// Its pods that are not gone.
    ///
    /// # Errors
    /// The API server's own words.
    pub fn pods(&self) -> Result<Vec<Pod>> {
        self.api.list(&format!("{}?labelSelector={SERVICE_LABEL}%3D{}", self.path(CORE, "pods"), self.name))
    }

    /// What its namespace holds.
    ///
    /// # Errors
    /// The API server's own words.
    pub fn state(&self) -> Result<State> {
        Ok(State::of(self.objects(&KINDS)?))
    }

    fn names(&self) -> Result<BTreeSet<String>> {
        let objects = self.objects(&[&KINDS[..], &TRACES].concat())?;
        Ok(objects.iter().map(|(kind, object)| state::name(kind, object)).collect())
    }

    fn objects(&self, kinds: &[(&str, &'static str)]) -> Result<Vec<(&'static str, Value)>> {
        let mut objects = Vec::new();
        for (group, kind) in kinds {
            let listed: Vec<Value> = self.api.list(&self.path(group, kind))?;
            objects.extend(listed.into_iter().map(|object| (*kind, object)));
        }
        Ok(objects)
    }

    fn own_path(&self) -> String {
        format!("{}/{}", self.path(SERVICES, PLURAL), self.name)
    }

    fn path(&self, group: &str, kind: &str) -> String {
        format!("{group}/namespaces/{}/{kind}", self.namespace.name())
    }
}
