//! Argo CD's scripts, in the libraries that Argo CD gives to scripts: base, table, package and a part of os.

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use std::fs;
use std::process::Command;
use windlass_tests::namespace::skip;
use windlass_tests::{command, operator, workspace};

const GENERATION: i64 = 3;

/// What a script returns for an object, in the Lua that Argo CD runs.
fn run(script: &str, object: &Value, parameters: &Value) -> Result<Value> {
    let path = operator::chart("windlass").join("files/argocd").join(script);
    let text = fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
    let request = json!({"script": text, "obj": object, "actionParams": parameters});
    let returned = command::output_with_input(&mut lua()?, &request.to_string()).context(script.to_owned())?;
    serde_json::from_str(&returned).with_context(|| format!("{script} returned {returned}"))
}

/// Lua, as `tests/setup` has installed it.
fn lua() -> Result<Command> {
    let mut python = Command::new("python3");
    python.arg(workspace::root().join("tests/python/lua.py")).env("PYTHONPATH", workspace::cache()?.join("lua"));
    Ok(python)
}

/// Whether there is Lua; said out loud if not.
fn is_ready() -> Result<bool> {
    let found = workspace::cache()?.join("lua/lupa").exists();
    if !found {
        skip("no Lua; run tests/setup tests")?;
    }
    Ok(found)
}

fn service(spec: Value, conditions: &[(&str, &str, &str)]) -> Value {
    let dated = |(kind, status, reason): &(&str, &str, &str)| json!({"type": kind, "status": status, "reason": reason, "message": "words", "observedGeneration": GENERATION});
    let conditions: Vec<Value> = conditions.iter().map(dated).collect();
    json!({
        "apiVersion": "windlass.dev/v1alpha1", "kind": "InferenceService",
        "metadata": {"name": "llama", "generation": GENERATION}, "spec": spec,
        "status": {"observedGeneration": GENERATION, "conditions": conditions},
    })
}

fn health(object: &Value) -> Result<(String, String)> {
    let found = run("health.lua", object, &json!({}))?;
    let text = |name: &str| found[name].as_str().map(str::to_owned).with_context(|| format!("no {name} in {found}"));
    Ok((text("status")?, text("message")?))
}

const SERVING: (&str, &str, &str) = ("Ready", "True", "Serving");
const SETTLED: [(&str, &str, &str); 2] = [("Reconciling", "False", "Settled"), ("Stalled", "False", "Proceeding")];
const CONVERGING: [(&str, &str, &str); 2] = [("Reconciling", "True", "Converging"), ("Stalled", "False", "Proceeding")];

#[test]
fn health_follows_the_conditions() -> Result<()> {
    if !is_ready()? {
        return Ok(());
    }
    let (manual, builtin) = (json!({}), json!({"autoscaling": {"mode": "Builtin"}}));
    let starting = ("Progressing", "True", "ReplicasStarting");
    let complete = ("Progressing", "True", "Complete");
    let failing = [("Reconciling", "True", "ApplyFailed"), CONVERGING[1]];
    let rolling = ("Progressing", "True", "RollingOut");
    let stalled = |reason| [("Ready", "False", reason), ("Reconciling", "False", reason), ("Stalled", "True", reason)];
    let not_ready = |reason| vec![("Ready", "False", reason), CONVERGING[0], CONVERGING[1]];
    let cases = [
        ("serving", &manual, vec![SERVING, complete, SETTLED[0], SETTLED[1]], "Healthy"),
        ("starting", &manual, not_ready("Starting"), "Progressing"),
        ("no node yet, which more nodes will end", &manual, not_ready("Unschedulable"), "Progressing"),
        ("not reached yet, which is tried for ever", &manual, not_ready("ModelUnavailable"), "Progressing"),
        ("out of memory", &manual, stalled("OutOfMemory").into(), "Degraded"),
        ("a wrong checksum", &builtin, stalled("ChecksumMismatch").into(), "Degraded"),
        ("a rollout that is stuck", &manual, stalled("ProgressDeadlineExceeded").into(), "Degraded"),
        ("scaled by hand", &manual, vec![SERVING, starting, CONVERGING[0], CONVERGING[1]], "Progressing"),
        ("scaled by the autoscaler", &builtin, vec![SERVING, starting, CONVERGING[0], CONVERGING[1]], "Healthy"),
        ("scaled in by hand", &manual, vec![SERVING, complete, CONVERGING[0], CONVERGING[1]], "Progressing"),
        ("scaled in by the autoscaler", &builtin, vec![SERVING, complete, CONVERGING[0], CONVERGING[1]], "Healthy"),
        ("a write that fails", &builtin, vec![SERVING, complete, failing[0], failing[1]], "Progressing"),
        ("rolling", &builtin, vec![SERVING, rolling, CONVERGING[0], CONVERGING[1]], "Progressing"),
        ("paused", &manual, vec![SERVING, ("Progressing", "False", "Paused"), CONVERGING[0]], "Suspended"),
        ("scaled to zero", &manual, vec![("Ready", "False", "ScaledToZero"), SETTLED[0], SETTLED[1]], "Suspended"),
    ];
    for (name, spec, conditions, expected) in cases {
        let (status, message) = health(&service(spec.clone(), &conditions))?;
        ensure!(status == expected, "{name}: {status}, not {expected}");
        ensure!(message.contains("words"), "{name}: {message}");
    }
    Ok(())
}

