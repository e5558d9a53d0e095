//! Prepares what the cluster tests need, step by step or all at once. `./tests/run` calls it.

use anyhow::{Context, Result};
use clap::{Parser, Subcommand};
use std::fs;
use std::path::{Path, PathBuf};
use windlass_tests::cluster::Cluster;
use windlass_tests::image::{self, Builder, Program, Staged};
use windlass_tests::operator;
use windlass_tests::progress::Progress;
use windlass_tests::rights;

const VERSION: &str = env!("CARGO_PKG_VERSION");

/// Prepares what the cluster tests need.
#[derive(Parser)]
#[command(max_term_width = 110)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Lay out the files of both images from the release build; prints the commands that build them
    Stage,
    /// Write both images and their bills of materials into a folder, from the release build; `tests/release` calls it
    Release {
        /// Made if it is not there; what is in it is replaced
        folder: PathBuf,
    },
    /// Start a cluster (or use the one KUBECONFIG names), load both images, install the operator
    Up,
    /// Compare the rights that the installed operator has with those that it has used; for after all tests
    Rights,
    /// End the cluster that `up` started; on a cluster of yours, remove the operator
    Down,
}

fn main() -> Result<()> {
    match Cli::parse().command {
        Command::Stage => stage(),
        Command::Release { folder } => release(&folder),
        Command::Up => up(),
        Command::Rights => rights(),
        Command::Down => down(),
    }
}

fn stage() -> Result<()> {
    for program in [Program::Operator, Program::Engine] {
        let Staged { context, bytes, .. } = image::stage(program)?;
        let folder = if program == Program::Operator { "operator" } else { "engine" };
        println!("{:.1} MB: docker build -f {folder}/Dockerfile {}", bytes as f64 / 1e6, context.display());
    }
    Ok(())
}

fn release(folder: &Path) -> Result<()> {
    fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))?;
    let builder = Builder::find()?;
    for program in [Program::Operator, Program::Engine] {
        let (name, staged) = (program.name(), image::stage(program)?);
        builder.build_as(&staged, &format!("{name}:{VERSION}"), &folder.join(format!("{name}-{VERSION}.tar")))?;
        fs::copy(staged.bill(), folder.join(format!("{name}-{VERSION}.cdx.json")))?;
        println!("{name}:{VERSION}, {:.1} MB", staged.bytes as f64 / 1e6);
    }
    Ok(())
}

fn up() -> Result<()> {
    let mut progress = Progress::default();
    let cluster = progress.phase("Start the cluster", |_| Cluster::start())?;
    let [operator, engine] =
        progress.phase("Build and load both images", |_| image::deliver(&cluster, Builder::find()?))?;
    progress.phase("Install the operator", |_| operator::install(&cluster, &operator, &engine))
}

fn rights() -> Result<()> {
    let cluster = Cluster::attach()?;
    match cluster.audit_log() {
        Some(log) => println!("{} rights granted, each of them used", rights::compare(&cluster, &log)?),
        None => println!("SKIPPED: rights granted against used; the audit log of this cluster cannot be read"),
    }
    Ok(())
}

fn down() -> Result<()> {
    match Cluster::attach() {
        Ok(cluster) if !cluster.is_own() => operator::uninstall(&cluster),
        _ => Cluster::stop(),
    }
}
