//! Deficit round robin over tenants (Shreedhar and Varghese 1995): whose request leaves the queue next.
//!
//! A tenant at the head of the round gets a quantum of [`QUANTUM_TOKENS`]. It may start requests while its credit is
//! positive, and pays for the prompt of a request when that starts and for each generated token. A tenant without
//! waiting requests keeps its debt and earns nothing.

use std::collections::{HashMap, VecDeque};

use crate::request::Tenant;

/// Tokens of a quantum: a few prefill chunks, so that rounds are short and a long prompt waits for few of them.
const QUANTUM_TOKENS: i64 = 2048;

#[derive(Clone, Debug, Default)]
pub(super) struct Fairness {
    /// Tenants with waiting requests, the one at the head of the round first.
    active: VecDeque<Tenant>,
    /// Tokens that a tenant may still spend; below 0, its debt.
    credit: HashMap<Tenant, i64>,
}

impl Fairness {
    /// The tenant whose request is next, among those with waiting requests. Asking again before anything is spent
    /// gives the same answer.
    pub(super) fn next(&mut self, waiting: impl Iterator<Item = Tenant> + Clone) -> Option<Tenant> {
        self.active.retain(|tenant| waiting.clone().any(|other| other == *tenant));
        for tenant in waiting {
            if !self.active.contains(&tenant) {
                self.active.push_back(tenant);
            }
        }
        loop {
            let tenant = *self.active.front()?;
            let credit = self.credit.entry(tenant).or_default();
            if *credit > 0 {
                return Some(tenant);
            }
            *credit += QUANTUM_TOKENS;
            if *credit > 0 {
                return Some(tenant);
            }
            self.active.rotate_left(1);
        }
    }

    /// Charges a tenant for computed or generated tokens.
    pub(super) fn spend(&mut self, tenant: Tenant, tokens: usize) {
        let credit = self.credit.entry(tenant).or_default();
        let had = *credit > 0;
        *credit -= tokens as i64;
        if had && *credit <= 0 && self.active.front() == Some(&tenant) {
            self.active.rotate_left(1);
        }
    }

    /// Forgets all credit and debt: nothing waits or runs.
    pub(super) fn forget(&mut self) {
        *self = Fairness::default();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Tokens served by tenant, with requests of these sizes always waiting, once `rounds` requests have started.
    fn served(sizes: &[(u32, usize)], rounds: usize) -> HashMap<u32, usize> {
        let (mut fairness, mut served) = (Fairness::default(), HashMap::new());
        for _ in 0..rounds {
            let next = fairness.next(sizes.iter().map(|(tenant, _)| Tenant(*tenant))).unwrap();
            let size = sizes.iter().find(|(tenant, _)| *tenant == next.0).unwrap().1;
            fairness.spend(next, size);
            *served.entry(next.0).or_default() += size;
        }
        served
    }

    #[test]
    fn tenants_get_the_same_tokens_whatever_the_size_of_their_requests() {
        let served = served(&[(1, 10_000), (2, 100), (3, 700)], 2000);
        let most = *served.values().max().unwrap() as f64;
        let least = *served.values().min().unwrap() as f64;
        assert!(served.len() == 3 && least / most > 0.8, "{served:?}");
    }

    #[test]
    fn a_quantum_pays_debts_before_it_gives() {
        for (owed, next) in [(QUANTUM_TOKENS - 1, 1), (QUANTUM_TOKENS, 2)] {
            let mut fairness = Fairness::default();
            fairness.spend(Tenant(1), owed as usize);
            assert_eq!(fairness.next([Tenant(1), Tenant(2)].into_iter()), Some(Tenant(next)), "{owed}");
        }
    }

    #[test]
    fn a_token_of_an_answer_costs_no_quantum() {
        let mut fairness = Fairness::default();
        let next = |fairness: &mut Fairness| fairness.next([Tenant(1), Tenant(2)].into_iter()).map(|tenant| tenant.0);
        for tenant in [1, 2] {
            assert_eq!(next(&mut fairness), Some(tenant));
            fairness.spend(Tenant(tenant), QUANTUM_TOKENS as usize);
        }
        fairness.spend(Tenant(1), 1);
        assert_eq!(next(&mut fairness), Some(1));
    }

    #[test]
    fn asking_twice_changes_nothing_and_absence_saves_nothing() {
        let mut fairness = Fairness::default();
        let both = || [Tenant(1), Tenant(2)].into_iter();
        assert_eq!(fairness.next(both()), fairness.next(both()));
        for _ in 0..50 {
            fairness.next([Tenant(1)].into_iter());
            fairness.spend(Tenant(1), 1000);
        }
        // The other comes now, and does not get all that the first one had.
        let rounds: Vec<Tenant> = (0..40)
            .map(|_| {
                let next = fairness.next(both()).unwrap();
                fairness.spend(next, 1000);
                next
            })
            .collect();
        let second = rounds.iter().filter(|tenant| tenant.0 == 2).count();
        assert!((15..=25).contains(&second), "{rounds:?}");
    }
}
