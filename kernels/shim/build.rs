//! Compiles the CUDA sources for the CPU: each with a function that enters its kernels into the registry.

use std::path::{Path, PathBuf};
use std::{env, fs, io};

fn main() -> io::Result<()> {
    let out = PathBuf::from(env::var("OUT_DIR").map_err(io::Error::other)?);
    // Mutation tests compile a changed copy.
    let sources = env::var("WINDLASS_CUDA_SOURCES").map_or_else(|_| PathBuf::from("../cuda"), PathBuf::from);
    for watched in [&sources, Path::new("cpp")] {
        println!("cargo::rerun-if-changed={}", watched.display());
    }
    println!("cargo::rerun-if-env-changed=WINDLASS_CUDA_SOURCES");
    let mut build = cc::Build::new();
    build.cpp(true).std("c++17").opt_level(2).define("CPU_SHIM", None).include("cpp").include(&sources);
    // A product and a sum round twice, as the references do; warnings of NVIDIA's pragmas say nothing here.
    build.flag("-ffp-contract=off").flag("-Wno-unknown-pragmas").flag("-fno-strict-aliasing");
    let mut enter_all = String::new();
    for stem in cuda_files(&sources)? {
        let file = out.join(format!("{stem}.cpp"));
        fs::write(&file, unit(&stem, &fs::read_to_string(sources.join(format!("{stem}.cu")))?))?;
        build.file(file);
        enter_all += &format!("void enter_{stem}();\n");
    }
    let calls: String = cuda_files(&sources)?.iter().map(|stem| format!("  enter_{stem}();\n")).collect();
    fs::write(out.join("all.cpp"), format!("{enter_all}extern \"C\" void shim_enter_all() {{\n{calls}}}\n"))?;
    build.file(out.join("all.cpp")).file("cpp/runtime.cpp").compile("cuda_shim");
    Ok(())
}

/// Names of the sources without their `.cu`, sorted.
fn cuda_files(folder: &Path) -> io::Result<Vec<String>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        if path.extension().is_some_and(|extension| extension == "cu") {
            found.extend(path.file_stem().map(|stem| stem.to_string_lossy().into_owned()));
        }
    }
    found.sort();
    Ok(found)
}

/// A C++ file that includes a source and enters its kernels.
fn unit(stem: &str, source: &str) -> String {
    let kernels = source.lines().filter_map(|line| {
        let declared = line.strip_prefix("LARGE_KERNEL(").or_else(|| line.strip_prefix("KERNEL("))?;
        declared.split(',').next()
    });
    let entries: String = kernels.map(|name| format!("  ENTER({name}, \"{stem}.cu\");\n")).collect();
    format!("#include \"{stem}.cu\"\n#include \"registry.h\"\nvoid enter_{stem}() {{\n{entries}}}\n")
}
