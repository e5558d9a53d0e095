//! The endpoint: the API port of every pod of the service, in whichever workload. The admin port is in no Service.

use k8s_openapi::api::core::v1::{Service, ServicePort, ServiceSpec};
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use windlass_engine_contract::API_PORT;

use super::metadata;
use crate::names::{self, ROUTED};
use crate::standby::{self, Standby};
use crate::validate::ValidatedService;

/// Name of the API port in pods and Service.
pub const PORT_NAME: &str = "http";

/// The Service of `service`, which leaves out those on standby.
pub fn build(service: &ValidatedService, standby: &Standby) -> Service {
    let mut selector = names::selector_labels(&service.name);
    selector.extend(standby.is_routed.then(|| (ROUTED.to_owned(), standby::ON.to_owned())));
    let port = ServicePort {
        name: Some(PORT_NAME.into()),
        port: API_PORT.into(),
        target_port: Some(IntOrString::String(PORT_NAME.into())),
        protocol: Some("TCP".into()),
        app_protocol: Some("http".into()),
        ..ServicePort::default()
    };
    Service {
        metadata: metadata(service, service.name.clone()),
        spec: Some(ServiceSpec {
            type_: Some("ClusterIP".into()),
            selector: Some(selector),
            ports: Some(vec![port]),
            ..ServiceSpec::default()
        }),
        status: None,
    }
}

/// Base URL of the API inside the cluster.
pub fn url(service: &ValidatedService, cluster_domain: &str) -> String {
    format!("http://{}.{}.svc.{cluster_domain}:{API_PORT}/v1", service.name, service.namespace)
}
