//! Children of a service: one kind per file. Everything is made from the validated service and the defaults alone.

pub mod affinity;
pub mod args;
pub mod autoscaler;
pub mod deployment;
pub mod disruption_budget;
pub mod inspect_job;
pub mod network_policy;
pub mod pod;
pub mod service;
pub mod service_account;
pub mod volumes;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

use crate::names;
use crate::validate::ValidatedService;

/// Metadata of a child called `name`.
pub(crate) fn metadata(service: &ValidatedService, name: String) -> ObjectMeta {
    ObjectMeta {
        name: Some(name),
        namespace: Some(service.namespace.clone()),
        labels: Some(names::labels(&service.name)),
        owner_references: Some(vec![service.owner.clone()]),
        ..ObjectMeta::default()
    }
}

/// A list, or nothing where it is empty: an empty list is a claim of ownership that says nothing.
pub(crate) fn some<T>(list: Vec<T>) -> Option<Vec<T>> {
    (!list.is_empty()).then_some(list)
}
