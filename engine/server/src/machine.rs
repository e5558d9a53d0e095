//! What this machine lets the process use.

use std::fs;

/// CPUs that the process may use, its cgroup's quota included; at least one.
pub fn cpus() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// Bytes that the process may still take: of its cgroup's limit or of the machine, whichever is less. `None` where
/// neither can be read.
pub fn free_memory_bytes() -> Option<u64> {
    let machine = fs::read_to_string("/proc/meminfo").ok().and_then(|text| mem_available_bytes(&text));
    let group = cgroup_free_bytes();
    match (machine, group) {
        (Some(machine), Some(group)) => Some(machine.min(group)),
        (machine, group) => machine.or(group),
    }
}

/// What a memory cgroup of version 2 has left. Page cache counts as used there and is given back on demand, so only
/// what cannot be reclaimed is taken off.
fn cgroup_free_bytes() -> Option<u64> {
    let limit: u64 = fs::read_to_string("/sys/fs/cgroup/memory.max").ok()?.trim().parse().ok()?;
    let stat = fs::read_to_string("/sys/fs/cgroup/memory.stat").ok()?;
    Some(limit.saturating_sub(anonymous_bytes(&stat)?))
}

fn mem_available_bytes(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kibibytes: u64 = line.trim().strip_suffix(" kB")?.parse().ok()?;
    Some(kibibytes << 10)
}

fn anonymous_bytes(stat: &str) -> Option<u64> {
    stat.lines().find_map(|line| line.strip_prefix("anon "))?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernels_files_are_understood() {
        assert_eq!(mem_available_bytes("MemTotal:  10 kB\nMemAvailable:    2048 kB\n"), Some(2 << 20));
        assert_eq!(anonymous_bytes("anon 4096\nfile 8192\n"), Some(4096));
    }
}
