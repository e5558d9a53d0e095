//! The two images: what goes into each is staged in a folder, and any of docker, podman and buildah builds it.
//!
//! Nothing is fetched: the files are the stripped program, the shared libraries that it names, a user, the notices and
//! the bill of materials.

use anyhow::{Context, Result, bail, ensure};
use sha2::{Digest, Sha256};
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::cluster::Cluster;
use crate::{command, licences, sbom, workspace};

/// The user that images run as; a number that owns nothing anywhere.
const USER: u32 = 65_532;

/// The bill of materials in an image.
const BILL: &str = "/usr/share/doc/windlass/sbom.cdx.json";

/// A program that goes into an image of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Program {
    /// `windlass-operator`
    Operator,
    /// `windlass-engine`
    Engine,
}

impl Program {
    /// Name of the binary, its package and its image.
    pub fn name(self) -> &'static str {
        match self {
            Program::Operator => "windlass-operator",
            Program::Engine => "windlass-engine",
        }
    }

    fn dockerfile(self) -> PathBuf {
        let folder = match self {
            Program::Operator => "operator",
            Program::Engine => "engine",
        };
        workspace::root().join(folder).join("Dockerfile")
    }
}

/// A build context: `rootfs/` holds exactly what the image will.
#[derive(Debug)]
pub struct Staged {
    /// What is in it.
    pub program: Program,
    /// The folder to build from.
    pub context: PathBuf,
    /// Fingerprint of its content, used as the image's tag: a changed program is a changed image.
    pub tag: String,
    /// Sum of all files, bytes.
    pub bytes: u64,
}

/// An image in a file that every container runtime can load.
#[derive(Clone, Debug)]
pub struct Image {
    /// Repository with its registry.
    pub repository: String,
    /// Tag.
    pub tag: String,
    /// The docker archive.
    pub archive: PathBuf,
    /// Uncompressed size, bytes.
    pub bytes: u64,
}

/// Stages `program` from the release build.
///
/// # Errors
/// When the program is not built, or a file of the system that belongs into the image is missing.
pub fn stage(program: Program) -> Result<Staged> {
    let binary = workspace::binaries()?.join(program.name());
    ensure!(binary.is_file(), "{} is not built", binary.display());
    let context = workspace::binaries()?.join("images").join(program.name());
    let rootfs = context.join("rootfs");
    if rootfs.exists() {
        fs::remove_dir_all(&rootfs).with_context(|| format!("cannot clear {}", rootfs.display()))?;
    }
    let libraries = shared_libraries(&binary)?;
    let installed = Path::new("/usr/bin").join(program.name());
    strip(&binary, &placed(&rootfs, &installed)?)?;
    for library in &libraries {
        fs::copy(library, placed(&rootfs, library)?).with_context(|| format!("cannot copy {}", library.display()))?;
    }
    write(&rootfs, "/etc/passwd", &format!("windlass:x:{USER}:{USER}::/nonexistent:/sbin/nologin\n"))?;
    write(&rootfs, "/etc/group", &format!("windlass:x:{USER}:\n"))?;
    write(&rootfs, "/etc/nsswitch.conf", "hosts: files dns\n")?;
    write(&rootfs, "/usr/share/doc/windlass/LICENSE", &fs::read_to_string(workspace::root().join("LICENSE"))?)?;
    write(&rootfs, "/usr/share/doc/windlass/THIRD-PARTY", &licences::notices(program.name(), &libraries)?)?;
    let files = libraries.iter().chain([&installed]).map(|path| Ok((placed(&rootfs, path)?, path.as_path())));
    write(&rootfs, BILL, &sbom::cyclonedx(program.name(), &files.collect::<Result<Vec<_>>>()?)?)?;
    let (tag, bytes) = fingerprint(&rootfs, &program.dockerfile())?;
    Ok(Staged { program, context, tag, bytes })
}

impl Staged {
    /// Its bill of materials, as it lies in the image.
    pub fn bill(&self) -> PathBuf {
        self.context.join("rootfs").join(BILL.trim_start_matches('/'))
    }
}

