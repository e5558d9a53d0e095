//! What `tests/setup` fetched: models and suites that tests run on where they are there.

use std::env;
use std::path::PathBuf;

/// SmolLM2-135M-Instruct in Q4_1, a GGUF file.
pub fn real_model() -> Option<PathBuf> {
    fetched("WINDLASS_MODEL", "models/SmolLM2-135M-Instruct.Q4_1.gguf", "SmolLM2-135M-Instruct in Q4_1")
}

/// The encoder all-MiniLM-L6-v2, a folder of the hub's kind.
pub fn sentence_encoder() -> Option<PathBuf> {
    fetched("WINDLASS_ENCODER", "models/all-MiniLM-L6-v2", "all-MiniLM-L6-v2")
}

/// The folder of the JSON-Schema-Test-Suite.
pub fn schema_suite() -> Option<PathBuf> {
    fetched("WINDLASS_SCHEMA_SUITE", "json-schema-test-suite", "the JSON-Schema-Test-Suite")
}

/// Where `what` is: at the path that `variable` names, else at `place` in the user's cache folder (`XDG_CACHE_HOME`, or
/// `~/.cache`), under `windlass`. Where it is not it says so, for the test to be skipped.
///
/// # Panics
/// When it is not there and `CI` is `true`.
pub fn fetched(variable: &str, place: &str, what: &str) -> Option<PathBuf> {
    let path = locate(|name| env::var_os(name).map(PathBuf::from), variable, place)?;
    if path.exists() {
        return Some(path);
    }
    let missing = format!("there is no {}: `tests/setup tests` fetches {what}, or {variable} names it", path.display());
    assert!(env::var("CI").as_deref() != Ok("true"), "{missing}");
    eprintln!("SKIPPED: {missing}");
    None
}

fn locate(set: impl Fn(&str) -> Option<PathBuf>, variable: &str, place: &str) -> Option<PathBuf> {
    let set = |name| set(name).filter(|value| !value.as_os_str().is_empty());
    let cache = set("XDG_CACHE_HOME").or_else(|| Some(set("HOME")?.join(".cache")));
    set(variable).or_else(|| Some(cache?.join("windlass").join(place)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_variable_goes_before_the_cache_folder_and_that_before_the_home() {
        let path = |set: &[(&str, &str)]| {
            let found = |name: &str| set.iter().find(|(key, _)| *key == name).map(|(_, value)| PathBuf::from(value));
            locate(found, "WINDLASS_MODEL", "models/m.gguf").map(|path| path.display().to_string())
        };
        let [home, cache, named] = [("HOME", "/home"), ("XDG_CACHE_HOME", "/cache"), ("WINDLASS_MODEL", "/m.gguf")];
        assert_eq!(path(&[home]).as_deref(), Some("/home/.cache/windlass/models/m.gguf"));
        assert_eq!(path(&[home, cache]).as_deref(), Some("/cache/windlass/models/m.gguf"));
        assert_eq!(path(&[home, cache, named]).as_deref(), Some("/m.gguf"));
        assert_eq!(path(&[home, ("XDG_CACHE_HOME", ""), ("WINDLASS_MODEL", "")]), path(&[home]));
        assert_eq!(path(&[]), None);
    }
}
