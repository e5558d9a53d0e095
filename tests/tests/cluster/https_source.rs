//! A model behind https with a certificate of a private authority: fetched, resumed after a cut, and checked.

use anyhow::{Result, ensure};
use serde_json::{Value, json};
use std::time::Duration;
use windlass_tests::chat::{self, Client};
use windlass_tests::model;
use windlass_tests::namespace::{skip, with_namespace};
use windlass_tests::service::{self, Service};

const PATIENCE: Duration = Duration::from_secs(120);
/// The first answer with this byte, in the middle of the file, is cut before it.
const CUT: u64 = 40_000_000;

#[test]
fn an_https_model_is_resumed_after_a_cut_and_checked() -> Result<()> {
    with_namespace("https", |namespace| {
        let Some(address) = namespace.cluster().host_address() else {
            return skip("pods of this cluster cannot reach a server on this machine");
        };
        let server = crate::tls::Server::start(address, &model::file()?, CUT)?;
        namespace.apply(&[json!({
            "apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "authority"},
            "data": {"ca.crt": server.authority()},
        })])?;
        let good = Service::apply(namespace, "good", &spec(&server.url(), model::SHA256))?;
        good.wait_ready(1, PATIENCE)?;
        let answer = Client::pooled(good.reach()?.url()).stream(&chat::request("good", "What is 2 + 2?", 8), |_| {})?;
        ensure!(!answer.text.is_empty(), "{answer:?}");
        let (length, sent) = (model::file()?.metadata()?.len(), server.sent());
        ensure!(server.times(CUT) == 2, "what was cut was asked for {} times", server.times(CUT));
        ensure!(sent < length + length / 2, "not resumed: {sent} bytes were sent of {length}");

        let wrong = Service::apply(namespace, "wrong", &spec(&server.url(), &"0".repeat(64)))?;
        let condition = wrong.wait_condition("Ready", "False", Some("ChecksumMismatch"), PATIENCE)?;
        ensure!(condition.message.contains(model::SHA256), "the message does not say what was found: {condition:?}");
        Ok(())
    })
}

fn spec(url: &str, sha256: &str) -> Value {
    let mut spec = service::real();
    spec["model"] = json!({"source": url, "sha256": sha256, "caConfigMapRef": {"name": "authority"}});
    spec
}
