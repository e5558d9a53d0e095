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
    /// Without progress for so many seconds, a rollout is reported as stuck; it goes on being tried. Absent: 600.
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
