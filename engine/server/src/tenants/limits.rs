//! How much a tenant may ask of one replica.

use super::keys::MAX_FILE_BYTES;
use crate::small_file;
use serde::Deserialize;
use std::collections::HashMap;
use std::io;
use std::path::PathBuf;

/// Limits of one tenant on this replica; absent ones do not limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Limits {
    /// Answers that may be made at once: a request has as many as it asks for.
    pub max_concurrent_requests: Option<u32>,
    /// Tokens a minute, of prompts and answers together; a whole minute's may be used at once.
    pub tokens_per_minute: Option<u64>,
}

/// Where limits come from.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LimitsSource {
    /// For tenants that the file does not name.
    pub default: Limits,
    /// JSON: an object from a tenant's name to its [`Limits`], which replace the default as a whole.
    pub file: Option<PathBuf>,
}

/// Limits by tenant, as read.
#[derive(Default)]
pub struct LimitTable {
    default: Limits,
    own: HashMap<String, Limits>,
}

impl Limits {
    /// A limit of nothing, which is a mistake: a tenant without rights has no key.
    pub fn stop_everything(&self) -> bool {
        self.max_concurrent_requests == Some(0) || self.tokens_per_minute == Some(0)
    }
}

impl LimitsSource {
    /// Reads the file, if there is one.
    pub fn read(&self) -> io::Result<LimitTable> {
        let own = match &self.file {
            None => HashMap::new(),
            Some(file) => {
                let failed = |error: &dyn std::fmt::Display| io::Error::other(format!("{}: {error}", file.display()));
                let text = small_file::read(file, MAX_FILE_BYTES).map_err(|error| failed(&error))?;
                let own: HashMap<String, Limits> = serde_json::from_slice(&text).map_err(|error| failed(&error))?;
                match own.iter().find(|(_, limits)| limits.stop_everything()) {
                    Some((tenant, _)) => {
                        return Err(failed(&format!("a limit of {tenant} is 0; it must be at least 1")));
                    }
                    None => own,
                }
            }
        };
        Ok(LimitTable { default: self.default, own })
    }
}

impl LimitTable {
    /// The limits of this tenant.
    pub fn of(&self, tenant: &str) -> Limits {
        self.own.get(tenant).copied().unwrap_or(self.default)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_named_tenant_has_its_own_limits_and_others_the_default() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), r#"{"alice": {"tokens_per_minute": 60}}"#).unwrap();
        let default = Limits { max_concurrent_requests: Some(2), tokens_per_minute: None };
        let table = LimitsSource { default, file: Some(file.path().to_owned()) }.read().unwrap();
        assert_eq!(table.of("alice"), Limits { max_concurrent_requests: None, tokens_per_minute: Some(60) });
        assert_eq!(table.of("bob"), default);
    }

    #[test]
    fn a_misspelt_limit_is_an_error_that_names_the_file() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), r#"{"alice": {"tokens": 60}}"#).unwrap();
        let source = LimitsSource { default: Limits::default(), file: Some(file.path().to_owned()) };
        let error = source.read().err().unwrap().to_string();
        assert!(error.contains("unknown field `tokens`") && error.contains(&*file.path().to_string_lossy()), "{error}");
    }
}
