//! Who goes first: the order in which requests leave the queue and give up their blocks.

/// The order of service.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Policy {
    /// First come, first served.
    #[default]
    Fcfs,
    /// The lowest [`priority`](crate::request::Request::priority) first, of equals the first to come. The highest is
    /// preempted first, also for a waiting request whose priority is lower by more than `preemption_threshold`.
    Priority {
        /// Difference of priorities that is not yet worth a preemption.
        preemption_threshold: u32,
    },
    /// Tenants in turn, each with as many tokens as the others (deficit round robin, Shreedhar and Varghese 1995).
    Fair,
    /// The longest prefix in the cache first, of equals the first to come. A request that waits long goes first all
    /// the same.
    LongestPrefix,
}
