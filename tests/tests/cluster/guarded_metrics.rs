//! The operator's metrics behind authentication, as a client sees them that trusts what the chart publishes.

use anyhow::{Context, Result, ensure};
use serde_json::json;
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::time::Duration;
use windlass_tests::namespace::Namespace;
use windlass_tests::operator;
use windlass_tests::wait::{self, Look};

use crate::secured::{Secured, exchange};

const PORT: u16 = 8443;
const OPEN_PORT: u16 = 8080;
const SERVICE: &str = "windlass-metrics";
const METRICS: &str = "/metrics";
/// The ServiceAccount that may read, and one that may not.
const READER: &str = "reader";
const STRANGER: &str = "stranger";
/// A new role binding reaches the API server's authorizer within a moment, a new pod's port likewise.
const PATIENCE: Duration = Duration::from_secs(30);

/// Values of the chart that guard the metrics, and let the namespace's reader see them.
pub fn values(namespace: &Namespace) -> [String; 3] {
    let reader = |field: &str, value: &str| format!("guardedMetrics.readers[0].{field}={value}");
    ["guardedMetrics.enabled=true".to_owned(), reader("namespace", namespace.name()), reader("name", READER)]
}

/// Asks as nobody, as somebody who may not and as the reader; and on the port that was open before.
pub fn are_for_readers_alone(namespace: &Namespace) -> Result<()> {
    let account = |name: &str| json!({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": name}});
    namespace.apply(&[account(READER), account(STRANGER)])?;
    let token = |name: &str| namespace.run(&["create", "token", name]).map(|token| token.trim().to_owned());
    let pods = operator::pods(namespace.cluster())?;
    let address = pods.iter().find_map(|pod| pod.status.as_ref()?.pod_ip.clone()).context("no address")?;
    let address: IpAddr = address.parse()?;
    let client = Secured::trusting(namespace.cluster(), SERVICE, None)?;
    let ask = |token: Option<&str>| client.get(SocketAddr::new(address, PORT), METRICS, token);
    for (who, token, status) in [
        ("nobody", None, 401),
        ("a token of no cluster", Some("x".to_owned()), 401),
        ("a stranger", Some(token(STRANGER)?), 403),
        ("the reader", Some(token(READER)?), 200),
    ] {
        wait::until(&format!("{who} is answered with {status}"), PATIENCE, || {
            let answer = ask(token.as_deref())?;
            let is_right = answer.starts_with(&format!("HTTP/1.1 {status} "));
            ensure!(!is_right || (status == 200) == answer.contains("windlass_operator_leader"), "{who}: {answer}");
            Ok(Look::when(is_right, (), answer.lines().next().unwrap_or_default()))
        })?;
    }
    let open = plain(SocketAddr::new(address, OPEN_PORT))?;
    ensure!(open.starts_with("HTTP/1.1 404 "), "the open port has them too: {open}");
    Ok(())
}

fn plain(address: SocketAddr) -> Result<String> {
    exchange(TcpStream::connect_timeout(&address, PATIENCE)?, SERVICE, METRICS, None)
}
