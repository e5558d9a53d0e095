//! References to other objects, `spec.auth` and `spec.network`.

use k8s_openapi::api::networking::v1::NetworkPolicyPeer;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// An object in the resource's namespace.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct LocalReference {
    /// Name of the object.
    #[schemars(length(min = 1, max = 253))]
    pub name: String,
}

/// Who may call the API.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Auth {
    /// Secret of which every value is an API key; a request then needs one as `Authorization: Bearer`. Mounted into
    /// pods; the operator never reads it. Absent: no key is asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub api_keys_secret_ref: Option<LocalReference>,
}

/// From where the API can be reached.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Network {
    /// NetworkPolicy peers that may connect to the API port. Absent or empty: pods of the same namespace.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "crate::schema::peers")]
    pub allow_from: Vec<NetworkPolicyPeer>,
}
