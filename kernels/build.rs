//! Takes the CUDA sources in: as machine code where nvcc is at hand, and as text for NVRTC in any case.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs, io};

use flate2::Compression;
use flate2::write::ZlibEncoder;

/// What machine code is made for: Ampere, Ada and Hopper; and PTX, which the drivers of other chips compile: from Hopper on that
/// of 9.0, as the host then chooses what 8.0 has not (`image.rs`).
const TARGETS: [(&str, &str); 6] = [
    ("compute_80", "sm_80"),
    ("compute_86", "sm_86"),
    ("compute_89", "sm_89"),
    ("compute_90a", "sm_90a"),
    ("compute_80", "compute_80"),
    ("compute_90", "compute_90"),
];

fn main() -> io::Result<()> {
    // Not PATH, which changes for many other reasons: a compiler that is put there later is found if NVCC names it.
    for name in ["WINDLASS_CUDA_IMAGES", "NVCC", "CUDA_HOME"] {
        println!("cargo::rerun-if-env-changed={name}");
    }
    println!("cargo::rerun-if-changed=cuda");
    let out = PathBuf::from(env::var("OUT_DIR").map_err(io::Error::other)?);
    let files = files(Path::new("cuda"))?;
    let images = match (env::var_os("WINDLASS_CUDA_IMAGES"), find_nvcc()) {
        (Some(folder), _) => ready_made(Path::new(&folder), &out)?,
        (None, Some(nvcc)) => compiled(&nvcc, &files, &out)?,
        (None, None) => String::new(),
    };
    let text = |file: &PathBuf| Ok(format!("({:?}, include_str!({:?})),\n", name(file), fs::canonicalize(file)?));
    let sources = files.iter().map(text).collect::<io::Result<String>>()?;
    let constants = [("IMAGES", "(&str, &str, &[u8])", images), ("SOURCES", "(&str, &str)", sources)];
    let constants = constants.map(|(name, kind, items)| format!("pub(super) const {name}: &[{kind}] = &[{items}];\n"));
    fs::write(out.join("cuda_images.rs"), constants.concat())
}

/// An image for what `target` names: an architecture's code, PTX for one and later ones, or `fatbin` for all of it. Deflated, which leaves a quarter:
/// a program carries the code of every architecture and reads that of one.
fn image(file: &str, target: &str, path: &Path, out: &Path) -> io::Result<String> {
    let deflated = out.join(format!("{file}.{target}.z"));
    let mut encoder = ZlibEncoder::new(fs::File::create(&deflated)?, Compression::best());
    io::copy(&mut fs::File::open(path)?, &mut encoder)?;
    encoder.finish()?;
    Ok(format!("({file:?}, {target:?}, include_bytes!({deflated:?})),\n"))
}

/// Images that were made before: `KERNELS.TARGET.cubin` and `KERNELS.TARGET.ptx`, by `tests/cuda/check --images`.
fn ready_made(folder: &Path, out: &Path) -> io::Result<String> {
    println!("cargo::rerun-if-changed={}", folder.display());
    let mut images = String::new();
    for entry in fs::read_dir(folder)? {
        let path = fs::canonicalize(entry?.path())?;
        let name = name(&path);
        let parts: Vec<&str> = name.split('.').collect();
        match parts[..] {
            [kernels, target, "cubin" | "ptx"] => images += &image(&format!("{kernels}.cu"), target, &path, out)?,
            _ => return Err(io::Error::other(format!("{} is no image of kernels", path.display()))),
        }
    }
    Ok(images)
}

/// Images that nvcc makes now.
fn compiled(nvcc: &Path, files: &[PathBuf], out: &Path) -> io::Result<String> {
    let mut images = String::new();
    for file in files.iter().filter(|file| file.extension().is_some_and(|extension| extension == "cu")) {
        let fatbin = out.join(file.with_extension("fatbin").file_name().unwrap_or_default());
        compile(nvcc, file, &fatbin)?;
        images += &image(&name(file), "fatbin", &fatbin, out)?;
    }
    Ok(images)
}

fn files(folder: &Path) -> io::Result<Vec<PathBuf>> {
    let mut files = fs::read_dir(folder)?.map(|entry| Ok(entry?.path())).collect::<io::Result<Vec<_>>>()?;
    files.retain(|file| file.extension().is_some_and(|extension| extension == "cu" || extension == "cuh"));
    files.sort();
    Ok(files)
}

fn name(file: &Path) -> String {
    file.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

/// `NVCC`, or what `CUDA_HOME` or `PATH` hold.
fn find_nvcc() -> Option<PathBuf> {
    let named = env::var_os("NVCC").map(PathBuf::from);
    let home = env::var_os("CUDA_HOME").map(|home| Path::new(&home).join("bin/nvcc"));
    let path = env::var_os("PATH").unwrap_or_default();
    let on_path: Vec<_> = env::split_paths(&path).map(|folder| folder.join("nvcc")).collect();
    named.into_iter().chain(home).chain(on_path).find(|candidate| candidate.is_file())
}

fn compile(nvcc: &Path, file: &Path, fatbin: &Path) -> io::Result<()> {
    let mut command = Command::new(nvcc);
    command.args(["-fatbin", "-O3", "-std=c++17", "-o"]).arg(fatbin).arg(file);
    for (virtual_target, target) in TARGETS {
        command.arg("-gencode").arg(format!("arch={virtual_target},code={target}"));
    }
    match command.status()?.success() {
        true => Ok(()),
        false => Err(io::Error::other(format!("{} could not compile {}", nvcc.display(), file.display()))),
    }
}
