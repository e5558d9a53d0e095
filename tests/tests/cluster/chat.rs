//! The main job: apply, Ready, and the openai Python client gets its answers, whole, streamed and two at once.

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;
use windlass_tests::namespace::{skip, with_namespace};
use windlass_tests::service::{self, Service};
use windlass_tests::{command, workspace};

#[test]
fn the_openai_client_gets_whole_streamed_and_parallel_answers() -> Result<()> {
    let Some(python) = python_client()? else { return skip("no openai Python client; run tests/setup tests") };
    with_namespace("chat", |namespace| {
        let service = Service::apply(namespace, "smollm2", &service::real())?;
        service.wait_ready(1, Duration::from_secs(90))?;
        let reach = service.reach()?;
        let script = workspace::root().join("tests/python/chat.py");
        let output = command::output(Command::new(python).arg(script).args([reach.url(), "smollm2"]))?;
        let answers: Value = serde_json::from_str(&output).with_context(|| output.clone())?;
        ensure!(answers["models"] == serde_json::json!(["smollm2"]), "{answers}");
        for kind in ["whole", "streamed"] {
            let answer = &answers[kind];
            ensure!(answer["text"].as_str().is_some_and(|text| text.contains("Paris")), "{kind}: {answer}");
            ensure!(answer["completion_tokens"].as_u64().is_some_and(|tokens| tokens > 0), "{kind}: {answer}");
        }
        // Greedy text does not depend on how it is asked for, nor on who else asks.
        ensure!(answers["whole"]["text"] == answers["streamed"]["text"], "{answers}");
        ensure!(answers["together"][0] == answers["whole"]["text"], "{answers}");
        ensure!(answers["together"][1].as_str().is_some_and(|text| !text.is_empty()), "{answers}");
        ensure!(answers["unknown_model"] == "NotFoundError", "{answers}");
        Ok(())
    })
}

/// The interpreter of the environment that `tests/setup tests` makes: the one named by a version. Others lie beside it.
fn python_client() -> Result<Option<PathBuf>> {
    let Ok(environments) = std::fs::read_dir(workspace::cache()?.join("python")) else { return Ok(None) };
    let versions = environments.filter_map(|entry| {
        let entry = entry.ok()?;
        let is_version = entry.file_name().to_str()?.starts_with(|first: char| first.is_ascii_digit());
        is_version.then(|| entry.path().join("bin/python"))
    });
    Ok(versions.filter(|python| python.exists()).max())
}
