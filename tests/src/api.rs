//! The API in plain HTTP, through `kubectl proxy`: for whoever looks often. To start `kubectl` for each look takes a
//! processor longer than what is looked for takes to happen.

use anyhow::{Context, Result, ensure};
use serde::de::DeserializeOwned;
use serde_json::Value;
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use crate::process::{Running, free_port};
use crate::wait::{self, Look};

const PATIENCE: Duration = Duration::from_secs(60);

/// A running `kubectl proxy`; it ends with its owner.
#[derive(Debug)]
pub struct Api {
    address: SocketAddr,
    agent: ureq::Agent,
    _proxy: Running,
}

impl Api {
    /// With the rights that `kubectl`, a command without arguments, has.
    ///
    /// # Errors
    /// When it does not start.
    pub fn start(mut kubectl: Command, folder: &Path) -> Result<Api> {
        let port = free_port()?;
        let proxy =
            Running::start(&format!("api-{port}"), kubectl.args(["proxy", "--port", &port.to_string()]), folder)?;
        let address = SocketAddr::from(([127, 0, 0, 1], port));
        wait::until("kubectl proxy listens", PATIENCE, || {
            Ok(Look::when(TcpStream::connect(address).is_ok(), (), proxy.log()))
        })?;
        let agent = ureq::Agent::config_builder().http_status_as_error(false).timeout_global(Some(PATIENCE)).build();
        Ok(Api { address, agent: agent.into(), _proxy: proxy })
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// What is at `path`.
    ///
    /// # Errors
    /// The API server's own words.
    pub fn get<T: DeserializeOwned>(&self, path: &str) -> Result<T> {
        let text = answer(path, self.agent.get(self.url(path)).call())?;
        serde_json::from_str(&text).with_context(|| format!("{path}: an unexpected answer"))
    }

    /// The items of the list at `path`.
    ///
    /// # Errors
    /// The API server's own words.
    pub fn list<T: DeserializeOwned>(&self, path: &str) -> Result<Vec<T>> {
        let mut list: Value = self.get(path)?;
        serde_json::from_value(list["items"].take()).with_context(|| format!("{path}: unexpected items"))
    }

    /// Makes `object` in the collection at `path`; a field that is unknown is an error.
    ///
    /// # Errors
    /// The API server's own words.
    pub fn create(&self, path: &str, object: &Value) -> Result<()> {
        let post = self.agent.post(self.url(path)).query("fieldValidation", "Strict").content_type("application/json");
        answer(path, post.send(object.to_string())).map(drop)
    }

    /// Merges `patch` into what is at `path`; a field that is unknown is an error.
    ///
    /// # Errors
    /// The API server's own words.
    pub fn merge(&self, path: &str, patch: &Value) -> Result<()> {
        let merge = self.agent.patch(self.url(path)).query("fieldValidation", "Strict");
        answer(path, merge.content_type("application/merge-patch+json").send(patch.to_string())).map(drop)
    }

    /// Deletes what is at `path`, and returns at once.
    ///
    /// # Errors
    /// The API server's own words.
    pub fn delete(&self, path: &str) -> Result<()> {
        answer(path, self.agent.delete(self.url(path)).call()).map(drop)
    }

    fn url(&self, path: &str) -> String {
        format!("http://{}/{path}", self.address)
    }
}

fn answer(path: &str, answer: Result<ureq::http::Response<ureq::Body>, ureq::Error>) -> Result<String> {
    let mut answer = answer.with_context(|| format!("{path}: no answer"))?;
    let text = answer.body_mut().read_to_string()?;
    ensure!(answer.status().is_success(), "{path}: {}: {text}", answer.status());
    Ok(text)
}
