//! Where the kernels' machine code comes from: a folder that somebody names, else built in where the build was given it or found
//! nvcc, else compiled by NVRTC for the device at hand, once, into a cache.

mod nvrtc;

use std::io::{ErrorKind, Read};
use std::path::Path;

use flate2::read::ZlibDecoder;

use super::error::DriverError;
use super::table::Kernel;

/// The first compute capability that the kernels compile for: Ampere's.
const OLDEST: (u32, u32) = (8, 0);

mod built {
    //! What `build.rs` found: `IMAGES`, each `(file, target, contents deflated)`, and `SOURCES`, each `(file, contents)`.
    include!(concat!(env!("OUT_DIR"), "/cuda_images.rs"));
}

/// Whether this program carries the machine code, and never compiles.
pub fn is_built_in() -> bool {
    !built::IMAGES.is_empty()
}

/// The sources, each `(file, text)`: kernels (`.cu`) and what they include (`.cuh`).
pub fn sources() -> &'static [(&'static str, &'static str)] {
    built::SOURCES
}

/// The environment variable of a folder of images, as `tests/cuda/check --images` writes them, which are taken before those built
/// in: a kernel is tried without a build of this program.
const FOLDER: &str = "WINDLASS_CUDA_IMAGES";

/// The image of a source file for a device of `capability`: its own code, else PTX, which the driver compiles.
fn of(file: &'static str, capability: (u32, u32), cache: &Path) -> Result<Vec<u8>, DriverError> {
    let own = architecture(capability);
    if let Some(image) = named(file, &own)? {
        return Ok(image);
    }
    let targets = [own.as_str(), "fatbin", ptx(capability)];
    let built = |target: &&str| built::IMAGES.iter().find(|(name, made_for, _)| *name == file && made_for == target);
    match targets.iter().find_map(built) {
        Some((_, _, deflated)) => inflated(file, deflated),
        None => nvrtc::compiled(file, capability, cache),
    }
}

/// Of the folder that the environment names, if it has this one.
fn named(file: &'static str, target: &str) -> Result<Option<Vec<u8>>, DriverError> {
    let Some(folder) = std::env::var_os(FOLDER) else { return Ok(None) };
    let path = Path::new(&folder).join(format!("{}.{target}.cubin", file.trim_end_matches(".cu")));
    match std::fs::read(&path) {
        Ok(image) => Ok(Some(image)),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(DriverError::Image { file, reason: format!("{FOLDER}: {}: {error}", path.display()) }),
    }
}

fn inflated(file: &'static str, deflated: &[u8]) -> Result<Vec<u8>, DriverError> {
    let mut image = Vec::new();
    match ZlibDecoder::new(deflated).read_to_end(&mut image) {
        Ok(_) => Ok(image),
        Err(error) => Err(DriverError::Image { file, reason: error.to_string() }),
    }
}

/// The images of all sources, in the order of [`Kernel::FILES`]. Those that are compiled now are so side by side.
pub fn all(capability: (u32, u32), cache: &Path) -> Result<Vec<Vec<u8>>, DriverError> {
    if capability < OLDEST {
        return Err(DriverError::TooOld { capability });
    }
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

/// The PTX for a device of `capability` that has no code of its own here. From 9.0 on that of 9.0: the host has launches overlap
/// there and multiplies e4m3, which PTX of 8.0 knows nothing of. Before it, that of 8.0.
fn ptx(capability: (u32, u32)) -> &'static str {
    if capability >= (9, 0) { "compute_90" } else { "compute_80" }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chips_without_code_of_their_own_get_the_latest_ptx_that_they_can_run() {
        let given = [(8, 7), (8, 8), (9, 0), (10, 0), (12, 1)].map(ptx);
        assert_eq!(given, ["compute_80", "compute_80", "compute_90", "compute_90", "compute_90"]);
    }
}
