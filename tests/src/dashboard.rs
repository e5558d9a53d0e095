//! The dashboard that the chart ships, as far as queries go.

use anyhow::{Context, Result};
use serde::Deserialize;
use std::fs;
use std::path::Path;

/// One panel.
#[derive(Clone, Debug)]
pub struct Panel {
    /// Its title.
    pub title: String,
    /// Its queries, for every namespace and service.
    pub queries: Vec<String>,
}

#[derive(Deserialize)]
struct Dashboard {
    panels: Vec<RawPanel>,
}

#[derive(Deserialize)]
struct RawPanel {
    title: String,
    targets: Vec<Target>,
}

#[derive(Deserialize)]
struct Target {
    expr: String,
}

/// Every panel of the dashboard in `chart`, Grafana's variables set to "all".
///
/// # Errors
/// When the file is missing or no dashboard.
pub fn panels(chart: &Path) -> Result<Vec<Panel>> {
    let text = fs::read_to_string(chart.join("files/dashboard.json")).context("the chart has no dashboard")?;
    let dashboard: Dashboard = serde_json::from_str(&text).context("files/dashboard.json is no dashboard")?;
    let all = |target: Target| target.expr.replace("$namespace", ".*").replace("$service", ".*");
    let panel = |raw: RawPanel| Panel { title: raw.title, queries: raw.targets.into_iter().map(all).collect() };
    Ok(dashboard.panels.into_iter().map(panel).collect())
}
