//! The dashboard asks for metrics that exist; `tests/cluster/monitoring.rs` puts its queries to a real Prometheus.

use anyhow::{Result, ensure};
use std::collections::BTreeSet;
use std::fs;
use windlass_tests::{dashboard, operator, workspace};

#[test]
fn every_query_names_metrics_that_programs_export() -> Result<()> {
    let sources = ["engine/contract/src/metrics.rs", "operator/controller/src/metrics.rs"];
    let sources: Vec<String> =
        sources.iter().map(|file| fs::read_to_string(workspace::root().join(file))).collect::<Result<_, _>>()?;
    let is_exported = |name: &str| {
        let base = name.strip_suffix("_bucket").unwrap_or(name);
        // The operator's names are put together from these prefixes and what follows.
        let rest = ["windlass_operator_", "windlass_autoscaler_"].iter().find_map(|prefix| base.strip_prefix(prefix));
        sources.iter().any(|source| source.contains(&format!("\"{}\"", base)))
            || rest.is_some_and(|rest| sources[1].contains(&format!("\"{rest}\"")))
    };
    let panels = dashboard::panels(&operator::chart("windlass"))?;
    ensure!(panels.len() > 10, "only {} panels", panels.len());
    for panel in panels {
        for query in panel.queries {
            let names = metrics(&query);
            ensure!(!names.is_empty(), "{}: no metric in {query}", panel.title);
            for name in names {
                ensure!(is_exported(&name), "{}: nobody exports {name}", panel.title);
            }
        }
    }
    Ok(())
}

/// Names of ours in a query.
fn metrics(query: &str) -> BTreeSet<String> {
    let is_part = |character: char| character.is_ascii_alphanumeric() || character == '_' || character == ':';
    let words = query.split(|character| !is_part(character));
    let ours = ["vllm:", "windlass:", "windlass_operator_", "windlass_autoscaler_"];
    words.filter(|word| ours.iter().any(|prefix| word.starts_with(prefix))).map(str::to_owned).collect()
}
