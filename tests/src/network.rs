//! What NetworkPolicies allow, computed: the network of our own cluster does not enforce them.
//!
//! As the API defines them: a pod that a policy of its namespace selects for a direction is closed in that direction
//! but for what some policy's rule allows; a connection needs both ends to be open. Blocks of addresses are not
//! modelled: a rule that names one allows nothing here.

use k8s_openapi::api::networking::v1::{NetworkPolicy, NetworkPolicyPeer, NetworkPolicyPort, NetworkPolicySpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use std::collections::BTreeMap;

/// Labels.
pub type Labels = BTreeMap<String, String>;

/// A pod, as policies see it.
#[derive(Clone, Debug)]
pub struct Endpoint {
    /// Its namespace.
    pub namespace: String,
    /// Its labels.
    pub labels: Labels,
}

impl Endpoint {
    /// A pod with these labels.
    pub fn new(namespace: &str, labels: &[(&str, &str)]) -> Endpoint {
        let labels = labels.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
        Endpoint { namespace: namespace.to_owned(), labels }
    }
}

/// Whether `policies` let `from` connect to a TCP port of `to`. Namespaces carry their name as their only label.
pub fn allows(policies: &[NetworkPolicy], from: &Endpoint, to: &Endpoint, port: u16) -> bool {
    let out = Direction { policies, pod: from, kind: "Egress" };
    let into = Direction { policies, pod: to, kind: "Ingress" };
    out.is_open(to, port) && into.is_open(from, port)
}

/// One end of a connection.
struct Direction<'a> {
    policies: &'a [NetworkPolicy],
    pod: &'a Endpoint,
    kind: &'static str,
}

impl Direction<'_> {
    fn is_open(&self, other: &Endpoint, port: u16) -> bool {
        let mut closing = self.policies.iter().filter(|policy| self.is_closed_by(policy)).peekable();
        closing.peek().is_none() || closing.any(|policy| self.is_allowed_by(policy, other, port))
    }

    fn is_closed_by(&self, policy: &NetworkPolicy) -> bool {
        let Some(spec) = &policy.spec else { return false };
        let is_here = policy.metadata.namespace.as_deref() == Some(self.pod.namespace.as_str());
        is_here && self.is_about(spec) && selects(spec.pod_selector.as_ref(), &self.pod.labels)
    }

    /// Without types a policy is about what comes in, and about what goes out if it has rules for that.
    fn is_about(&self, spec: &NetworkPolicySpec) -> bool {
        match &spec.policy_types {
            Some(types) => types.iter().any(|kind| kind == self.kind),
            None => self.kind == "Ingress" || spec.egress.is_some(),
        }
    }

    fn is_allowed_by(&self, policy: &NetworkPolicy, other: &Endpoint, port: u16) -> bool {
        let Some(spec) = &policy.spec else { return false };
        let rule = |peers: &Option<Vec<NetworkPolicyPeer>>, ports: &Option<Vec<NetworkPolicyPort>>| {
            self.names_peer(peers.as_deref(), other) && names_port(ports.as_deref(), port)
        };
        match self.kind {
            "Ingress" => spec.ingress.iter().flatten().any(|allowed| rule(&allowed.from, &allowed.ports)),
            _ => spec.egress.iter().flatten().any(|allowed| rule(&allowed.to, &allowed.ports)),
        }
    }

    /// No peers are all peers.
    fn names_peer(&self, peers: Option<&[NetworkPolicyPeer]>, other: &Endpoint) -> bool {
        let peers = peers.unwrap_or_default();
        peers.is_empty() || peers.iter().any(|peer| self.is_peer(peer, other))
    }

    fn is_peer(&self, peer: &NetworkPolicyPeer, other: &Endpoint) -> bool {
        let namespace = Labels::from([("kubernetes.io/metadata.name".to_owned(), other.namespace.clone())]);
        let is_there = match &peer.namespace_selector {
            Some(selector) => selects(Some(selector), &namespace),
            None => other.namespace == self.pod.namespace,
        };
        let names_pods = peer.pod_selector.is_some() || peer.namespace_selector.is_some();
        peer.ip_block.is_none() && names_pods && is_there && selects(peer.pod_selector.as_ref(), &other.labels)
    }
}

