//! An API server small enough to read: objects by path, server-side apply as a deep merge, versions, and refusals on
//! request. It stands in for the real one at its own contract, so that tests see which requests are made, and not how.

mod authority;

pub use authority::Authority;

use crate::children::{Children, Form, owner};
use crate::watches::{Guarded, Stores};
use axum::Router;
use axum::body::{Body, to_bytes};
use axum::extract::{Request, State};
use axum::http::{Method, StatusCode};
use axum::response::{IntoResponse, Response};
use kube::runtime::reflector::{self, store::Writer};
use kube::runtime::watcher::Event;
use kube::{Client, Resource};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fmt::Debug;
use std::sync::{Arc, Mutex, MutexGuard};

/// The server; clones share it.
#[derive(Clone, Default)]
pub struct FakeApi(Arc<Mutex<Inner>>);

#[derive(Default)]
struct Inner {
    objects: BTreeMap<String, Value>,
    version: u64,
    requests: Vec<String>,
    managers: Vec<(String, String)>,
    refusals: Vec<(String, u16, String)>,
    /// What an admission webhook does to every object that is applied.
    mutate: Option<fn(&mut Value)>,
}

impl FakeApi {
    /// A client of this server.
    pub fn client(&self) -> Client {
        Client::new(Router::new().fallback(answer).with_state(self.clone()), "default")
    }

    /// Puts an object there as somebody else's.
    pub fn put(&self, path: &str, object: Value) {
        let mut inner = self.lock();
        let stamped = inner.stamped(object, None);
        inner.objects.insert(path.to_owned(), stamped);
    }

    /// Changes an object as somebody else would.
    pub fn change(&self, path: &str, change: impl FnOnce(&mut Value)) {
        let mut inner = self.lock();
        let mut object = inner.objects.get(path).cloned().unwrap_or_else(|| panic!("no {path}"));
        change(&mut object);
        let before = inner.objects.get(path).cloned();
        let stamped = inner.stamped(object, before.as_ref());
        inner.objects.insert(path.to_owned(), stamped);
    }

    /// Refuses every write to a path that contains `part`.
    pub fn refuse(&self, part: &str, code: u16, message: &str) {
        self.lock().refusals.push((part.to_owned(), code, message.to_owned()));
    }

    /// Accepts writes again.
    pub fn accept(&self) {
        self.lock().refusals.clear();
    }

    /// Changes every object that is applied from now on.
    pub fn mutate(&self, mutate: fn(&mut Value)) {
        self.lock().mutate = Some(mutate);
    }

    /// The object at `path`.
    pub fn get(&self, path: &str) -> Option<Value> {
        self.lock().objects.get(path).cloned()
    }

    /// Requests since the last call, as `METHOD path`.
    pub fn requests(&self) -> Vec<String> {
        std::mem::take(&mut self.lock().requests)
    }

    /// Of [`FakeApi::requests`], those that change something.
    pub fn writes(&self) -> Vec<String> {
        self.requests().into_iter().filter(|request| !request.starts_with("GET ")).collect()
    }

    /// Paths that were patched since the last call, each with the manager that fields were written as.
    pub fn managers(&self) -> Vec<(String, String)> {
        std::mem::take(&mut self.lock().managers)
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.0.lock().expect("no test panics while it holds the server")
    }

    fn all<K: Resource<DynamicType = ()> + DeserializeOwned>(&self) -> Vec<K> {
        let inner = self.lock();
        let found = inner.objects.iter().filter(|(path, _)| path.rsplit('/').nth(1) == Some(K::plural(&()).as_ref()));
        found.map(|(_, object)| serde_json::from_value(object.clone()).expect("of its kind")).collect()
    }
}