/// Shared libraries of `binary`, the loader included, as the loader itself resolves them.
fn shared_libraries(binary: &Path) -> Result<Vec<PathBuf>> {
    let listed = command::output(Command::new("ldd").arg(binary))?;
    ensure!(!listed.contains("not found"), "a shared library is missing:\n{listed}");
    let words = listed.lines().flat_map(|line| line.split_whitespace().find(|word| word.starts_with('/')));
    Ok(words.map(PathBuf::from).collect())
}

fn strip(binary: &Path, to: &Path) -> Result<()> {
    command::output(Command::new("strip").arg("-o").arg(to).arg(binary)).map(drop)
}

/// Where `path` lies under `rootfs`; its folder is made.
fn placed(rootfs: &Path, path: &Path) -> Result<PathBuf> {
    let target = rootfs.join(path.strip_prefix("/").unwrap_or(path));
    let folder = target.parent().unwrap_or(rootfs);
    fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))?;
    Ok(target)
}

fn write(rootfs: &Path, path: &str, text: &str) -> Result<()> {
    let target = placed(rootfs, Path::new(path))?;
    fs::write(&target, text).with_context(|| format!("cannot write {}", target.display()))
}

/// Hash of every file's path, mode and content under `rootfs`, and of the Dockerfile; and the sum of sizes.
fn fingerprint(rootfs: &Path, dockerfile: &Path) -> Result<(String, u64)> {
    let mut hash = Sha256::new();
    let mut bytes = 0;
    hash.update(fs::read(dockerfile).with_context(|| format!("cannot read {}", dockerfile.display()))?);
    for path in files(rootfs)? {
        let content = fs::read(&path)?;
        hash.update(path.strip_prefix(rootfs).unwrap_or(&path).to_string_lossy().as_bytes());
        hash.update(fs::metadata(&path)?.permissions().mode().to_le_bytes());
        hash.update(&content);
        bytes += content.len() as u64;
    }
    let digest = hash.finalize();
    Ok((digest.iter().take(6).map(|byte| format!("{byte:02x}")).collect(), bytes))
}

/// Every file under `folder`, in order of path.
fn files(folder: &Path) -> Result<Vec<PathBuf>> {
    let mut entries: Vec<PathBuf> = fs::read_dir(folder)?.map(|entry| Ok(entry?.path())).collect::<Result<_>>()?;
    entries.sort();
    let nested = entries.into_iter().map(|path| if path.is_dir() { files(&path) } else { Ok(vec![path]) });
    Ok(nested.collect::<Result<Vec<_>>>()?.concat())
}

/// What builds images here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Builder {
    /// Needs its engine running.
    Docker,
    /// Needs nothing running.
    Podman,
    /// Needs nothing running; works in containers.
    Buildah,
}

impl Builder {
    /// The first that works on this machine, or what `WINDLASS_IMAGE_BUILDER` names.
    ///
    /// # Errors
    /// When there is none, or the name is none of the three.
    pub fn find() -> Result<Builder> {
        match std::env::var("WINDLASS_IMAGE_BUILDER").as_deref() {
            Ok("docker") => return Ok(Builder::Docker),
            Ok("podman") => return Ok(Builder::Podman),
            Ok("buildah") => return Ok(Builder::Buildah),
            Ok(other) => bail!("WINDLASS_IMAGE_BUILDER={other}: docker, podman or buildah"),
            Err(_) => {}
        }
        let works = |program: &str, argument: &str| command::output(Command::new(program).arg(argument)).is_ok();
        let found = [
            (Builder::Docker, "docker", "info"),
            (Builder::Podman, "podman", "info"),
            (Builder::Buildah, "buildah", "--version"),
        ];
        let found = found.into_iter().find(|(_, program, argument)| works(program, argument));
        found.map(|(builder, ..)| builder).context("none of docker, podman and buildah works here; install one of them")
    }

