//! How many replicas: a pure rule from policy, readings and time.

use std::collections::VecDeque;

use jiff::Timestamp;

/// What the rule remembers from one decision to the next. Lost at a restart of the operator: then scaling down waits
/// until a whole window has been seen again.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Memory {
    /// Recommendations with their time, oldest first.
    pub recommendations: VecDeque<(Timestamp, i32)>,
}
