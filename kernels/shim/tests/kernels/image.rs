//! Compiling at first start, where NVRTC is at hand (`tests/run cuda` brings it).

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use windlass_kernels::cuda::{Kernel, image};

/// Each file's contents.
fn files(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    let entry = |entry: fs::DirEntry| (entry.file_name().into_string().unwrap(), fs::read(entry.path()).unwrap());
    fs::read_dir(folder).unwrap().map(|found| entry(found.unwrap())).collect()
}

#[test]
fn a_first_start_compiles_and_the_next_one_reads() {
    if std::env::var_os("WINDLASS_NVRTC").is_none() {
        assert_ne!(std::env::var("CI").as_deref(), Ok("true"), "no NVRTC; tests/run cuda has it");
        return eprintln!("skipped: no NVRTC; tests/run cuda has it");
    }
    let cache = tempfile::tempdir().unwrap();
    assert_eq!(image::prepare((9, 0), cache.path()).unwrap(), Kernel::FILES.len());
    let made = files(cache.path());
    assert_eq!(made.len(), Kernel::FILES.len());
    assert!(made.values().all(|image| image.starts_with(b"\x7fELF")));
    // What is kept is what is used: a start reads it, and makes only what is missing.
    let (kept, missing) = (made.keys().next().unwrap(), made.keys().last().unwrap());
    fs::write(cache.path().join(kept), "kept").unwrap();
    fs::remove_file(cache.path().join(missing)).unwrap();
    image::prepare((9, 0), cache.path()).unwrap();
    let found = files(cache.path());
    assert_eq!(found[kept], b"kept");
    assert_eq!(found[missing], made[missing]);
    // Another device has another code.
    image::prepare((8, 0), cache.path()).unwrap();
    assert_eq!(files(cache.path()).len(), 2 * Kernel::FILES.len());
}
