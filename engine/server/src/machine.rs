//! What this machine lets the process use, and what it has used.

mod cgroup;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// CPUs that the process may use, its cgroup's quota included; at least one.
pub fn cpus() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// Where this program keeps what it can make or fetch again.
pub fn cache_folder(name: &str) -> PathBuf {
    let home = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from);
    let home = home.or_else(|| std::env::var_os("HOME").map(|home| PathBuf::from(home).join(".cache")));
    home.unwrap_or_else(std::env::temp_dir).join("windlass").join(name)
}

/// What the kernel calls the machine; in a pod, the pod's name, in each of its containers.
pub fn host_name() -> String {
    fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default().trim().to_owned()
}

/// Bytes that the process may still take: of the limits of its cgroups or of the machine, whichever is least. `None` where
/// neither can be read.
pub fn free_memory_bytes() -> Option<u64> {
    let machine = fs::read_to_string("/proc/meminfo").ok().and_then(|text| kibibytes_as_bytes(&text, "MemAvailable:"));
    let group = cgroup::free_bytes();
    match (machine, group) {
        (Some(machine), Some(group)) => Some(machine.min(group)),
        (machine, group) => machine.or(group),
    }
}

/// Files and connections that the process may have open, as many as the machine lets it be from now on.
pub fn raise_open_files() -> u64 {
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit { current: limit.maximum, maximum: limit.maximum };
    // Where it stays as it is, that is what counts.
    let _ = setrlimit(Resource::Nofile, raised);
    getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX)
}

/// Memory that a process holds; 0 where that cannot be read.
pub fn resident_bytes(process: u32) -> u64 {
    status_bytes(&process.to_string(), "VmRSS:")
}

/// Memory that this process holds and that belongs to no file; 0 where that cannot be read.
pub fn own_bytes() -> u64 {
    status_bytes("self", "RssAnon:")
}

fn status_bytes(process: &str, name: &str) -> u64 {
    let status = fs::read_to_string(format!("/proc/{process}/status")).unwrap_or_default();
    kibibytes_as_bytes(&status, name).unwrap_or(0)
}

/// Where memory runs out, the kernel ends this process before others, such as the one that it works for. It may refuse to
/// be told so.
pub fn end_before_others() {
    let _ = fs::write("/proc/self/oom_score_adj", "1000");
}

/// Time on processors that the thread that calls has taken.
pub fn own_time() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    Duration::try_from(time).unwrap_or_default()
}

/// What a thread is asked for its time by, from other threads, too.
#[derive(Clone, Debug)]
pub struct ThreadTime(PathBuf);

/// The kernel's tick, in which it tells times whatever it counts by (`USER_HZ`).
const TICK: Duration = Duration::from_millis(10);

impl ThreadTime {
    /// Of the thread that calls.
    pub fn of_this_thread() -> ThreadTime {
        let thread = fs::read_link("/proc/thread-self").unwrap_or_default();
        ThreadTime(Path::new("/proc").join(thread).join("stat"))
    }

    /// Time on processors so far; zero where that cannot be read, or the thread is gone.
    pub fn spent(&self) -> Duration {
        let ticks = fs::read_to_string(&self.0).map_or(0, |stat| cpu_ticks(&stat));
        TICK * u32::try_from(ticks).unwrap_or(u32::MAX)
    }
}

/// The fields `utime` and `stime` of proc(5), the 12th and 13th behind the name in parentheses.
fn cpu_ticks(stat: &str) -> u64 {
    let fields = stat.rsplit(')').next().unwrap_or_default().split_whitespace();
    fields.skip(11).take(2).filter_map(|field| field.parse::<u64>().ok()).sum()
}

/// A line of the kernel's that gives its number in `kB`, by which it means 1024 bytes.
fn kibibytes_as_bytes(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    let kibibytes: u64 = line.trim().strip_suffix(" kB")?.parse().ok()?;
    kibibytes.checked_mul(1 << 10)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernels_files_are_understood() {
        let memory = "MemTotal:  10 kB\nMemAvailable:    2048 kB\n";
        assert_eq!(kibibytes_as_bytes(memory, "MemAvailable:"), Some(2 << 20));
        assert_eq!(cpu_ticks("7 (a) b) R 1 2 3 4 5 6 7 8 9 10 30 12 0 0"), 42);
    }

    #[test]
    fn time_and_memory_that_were_taken_are_told() {
        assert!((1 << 20..resident_bytes(std::process::id())).contains(&own_bytes()));
        let time = ThreadTime::of_this_thread();
        let began = time.spent();
        while time.spent() < began + 3 * TICK {
            std::hint::black_box((0..1_000_000_u64).sum::<u64>());
        }
        let asleep = std::thread::spawn(|| {
            std::thread::sleep(10 * TICK);
            ThreadTime::of_this_thread().spent()
        });
        assert!(asleep.join().unwrap() < 5 * TICK, "time of its own alone");
    }
}
