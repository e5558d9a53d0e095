//! Compiles the kernels with NVRTC, which needs neither a tool kit nor, for compiling, a GPU.

use std::ffi::{CString, c_char, c_int};
use std::fs;
use std::path::{Path, PathBuf};
use std::ptr::null_mut;

use cudarc::nvrtc::sys::{self, nvrtcProgram, nvrtcResult};
use sha2::{Digest, Sha256};

use super::super::error::DriverError;
use super::{architecture, sources};

/// The cubin of `file`, from the cache or made now. The cache is keyed by everything that decides the code.
pub(super) fn compiled(file: &'static str, capability: (u32, u32), cache: &Path) -> Result<Vec<u8>, DriverError> {
    // SAFETY: looks for a library by name.
    if !unsafe { sys::is_culib_present() } {
        return failed(file, "this build has no kernels built in, and libnvrtc, which would make them, was not found");
    }
    let options = options(capability);
    let kept = cache.join(key(file, &options));
    if let Ok(image) = fs::read(&kept) {
        return Ok(image);
    }
    let image = compile(file, &options)?;
    // The cache saves time at the next start; where it cannot be written, that start compiles again.
    let _ = keep(&kept, &image);
    Ok(image)
}

fn options(capability: (u32, u32)) -> Vec<String> {
    vec![
        format!("--gpu-architecture={}", architecture(capability)),
        "--std=c++17".into(),
        "--extra-device-vectorization".into(),
    ]
}

/// A name for the image of these sources with these options by this compiler.
fn key(file: &str, options: &[String]) -> PathBuf {
    let mut hash = Sha256::new();
    for (name, text) in sources().iter().filter(|(name, _)| *name == file || name.ends_with(".cuh")) {
        hash.update(name);
        hash.update(text);
    }
    let (mut major, mut minor) = (0, 0);
    // SAFETY: the library is there, and both places are valid for the writes.
    unsafe { sys::nvrtcVersion(&mut major, &mut minor) };
    hash.update(format!("{options:?} {major}.{minor}"));
    let hash: String = hash.finalize().iter().take(12).map(|byte| format!("{byte:02x}")).collect();
    PathBuf::from(format!("{}-{hash}.cubin", file.trim_end_matches(".cu")))
}

/// Written beside its place and moved there, so that no start reads half of it.
fn keep(path: &Path, image: &[u8]) -> std::io::Result<()> {
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder)?;
    }
    let unfinished = path.with_extension(format!("{}", std::process::id()));
    fs::write(&unfinished, image)?;
    fs::rename(unfinished, path)
}

fn compile(file: &'static str, options: &[String]) -> Result<Vec<u8>, DriverError> {
    let text = |name: &str| CString::new(name).map_err(|error| image_error(file, error.to_string()));
    let source = sources().iter().find(|(name, _)| *name == file).map_or("", |(_, source)| source);
    let headers: Vec<_> = sources().iter().filter(|(name, _)| name.ends_with(".cuh")).collect();
    let names = headers.iter().map(|(name, _)| text(name)).collect::<Result<Vec<_>, _>>()?;
    let bodies = headers.iter().map(|(_, body)| text(body)).collect::<Result<Vec<_>, _>>()?;
    let program = Program::new(file, &text(source)?, &text(file)?, &names, &bodies)?;
    let options = options.iter().map(|option| text(option)).collect::<Result<Vec<_>, _>>()?;
    program.compile(&pointers(&options))?;
    program.cubin()
}

fn pointers(texts: &[CString]) -> Vec<*const c_char> {
    texts.iter().map(|text| text.as_ptr()).collect()
}

/// NVRTC's program, destroyed when dropped.
struct Program {
    file: &'static str,
    handle: nvrtcProgram,
}

impl Program {
    fn new(
        file: &'static str,
        source: &CString,
        name: &CString,
        header_names: &[CString],
        headers: &[CString],
    ) -> Result<Program, DriverError> {
        let mut handle = null_mut();
        let (bodies, names) = (pointers(headers), pointers(header_names));
        // SAFETY: all texts end with a zero and are copied by the call; the arrays have the given length.
        let result = unsafe {
            let count = headers.len() as c_int;
            sys::nvrtcCreateProgram(&mut handle, source.as_ptr(), name.as_ptr(), count, bodies.as_ptr(), names.as_ptr())
        };
        if result == nvrtcResult::NVRTC_SUCCESS {
            Ok(Program { file, handle })
        } else {
            failed(file, format!("{result:?}"))
        }
    }

    fn compile(&self, options: &[*const c_char]) -> Result<(), DriverError> {
        // SAFETY: the options end with a zero and outlive the call.
        let result = unsafe { sys::nvrtcCompileProgram(self.handle, options.len() as c_int, options.as_ptr()) };
        if result == nvrtcResult::NVRTC_SUCCESS {
            Ok(())
        } else {
            failed(self.file, format!("{result:?}: {}", self.log()))
        }
    }

    fn log(&self) -> String {
        let mut log = vec![];
        // SAFETY: the program lives, and the log has the room that it said it needs.
        unsafe {
            let mut bytes = 0;
            if sys::nvrtcGetProgramLogSize(self.handle, &mut bytes) == nvrtcResult::NVRTC_SUCCESS {
                log.resize(bytes, 0u8);
                sys::nvrtcGetProgramLog(self.handle, log.as_mut_ptr().cast());
            }
        }
        String::from_utf8_lossy(&log).trim_end_matches('\0').to_string()
    }

    fn cubin(&self) -> Result<Vec<u8>, DriverError> {
        let mut image = vec![];
        // SAFETY: the program lives and was compiled; the image has the room that it said it needs.
        let result = unsafe {
            let mut bytes = 0;
            let size = sys::nvrtcGetCUBINSize(self.handle, &mut bytes);
            image.resize(bytes, 0u8);
            if size == nvrtcResult::NVRTC_SUCCESS {
                sys::nvrtcGetCUBIN(self.handle, image.as_mut_ptr().cast())
            } else {
                size
            }
        };
        if result == nvrtcResult::NVRTC_SUCCESS { Ok(image) } else { failed(self.file, format!("{result:?}")) }
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        // SAFETY: made by `new`, named nowhere else.
        unsafe { sys::nvrtcDestroyProgram(&mut self.handle) };
    }
}

fn failed<T>(file: &'static str, reason: impl Into<String>) -> Result<T, DriverError> {
    Err(image_error(file, reason))
}

fn image_error(file: &'static str, reason: impl Into<String>) -> DriverError {
    DriverError::Image { file, reason: reason.into() }
}
