//! Compiles the CUDA sources for the CPU: each with a function that enters its kernels into the registry. One that is as it was
//! when its object was made is not compiled again.

use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash, Hasher};
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
    let compiler = compiler(&sources);
    let (mut library, mut enter_all) = (compiler.clone(), String::new());
    for stem in cuda_files(&sources)? {
        let source = fs::read_to_string(sources.join(format!("{stem}.cu")))?;
        let mut unit = Unit { name: stem.clone(), text: unit(&stem, &source), included: BTreeMap::new() };
        add_included(&unit.text, &[&sources, Path::new("cpp")], &mut unit.included)?;
        for object in unit.objects(&compiler, &out)? {
            library.object(object);
        }
        enter_all += &format!("void enter_{stem}();\n");
    }
    let calls: String = cuda_files(&sources)?.iter().map(|stem| format!("  enter_{stem}();\n")).collect();
    fs::write(out.join("all.cpp"), format!("{enter_all}extern \"C\" void shim_enter_all() {{\n{calls}}}\n"))?;
    let own = ["cpp/runtime.cpp", "cpp/hopper.cpp", "cpp/operands.cpp"];
    library.file(out.join("all.cpp")).files(own).compile("cuda_shim");
    Ok(())
}

/// A product and a sum round twice, as the references do; what is said of NVIDIA's pragmas and of old ABIs says nothing here.
const FLAGS: [&str; 4] = ["-ffp-contract=off", "-Wno-unknown-pragmas", "-fno-strict-aliasing", "-Wno-psabi"];

fn compiler(sources: &Path) -> cc::Build {
    let mut build = cc::Build::new();
    build.cpp(true).std("c++17").opt_level(2).define("CPU_SHIM", None).include("cpp").include(sources);
    FLAGS.iter().for_each(|flag| {
        build.flag(flag);
    });
    build
}

/// A C++ file to compile.
struct Unit {
    name: String,
    text: String,
    /// What it includes, and what that includes, by name.
    included: BTreeMap<String, String>,
}

/// Adds the files of these folders that a text includes.
fn add_included(text: &str, folders: &[&Path], included: &mut BTreeMap<String, String>) -> io::Result<()> {
    for name in text.lines().filter_map(|line| line.strip_prefix("#include \"")?.strip_suffix('"')) {
        let found = folders.iter().map(|folder| folder.join(name)).find(|path| path.exists());
        let Some(path) = found.filter(|_| !included.contains_key(name)) else { continue };
        let own = fs::read_to_string(path)?;
        included.insert(name.to_owned(), own.clone());
        add_included(&own, folders, included)?;
    }
    Ok(())
}

impl Unit {
    /// Its object, made unless an earlier build made it of the same.
    fn objects(&self, compiler: &cc::Build, out: &Path) -> io::Result<Vec<PathBuf>> {
        let mut hasher = DefaultHasher::new();
        (&self.text, &self.included, FLAGS).hash(&mut hasher);
        let (key, kept) = (format!("{:016x}", hasher.finish()), out.join(format!("{}.made", self.name)));
        if let Some(made) = fs::read_to_string(&kept).ok().and_then(|made| made.strip_prefix(&key).map(str::to_owned)) {
            let objects: Vec<PathBuf> = made.lines().filter(|line| !line.is_empty()).map(PathBuf::from).collect();
            if objects.iter().all(|object| object.exists()) {
                return Ok(objects);
            }
        }
        let file = out.join(format!("{}.cpp", self.name));
        fs::write(&file, &self.text)?;
        let objects = compiler.clone().file(file).compile_intermediates();
        let names: String = objects.iter().map(|object| format!("\n{}", object.display())).collect();
        fs::write(kept, key + &names)?;
        Ok(objects)
    }
}

/// Names of the sources without their `.cu`, sorted.
fn cuda_files(folder: &Path) -> io::Result<Vec<String>> {
    let stems = files(folder, "cu")?.into_iter().filter_map(|file| Some(file.file_stem()?.to_str()?.to_owned()));
    Ok(stems.collect())
}

/// The files of a folder whose names end like that, sorted.
fn files(folder: &Path, extension: &str) -> io::Result<Vec<PathBuf>> {
    let mut found = fs::read_dir(folder)?.map(|entry| Ok(entry?.path())).collect::<io::Result<Vec<PathBuf>>>()?;
    found.retain(|file| file.extension().is_some_and(|found| found == extension));
    found.sort();
    Ok(found)
}

/// A C++ file that includes a source and enters its kernels.
fn unit(stem: &str, source: &str) -> String {
    let kernels = source.lines().filter_map(|line| {
        let words = ["KERNEL(", "LARGE_KERNEL(", "RESIDENT_KERNEL("];
        words.into_iter().find_map(|word| line.strip_prefix(word))?.split(',').next()
    });
    let entries: String = kernels.map(|name| format!("  ENTER({name}, \"{stem}.cu\");\n")).collect();
    format!("#include \"{stem}.cu\"\n#include \"registry.h\"\nvoid enter_{stem}() {{\n{entries}}}\n")
}
