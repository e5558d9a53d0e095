//! `spec.rollout`: how pods of a new revision take the place of the old ones.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// How pods of a new revision take the place of the old ones.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Rollout {
    /// Surge: a new pod serves before an old one goes. Drain: an old pod drains first, one at a time, which leaves none
    /// with one replica. Auto: as Surge while nodes have room for one more pod, else as Drain with two replicas or more;
    /// with one, nothing rolls and Progressing says NoCapacity. Absent: Auto.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub strategy: Option<RolloutStrategy>,
    /// Without progress for so many seconds, a rollout is reported as stuck. It goes on being tried, unless an old pod has
    /// made room for one that does not start: then pods of the old revision come back, and `restartedAt` tries again. The
    /// autoscaler waits as long for a replica to serve. Absent: 600.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 60, max = 86_400))]
    pub progress_deadline_seconds: Option<i32>,
    /// Pods stay as they are, whatever changes in the spec; only their number follows. Absent: false.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub paused: Option<bool>,
    /// A new time replaces every pod, as a rollout does; which time it is does not matter. Leave it out of Git: the
    /// action `restart` of Argo CD writes it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "crate::schema::time_text")]
    pub restarted_at: Option<String>,
    /// A revision of `status.revisions`, by name, whose pods are to serve whatever else the spec says of them: the way
    /// back from a change. Replicas, autoscaling and who may call follow the spec. Absent: the spec's own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 63), regex(pattern = r"^[a-z]([-a-z0-9]*[a-z0-9])?$"))]
    pub pinned_revision: Option<String>,
    /// Earlier revisions that are kept to go back to. Absent: 10.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 50))]
    pub revision_history_limit: Option<i32>,
    /// What an operator with another default engine image does. OnSpecChange: nothing, until the next change of the spec.
    /// Automatic: it rolls to that image, one at a time of all services of this operator. Absent: OnSpecChange.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub engine_upgrade: Option<EngineUpgrade>,
}

/// When the operator's default engine image is taken.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum EngineUpgrade {
    /// With the next change of the spec.
    #[default]
    OnSpecChange,
    /// At once, one service at a time.
    Automatic,
}

/// What comes first, the new pod or the end of an old one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum RolloutStrategy {
    /// By what room there is.
    #[default]
    Auto,
    /// The new pod.
    Surge,
    /// The end of an old one.
    Drain,
}
