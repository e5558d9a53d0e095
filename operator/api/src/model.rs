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
        "rule": "!self.source.startsWith('pvc://') || !has(self.secretRef)",
        "message": "spec.model.secretRef: acts only on a source that is fetched; a pvc:// source is read in place"
    },
    {
        "rule": "!self.source.startsWith('pvc://') || !has(self.caConfigMapRef)",
        "message": "spec.model.caConfigMapRef: acts only on a source that is fetched; a pvc:// source is read in place"
    },
    {
        "rule": "!self.source.startsWith('pvc://') || !has(self.cache)",
        "message": "spec.model.cache: acts only on a source that is fetched; a pvc:// source is read in place"
    }
]))]
pub struct Model {
    /// Where the weights are. `pvc://claim/path`: a file or folder in a claim, read in place. Others are fetched into the
    /// cache, a GGUF file where the address ends with its name, else all files of a model: `hf://organization/name`,
    /// `s3://bucket/prefix`, `gs://bucket/prefix`, `az://container/prefix`, `oci://registry/name:tag`, and
    /// `https://host/path`, one GGUF file checked against `sha256`.
    #[schemars(length(min = 1, max = 2048), extend("x-kubernetes-validations" = [
        {
            "rule": "self.matches('^(pvc|https|hf|s3|gs|az|oci)://')",
            "message": "spec.model.source: starts with pvc://, https://, hf://, s3://, gs://, az:// or oci://"
        },
        {
            "rule": "!self.startsWith('pvc://') || self.matches('^pvc://[a-z0-9]([-a-z0-9.]*[a-z0-9])?(/[^/\\\\s]+)*$')",
            "message": "spec.model.source: a claim reads pvc://claim/path/in/claim, without spaces or empty parts"
        },
        {
            "rule": "!self.matches('^(pvc|s3|gs|az)://') || !self.matches('/[.][.]?(/|$)')",
            "message": "spec.model.source: a path in a claim or bucket has no . or .. parts"
        },
        {
            "rule": "!self.startsWith('hf://') || self.matches('^hf://[.]*[-A-Za-z0-9_][-A-Za-z0-9._]*(/[.]*[-A-Za-z0-9_][-A-Za-z0-9._]*)+$')",
            "message": "spec.model.source: a model of the hub reads hf://organization/name, with a file or folder behind it or not; a branch, tag or commit belongs in spec.model.revision"
        },
        {
            "rule": "!self.matches('^(s3|gs|az)://') || self.matches('^(s3|gs|az)://[A-Za-z0-9]([-A-Za-z0-9._]*[A-Za-z0-9])?(/[^/\\\\s]+)*$')",
            "message": "spec.model.source: a bucket reads s3://bucket/path (gs://, az://), without spaces or empty parts; credentials belong in spec.model.secretRef"
        },
        {
            "rule": "!self.startsWith('oci://') || self.matches('^oci://[A-Za-z0-9]([-A-Za-z0-9.]*[A-Za-z0-9])?(:0*([1-9][0-9]{0,3}|[1-5][0-9]{4}|6[0-4][0-9]{3}|65[0-4][0-9]{2}|655[0-2][0-9]|6553[0-5]))?(/[A-Za-z0-9][-A-Za-z0-9._]*)+(:[A-Za-z0-9_][-A-Za-z0-9._]*|@sha256:[a-f0-9]{64})?$')",
            "message": "spec.model.source: an artifact reads oci://registry/name:tag or oci://registry/name@sha256:digest"
        },
        {
            "rule": "!self.startsWith('https://') || self.matches('^https://([^/\\\\s@?#:\\\\[\\\\]]+|\\\\[[0-9A-Fa-f:.]+\\\\])(:0*([1-9][0-9]{0,3}|[1-5][0-9]{4}|6[0-4][0-9]{3}|65[0-4][0-9]{2}|655[0-2][0-9]|6553[0-5]))?/[^\\\\s#]+$')",
            "message": "spec.model.source: a URL reads https://host/path or https://host:port/path, without spaces or fragment; credentials belong in spec.model.secretRef"
        }
    ]))]
    pub source: String,
    /// Of an hf:// source the branch, tag or commit; only a commit means the same files for ever. Absent: main. Of any other
    /// source a marker of your own. A change of it rolls the pods: use it when the content behind an unchanged `source` has
    /// changed.
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
    /// Secret with credentials, mounted into pods; the operator never reads it. Of https:// and hf:// the key `token`, sent as
    /// `Authorization: Bearer`; of oci:// the same with `user:password`; of s3://, gs:// and az:// a key for each setting,
    /// named like it (`AWS_ACCESS_KEY_ID`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub secret_ref: Option<LocalReference>,
    /// ConfigMap whose key `ca.crt` holds the certificates (PEM) that the server of the source is checked against
    /// instead of the public ones.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ca_config_map_ref: Option<LocalReference>,
    /// Where a source that is fetched is kept in the pod. Absent: EmptyDir.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cache: Option<Cache>,
}

/// A union of cache kinds.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("x-kubernetes-validations" = [
    {
        "rule": "(self.type == 'EmptyDir') != has(self.claimName)",
        "message": "spec.model.cache.claimName: required with types PersistentVolumeClaim and Node, and only there"
    },
    {
        "rule": "self.type != 'Node' || has(self.sizeLimit)",
        "message": "spec.model.cache.sizeLimit: required with type Node, where nothing else bounds what models take of a disk"
    },
    {
        "rule": "self.type != 'EmptyDir' || !has(self.keepUnusedSeconds)",
        "message": "spec.model.cache.keepUnusedSeconds: only with types PersistentVolumeClaim and Node; an EmptyDir goes with its pod"
    }
]))]
pub struct Cache {
    /// EmptyDir: each pod fetches for itself. PersistentVolumeClaim: fetched once, kept for every pod that mounts the claim.
    /// Node: fetched once a node, kept for every pod there; the claim's volume is one that each node has for itself, such as
    /// a `local` PersistentVolume whose node affinity fits several nodes.
    #[serde(rename = "type")]
    pub kind: CacheType,
    /// An existing claim. With type PersistentVolumeClaim, pods on several nodes need ReadWriteMany.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 253))]
    pub claim_name: Option<String>,
    /// Of an EmptyDir, the most bytes the model may take on the node's disk; a pod that exceeds it is evicted. Of a claim, the
    /// most bytes that all models in it may take together: those that no pod serves make room, the longest unused first, and
    /// a pod whose model finds none does not start.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "crate::schema::positive_quantity")]
    pub size_limit: Option<Quantity>,
    /// A model in the claim that no pod serves, and that no pod has started with for so long, is removed when the next pod
    /// starts. Absent: it is kept as long as there is room.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 3600, max = 31_536_000))]
    pub keep_unused_seconds: Option<i32>,
}

/// Kinds of cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum CacheType {
    /// The pod's own disk.
    EmptyDir,
    /// A claim shared by pods.
    PersistentVolumeClaim,
    /// A claim whose volume each node has for itself.
    Node,
}
