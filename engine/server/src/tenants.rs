//! Who may ask, and how much: API keys from files, each of a tenant with limits of its own.
//!
//! Everything is counted in this process: with several replicas a tenant has its limits on each. Nothing here knows
//! HTTP; what a key is to a request is decided in [`crate::http::auth`].

mod account;
mod bucket;
mod keys;
mod limits;

pub use account::{Account, Lease, OverLimit};
pub use keys::KeySource;
pub use limits::{Limits, LimitsSource};

use crate::clock::Clock;
use crate::failure::Failure;
use keys::Key;
use std::collections::HashMap;
use std::io;
use std::sync::{Arc, PoisonError, RwLock};
use std::time::{Duration, Instant};
use tracing::warn;
use windlass_engine_core::request::Tenant;

/// Where keys and limits come from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TenantSource {
    /// The keys.
    pub keys: KeySource,
    /// The limits.
    pub limits: LimitsSource,
}

/// The tenants that are valid now.
pub struct Tenants {
    source: TenantSource,
    refresh_every: Duration,
    clock: Clock,
    known: RwLock<Known>,
}

struct Known {
    /// Digests: equally long, and of no use to a reader of memory.
    keys: Vec<([u8; 32], Arc<Account>)>,
    /// Every tenant that ever was, so that a number is never given twice.
    accounts: HashMap<String, Arc<Account>>,
    read_at: Instant,
}

impl Tenants {
    /// Reads keys and limits; there must be a key. A request that finds them older than `refresh_every` reads them
    /// again.
    pub fn read(source: TenantSource, refresh_every: Duration, clock: Clock) -> Result<Tenants, Failure> {
        let mut known = Known { keys: Vec::new(), accounts: HashMap::new(), read_at: Instant::now() };
        known.read(&source).map_err(|error| Failure::configuration(format!("API keys: {error}")))?;
        Ok(Tenants { source, refresh_every, clock, known: RwLock::new(known) })
    }

    /// Whose key this is. The time taken depends on the number of keys only.
    pub fn find(&self, key: &str) -> Option<Arc<Account>> {
        self.refresh();
        let digest = keys::digest(key.as_bytes());
        let known = self.known.read().unwrap_or_else(PoisonError::into_inner);
        let found = known.keys.iter().fold(None, |found, (candidate, account)| {
            let same = keys::same(candidate, &digest);
            if same { Some(account) } else { found }
        });
        found.cloned()
    }

    /// Seconds on the clock by which limits are counted.
    pub fn now(&self) -> f64 {
        self.clock.seconds()
    }

    /// Reads the files again if the last reading is old. Unreadable ones leave everything as it was.
    fn refresh(&self) {
        let old = |known: &Known| known.read_at.elapsed() >= self.refresh_every;
        if !old(&self.known.read().unwrap_or_else(PoisonError::into_inner)) {
            return;
        }
        let mut known = self.known.write().unwrap_or_else(PoisonError::into_inner);
        if old(&known) {
            known.read_at = Instant::now();
            if let Err(error) = known.read(&self.source) {
                warn!("API keys could not be read again, the old ones stay: {error}");
            }
        }
    }
}

impl Known {
    fn read(&mut self, source: &TenantSource) -> io::Result<()> {
        let (keys, limits) = (source.keys.read()?, source.limits.read()?);
        self.keys = keys.into_iter().map(|Key { tenant, digest }| (digest, self.account(tenant))).collect();
        self.accounts.iter().for_each(|(name, account)| account.set_limits(limits.of(name)));
        Ok(())
    }

    /// The tenant of this name, new ones with the next number. 0 belongs to servers without keys.
    fn account(&mut self, name: String) -> Arc<Account> {
        let next = Tenant(self.accounts.len() as u32 + 1);
        self.accounts.entry(name).or_insert_with_key(|name| Arc::new(Account::new(name, next))).clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::path::Path;

    const REFRESH_EVERY: Duration = Duration::from_secs(10);

    fn tenants(keys: KeySource, refresh_every: Duration) -> Result<Tenants, Failure> {
        let source = TenantSource { keys, limits: LimitsSource::default() };
        Tenants::read(source, refresh_every, Clock::start())
    }

    fn folder(path: &Path, refresh_every: Duration) -> Result<Tenants, Failure> {
        tenants(KeySource::Folder(path.to_owned()), refresh_every)
    }

    #[test]
    fn every_file_of_a_folder_is_a_tenant_and_every_line_a_key_of_it() {
        let path = tempfile::tempdir().unwrap();
        fs::write(path.path().join("alice"), "key-a\nkey-a2\n").unwrap();
        fs::write(path.path().join("bob"), "key-b").unwrap();
        fs::write(path.path().join("..data"), "not a key").unwrap();
        let tenants = folder(path.path(), REFRESH_EVERY).unwrap();
        let tenant = |key: &str| tenants.find(key).map(|account| account.tenant());
        assert!(tenant("key-a").is_some() && tenant("key-a") == tenant("key-a2"));
        assert!(tenant("key-b").is_some() && tenant("key-b") != tenant("key-a"));
        assert!(["key-", "", "not a key", "key-a\nkey-a2"].iter().all(|key| tenant(key).is_none()));
    }

    #[test]
    fn lines_of_one_file_are_tenants_by_name_or_each_its_own() {
        let file = tempfile::NamedTempFile::new().unwrap();
        fs::write(file.path(), "# rotated in May\nalice key-1\nalice key-2\nkey-3\nkey-4\n").unwrap();
        let tenants = tenants(KeySource::File(file.path().to_owned()), REFRESH_EVERY).unwrap();
        let tenant = |key: &str| tenants.find(key).unwrap().tenant();
        assert_eq!(tenant("key-1"), tenant("key-2"));
        assert_ne!(tenant("key-3"), tenant("key-4"));
        assert!(tenants.find("alice").is_none() && tenants.find("# rotated in May").is_none());
    }

    #[test]
    fn a_changed_folder_counts_and_an_unreadable_one_does_not() {
        let path = tempfile::tempdir().unwrap();
        let file = path.path().join("key");
        fs::write(&file, "old").unwrap();
        let tenants = folder(path.path(), Duration::ZERO).unwrap();
        let before = tenants.find("old").unwrap().tenant();
        fs::write(&file, "new").unwrap();
        assert_eq!(tenants.find("new").unwrap().tenant(), before, "the tenant is the file, not the key");
        assert!(tenants.find("old").is_none());
        fs::remove_file(&file).unwrap();
        assert!(tenants.find("new").is_some(), "no key at all is a mistake, not a decision");
    }

    #[test]
    fn a_missing_or_empty_key_is_an_error_that_names_the_file() {
        let path = tempfile::tempdir().unwrap();
        let empty = folder(path.path(), REFRESH_EVERY).err().unwrap();
        assert!(empty.message.contains("holds no file"), "{empty}");
        fs::write(path.path().join("blank"), " \n").unwrap();
        let blank = folder(path.path(), REFRESH_EVERY).err().unwrap();
        assert!(blank.message.contains("blank holds no key"), "{blank}");
    }
}
