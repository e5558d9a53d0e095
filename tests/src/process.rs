//! Programs that run beside a test and end with it.

use anyhow::{Context, Result};
use std::fs::File;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::Duration;

use crate::wait::{self, Look};

/// How long a program may take to end after SIGTERM.
const LAST_WORDS: Duration = Duration::from_secs(40);

/// A running program; killed when dropped.
#[derive(Debug)]
pub struct Running {
    name: String,
    child: Child,
    log: PathBuf,
}

impl Running {
    /// Starts `command`, its output in a file of `folder`.
    ///
    /// # Errors
    /// When it cannot be started.
    pub fn start(name: &str, command: &mut Command, folder: &Path) -> Result<Running> {
        let log = folder.join(format!("{name}.log"));
        let file = File::options().create(true).append(true).open(&log);
        let file = file.with_context(|| format!("cannot write {}", log.display()))?;
        command.stdin(Stdio::null()).stdout(file.try_clone()?).stderr(file);
        let child = command.spawn().with_context(|| format!("cannot start {name}"))?;
        Ok(Running { name: name.to_owned(), child, log })
    }

    /// Its process id.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// The end of its output.
    pub fn log(&self) -> String {
        let text = std::fs::read_to_string(&self.log).unwrap_or_default();
        let lines: Vec<&str> = text.lines().collect();
        lines[lines.len().saturating_sub(40)..].join("\n")
    }

    /// Whether it has ended by itself.
    pub fn has_ended(&mut self) -> bool {
        self.child.try_wait().is_ok_and(|status| status.is_some())
    }

    /// Ends it as the kernel does when memory runs out: without a word.
    pub fn kill(&mut self) {
        // It may have ended by itself, which is as good.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    /// Asks it to end, and waits until it has.
    ///
    /// # Errors
    /// When it does not.
    pub fn terminate(mut self) -> Result<()> {
        crate::command::output(Command::new("kill").arg(self.child.id().to_string()))?;
        wait::until(&format!("the end of {}", self.name), LAST_WORDS, || {
            Ok(Look::when(self.child.try_wait()?.is_some(), (), "it runs on"))
        })
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.kill();
    }
}

/// What a process has used.
#[derive(Clone, Copy, Debug)]
pub struct Usage {
    /// Resident memory, bytes.
    pub memory_bytes: u64,
    /// Most resident memory so far, bytes.
    pub peak_memory_bytes: u64,
    /// Processor time, user and system.
    pub cpu: Duration,
}

/// What a process has used, from Linux' own books.
///
/// # Errors
/// When there is no such process.
pub fn usage(id: u32) -> Result<Usage> {
    let read = |file: &str| std::fs::read_to_string(format!("/proc/{id}/{file}")).context("no such process");
    let (status, stat) = (read("status")?, read("stat")?);
    let kibibytes = |name: &str| {
        let line = status.lines().find(|line| line.starts_with(name)).context("no such line of its status")?;
        line.split_whitespace().nth(1).and_then(|word| word.parse::<u64>().ok()).context("no number in its status")
    };
    // Behind the name, which may hold anything: fields 14 and 15 of the line, in hundredths of a second.
    let fields: Vec<&str> = stat.rsplit(')').next().unwrap_or_default().split_whitespace().collect();
    let ticks =
        fields.get(11..13).context("a short line")?.iter().filter_map(|word| word.parse::<u64>().ok()).sum::<u64>();
    Ok(Usage {
        memory_bytes: kibibytes("VmRSS:")? * 1024,
        peak_memory_bytes: kibibytes("VmHWM:")? * 1024,
        cpu: Duration::from_millis(ticks * 10),
    })
}

/// A port on which nobody listens now. It is none of those that the system gives to connections that go out, or one of
/// these might have it a moment later.
///
/// # Errors
/// When the machine has none.
pub fn free_port() -> Result<u16> {
    let first = u16::try_from(std::process::id() % u32::from(PORTS)).unwrap_or_default();
    let number = |_| first.wrapping_add(NEXT_PORT.fetch_add(1, Ordering::Relaxed)) % PORTS;
    let mut ports = (0..PORTS).map(number).map(|number| FIRST_PORT + number);
    ports.find(|port| TcpListener::bind(("127.0.0.1", *port)).is_ok()).context("no free port")
}

/// Ports that [`free_port`] chooses from: below those for connections (32768 on), and node ports are not among them.
const FIRST_PORT: u16 = 12_000;
const PORTS: u16 = 16_000;
/// Of this process, so that two of its tests do not choose the same one.
static NEXT_PORT: AtomicU16 = AtomicU16::new(0);