impl Inner {
    /// `object` with its bookkeeping; nothing changes where it equals `before`.
    fn stamped(&mut self, mut object: Value, before: Option<&Value>) -> Value {
        if before == Some(&object) {
            return object;
        }
        self.version += 1;
        let version = self.version;
        let meta = object["metadata"].as_object_mut().expect("metadata");
        meta.insert("resourceVersion".into(), version.to_string().into());
        if before.is_none() {
            meta.entry("uid").or_insert(format!("uid-{version}").into());
            meta.entry("creationTimestamp").or_insert("2026-01-01T00:00:00Z".into());
        }
        let generation = before.and_then(|before| before["metadata"]["generation"].as_i64()).unwrap_or(0);
        let is_respecified = before.is_none_or(|before| before["spec"] != object["spec"]);
        object["metadata"]["generation"] = (generation + i64::from(is_respecified)).into();
        object
    }

    fn handle(&mut self, method: &Method, path: &str, body: &Value) -> Result<Value, (u16, String)> {
        self.requests.push(format!("{method} {path}"));
        let refusal = self.refusals.iter().find(|(part, _, _)| method != Method::GET && path.contains(part));
        if let Some((_, code, message)) = refusal {
            return Err((*code, message.clone()));
        }
        match method.as_str() {
            "GET" if is_collection(path) => Ok(json!({"metadata": {}, "items": []})),
            "GET" => self.objects.get(path).cloned().ok_or((404, format!("{path} not found"))),
            "POST" => {
                let name = body["metadata"]["name"].as_str().expect("a name");
                self.write(&format!("{path}/{name}"), |_| body.clone())
            }
            "PUT" => {
                let before = self.objects.get(path).ok_or((404, "not found".to_owned()))?;
                if before["metadata"]["resourceVersion"] != body["metadata"]["resourceVersion"] {
                    return Err((409, "the object has been modified".into()));
                }
                self.write(path, |_| body.clone())
            }
            "PATCH" if path.ends_with("/scale") => {
                let answer = self.write(path.trim_end_matches("/scale"), |object| merged(object, body))?;
                Ok(json!({"metadata": answer["metadata"], "spec": {"replicas": answer["spec"]["replicas"]}}))
            }
            "PATCH" if path.ends_with("/status") => {
                let status = body["status"].clone();
                self.write(path.trim_end_matches("/status"), |mut object| {
                    object["status"] = status;
                    object
                })
            }
            "PATCH" => {
                let mutate = self.mutate;
                self.write(path, |object| {
                    let mut object = merged(object, body);
                    mutate.iter().for_each(|mutate| mutate(&mut object));
                    object
                })
            }
            "DELETE" => self.delete(path, &body["preconditions"]["uid"]),
            other => panic!("{other} {path} is not expected"),
        }
    }

    /// Removes the object that has this UID, or whichever there is where none is named.
    fn delete(&mut self, path: &str, uid: &Value) -> Result<Value, (u16, String)> {
        let found = self.objects.get(path).ok_or((404, "not found".to_owned()))?;
        if !uid.is_null() && found["metadata"]["uid"] != *uid {
            return Err((409, "the UID in the precondition is another's".into()));
        }
        Ok(self.objects.remove(path).unwrap_or_default())
    }

    fn write(&mut self, path: &str, change: impl FnOnce(Value) -> Value) -> Result<Value, (u16, String)> {
        let before = self.objects.get(path).cloned();
        let changed = change(before.clone().unwrap_or(json!({"metadata": {}})));
        let stamped = self.stamped(changed, before.as_ref());
        self.objects.insert(path.to_owned(), stamped.clone());
        Ok(stamped)
    }
}

/// Ends with a kind and not with a name: `/api/v1/namespaces/n/events`.
fn is_collection(path: &str) -> bool {
    let parts: Vec<_> = path.split('/').skip_while(|part| *part != "namespaces").collect();
    parts.len() == 3
}

/// Objects merged key by key; everything else is replaced.
fn merged(mut object: Value, patch: &Value) -> Value {
    match (object.as_object_mut(), patch.as_object()) {
        (Some(fields), Some(changes)) => {
            for (name, change) in changes {
                let before =
                    fields.remove(name).unwrap_or_else(|| if change.is_object() { json!({}) } else { json!(null) });
                let after = merged(before, change);
                if !after.is_null() {
                    fields.insert(name.clone(), after);
                }
            }
            object
        }
        _ => patch.clone(),
    }
}

