//! Where the kernels' machine code comes from: built in by nvcc where the build found it, else compiled by NVRTC for the
//! device at hand, once, into a cache.

mod nvrtc;

use std::borrow::Cow;
use std::path::Path;

use super::error::DriverError;

mod built {
    //! What `build.rs` found: `FATBINS` (empty without nvcc) and `SOURCES`, each `(file, contents)`.
    include!(concat!(env!("OUT_DIR"), "/cuda_images.rs"));
}

/// Where this program's kernels come from, in a word: for people.
pub fn origin() -> &'static str {
    if built::FATBINS.is_empty() { "compiled at first start by NVRTC" } else { "built in" }
}

/// The sources, each `(file, text)`: kernels (`.cu`) and what they include (`.cuh`).
pub fn sources() -> &'static [(&'static str, &'static str)] {
    built::SOURCES
}

/// The image of a source file for a device of `capability`.
pub fn of(file: &'static str, capability: (u32, u32), cache: &Path) -> Result<Cow<'static, [u8]>, DriverError> {
    match built::FATBINS.iter().find(|(name, _)| *name == file) {
        Some((_, fatbin)) => Ok(Cow::Borrowed(fatbin)),
        None => nvrtc::compiled(file, capability, cache).map(Cow::Owned),
    }
}

/// The architecture that code for a device of `capability` is made for. `a` adds what only Hopper itself has (wgmma).
pub fn architecture(capability: (u32, u32)) -> String {
    let (major, minor) = capability;
    let own = if capability == (9, 0) { "a" } else { "" };
    format!("sm_{major}{minor}{own}")
}
