//! Generated files are fresh. `WINDLASS_UPDATE=1` writes them.

use crate::workspace;

fn is_fresh(path: &str, wanted: &str) {
    let file = workspace().join(path);
    if std::env::var_os("WINDLASS_UPDATE").is_some() {
        std::fs::write(&file, wanted).expect("written");
    }
    let found = std::fs::read_to_string(&file).unwrap_or_default();
    assert!(found == wanted, "{path} is stale: run this test with WINDLASS_UPDATE=1");
}

#[test]
fn the_definition_is_fresh_and_small() {
    let yaml = windlass_operator_api::crd::yaml().expect("yaml");
    assert!(yaml.len() < 200_000, "{} bytes", yaml.len());
    is_fresh("crds/inferenceservices.windlass.dev.yaml", &yaml);
    // A chart may name no file outside itself, so it carries its own copy.
    is_fresh("charts/windlass-crds/files/inferenceservices.windlass.dev.yaml", &yaml);
}

#[test]
fn the_reference_is_fresh() {
    is_fresh("crds/README.md", &windlass_operator_api::reference::markdown());
}