async fn answer(State(api): State<FakeApi>, request: Request) -> Response {
    let (parts, body) = request.into_parts();
    let bytes = to_bytes(body, 1 << 20).await.expect("a small body");
    let body = if bytes.is_empty() { Value::Null } else { serde_json::from_slice(&bytes).expect("JSON") };
    let mut inner = api.lock();
    let mut query = form_urlencoded::parse(parts.uri.query().unwrap_or_default().as_bytes()).into_owned();
    let manager = query.find(|(name, _)| name == "fieldManager").map(|(_, manager)| manager);
    inner.managers.extend(manager.map(|manager| (parts.uri.path().to_owned(), manager)));
    match inner.handle(&parts.method, parts.uri.path(), &body) {
        Ok(object) => Body::from(object.to_string()).into_response(),
        Err((code, message)) => {
            let reason = if code == 404 { "NotFound" } else { "" };
            let mut status = json!({"status": "Failure", "code": code, "message": message, "reason": reason});
            if message.ends_with("because it is being terminated") {
                status["details"] = json!({"causes": [{"reason": "NamespaceTerminating"}]});
            }
            (StatusCode::from_u16(code).expect("a status"), status.to_string()).into_response()
        }
    }
}

/// Fills one store.
type Fill = Box<dyn FnMut(&FakeApi) + Send>;

/// Stores that are filled from a [`FakeApi`] when a test says so: the watch, and its lag, in the test's hand.
pub struct Watched {
    /// What observation reads.
    pub stores: Stores,
    fills: Vec<Fill>,
}

impl Watched {
    /// Stores whose first list was empty.
    pub fn empty() -> Self {
        let mut fills = Vec::new();
        let stores = Stores {
            services: store::<Guarded>(&mut fills),
            deployments: children(&mut fills),
            stateful_sets: children(&mut fills),
            endpoints: children(&mut fills),
            accounts: children(&mut fills),
            budgets: children(&mut fills),
            policies: children(&mut fills),
            jobs: children(&mut fills),
            revisions: children(&mut fills),
            autoscalers: store(&mut fills),
            pods: children(&mut fills),
            nodes: None,
        };
        let mut watched = Watched { stores, fills };
        watched.catch_up(&FakeApi::default());
        watched
    }

    /// Takes in everything that `api` holds. Of children, as the real watch, only those with a service's label.
    pub fn catch_up(&mut self, api: &FakeApi) {
        self.fills.iter_mut().for_each(|fill| fill(api));
    }
}

fn store<K>(fills: &mut Vec<Fill>) -> reflector::Store<K>
where
    K: Resource<DynamicType = ()> + Clone + Debug + DeserializeOwned + Send + Sync + 'static,
{
    let (reader, mut writer): (_, Writer<K>) = reflector::store();
    fills.push(Box::new(move |api| listed(api.all()).iter().for_each(|event| writer.apply_watcher_event(event))));
    reader
}

fn children<K, F>(fills: &mut Vec<Fill>) -> Children<K, F>
where
    F: Form<K> + Send + Sync + 'static,
    K: Resource<DynamicType = ()> + Clone + Debug + DeserializeOwned + Send + Sync + 'static,
{
    let (reader, mut feed) = Children::new();
    fills.push(Box::new(move |api| {
        let ours = api.all::<K>().into_iter().filter(|object| owner(object).is_some());
        listed(ours.collect()).iter().for_each(|event| feed.take(event));
    }));
    reader
}

/// What a watch tells of a list.
fn listed<K>(objects: Vec<K>) -> Vec<Event<K>> {
    let objects = objects.into_iter().map(Event::InitApply);
    [Event::Init].into_iter().chain(objects).chain([Event::InitDone]).collect()
}
