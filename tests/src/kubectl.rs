//! `kubectl` against one cluster.

use anyhow::{Context, Result};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use crate::command;
use crate::wait::{self, Look};

const DEFINING: Duration = Duration::from_secs(60);

/// The client, bound to a kubeconfig.
#[derive(Clone, Debug)]
pub struct Kubectl {
    program: PathBuf,
    kubeconfig: PathBuf,
}

impl Kubectl {
    /// `program` against the cluster that `kubeconfig` names.
    pub fn new(program: PathBuf, kubeconfig: PathBuf) -> Kubectl {
        Kubectl { program, kubeconfig }
    }

    /// A command without arguments.
    pub fn command(&self) -> Command {
        let mut command = Command::new(&self.program);
        command.env("KUBECONFIG", &self.kubeconfig);
        command
    }

    /// Runs it and returns its output.
    ///
    /// # Errors
    /// kubectl's own words.
    pub fn run(&self, arguments: &[&str]) -> Result<String> {
        command::output(self.command().args(arguments))
    }

    /// Runs it with `-o json` and reads the answer.
    ///
    /// # Errors
    /// kubectl's own words, or where the answer is not a `T`.
    pub fn get<T: DeserializeOwned>(&self, arguments: &[&str]) -> Result<T> {
        let text = self.run(&[arguments, &["-o", "json"]].concat())?;
        serde_json::from_str(&text).with_context(|| format!("unexpected answer to kubectl {}", arguments.join(" ")))
    }

    /// As [`Kubectl::get`] for a list's items.
    ///
    /// # Errors
    /// As [`Kubectl::get`].
    pub fn list<T: DeserializeOwned>(&self, arguments: &[&str]) -> Result<Vec<T>> {
        let mut list: Value = self.get(arguments)?;
        serde_json::from_value(list["items"].take())
            .with_context(|| format!("unexpected items of kubectl {}", arguments.join(" ")))
    }

    /// Applies objects server-side, with strict validation: an unknown field is an error.
    ///
    /// # Errors
    /// The API server's own words.
    pub fn apply(&self, objects: &[Value]) -> Result<String> {
        let list = json!({"apiVersion": "v1", "kind": "List", "items": objects}).to_string();
        let mut apply = self.command();
        apply.args(["apply", "--server-side", "--force-conflicts", "--validate=strict", "-f", "-"]);
        command::output_with_input(&mut apply, &list)
    }

    /// Applies definitions of kinds, and waits until the API server serves them.
    ///
    /// # Errors
    /// The API server's own words, or when they are not served within a minute.
    pub fn define(&self, file: &Path) -> Result<()> {
        let file = file.to_str().context("a path that is no text")?;
        self.run(&["apply", "--server-side", "--force-conflicts", "-f", file])?;
        // Without a condition yet, `kubectl wait` fails at once.
        wait::until(&format!("{file} is established"), DEFINING, || {
            self.run(&["wait", "--for=condition=Established", "--timeout=5s", "-f", file]).map(|_| Look::Done(()))
        })
    }

    /// Runs it with `input` on standard input.
    ///
    /// # Errors
    /// kubectl's own words.
    pub fn run_with_input(&self, arguments: &[&str], input: &str) -> Result<String> {
        command::output_with_input(self.command().args(arguments), input)
    }

    /// Runs it with a file on standard input.
    ///
    /// # Errors
    /// kubectl's own words.
    pub fn run_with_file(&self, arguments: &[&str], file: File) -> Result<String> {
        command::output_with_file(self.command().args(arguments), file)
    }
}
