//! Generated files are fresh. `WINDLASS_UPDATE=1` writes them.

use crate::crds;

fn is_fresh(name: &str, wanted: &str) {
    if std::env::var_os("WINDLASS_UPDATE").is_some() {
        std::fs::write(crds(name), wanted).expect("written");
    }
    let found = std::fs::read_to_string(crds(name)).unwrap_or_default();
    assert!(found == wanted, "crds/{name} is stale: run this test with WINDLASS_UPDATE=1");
}

#[test]
fn the_definition_is_fresh_and_small() {
    let yaml = windlass_operator_api::crd::yaml().expect("yaml");
    assert!(yaml.len() < 200_000, "{} bytes", yaml.len());
    is_fresh("inferenceservices.windlass.dev.yaml", &yaml);
}

#[test]
fn the_reference_is_fresh() {
    is_fresh("README.md", &windlass_operator_api::reference::markdown());
}
