//! Who may connect to engine pods, and where these may connect to. Both directions are closed but for what is listed.

use std::collections::BTreeMap;

use k8s_openapi::api::networking::v1::{
    NetworkPolicy, NetworkPolicyEgressRule, NetworkPolicyIngressRule, NetworkPolicyPeer, NetworkPolicyPort,
    NetworkPolicySpec,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use windlass_engine_contract::{ADMIN_PORT, API_PORT, PIPELINE_PORT};

use super::metadata;
use crate::names;
use crate::observed::Defaults;
use crate::source::ModelSource;
use crate::validate::ValidatedService;

const DNS_PORT: u16 = 53;
/// Every namespace carries its name under this label.
const NAMESPACE_NAME: &str = "kubernetes.io/metadata.name";

/// The policy of `service`.
pub fn build(service: &ValidatedService, defaults: &Defaults) -> NetworkPolicy {
    NetworkPolicy {
        metadata: metadata(service, service.name.clone()),
        spec: Some(NetworkPolicySpec {
            pod_selector: Some(LabelSelector {
                // The pod that reads the model's header too.
                match_labels: Some(names::instance_labels(&service.name)),
                ..LabelSelector::default()
            }),
            policy_types: Some(vec!["Ingress".into(), "Egress".into()]),
            ingress: Some(ingress(service, defaults)),
            // Written even when empty: a list left out is one that others may fill.
            egress: Some(egress(service)),
        }),
    }
}

fn ingress(service: &ValidatedService, defaults: &Defaults) -> Vec<NetworkPolicyIngressRule> {
    let callers = if service.allow_from.is_empty() { vec![same_namespace()] } else { service.allow_from.clone() };
    let api = NetworkPolicyIngressRule { from: Some(callers), ports: Some(vec![port(API_PORT, "TCP")]) };
    let readers = admin_peers(defaults);
    let admin = NetworkPolicyIngressRule { from: Some(readers), ports: Some(vec![port(ADMIN_PORT, "TCP")]) };
    let nodes =
        nodes(service).map(|(pods, port)| NetworkPolicyIngressRule { from: Some(vec![pods]), ports: Some(vec![port]) });
    // A rule without peers would let everybody in.
    [api, admin]
        .into_iter()
        .chain(nodes)
        .filter(|rule| rule.from.as_ref().is_some_and(|from| !from.is_empty()))
        .collect()
}

fn admin_peers(defaults: &Defaults) -> Vec<NetworkPolicyPeer> {
    let operator = defaults.operator_namespace.as_ref().map(|namespace| NetworkPolicyPeer {
        pod_selector: Some(labelled(defaults.operator_pod_labels.clone())),
        ..pods_of(namespace)
    });
    let monitoring = defaults.monitoring_namespace.as_deref().map(pods_of);
    operator.into_iter().chain(monitoring).collect()
}

/// Only a pod that fetches its model, or joins others, needs to go anywhere.
fn egress(service: &ValidatedService) -> Vec<NetworkPolicyEgressRule> {
    let nodes =
        nodes(service).map(|(pods, port)| NetworkPolicyEgressRule { to: Some(vec![pods]), ports: Some(vec![port]) });
    fetching(service).into_iter().chain(nodes).collect()
}

/// The nodes of a replica trust whoever comes: the pods of the service, and the port on which they meet.
fn nodes(service: &ValidatedService) -> Option<(NetworkPolicyPeer, NetworkPolicyPort)> {
    let pods = labelled(names::instance_labels(&service.name));
    let peer = NetworkPolicyPeer { pod_selector: Some(pods), ..NetworkPolicyPeer::default() };
    (service.nodes > 1).then(|| (peer, port(PIPELINE_PORT, "TCP")))
}

/// To name servers and to the source's port.
fn fetching(service: &ValidatedService) -> Vec<NetworkPolicyEgressRule> {
    let ModelSource::Fetched(source) = &service.source else { return Vec::new() };
    let names = vec![port(DNS_PORT, "UDP"), port(DNS_PORT, "TCP")];
    // Where an object store is, a Secret may say: no port is named then, which means all.
    let server = source.port().map(|number| vec![port(number, "TCP")]);
    [Some(names), server].map(|ports| NetworkPolicyEgressRule { ports, to: None }).to_vec()
}

fn same_namespace() -> NetworkPolicyPeer {
    NetworkPolicyPeer { pod_selector: Some(LabelSelector::default()), ..NetworkPolicyPeer::default() }
}

fn pods_of(namespace: &str) -> NetworkPolicyPeer {
    let name = BTreeMap::from([(NAMESPACE_NAME.to_owned(), namespace.to_owned())]);
    NetworkPolicyPeer { namespace_selector: Some(labelled(name)), ..NetworkPolicyPeer::default() }
}

fn labelled(labels: BTreeMap<String, String>) -> LabelSelector {
    LabelSelector { match_labels: Some(labels), ..LabelSelector::default() }
}

fn port(number: u16, protocol: &str) -> NetworkPolicyPort {
    NetworkPolicyPort {
        port: Some(IntOrString::Int(number.into())),
        protocol: Some(protocol.into()),
        ..NetworkPolicyPort::default()
    }
}
