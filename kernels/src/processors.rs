//! The processors that a thread may use, and which of them are near each other.

#![allow(unsafe_code)]

use std::fs;

/// The processors that the calling thread may use, in the order of their numbers.
pub fn allowed() -> Vec<usize> {
    // SAFETY: an all-zero cpu_set_t is an empty set; the call writes at most the size it is told.
    let (set, found) = unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        let found = libc::sched_getaffinity(0, size_of::<libc::cpu_set_t>(), &raw mut set) == 0;
        (set, found)
    };
    let all = 0..libc::CPU_SETSIZE as usize;
    // SAFETY: every number is below the set's size.
    all.filter(|&processor| found && unsafe { libc::CPU_ISSET(processor, &set) }).collect()
}

/// Confines the calling thread, and those that it starts from now on, to `processors`. Best effort: an unconfined
/// thread is only slower.
pub fn confine(processors: &[usize]) {
    let known = processors.iter().filter(|&&processor| processor < libc::CPU_SETSIZE as usize);
    // SAFETY: an all-zero cpu_set_t is an empty set, and the numbers are below its size.
    unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        known.for_each(|&processor| libc::CPU_SET(processor, &mut set));
        libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &raw const set);
    }
}

/// The calling thread's processors in `count` shares, each of neighbours: a memory node is split only where shares are
/// smaller than nodes. Empty where there are fewer processors than shares.
pub fn shares(count: usize) -> Vec<Vec<usize>> {
    split(by_node(allowed(), &nodes()), count)
}

/// The processors of each memory node.
fn nodes() -> Vec<Vec<usize>> {
    let list = |node: usize| fs::read_to_string(format!("/sys/devices/system/node/node{node}/cpulist")).ok();
    (0..).map_while(list).map(|list| numbers(&list)).collect()
}

/// `0-3,8-11` as numbers.
fn numbers(list: &str) -> Vec<usize> {
    let range = |part: &str| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        Some(first.parse::<usize>().ok()?..=last.parse().ok()?)
    };
    list.trim().split(',').filter_map(range).flatten().collect()
}

fn by_node(mut processors: Vec<usize>, nodes: &[Vec<usize>]) -> Vec<usize> {
    processors.sort_by_key(|processor| (nodes.iter().position(|node| node.contains(processor)), *processor));
    processors
}

fn split(processors: Vec<usize>, count: usize) -> Vec<Vec<usize>> {
    if processors.len() < count {
        return Vec::new();
    }
    let border = |share: usize| processors.len() * share / count;
    (0..count).map(|share| processors[border(share)..border(share + 1)].to_vec()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_keep_a_memory_nodes_processors_together() {
        // Two nodes whose second threads come last, as Linux numbers them.
        let nodes = [numbers("0-1,4-5\n"), numbers("2-3,6-7\n")];
        let all = by_node((0..8).collect(), &nodes);
        assert_eq!(split(all.clone(), 2), [[0, 1, 4, 5], [2, 3, 6, 7]]);
        assert_eq!(split(all.clone(), 4), [[0, 1], [4, 5], [2, 3], [6, 7]]);
        assert_eq!(split(all, 3).iter().map(Vec::len).sum::<usize>(), 8);
        assert!(split(vec![0, 1], 3).is_empty());
    }

    #[test]
    fn a_confined_thread_may_use_what_it_was_given() {
        let Some(&first) = allowed().first() else { panic!("no processor is allowed") };
        std::thread::spawn(move || {
            confine(&[first]);
            assert_eq!(allowed(), [first]);
        })
        .join()
        .unwrap();
    }
}
