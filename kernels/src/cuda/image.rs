//! Where the kernels' machine code comes from: built in where the build was given it or found nvcc, else compiled by NVRTC
//! for the device at hand, once, into a cache.

mod nvrtc;

use std::borrow::Cow;
use std::path::Path;

use super::error::DriverError;
use super::table::Kernel;

mod built {
    //! What `build.rs` found: `IMAGES`, each `(file, target, contents)`, and `SOURCES`, each `(file, contents)`.
    include!(concat!(env!("OUT_DIR"), "/cuda_images.rs"));
}

/// Where this program's kernels come from, in a word: for people.
pub fn origin() -> &'static str {
    if built::IMAGES.is_empty() { "compiled at first start by NVRTC" } else { "built in" }
}

/// The sources, each `(file, text)`: kernels (`.cu`) and what they include (`.cuh`).
pub fn sources() -> &'static [(&'static str, &'static str)] {
    built::SOURCES
}

/// The image of a source file for a device of `capability`: its own code, else PTX, which the driver compiles.
fn of(file: &'static str, capability: (u32, u32), cache: &Path) -> Result<Cow<'static, [u8]>, DriverError> {
    let own = architecture(capability);
    let targets = [own.as_str(), "fatbin", "ptx"];
    let built = |target: &&str| built::IMAGES.iter().find(|(name, made_for, _)| *name == file && made_for == target);
    match targets.iter().find_map(built) {
        Some((_, _, image)) => Ok(Cow::Borrowed(*image)),
        None => nvrtc::compiled(file, capability, cache).map(Cow::Owned),
    }
}

/// The images of all sources, in the order of [`Kernel::FILES`]. Those that are compiled now are so side by side.
pub fn all(capability: (u32, u32), cache: &Path) -> Result<Vec<Cow<'static, [u8]>>, DriverError> {
    std::thread::scope(|scope| {
        let start = |file: &'static str| (file, scope.spawn(move || of(file, capability, cache)));
        let started: Vec<_> = Kernel::FILES.iter().map(|&file| start(file)).collect();
        let panicked = |file| DriverError::Image { file, reason: "making it panicked".into() };
        started.into_iter().map(|(file, made)| made.join().unwrap_or_else(|_| Err(panicked(file)))).collect()
    })
}

/// Makes every image for a device of `capability` ready in `cache`, so that no start has to; the number of sources.
pub fn prepare(capability: (u32, u32), cache: &Path) -> Result<usize, DriverError> {
    all(capability, cache).map(|images| images.len())
}

/// The architecture that code for a device of `capability` is made for. `a` adds what only Hopper itself has (wgmma).
pub fn architecture(capability: (u32, u32)) -> String {
    let (major, minor) = capability;
    let own = if capability == (9, 0) { "a" } else { "" };
    format!("sm_{major}{minor}{own}")
}