#[test]
fn what_the_operator_has_not_seen_is_progressing() -> Result<()> {
    if !is_ready()? {
        return Ok(());
    }
    let mut unseen = service(json!({}), &[SERVING, SETTLED[0], SETTLED[1]]);
    unseen["metadata"]["generation"] = json!(GENERATION + 1);
    let mut half_seen = unseen.clone();
    half_seen["status"]["observedGeneration"] = json!(GENERATION + 1);
    let mut stalled_before =
        service(json!({}), &[("Ready", "False", "OutOfMemory"), ("Stalled", "True", "OutOfMemory")]);
    stalled_before["metadata"]["generation"] = json!(GENERATION + 1);
    let mut new = unseen.clone();
    new["status"] = Value::Null;
    for object in [unseen, half_seen, stalled_before, new] {
        let (status, message) = health(&object)?;
        ensure!(status == "Progressing", "{status}, {message}: {object}");
    }
    Ok(())
}

fn is_disabled(object: &Value, action: &str) -> Result<bool> {
    let found = run("actions/discovery.lua", object, &json!({}))?;
    found[action]["disabled"].as_bool().with_context(|| format!("no {action} in {found}"))
}

#[test]
fn actions_are_offered_where_they_act() -> Result<()> {
    if !is_ready()? {
        return Ok(());
    }
    let cases = [
        (json!({}), [("scale", false), ("restart", false), ("pause", false), ("resume", true)]),
        (
            json!({"rollout": {"paused": true}}),
            [("scale", false), ("restart", true), ("pause", true), ("resume", false)],
        ),
        (
            json!({"autoscaling": {"mode": "Builtin"}}),
            [("scale", true), ("restart", false), ("pause", false), ("resume", true)],
        ),
        (
            json!({"autoscaling": {"mode": "Builtin", "shadow": true}}),
            [("scale", false), ("restart", false), ("pause", false), ("resume", true)],
        ),
    ];
    for (spec, expected) in cases {
        for (action, disabled) in expected {
            ensure!(is_disabled(&service(spec.clone(), &[]), action)? == disabled, "{action} of {spec}");
        }
    }
    Ok(())
}

#[test]
fn an_action_changes_its_field_alone() -> Result<()> {
    if !is_ready()? {
        return Ok(());
    }
    let object = service(json!({"model": {"source": "pvc://a/b"}, "rollout": {"strategy": "Drain"}}), &[SERVING]);
    let act = |action: &str, parameters: Value| run(&format!("actions/{action}.lua"), &object, &parameters);
    let mut paused = object.clone();
    paused["spec"]["rollout"]["paused"] = json!(true);
    ensure!(act("pause", json!({}))? == paused);
    paused["spec"]["rollout"]["paused"] = json!(false);
    ensure!(act("resume", json!({}))? == paused);
    let mut scaled = object.clone();
    scaled["spec"]["replicas"] = json!(4);
    ensure!(act("scale", json!({"replicas": "4"}))? == scaled);
    for wrong in ["", "many", "-1", "1.5", "1001"] {
        let refused = act("scale", json!({"replicas": wrong}));
        ensure!(
            refused.as_ref().is_err_and(|error| format!("{error:#}").contains("whole number")),
            "{wrong}: {refused:?}"
        );
    }
    let mut revised = object.clone();
    revised["status"]["revision"] = json!("llama-b");
    revised["status"]["revisions"] = json!([{"name": "llama-b"}, {"name": "llama-a"}]);
    ensure!(is_disabled(&object, "rollback")? && !is_disabled(&revised, "rollback")?);
    let pinned = |parameters: Value| {
        let back = run("actions/rollback.lua", &revised, &parameters)?;
        Ok::<_, anyhow::Error>(back["spec"]["rollout"]["pinnedRevision"].clone())
    };
    ensure!(pinned(json!({}))? == "llama-a" && pinned(json!({"revision": "llama-b"}))? == "llama-b");
    ensure!(pinned(json!({"revision": "llama-z"})).is_err());
    revised["spec"]["rollout"]["pinnedRevision"] = json!("llama-a");
    ensure!(!is_disabled(&revised, "unpin")?);
    ensure!(run("actions/unpin.lua", &revised, &json!({}))?["spec"] == object["spec"]);
    let mut restarted = act("restart", json!({}))?;
    let at = restarted["spec"]["rollout"]["restartedAt"].take();
    ensure!(at.as_str().is_some_and(|at| at.len() == 20 && at.ends_with('Z')), "{at}");
    let mut expected = object.clone();
    expected["spec"]["rollout"]["restartedAt"] = Value::Null;
    ensure!(restarted == expected);
    Ok(())
}
