//! What the memory cgroups that the process is in have left: its own and those around it, each of which may be the one that
//! kills it.

use std::fs;
use std::path::{Component, Path, PathBuf};

/// How a version of cgroups names things.
struct Version {
    /// File system type of its mounts.
    kind: &'static str,
    /// The controller whose hierarchy it is.
    controller: &'static str,
    limit: &'static str,
    /// Of `memory.stat`, what cannot be reclaimed.
    used: &'static str,
}

const VERSIONS: [Version; 2] = [
    Version { kind: "cgroup2", controller: "", limit: "memory.max", used: "anon" },
    Version { kind: "cgroup", controller: "memory", limit: "memory.limit_in_bytes", used: "total_rss" },
];

/// The least that any of them has left; `None` without a limit. Page cache counts as used there and is given back on demand,
/// so only what cannot be reclaimed is taken off.
pub(super) fn free_bytes() -> Option<u64> {
    let [groups, mounts] = ["cgroup", "mountinfo"].map(|file| fs::read_to_string(Path::new("/proc/self").join(file)));
    least(&groups.ok()?, &mounts.ok()?)
}

fn least(groups: &str, mounts: &str) -> Option<u64> {
    VERSIONS.iter().flat_map(|version| version.left(groups, mounts)).min()
}

impl Version {
    /// What is left in each group with a limit, from the process's own to the outermost one that is mounted.
    fn left(&self, groups: &str, mounts: &str) -> Vec<u64> {
        let Some((folder, mount)) = self.folder(groups, mounts) else { return Vec::new() };
        let around = folder.ancestors().take_while(|folder| folder.starts_with(&mount));
        around.filter_map(|folder| self.left_in(folder)).collect()
    }

    fn left_in(&self, folder: &Path) -> Option<u64> {
        let read = |file| fs::read_to_string(folder.join(file)).ok();
        // Without a limit the file says `max`, or a number beyond any machine.
        let limit: u64 = read(self.limit)?.trim().parse().ok()?;
        let statistics = read("memory.stat")?;
        let line = |line: &str| line.strip_prefix(self.used)?.strip_prefix(' ')?.parse::<u64>().ok();
        Some(limit.saturating_sub(statistics.lines().find_map(line)?))
    }

    /// The folder of the process's own group, and where its hierarchy is mounted.
    fn folder(&self, groups: &str, mounts: &str) -> Option<(PathBuf, PathBuf)> {
        let own = groups.lines().find_map(|line| self.own(line))?;
        let (root, mount) = mounts.lines().find_map(|line| self.mount(line))?;
        // Outside of what is mounted, or above a namespace's own: then what is mounted is all that can be seen.
        let inside = Path::new(own).strip_prefix(root).unwrap_or(Path::new(""));
        let is_plain = inside.components().all(|part| matches!(part, Component::Normal(_)));
        let mount = PathBuf::from(mount);
        Some((if is_plain { mount.join(inside) } else { mount.clone() }, mount))
    }

    /// The process's group, if this line of `/proc/self/cgroup` is about this hierarchy.
    fn own<'a>(&self, line: &'a str) -> Option<&'a str> {
        let (controllers, path) = line.split_once(':')?.1.split_once(':')?;
        controllers.split(',').any(|name| name == self.controller).then_some(path)
    }

    /// Which part of this hierarchy is mounted where, if this line of `/proc/self/mountinfo` is about it.
    fn mount<'a>(&self, line: &'a str) -> Option<(&'a str, &'a str)> {
        let (place, what) = line.split_once(" - ")?;
        let (mut place, mut what) = (place.split(' ').skip(3), what.split(' '));
        let (kind, options) = (what.next()?, what.nth(1)?);
        let is_its =
            kind == self.kind && (self.controller.is_empty() || options.split(',').any(|name| name == self.controller));
        if is_its { Some((place.next()?, place.next()?)) } else { None }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A group with a limit, of which so much is used.
    fn group(folder: &Path, version: &Version, limit: &str, used: u64) {
        fs::create_dir_all(folder).unwrap();
        fs::write(folder.join(version.limit), format!("{limit}\n")).unwrap();
        fs::write(folder.join("memory.stat"), format!("{0}_thp 1\n{0} {used}\nfile 8192\n", version.used)).unwrap();
    }

    fn mountinfo(root: &str, mount: &Path, version: &Version) -> String {
        let options = if version.controller.is_empty() { "rw" } else { "rw,memory" };
        let mount = mount.display();
        format!(
            "22 1 8:1 / / rw - ext4 /dev/sda rw\n30 22 0:26 {root} {mount} ro shared:4 - {} cgroup {options}\n",
            version.kind
        )
    }

    #[test]
    fn the_tightest_of_the_groups_around_the_process_counts() {
        let folder = tempfile::tempdir().unwrap();
        for version in &VERSIONS {
            let mount = folder.path().join(version.kind);
            group(&mount, version, "max", 9000);
            group(&mount.join("pods"), version, "10000", 4000);
            group(&mount.join("pods/one"), version, "8000", 1000);
            group(&mount.join("pods/two"), version, "5000", 3000);
            let left = |own: &str, root: &str| {
                let groups = format!("7:cpu,cpuacct:/elsewhere\n3:{}:{own}\n", version.controller);
                least(&groups, &mountinfo(root, &mount, version))
            };
            assert_eq!(left("/pods/one", "/"), Some(6000), "the one around it is fuller");
            assert_eq!(left("/pods/two", "/"), Some(2000));
            assert_eq!(left("/", "/"), None, "no limit");
            // A container that sees its own group alone, by whatever name.
            assert_eq!(left("/kube/pods/two", "/kube"), Some(2000));
            assert_eq!(left("/../other", "/"), None);
            group(&mount, version, "7000", 3000);
            assert_eq!(left("/docker/1234", "/docker/1234"), Some(4000));
            assert_eq!(left("/gone", "/"), Some(4000), "a folder that is not there has none around it");
        }
        assert_eq!(least("", ""), None);
    }
}
