//! The identity of the pods: one that may do nothing, and whose token is mounted nowhere.

use k8s_openapi::api::core::v1::ServiceAccount;

use super::metadata;
use crate::validate::ValidatedService;

/// The ServiceAccount; `None` where the user brings one.
pub fn build(service: &ValidatedService) -> Option<ServiceAccount> {
    service.service_account_name.is_none().then(|| ServiceAccount {
        metadata: metadata(service, service.name.clone()),
        automount_service_account_token: Some(false),
        ..ServiceAccount::default()
    })
}

/// Name of the ServiceAccount that pods run as.
pub fn name(service: &ValidatedService) -> String {
    service.service_account_name.clone().unwrap_or_else(|| service.name.clone())
}
