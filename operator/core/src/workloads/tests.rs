//! The split between workloads.

use proptest::prelude::*;
use windlass_operator_api::spot::SpotMode;

use super::*;

fn policy(mode: Option<SpotMode>, base: i32, percent: i32) -> SpotPolicy {
    SpotPolicy {
        mode,
        on_demand_base: base,
        max_percent_above_base: percent,
        node_selector: Default::default(),
        tolerations: Vec::new(),
    }
}

fn parts(policy: &SpotPolicy, total: i32) -> (i32, i32) {
    let [(_, on_demand), (_, spot)] = split(policy, total);
    (on_demand, spot)
}

#[test]
fn the_base_comes_first_and_the_share_is_rounded_down() {
    let prefer = Some(SpotMode::Prefer);
    for (policy, total, expected) in [
        (policy(None, 0, 100), 5, (5, 0)),
        (policy(Some(SpotMode::Never), 0, 100), 5, (5, 0)),
        (policy(prefer, 0, 100), 5, (0, 5)),
        (policy(prefer, 1, 100), 5, (1, 4)),
        (policy(prefer, 1, 80), 6, (2, 4)),
        (policy(prefer, 1, 80), 5, (2, 3)),
        (policy(prefer, 9, 100), 5, (5, 0)),
        (policy(Some(SpotMode::Require), 1, 0), 5, (5, 0)),
    ] {
        assert_eq!(parts(&policy, total), expected, "{policy:?} {total}");
    }
}

proptest! {
    /// One replica more or fewer moves one workload by one: a victim is never moved between workloads.
    #[test]
    fn a_step_of_one_moves_one_workload_by_one(base in 0..20_i32, percent in 0..=100_i32, total in 0..50_i32) {
        let policy = policy(Some(SpotMode::Prefer), base, percent);
        let (before, after) = (parts(&policy, total), parts(&policy, total + 1));
        prop_assert_eq!(before.0 + before.1, total);
        prop_assert_eq!((after.0 - before.0).abs() + (after.1 - before.1).abs(), 1);
    }
}
