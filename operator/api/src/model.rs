//! `spec.model`: source, revision, checksum, names, credentials and cache.

use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::access::LocalReference;

/// What to serve.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("x-kubernetes-validations" = [
    {
        "rule": "!self.source.startsWith('https://') || has(self.sha256)",
        "message": "spec.model.sha256: required with an https:// source"
    },
    {
        "rule": "self.source.startsWith('https://') || !has(self.sha256)",
        "message": "spec.model.sha256: acts only on an https:// source"
    },
    {
        "rule": "self.source.startsWith('https://') || !has(self.secretRef)",
        "message": "spec.model.secretRef: acts only on an https:// source"
    },
    {
        "rule": "self.source.startsWith('https://') || !has(self.caConfigMapRef)",
        "message": "spec.model.caConfigMapRef: acts only on an https:// source"
    },
    {
        "rule": "self.source.startsWith('https://') || !has(self.cache)",
        "message": "spec.model.cache: acts only on an https:// source; a pvc:// source is read in place"
    }
]))]
pub struct Model {
    /// Where the weights are: `pvc://claim/path` (a file or folder in a claim, read in place) or `https://host/path`
    /// (one GGUF file, fetched into the cache and checked against `sha256`).
    #[schemars(length(min = 1, max = 2048), extend("x-kubernetes-validations" = [
        {
            "rule": "self.startsWith('pvc://') || self.startsWith('https://')",
            "message": "spec.model.source: starts with pvc:// or https://; other sources (hf, s3, gs, az, oci) are not supported yet"
        },
        {
            "rule": "!self.startsWith('pvc://') || self.matches('^pvc://[a-z0-9]([-a-z0-9.]*[a-z0-9])?(/[^/\\\\s]+)*$')",
            "message": "spec.model.source: a claim reads pvc://claim/path/in/claim, without spaces or empty parts"
        },
        {
            "rule": "!self.startsWith('pvc://') || !self.matches('/[.][.]?(/|$)')",
            "message": "spec.model.source: a path in a claim has no . or .. parts"
        },
        {
            "rule": "!self.startsWith('https://') || self.matches('^https://([^/\\\\s@?#:\\\\[\\\\]]+|\\\\[[0-9A-Fa-f:.]+\\\\])(:0*([1-9][0-9]{0,3}|[1-5][0-9]{4}|6[0-4][0-9]{3}|65[0-4][0-9]{2}|655[0-2][0-9]|6553[0-5]))?/[^\\\\s#]+$')",
            "message": "spec.model.source: a URL reads https://host/path or https://host:port/path, without spaces or fragment; credentials belong in spec.model.secretRef"
        }
    ]))]
    pub source: String,
    /// A version marker of your own: a change of it rolls the pods. Use it when the content behind an unchanged `source`
    /// has changed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 63), regex(pattern = r"^[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$"))]
    pub revision: Option<String>,
    /// SHA-256 of the file at an https source, 64 hexadecimal digits. A pod that reads anything else does not start.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(equal = 64), regex(pattern = r"^[a-f0-9]{64}$"))]
    pub sha256: Option<String>,
    /// Names that requests may put in their `model` field. Absent: the resource's name.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(
        length(max = 8),
        inner(length(min = 1, max = 128), regex(pattern = r"^[A-Za-z0-9][-A-Za-z0-9_./:@]*$")),
        extend("x-kubernetes-list-type" = "set")
    )]
    pub served_names: Vec<String>,
    /// Secret whose key `token` is sent to an https source as `Authorization: Bearer`. Mounted into pods; the operator
    /// never reads it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub secret_ref: Option<LocalReference>,
    /// ConfigMap whose key `ca.crt` holds the certificates (PEM) that an https source is checked against instead of
    /// the public ones.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ca_config_map_ref: Option<LocalReference>,
    /// Where an https source is kept in the pod. Absent: EmptyDir.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cache: Option<Cache>,
}

/// A union of cache kinds.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("x-kubernetes-validations" = [
    {
        "rule": "(self.type == 'PersistentVolumeClaim') == has(self.claimName)",
        "message": "spec.model.cache.claimName: required with type PersistentVolumeClaim, and only there"
    },
    {
        "rule": "self.type == 'EmptyDir' || !has(self.sizeLimit)",
        "message": "spec.model.cache.sizeLimit: only with type EmptyDir"
    }
]))]
pub struct Cache {
    /// EmptyDir: each pod fetches for itself. PersistentVolumeClaim: fetched once, kept for every pod that mounts the claim.
    #[serde(rename = "type")]
    pub kind: CacheType,
    /// An existing claim. Pods on several nodes need ReadWriteMany.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 253))]
    pub claim_name: Option<String>,
    /// Most bytes the model may take on the node's disk; a pod that exceeds it is evicted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "crate::schema::quantity")]
    pub size_limit: Option<Quantity>,
}

/// Kinds of cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum CacheType {
    /// The pod's own disk.
    EmptyDir,
    /// A claim shared by pods.
    PersistentVolumeClaim,
}
