//! Every example in `crds/examples` is accepted by an API server, strictly.

use anyhow::{Context, Result, ensure};
use windlass_tests::namespace::with_namespace;
use windlass_tests::workspace;

#[test]
fn every_example_is_accepted() -> Result<()> {
    with_namespace("examples", |namespace| {
        let folder = workspace::root().join("crds/examples");
        let entries = std::fs::read_dir(&folder).with_context(|| format!("cannot read {}", folder.display()))?;
        let files: Vec<_> = entries.filter_map(|entry| Some(entry.ok()?.path())).collect();
        ensure!(!files.is_empty(), "no examples in {}", folder.display());
        for file in &files {
            let file = file.to_str().context("a path that is no text")?;
            namespace.run(&["apply", "--dry-run=server", "--validate=strict", "-f", file])?;
        }
        Ok(())
    })
}
