//! The API server's audit log: what the operator was seen doing.

use anyhow::{Context, Result, ensure};
use serde::Deserialize;
use std::fs::File;
use std::io::{BufRead, BufReader, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use crate::operator;

/// A place in the log.
#[derive(Debug)]
pub struct Mark {
    log: PathBuf,
    offset: u64,
}

/// One request of the operator.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Act {
    /// `get`, `list`, `watch`, `create`, `update`, `patch`, `delete`, …
    pub verb: String,
    /// API group, empty for the core.
    pub group: String,
    /// Plural, with the subresource after a slash.
    pub resource: String,
    /// Empty for a resource of the cluster, or for all namespaces.
    pub namespace: String,
    /// Empty for a collection.
    pub name: String,
    /// It has made an object: a server-side apply of one that was not there, which needs the right to create too.
    pub creates: bool,
}

impl Act {
    /// Whether it changes, or tries to change, an object other than a Lease.
    pub fn writes(&self) -> bool {
        !["get", "list", "watch"].contains(&self.verb.as_str()) && self.resource != "leases"
    }
}

impl Mark {
    /// The end of `log`.
    ///
    /// # Errors
    /// When there is no such file.
    pub fn now(log: &Path) -> Result<Mark> {
        let length = std::fs::metadata(log).with_context(|| format!("no audit log at {}", log.display()))?.len();
        Ok(Mark { log: log.to_owned(), offset: length })
    }

    /// The beginning of `log`.
    pub fn beginning(log: &Path) -> Mark {
        Mark { log: log.to_owned(), offset: 0 }
    }

    /// What the operator did since.
    ///
    /// # Errors
    /// When the log cannot be read, or begins anew behind the mark: what was in between is not known.
    pub fn acts(&self) -> Result<Vec<Act>> {
        let mut file = File::open(&self.log).with_context(|| format!("cannot open {}", self.log.display()))?;
        let length = file.metadata()?.len();
        ensure!(length >= self.offset, "the audit log was {} bytes long and is {length} now", self.offset);
        file.seek(SeekFrom::Start(self.offset))?;
        let mut acts = Vec::new();
        for line in BufReader::new(file).split(b'\n') {
            // The last line may be half written.
            let Ok(event) = serde_json::from_slice::<Event>(&line?) else { continue };
            acts.extend(event.act());
        }
        Ok(acts)
    }
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Event {
    verb: String,
    user: User,
    object_ref: Option<ObjectRef>,
    response_status: Option<ResponseStatus>,
}

#[derive(Deserialize)]
struct ResponseStatus {
    code: Option<u16>,
}

#[derive(Deserialize)]
struct User {
    username: String,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", default)]
#[derive(Default)]
struct ObjectRef {
    api_group: String,
    resource: String,
    subresource: String,
    namespace: String,
    name: String,
}

impl Event {
    /// The act, if it is the operator's.
    fn act(self) -> Option<Act> {
        let by_operator = self.user.username.starts_with(&format!("system:serviceaccount:{}:", operator::NAMESPACE));
        let object = self.object_ref.filter(|_| by_operator)?;
        let resource = match object.subresource.as_str() {
            "" => object.resource,
            subresource => format!("{}/{subresource}", object.resource),
        };
        let creates = self.response_status.and_then(|status| status.code) == Some(201);
        let (group, namespace, name) = (object.api_group, object.namespace, object.name);
        Some(Act { verb: self.verb, group, resource, namespace, name, creates })
    }
}