    /// Builds `staged` into an archive, unless an equal one is there already.
    ///
    /// # Errors
    /// The builder's own.
    pub fn build(self, staged: &Staged, registry: &str) -> Result<Image> {
        let repository = format!("{registry}/{}", staged.program.name());
        let name = format!("{repository}:{}", staged.tag);
        let archive = staged.context.join(format!("{}.tar", name.replace(['/', ':'], "_")));
        if !archive.exists() {
            self.build_as(staged, &name, &archive)?;
        }
        let bytes = fs::metadata(&archive)?.len();
        Ok(Image { repository, tag: staged.tag.clone(), archive, bytes })
    }

    /// Builds `staged` as `name`, a repository with a tag, into `archive`, whatever is there.
    ///
    /// # Errors
    /// The builder's own.
    pub fn build_as(self, staged: &Staged, name: &str, archive: &Path) -> Result<()> {
        let unfinished = archive.with_extension("part");
        self.build_archive(staged, name, &unfinished)?;
        fs::rename(&unfinished, archive).with_context(|| format!("cannot name {}", archive.display()))
    }

    /// Pushes an image that [`Builder::build`] made to the registry in its name.
    ///
    /// # Errors
    /// The builder's own.
    pub fn push(self, image: &Image) -> Result<String> {
        let name = format!("{}:{}", image.repository, image.tag);
        let archive = image.archive.display();
        match self {
            Builder::Docker | Builder::Podman => {
                let program = if self == Builder::Docker { "docker" } else { "podman" };
                command::output(Command::new(program).arg("load").arg("-i").arg(&image.archive))?;
                command::output(Command::new(program).args(["push", &name]))
            }
            Builder::Buildah => {
                let (_storage, buildah) = buildah()?;
                let pulled = command::output(buildah().arg("pull").arg(format!("docker-archive:{archive}")))?;
                command::output(buildah().args(["push", pulled.trim()]).arg(format!("docker://{name}")))
            }
        }
    }

    fn build_archive(self, staged: &Staged, name: &str, archive: &Path) -> Result<()> {
        if archive.exists() {
            fs::remove_file(archive)?;
        }
        let dockerfile = staged.program.dockerfile();
        match self {
            Builder::Docker | Builder::Podman => {
                let program = if self == Builder::Docker { "docker" } else { "podman" };
                let mut build = Command::new(program);
                build.args(["build", "-q", "-t", name, "-f"]).arg(&dockerfile).arg(&staged.context);
                command::output(&mut build)?;
                command::output(Command::new(program).args(["save", "-o"]).arg(archive).arg(name))?;
            }
            Builder::Buildah => {
                let (_storage, buildah) = buildah()?;
                let mut build = buildah();
                build.args(["build", "-q", "--isolation", "chroot", "-t", name, "-f"]).arg(&dockerfile);
                command::output(build.arg(&staged.context))?;
                command::output(
                    buildah().args(["push", name]).arg(format!("docker-archive:{}:{name}", archive.display())),
                )?;
            }
        }
        Ok(())
    }
}

/// buildah with storage of its own that is gone afterwards: nothing piles up in the machine's.
fn buildah() -> Result<(tempfile::TempDir, impl Fn() -> Command)> {
    let storage = tempfile::tempdir().context("cannot make a temporary folder")?;
    let [root, runroot] = ["root", "run"].map(|folder| storage.path().join(folder));
    let command = move || {
        let mut buildah = Command::new("buildah");
        buildah.args(["--storage-driver", "vfs", "--root"]).arg(&root).arg("--runroot").arg(&runroot);
        buildah
    };
    Ok((storage, command))
}

/// Stages, builds and loads both images: operator's, engine's.
///
/// # Errors
/// Any step's own.
pub fn deliver(cluster: &Cluster, builder: Builder) -> Result<[Image; 2]> {
    let deliver = |program| -> Result<Image> {
        let image = builder.build(&stage(program)?, cluster.registry())?;
        cluster.load(builder, &image)?;
        Ok(image)
    };
    Ok([deliver(Program::Operator)?, deliver(Program::Engine)?])
}
