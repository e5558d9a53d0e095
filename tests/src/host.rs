//! An operator as a process of this machine, with the rights of the installed one, which stands aside meanwhile.

use anyhow::{Context, Result, anyhow, bail};
use serde_json::json;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;
use tempfile::TempDir;

use crate::api::Api;
use crate::cluster::Cluster;
use crate::process::{Running, free_port};
use crate::wait::{self, Look};
use crate::{operator, workspace};

const PATIENCE: Duration = Duration::from_secs(60);

/// Stops the installed operator until it is dropped, and lends its identity.
#[derive(Debug)]
pub struct Stage<'a> {
    cluster: &'a Cluster,
    api: Api,
    folder: TempDir,
    engine_image: String,
}

impl<'a> Stage<'a> {
    /// Scales the installed operator to none.
    ///
    /// # Errors
    /// kubectl's own words.
    pub fn clear(cluster: &'a Cluster) -> Result<Stage<'a>> {
        let folder = tempfile::tempdir()?;
        let api = Api::start(cluster.kubectl().command(), folder.path())?;
        let stage = Stage { cluster, api, folder, engine_image: operator::engine_image(cluster)? };
        stage.scale_installed("0")?;
        wait::until("the installed operator is gone", PATIENCE, || {
            Ok(Look::when(operator::pods(cluster).is_err(), (), "it has pods"))
        })?;
        Ok(stage)
    }

    fn scale_installed(&self, replicas: &str) -> Result<()> {
        let replicas = format!("--replicas={replicas}");
        let scale = ["scale", "deployment", operator::RELEASE, "-n", operator::NAMESPACE, &replicas];
        self.cluster.kubectl().run(&scale).map(drop)
    }

    /// The API with all rights.
    pub fn api(&self) -> &Api {
        &self.api
    }

    /// A folder for what belongs to this.
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// A kubeconfig with the rights of the installed operator.
    ///
    /// # Errors
    /// kubectl's own words.
    pub fn kubeconfig(&self) -> Result<PathBuf> {
        let create = ["create", "token", operator::RELEASE, "-n", operator::NAMESPACE, "--duration=12h"];
        let token = self.cluster.kubectl().run(&create)?;
        let view = ["config", "view", "--raw", "--flatten", "-o", "json"];
        let mut config: serde_json::Value = serde_json::from_str(&self.cluster.kubectl().run(&view)?)?;
        config["users"] = json!([{"name": "operator", "user": {"token": token.trim()}}]);
        config["contexts"][0]["context"]["user"] = json!("operator");
        self.write(&config)
    }

    /// A kubeconfig that names an API which answers plain HTTP.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn plain_kubeconfig(&self, api: SocketAddr) -> Result<PathBuf> {
        let config = json!({
            "apiVersion": "v1", "kind": "Config", "current-context": "plain",
            "clusters": [{"name": "plain", "cluster": {"server": format!("http://{api}")}}],
            "users": [{"name": "none", "user": {}}],
            "contexts": [{"name": "plain", "context": {"cluster": "plain", "user": "none"}}],
        });
        self.write(&config)
    }

    fn write(&self, config: &serde_json::Value) -> Result<PathBuf> {
        let file = tempfile::Builder::new().prefix("operator-").suffix(".kubeconfig").tempfile_in(self.folder())?;
        let (_, path) = file.keep()?;
        std::fs::write(&path, config.to_string()).with_context(|| format!("cannot write {}", path.display()))?;
        Ok(path)
    }

    /// The API with the operator's rights.
    ///
    /// # Errors
    /// When it does not start.
    pub fn operators_api(&self) -> Result<Api> {
        let mut kubectl = self.cluster.kubectl().command();
        kubectl.env("KUBECONFIG", self.kubeconfig()?);
        Api::start(kubectl, self.folder())
    }

    /// Starts an operator against what `kubeconfig` names; further flags are `run`'s.
    ///
    /// # Errors
    /// When it does not become ready.
    pub fn operator(&self, kubeconfig: &Path, flags: &[&str]) -> Result<HostOperator> {
        let program = workspace::binaries()?.join("windlass-operator");
        let port = free_port()?;
        let mut command = Command::new(program);
        // As its image has it.
        command.env("MIMALLOC_ALLOW_THP", "0");
        command.env("KUBECONFIG", kubeconfig).arg("run").args(["--engine-image", &self.engine_image]);
        command.args(["--metrics-port", &port.to_string(), "--lease-namespace", operator::NAMESPACE]).args(flags);
        // Those that follow each other with one kubeconfig share a log.
        let name = kubeconfig.file_stem().context("the kubeconfig has no name")?.to_string_lossy();
        let process = Running::start(&name, &mut command, self.folder())?;
        Ok(HostOperator { process, port })
    }
}

impl Drop for Stage<'_> {
    fn drop(&mut self) {
        if let Err(error) = self.scale_installed("1") {
            eprintln!("the installed operator stays scaled to none: {error:#}");
        }
    }
}

/// A running operator; killed when dropped.
#[derive(Debug)]
pub struct HostOperator {
    process: Running,
    port: u16,
}

impl HostOperator {
    /// Waits until it serves.
    ///
    /// # Errors
    /// With the end of its log.
    pub fn wait_ready(&mut self) -> Result<()> {
        wait::until("the operator is ready", PATIENCE, || match self.get("/readyz") {
            Ok(_) => Ok(Look::Done(())),
            Err(_) if self.process.has_ended() => bail!("it has ended: {}", self.process.log()),
            Err(error) => Ok(Look::NotYet(format!("{error:#}"))),
        })
    }

    /// The value of a metric, summed over its series; 0 without any.
    ///
    /// # Errors
    /// When it does not answer.
    pub fn metric(&self, name: &str) -> Result<f64> {
        let text = self.get("/metrics")?;
        let is_it = |line: &&str| line.split(['{', ' ']).next() == Some(name);
        Ok(text.lines().filter(is_it).filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok()).sum())
    }

    /// Ends it without a word.
    pub fn kill(&mut self) {
        self.process.kill();
    }

    /// Asks it to end, and waits until it has.
    ///
    /// # Errors
    /// When it does not.
    pub fn terminate(self) -> Result<()> {
        self.process.terminate()
    }

    /// Its process id.
    pub fn id(&self) -> u32 {
        self.process.id()
    }

    /// The end of its log.
    pub fn log(&self) -> String {
        self.process.log()
    }

    /// `result`; an error with the end of the log.
    ///
    /// # Errors
    /// That of `result`.
    pub fn with_log<T>(&self, result: Result<T>) -> Result<T> {
        result.map_err(|error| anyhow!("{error:#}\nThe operator's log:\n{}", self.log()))
    }

    /// Whether it has ended by itself.
    pub fn has_ended(&mut self) -> bool {
        self.process.has_ended()
    }

    fn get(&self, path: &str) -> Result<String> {
        Ok(ureq::get(format!("http://127.0.0.1:{}{path}", self.port)).call()?.body_mut().read_to_string()?)
    }
}
