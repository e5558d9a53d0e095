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
use limits::LimitTable;
use std::collections::HashMap;
use std::sync::{Arc, PoisonError, RwLock};
use std::time::{Duration, Instant};
use tracing::{error, info};
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
    /// As read last without a mistake.
    limits: LimitTable,
    trouble: Option<String>,
    read_at: Instant,
}

impl Tenants {
    /// Reads keys and limits; there must be a key, and all must be right. A request that finds them older than
    /// `refresh_every` reads them again.
    pub fn read(source: TenantSource, refresh_every: Duration, clock: Clock) -> Result<Tenants, Failure> {
        let mut known = Known {
            keys: Vec::new(),
            accounts: HashMap::new(),
            limits: LimitTable::default(),
            trouble: None,
            read_at: Instant::now(),
        };
        known.read(&source);
        match &known.trouble {
            Some(trouble) => Err(Failure::configuration(format!("API keys: {trouble}"))),
            None => Ok(Tenants { source, refresh_every, clock, known: RwLock::new(known) }),
        }
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

    /// What of keys and limits could not be read last, if something could not.
    pub fn trouble(&self) -> Option<String> {
        self.refresh();
        self.known.read().unwrap_or_else(PoisonError::into_inner).trouble.clone()
    }

    /// Seconds on the clock by which limits are counted.
    pub fn now(&self) -> f64 {
        self.clock.seconds()
    }

    /// Reads the files again if the last reading is old.
    fn refresh(&self) {
        let old = |known: &Known| known.read_at.elapsed() >= self.refresh_every;
        if !old(&self.known.read().unwrap_or_else(PoisonError::into_inner)) {
            return;
        }
        let mut known = self.known.write().unwrap_or_else(PoisonError::into_inner);
        if old(&known) {
            known.read_at = Instant::now();
            known.read(&self.source);
        }
    }
}

impl Known {
    /// A key that is not there counts no more, whatever the reason: who takes it out must not have to wonder whether the
    /// rest of the file is right. Limits that cannot be read stay as they were.
    fn read(&mut self, source: &TenantSource) {
        let mut read = source.keys.read();
        if read.trouble.is_some() {
            // Whoever writes the files may be at it: a second look before anybody is put out.
            read = source.keys.read();
        }
        let mut trouble = read.trouble;
        self.keys = read.keys.into_iter().map(|Key { tenant, digest }| (digest, self.account(tenant))).collect();
        match source.limits.read() {
            Ok(limits) => self.limits = limits,
            Err(error) => _ = trouble.get_or_insert(error.to_string()),
        }
        self.accounts.iter().for_each(|(name, account)| account.set_limits(self.limits.of(name)));
        self.tell(trouble);
    }

    /// Says once what is wrong, and once that it is right again.
    fn tell(&mut self, trouble: Option<String>) {
        match &trouble {
            _ if trouble == self.trouble => (),
            Some(why) => error!(keys = self.keys.len(), "API keys: {why}; only keys that could be read are valid"),
            None => info!(keys = self.keys.len(), "API keys can be read again"),
        }
        self.trouble = trouble;
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
    fn a_changed_key_counts_and_its_tenant_stays() {
        let path = tempfile::tempdir().unwrap();
        let file = path.path().join("key");
        fs::write(&file, "old").unwrap();
        let tenants = folder(path.path(), Duration::ZERO).unwrap();
        let before = tenants.find("old").unwrap().tenant();
        fs::write(&file, "new").unwrap();
        assert_eq!(tenants.find("new").unwrap().tenant(), before, "the tenant is the file, not the key");
        assert!(tenants.find("old").is_none());
    }

    #[test]
    fn a_key_that_is_not_there_is_not_valid_whatever_else_is_wrong() {
        let path = tempfile::tempdir().unwrap();
        let file = path.path().join("keys");
        let write = |bytes: &[u8]| fs::write(&file, bytes).unwrap();
        write(b"alice key-a\nbob key-b\n");
        let tenants = tenants(KeySource::File(file.clone()), Duration::ZERO).unwrap();
        let valid = || ["key-a", "key-b"].map(|key| tenants.find(key).is_some());
        assert_eq!((valid(), tenants.trouble()), ([true, true], None));
        for (text, word) in [(&b"alice key-a\nbob two words\n"[..], "line 2"), (b"\xff\nalice key-a\n", "line 1")] {
            write(text);
            assert_eq!(valid(), [true, false], "{word}");
            assert!(tenants.trouble().unwrap().contains(word));
        }
        write(b"alice key-a\nbob key-b\n");
        assert_eq!((valid(), tenants.trouble()), ([true, true], None));
        write(b"");
        assert_eq!(valid(), [false, false]);
        assert!(tenants.trouble().unwrap().contains("holds no key"));
        fs::remove_file(&file).unwrap();
        assert_eq!(valid(), [false, false]);
        assert!(tenants.trouble().unwrap().contains("cannot be read"));
        fs::create_dir(&file).unwrap();
        assert!(tenants.trouble().unwrap().contains("it is no file"));
    }

    #[test]
    fn a_folder_without_files_lets_nobody_in() {
        let path = tempfile::tempdir().unwrap();
        fs::write(path.path().join("alice"), "key-a").unwrap();
        fs::write(path.path().join("bob"), "key-b").unwrap();
        let tenants = folder(path.path(), Duration::ZERO).unwrap();
        let valid = || ["key-a", "key-b"].map(|key| tenants.find(key).is_some());
        fs::write(path.path().join("bob"), "").unwrap();
        assert_eq!(valid(), [true, false]);
        assert!(tenants.trouble().unwrap().contains("bob holds no key"));
        fs::remove_dir_all(path.path()).unwrap();
        assert_eq!(valid(), [false, false]);
    }

    #[test]
    fn limits_that_cannot_be_read_stay_and_keys_count_all_the_same() {
        let path = tempfile::tempdir().unwrap();
        let (keys, file) = (path.path().join("keys"), path.path().join("limits"));
        fs::write(&keys, "alice key-a\n").unwrap();
        fs::write(&file, r#"{"alice": {"max_concurrent_requests": 1}}"#).unwrap();
        let limits = LimitsSource { file: Some(file.clone()), ..LimitsSource::default() };
        let source = TenantSource { keys: KeySource::File(keys.clone()), limits };
        let tenants = Tenants::read(source, Duration::ZERO, Clock::start()).unwrap();
        fs::write(&file, "{").unwrap();
        fs::write(&keys, "alice key-a2\n").unwrap();
        assert!(tenants.find("key-a").is_none() && tenants.trouble().is_some());
        let alice = tenants.find("key-a2").unwrap();
        let _running = alice.begin("r".into(), 0.0).unwrap();
        assert!(alice.begin("r".into(), 0.0).is_err(), "the old limit counts");
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
