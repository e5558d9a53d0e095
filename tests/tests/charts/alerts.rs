//! Every alert fires for what it is about and for nothing else, by promtool on made-up series (`alerts.yaml`).

use anyhow::{Context, Result, ensure};
use serde_yaml_ng::Value;
use std::fs;
use std::process::Command;
use windlass_tests::namespace::skip;
use windlass_tests::{command, operator};

#[test]
fn every_alert_fires_for_what_it_is_about_alone() -> Result<()> {
    if command::output(Command::new("promtool").arg("--version")).is_err() {
        return skip("promtool is not installed; see tests/setup");
    }
    let folder = tempfile::tempdir()?;
    fs::write(folder.path().join("rules.yaml"), rules()?)?;
    fs::write(folder.path().join("tests.yaml"), include_str!("alerts.yaml"))?;
    let mut promtool = Command::new("promtool");
    command::output(promtool.current_dir(&folder).args(["test", "rules", "tests.yaml"])).map(drop)
}

#[test]
fn every_alert_has_a_test_a_severity_and_a_section_of_the_runbook() -> Result<()> {
    let runbook = fs::read_to_string(operator::chart("windlass").join("README.md"))?;
    for rule in alerts()? {
        let name = rule["alert"].as_str().context("an alert without a name")?;
        ensure!(include_str!("alerts.yaml").contains(&format!("alertname=\"{name}\"")), "{name} has no test");
        ensure!(["warning", "critical"].contains(&rule["labels"]["severity"].as_str().unwrap_or_default()), "{name}");
        let url = rule["annotations"]["runbook_url"].as_str().with_context(|| format!("{name} has no runbook_url"))?;
        let (page, section) = url.split_once('#').with_context(|| format!("{name}: no section in {url}"))?;
        ensure!(page == RUNBOOK, "{name}: {page} is not what the chart replaces");
        let is_section = |line: &str| line.strip_prefix("### ").is_some_and(|title| title.to_lowercase() == section);
        ensure!(runbook.lines().any(is_section), "{name}: the runbook has no section {section}");
    }
    Ok(())
}

/// What stands in the shipped rules for the page of `prometheusRule.runbookUrl`.
const RUNBOOK: &str = "RUNBOOK_URL";

#[test]
fn the_runbook_is_where_the_chart_s_value_says() -> Result<()> {
    let template = fs::read_to_string(operator::chart("windlass").join("templates/prometheusrule.yaml"))?;
    let replaced = format!("replace \"{RUNBOOK}\" .Values.prometheusRule.runbookUrl");
    ensure!(template.contains(&replaced), "the template has no {replaced}");
    let values: Value = serde_yaml_ng::from_str(&fs::read_to_string(operator::chart("windlass").join("values.yaml"))?)?;
    let page = values["prometheusRule"]["runbookUrl"].as_str().context("no runbookUrl")?;
    ensure!(page.starts_with("https://") && page.ends_with("charts/windlass/README.md"), "{page}");
    Ok(())
}

fn alerts() -> Result<Vec<Value>> {
    let groups: Vec<Value> = serde_yaml_ng::from_str(&shipped()?)?;
    let rules = groups.iter().filter_map(|group| group["rules"].as_sequence()).flatten();
    let alerts: Vec<Value> = rules.filter(|rule| rule.get("alert").is_some()).cloned().collect();
    ensure!(alerts.len() > 10, "only {} alerts", alerts.len());
    Ok(alerts)
}

fn shipped() -> Result<String> {
    Ok(fs::read_to_string(operator::chart("windlass").join("files/alerts.yaml"))?)
}

/// The rules as the chart renders them with its default values.
fn rules() -> Result<String> {
    let template = fs::read_to_string(operator::chart("windlass").join("templates/prometheusrule.yaml"))?;
    let values: Value = serde_yaml_ng::from_str(&fs::read_to_string(operator::chart("windlass").join("values.yaml"))?)?;
    let objectives = values["prometheusRule"]["objectives"].as_mapping().context("no objectives")?;
    let mut objective_rules = template.lines().filter(|line| line.contains("record:")).collect::<Vec<_>>().join("\n");
    for (name, value) in objectives {
        let name = format!("{{{{ .{} }}}}", name.as_str().context("a name that is no text")?);
        let value = value.as_f64().context("an objective that is no number")?;
        objective_rules = objective_rules.replace(&name, &value.to_string());
    }
    ensure!(!objective_rules.contains("{{"), "an objective has no value: {objective_rules}");
    let page = values["prometheusRule"]["runbookUrl"].as_str().context("no runbookUrl")?;
    let shipped = shipped()?.replace(RUNBOOK, page);
    Ok(format!("groups:\n- name: objectives\n  rules:\n{objective_rules}\n{shipped}"))
}
