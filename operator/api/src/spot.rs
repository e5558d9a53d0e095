//! `spec.spot`: how many replicas may run on nodes that the provider can take back.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::Toleration;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Use of spot nodes.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("x-kubernetes-validations" = [
    {
        "rule": "self.mode != 'Never' || (!has(self.onDemandBase) && !has(self.maxPercentAboveBase) && !has(self.tolerations))",
        "message": "spec.spot: with mode Never only nodeSelector may be given, to name the nodes to avoid"
    },
    {
        "rule": "!has(self.fallbackAfterSeconds) || self.mode == 'Prefer'",
        "message": "spec.spot.fallbackAfterSeconds: acts only in mode Prefer"
    },
    {
        "rule": "!has(self.nodeSelector) || self.nodeSelector.all(label, self.nodeSelector[label].matches('^(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?$'))",
        "message": "spec.spot.nodeSelector: values of labels are letters, digits, '-', '_' and '.', with a letter or digit at both ends"
    }
]))]
pub struct Spot {
    /// Never: pods avoid spot nodes. Prefer: replicas above the base go to spot nodes where there are any, else to
    /// others. Require: replicas above the base run on spot nodes or wait.
    pub mode: SpotMode,
    /// Replicas that stay off spot nodes. Absent: 0.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 1000))]
    pub on_demand_base: Option<i32>,
    /// Most of the replicas above the base that may be spot, percent, rounded down. Absent: 100.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 100))]
    pub max_percent_above_base: Option<i32>,
    /// With mode Prefer: replicas for spot go to spot nodes alone, and when one has found none for so many seconds, as
    /// many run on demand until spot is back. Absent: the scheduler puts them at once where there is room.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 3600))]
    pub fallback_after_seconds: Option<i32>,
    /// Labels by which a spot node is known. Absent: those of Karpenter, EKS, GKE and AKS.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[schemars(schema_with = "crate::schema::labels")]
    pub node_selector: BTreeMap<String, String>,
    /// Taints of spot nodes. Absent: those of GKE and AKS.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "crate::schema::tolerations")]
    pub tolerations: Vec<Toleration>,
}

/// How spot nodes are used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum SpotMode {
    /// Avoid them.
    #[default]
    Never,
    /// Use them first.
    Prefer,
    /// Use only them above the base.
    Require,
}
