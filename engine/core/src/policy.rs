//! Scheduling policies: the order in which requests leave the queue, and in which running ones are preempted.

/// Order of service.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Policy {
    /// First come, first served.
    #[default]
    Fcfs,
    /// The lowest [`priority`](crate::request::Request::priority) value first; among equals, the first to arrive. The
    /// highest value is preempted first, also for a waiting request whose value is lower by more than
    /// `preemption_threshold`.
    Priority {
        /// Difference of priorities up to which no running sequence is preempted for a waiting one.
        preemption_threshold: u32,
    },
    /// Tenants share the engine by tokens: deficit round robin (Shreedhar and Varghese 1995).
    Fair,
    /// The longest cached prefix first; among equals, the first to arrive. A request that waited for long goes first
    /// nevertheless.
    LongestPrefix,
}
