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

/// What this process's memory cgroup has left. Page cache counts as used there and is given back on demand, so only
/// what cannot be reclaimed is taken off.
fn cgroup_free_bytes() -> Option<u64> {
    let version_2 = free_bytes("/sys/fs/cgroup", "memory.max", "anon");
    version_2.or_else(|| free_bytes("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "total_rss"))
}

fn free_bytes(folder: &str, limit: &str, used: &str) -> Option<u64> {
    let read = |file: &str| fs::read_to_string(format!("{folder}/{file}")).ok();
    // Without a limit the file says `max`, or a number beyond any machine.
    let limit: u64 = read(limit)?.trim().parse().ok()?;
    Some(limit.saturating_sub(field_bytes(&read("memory.stat")?, used)?))
}

fn mem_available_bytes(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kibibytes: u64 = line.trim().strip_suffix(" kB")?.parse().ok()?;
    Some(kibibytes << 10)
}

fn field_bytes(stat: &str, name: &str) -> Option<u64> {
    stat.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '))?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernels_files_are_understood() {
        assert_eq!(mem_available_bytes("MemTotal:  10 kB\nMemAvailable:    2048 kB\n"), Some(2 << 20));
        assert_eq!(field_bytes("anon_thp 1\nanon 4096\nfile 8192\n", "anon"), Some(4096));
    }
}
