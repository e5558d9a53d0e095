//! The cluster's front proxy, as the cluster tells extension servers to know it.

use crate::door::Clients;
use anyhow::{Context, Result};
use k8s_openapi::api::core::v1::ConfigMap;
use kube::{Api, Client};
use rustls::RootCertStore;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Where a cluster publishes by whom extension servers are asked.
const AUTHENTICATION: (&str, &str) = ("kube-system", "extension-apiserver-authentication");
const AUTHORITIES: &str = "requestheader-client-ca-file";
const ALLOWED_NAMES: &str = "requestheader-allowed-names";

/// Reads what the cluster publishes.
///
/// # Errors
/// It publishes nothing, as without an aggregation layer, or it cannot be read.
pub async fn published(client: &Client) -> Result<Clients> {
    let (namespace, name) = AUTHENTICATION;
    let found = Api::<ConfigMap>::namespaced(client.clone(), namespace).get(name).await;
    let found = found.with_context(|| format!("read ConfigMap {namespace}/{name}"))?;
    clients(&found.data.unwrap_or_default()).with_context(|| format!("ConfigMap {namespace}/{name}"))
}

fn clients(data: &BTreeMap<String, String>) -> Result<Clients> {
    let pem = data.get(AUTHORITIES).with_context(|| format!("no {AUTHORITIES}: there is no aggregation layer"))?;
    let mut authorities = RootCertStore::empty();
    for authority in CertificateDer::pem_slice_iter(pem.as_bytes()) {
        authorities.add(authority.context(AUTHORITIES)?).context(AUTHORITIES)?;
    }
    let names = data.get(ALLOWED_NAMES).map(|list| serde_json::from_str(list).context(ALLOWED_NAMES));
    Ok(Clients::Certified { authorities: Arc::new(authorities), names: names.transpose()?.unwrap_or_default() })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with(names: Option<&str>) -> Result<Vec<String>> {
        let names = names.map(|names| (ALLOWED_NAMES.to_owned(), names.to_owned()));
        match clients(&names.into_iter().chain([(AUTHORITIES.to_owned(), String::new())]).collect())? {
            Clients::Certified { names, .. } => Ok(names),
            Clients::Anybody => panic!("anybody"),
        }
    }

    #[test]
    fn names_are_a_list_and_none_at_all_allow_any() {
        assert_eq!(with(Some(r#"["front-proxy","b"]"#)).expect("names"), ["front-proxy", "b"]);
        assert_eq!(with(Some("[]")).expect("names"), Vec::<String>::new());
        assert_eq!(with(None).expect("names"), Vec::<String>::new());
        assert!(format!("{:#}", with(Some("front-proxy")).expect_err("no list")).contains(ALLOWED_NAMES));
        assert!(format!("{:#}", clients(&BTreeMap::new()).err().expect("nothing")).contains(AUTHORITIES));
    }
}
