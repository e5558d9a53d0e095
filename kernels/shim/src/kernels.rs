//! The kernels as the C++ compiler saw them, and a way to run them.

use std::ffi::{CStr, c_char};
use std::path::Path;
use std::sync::OnceLock;
use std::{env, fs};

use windlass_kernels::cuda::launch::{Argument, Launch, MAX_PARAMETERS, TensorMap};

/// Names a folder in which each kernel that ran to its end leaves an empty file of its name. Tests are many processes: what none of
/// them launches is missing there, and `tests/run` says so.
const LAUNCHED: &str = "WINDLASS_LAUNCHED";

/// A kernel as its source declares it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Declared {
    /// Its symbol.
    pub name: String,
    /// Its source file.
    pub file: String,
    /// Threads of a block.
    pub threads: u32,
    /// Its parameters, such as `in f32, out bf16, u32`.
    pub parameters: String,
}

#[repr(C)]
struct Entry {
    name: *const c_char,
    file: *const c_char,
    threads: u32,
    parameters: *const c_char,
    call: *const (),
}

unsafe extern "C" {
    fn shim_entry(index: usize) -> *const Entry;
    fn shim_launch(
        index: usize,
        grid: *const u32,
        cluster: *const u32,
        shared_bytes: u32,
        arguments: *const u64,
        seed: u64,
        error: *mut c_char,
        error_bytes: usize,
    ) -> bool;
}

/// A tensor map as `cpp/hopper.cpp` reads it.
type Tiles = [u64; 16];

fn tiles(map: &TensorMap) -> Tiles {
    let TensorMap { at, element, rows, cols, box_rows } = *map;
    let [rows, cols, box_rows, box_cols] = [rows, cols, box_rows, map.box_cols()].map(u64::from);
    let words = [at.0, rows, cols, element.bytes() as u64, box_rows, box_cols, TensorMap::BOX_ROW_BYTES as u64];
    std::array::from_fn(|index| words.get(index).copied().unwrap_or(0))
}

/// Every kernel of the sources.
pub fn declared() -> &'static [Declared] {
    static ALL: OnceLock<Vec<Declared>> = OnceLock::new();
    ALL.get_or_init(|| {
        // SAFETY: entries live as long as the program, and their texts end with a zero.
        let entry = |index| unsafe {
            let entry = shim_entry(index).as_ref()?;
            let text = |text| CStr::from_ptr(text).to_string_lossy().into_owned();
            let (name, file, parameters) = (text(entry.name), text(entry.file), text(entry.parameters));
            Some(Declared { name, file, threads: entry.threads, parameters })
        };
        (0..).map_while(entry).collect()
    })
}

/// Runs a launch to its end.
///
/// # Safety
/// The launch was checked, and its arguments name memory that this thread may read and write.
pub(crate) unsafe fn run(launch: &Launch, seed: u64) -> Result<(), String> {
    let name = launch.kernel().spec().name;
    let Some(index) = declared().iter().position(|kernel| kernel.name == name) else {
        return Err(format!("kernel {name} is in no source"));
    };
    let mut arguments = [0; MAX_PARAMETERS];
    let mut maps = [[0; 16]; MAX_PARAMETERS];
    for ((bits, map), argument) in arguments.iter_mut().zip(&mut maps).zip(launch.arguments()) {
        *bits = argument.bits();
        if let Argument::Tiles(found) = argument {
            *map = tiles(found);
            *bits = std::ptr::from_ref(map) as u64;
        }
    }
    let mut error = [0 as c_char; 512];
    // SAFETY: the entry is there, the arguments are as many as it reads, and the error's room is as given.
    let done = unsafe {
        let (grid, cluster, shared) = (launch.grid(), launch.cluster(), launch.shared_bytes());
        let (blocks, clusters) = (grid.as_ptr(), cluster.as_ptr());
        shim_launch(index, blocks, clusters, shared, arguments.as_ptr(), seed, error.as_mut_ptr(), error.len())
    };
    // SAFETY: the call leaves a text that ends with a zero.
    if done { leave_name(name) } else { Err(unsafe { CStr::from_ptr(error.as_ptr()) }.to_string_lossy().into_owned()) }
}

fn leave_name(kernel: &str) -> Result<(), String> {
    let Some(folder) = env::var_os(LAUNCHED) else { return Ok(()) };
    let file = Path::new(&folder).join(kernel);
    if file.exists() { Ok(()) } else { fs::write(&file, "").map_err(|error| format!("{}: {error}", file.display())) }
}
