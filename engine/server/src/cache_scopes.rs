//! Who may find whose prompts in the prefix cache.
//!
//! How fast a first token comes tells whether a prompt was cached (Gu et al., "Auditing prompt caching", 2025). So a
//! tenant finds only its own prompts unless the server is told to share, and a request with a `cache_salt` only those
//! of the same salt. Scopes are numbers that nobody outside this process can compute.

use sha2::{Digest, Sha256};
use windlass_engine_core::request::{CacheScope, Tenant};

/// The scopes of one process.
#[derive(Debug)]
pub struct CacheScopes {
    key: [u8; 32],
    shared_by_tenants: bool,
}

impl CacheScopes {
    /// Scopes under a key of this process.
    pub fn new(shared_by_tenants: bool) -> CacheScopes {
        CacheScopes { key: rand::random(), shared_by_tenants }
    }

    /// Where a request of `tenant` finds and leaves prompts.
    pub fn of(&self, tenant: Tenant, salt: Option<&str>) -> CacheScope {
        let tenant = if self.shared_by_tenants { Tenant::default() } else { tenant };
        if tenant == Tenant::default() && salt.is_none() {
            return CacheScope::SHARED;
        }
        let salted = [u8::from(salt.is_some())];
        let parts: [&[u8]; 4] = [&self.key, &tenant.0.to_le_bytes(), &salted, salt.unwrap_or_default().as_bytes()];
        let digest = parts.iter().fold(Sha256::new(), |digest, part| digest.chain_update(part)).finalize();
        let number = digest.iter().take(16).fold(0, |number, byte| number << 8 | u128::from(*byte));
        CacheScope(number >> 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tenants_and_salts_are_apart_and_processes_are_too() {
        let scopes = CacheScopes::new(false);
        let all = [(0, None), (1, None), (2, None), (0, Some("a")), (1, Some("a")), (1, Some("b")), (1, Some(""))];
        let mut distinct: Vec<u128> = all.iter().map(|(tenant, salt)| scopes.of(Tenant(*tenant), *salt).0).collect();
        distinct.sort_unstable();
        distinct.dedup();
        assert_eq!(distinct.len(), all.len());
        assert!(distinct.iter().all(|scope| scope >> 127 == 0));
        assert_eq!(scopes.of(Tenant(1), Some("a")), scopes.of(Tenant(1), Some("a")));
        assert_ne!(scopes.of(Tenant(1), Some("a")), CacheScopes::new(false).of(Tenant(1), Some("a")));
    }

    #[test]
    fn tenants_share_where_told_and_salts_never_do() {
        let scopes = CacheScopes::new(true);
        assert_eq!(scopes.of(Tenant(1), None), scopes.of(Tenant(2), None));
        assert_ne!(scopes.of(Tenant(1), Some("a")), scopes.of(Tenant(1), None));
    }
}