/// No ports are all ports.
fn names_port(ports: Option<&[NetworkPolicyPort]>, wanted: u16) -> bool {
    let ports = ports.unwrap_or_default();
    let is_it = |port: &NetworkPolicyPort| {
        let first = match &port.port {
            None => return true,
            Some(IntOrString::Int(first)) => *first,
            Some(IntOrString::String(_)) => return false,
        };
        port.protocol.as_deref().is_none_or(|protocol| protocol == "TCP")
            && (first..=port.end_port.unwrap_or(first)).contains(&i32::from(wanted))
    };
    ports.is_empty() || ports.iter().any(is_it)
}

/// An absent or empty selector selects everything.
fn selects(selector: Option<&LabelSelector>, labels: &Labels) -> bool {
    let Some(selector) = selector else { return true };
    let equal = selector.match_labels.iter().flatten().all(|(key, value)| labels.get(key) == Some(value));
    let expressions = selector.match_expressions.iter().flatten();
    equal
        && expressions.into_iter().all(|expression| {
            let (found, values) = (labels.get(&expression.key), expression.values.as_deref().unwrap_or_default());
            match expression.operator.as_str() {
                "In" => found.is_some_and(|value| values.contains(value)),
                "NotIn" => found.is_none_or(|value| !values.contains(value)),
                "Exists" => found.is_some(),
                _ => found.is_none(),
            }
        })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn policy(spec: Value) -> Vec<NetworkPolicy> {
        let policy = json!({"metadata": {"name": "p", "namespace": "here"}, "spec": spec});
        vec![serde_json::from_value(policy).expect("a policy")]
    }

    fn reaches(spec: Value, from: &Endpoint, to: &Endpoint) -> bool {
        allows(&policy(spec), from, to, 80)
    }

    #[test]
    fn rules_mean_what_the_api_says() {
        let [server, client] = ["server", "client"].map(|name| Endpoint::new("here", &[("app", name)]));
        let stranger = Endpoint::new("there", &[("app", "client")]);
        let ingress = |rules: Value| json!({"podSelector": {"matchLabels": {"app": "server"}}, "ingress": rules});
        let from = |peer: Value| ingress(json!([{"from": [peer]}]));
        let there = json!({"matchLabels": {"kubernetes.io/metadata.name": "there"}});
        let client_pods = json!({"matchLabels": {"app": "client"}});
        let cases = [
            ("no rule closes", ingress(json!([])), false, false),
            ("an empty rule opens", ingress(json!([{}])), true, true),
            ("a pod selector is about its own namespace", from(json!({"podSelector": client_pods})), true, false),
            ("a namespace selector is about pods there", from(json!({"namespaceSelector": there})), false, true),
            (
                "both must hold",
                from(json!({"namespaceSelector": there, "podSelector": {"matchLabels": {"app": "x"}}})),
                false,
                false,
            ),
            ("a block of addresses is nobody here", from(json!({"ipBlock": {"cidr": "0.0.0.0/0"}})), false, false),
            ("a port", ingress(json!([{"ports": [{"port": 80}]}])), true, true),
            ("a range", ingress(json!([{"ports": [{"port": 70, "endPort": 90}]}])), true, true),
            ("another port", ingress(json!([{"ports": [{"port": 81}]}])), false, false),
            ("another protocol", ingress(json!([{"ports": [{"port": 80, "protocol": "UDP"}]}])), false, false),
            (
                "an expression",
                from(
                    json!({"podSelector": {"matchExpressions": [{"key": "app", "operator": "NotIn", "values": ["client"]}]}}),
                ),
                false,
                false,
            ),
            ("a policy about others", json!({"podSelector": {"matchLabels": {"app": "x"}}, "ingress": []}), true, true),
            (
                "a policy about what goes out",
                json!({"podSelector": {}, "policyTypes": ["Egress"], "egress": []}),
                false,
                true,
            ),
        ];
        for (name, spec, from_here, from_there) in cases {
            assert_eq!(reaches(spec.clone(), &client, &server), from_here, "{name}");
            assert_eq!(reaches(spec, &stranger, &server), from_there, "{name}, from elsewhere");
        }
    }
}
