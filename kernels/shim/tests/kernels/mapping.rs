//! Memory that gets its addresses by mapping: CUDA's rules on it, and regions, which keep them.

use std::sync::Arc;

use windlass_cuda_shim::{HostDriver, HostMachine, Issued, Kernels};
use windlass_kernels::cuda::driver::{DevicePointer, Driver, PhysicalHandle};
use windlass_kernels::cuda::{Device, DriverError, Memory, Region};

use crate::common::refused;

/// A device of sixteen pieces.
const PIECES: usize = 16;

fn machine() -> HostMachine {
    HostMachine::new(Kernels::Run, 3)
}

/// A device, and what its memory is mapped in multiples of.
fn device() -> (Arc<HostDriver>, usize) {
    let piece = machine().driver(0, 1).facts().map_granularity.unwrap();
    (machine().driver(0, PIECES * piece), piece)
}

fn free(driver: &dyn Driver) -> usize {
    driver.memory().unwrap().free_bytes
}

/// Memory at these addresses, that the device may use.
fn usable(driver: &dyn Driver, at: DevicePointer, bytes: usize) {
    let memory = driver.create_physical(bytes).unwrap();
    driver.map(at, bytes, memory).unwrap();
    driver.release_physical(memory).unwrap();
    driver.allow(at, bytes).unwrap();
}

#[test]
fn what_is_reserved_made_and_mapped_comes_in_whole_pieces() {
    let (driver, piece) = device();
    for bytes in [0, 1, piece - 1, piece + 1] {
        refused(driver.reserve(bytes), "is no multiple of");
        refused(driver.create_physical(bytes), "is no multiple of");
    }
    let (at, memory) = (driver.reserve(4 * piece).unwrap(), driver.create_physical(piece).unwrap());
    refused(driver.map(at.plus(piece / 2), piece, memory), "is no multiple of");
    refused(driver.map(at, piece / 2, memory), "is no multiple of");
    refused(driver.create_physical(PIECES * piece), "no room for");
    driver.create_physical((PIECES - 1) * piece).unwrap();
    assert_eq!(free(&*driver), 0);
}

#[test]
fn memory_is_mapped_whole_where_addresses_are_reserved_and_nothing_lies() {
    let (driver, piece) = device();
    let (at, memory) = (driver.reserve(4 * piece).unwrap(), driver.create_physical(2 * piece).unwrap());
    let allocated = driver.allocate(piece).unwrap();
    refused(driver.map(DevicePointer(64 * piece as u64), 2 * piece, memory), "are not reserved");
    refused(
        driver.map(DevicePointer(allocated.0 / piece as u64 * piece as u64), 2 * piece, memory),
        "are not reserved",
    );
    refused(driver.map(at.plus(3 * piece), 2 * piece, memory), "are not reserved, or not in one piece");
    refused(driver.map(at, piece, memory), "has 16384 bytes, not 8192");
    refused(driver.map(at, 2 * piece, PhysicalHandle(u64::MAX)), "was not created");
    driver.map(at.plus(piece), 2 * piece, memory).unwrap();
    for first in 0..3 {
        refused(driver.map(at.plus(first * piece), 2 * piece, memory), "memory is mapped at");
    }
    let small = driver.create_physical(piece).unwrap();
    driver.map(at, piece, small).unwrap();
    driver.release_physical(small).unwrap();
    refused(driver.map(at.plus(3 * piece), piece, small), "was released before");
}

#[test]
fn mapped_memory_is_used_from_when_that_is_allowed_until_it_is_unmapped() {
    let (driver, piece) = device();
    let (device, stream) = (driver.device(), driver.device().stream().unwrap());
    let fill = |at, bytes| driver.fill(at, 7, bytes, stream.handle());
    let at = driver.reserve(4 * piece).unwrap();
    refused(fill(at, 1), "is reserved, and nothing is mapped there");
    let memory = driver.create_physical(piece).unwrap();
    driver.map(at, piece, memory).unwrap();
    refused(fill(at, 1), "was not allowed to use");
    refused(driver.allow(at, 2 * piece), "nothing is mapped at");
    refused(driver.allow(at.plus(2 * piece), piece), "nothing is mapped at");
    driver.allow(at, piece).unwrap();
    fill(at, piece).unwrap();
    refused(fill(at, piece + 1), "nothing is mapped there");
    // Neighbours are memory in one piece, and a copy may go over both.
    usable(&*driver, at.plus(piece), 2 * piece);
    fill(at.plus(piece / 2), 2 * piece).unwrap();
    let host = device.pinned::<u8>(2 * piece).unwrap();
    // SAFETY: the copy is waited for.
    unsafe { driver.copy_to_host(host.on_device().pointer().0 as *mut u8, at, 2 * piece, stream.handle()) }.unwrap();
    stream.synchronize().unwrap();
    assert_eq!(host.read(0..2 * piece), vec![7; 2 * piece]);
    refused(driver.unmap(at, 2 * piece), "has not these");
    refused(driver.unmap(at.plus(2 * piece), piece), "has not these");
    // What was issued before is done when memory goes; some of so much is not, until then.
    (0..8).for_each(|_| fill(at, piece).unwrap());
    driver.unmap(at, piece).unwrap();
    stream.synchronize().unwrap();
    refused(driver.unmap(at, piece), "has not these");
    refused(fill(at, 1), "nothing is mapped there");
    fill(at.plus(piece), 2 * piece).unwrap();
}

#[test]
fn memory_is_there_until_it_has_neither_handle_nor_address() {
    let (driver, piece) = device();
    let (all, at) = (free(&*driver), driver.reserve(2 * piece).unwrap());
    let memory = driver.create_physical(piece).unwrap();
    assert_eq!(free(&*driver), all - piece);
    driver.map(at, piece, memory).unwrap();
    driver.release_physical(memory).unwrap();
    refused(driver.release_physical(memory), "was released before");
    assert_eq!(free(&*driver), all - piece);
    driver.unmap(at, piece).unwrap();
    assert_eq!(free(&*driver), all);
    let memory = driver.create_physical(piece).unwrap();
    driver.map(at, piece, memory).unwrap();
    driver.unmap(at, piece).unwrap();
    assert_eq!(free(&*driver), all - piece);
    driver.release_physical(memory).unwrap();
    assert_eq!(free(&*driver), all);
}

#[test]
fn addresses_are_given_back_as_they_were_reserved_and_with_nothing_behind_them() {
    let (driver, piece) = device();
    let at = driver.reserve(2 * piece).unwrap();
    refused(driver.unreserve(at, piece), "16384 bytes were reserved");
    refused(driver.unreserve(at.plus(piece), piece), "was not reserved");
    refused(driver.free(at), "was not allocated");
    usable(&*driver, at, piece);
    refused(driver.unreserve(at, 2 * piece), "memory is mapped there");
    driver.unmap(at, piece).unwrap();
    driver.unreserve(at, 2 * piece).unwrap();
    refused(driver.unreserve(at, 2 * piece), "given back before");
}

#[test]
fn nothing_is_mapped_in_a_capture() {
    let (driver, piece) = device();
    let (at, memory) = (driver.reserve(4 * piece).unwrap(), driver.create_physical(piece).unwrap());
    usable(&*driver, at, piece);
    let stream = driver.device().stream().unwrap();
    for (call, spoil) in [
        ("cuMemAddressReserve", &(|| driver.reserve(piece).map(drop)) as &dyn Fn() -> Result<(), DriverError>),
        ("cuMemCreate", &|| driver.create_physical(piece).map(drop)),
        ("cuMemMap", &|| driver.map(at.plus(piece), piece, memory)),
        ("cuMemSetAccess", &|| driver.allow(at, piece)),
        ("cuMemUnmap", &|| driver.unmap(at, piece)),
        ("cuMemRelease", &|| driver.release_physical(memory)),
        ("cuMemAddressFree", &|| driver.unreserve(at, 4 * piece)),
    ] {
        let graph = stream.capture(|| {
            refused(spoil(), "while a stream is captured");
            Ok(())
        });
        refused(graph, &format!("spoiled by {call}"));
    }
}

#[test]
fn a_peer_does_not_reach_what_is_mapped() {
    let machine = machine();
    let [one, other] = [0, 1].map(|ordinal| machine.driver(ordinal, 1 << 20));
    let (piece, stream) = (one.facts().map_granularity.unwrap(), other.device().stream().unwrap());
    assert!(other.reach(one.facts()).unwrap());
    let at = one.reserve(piece).unwrap();
    usable(&*one, at, piece);
    refused(other.fill(at, 0, 1, stream.handle()), "was not allowed to use");
    other.allow(at, piece).unwrap();
    other.fill(at, 0, 1, stream.handle()).unwrap();
}

#[test]
fn a_device_that_maps_no_memory_has_no_regions() {
    let driver = machine().without_mapping().driver(0, 1 << 20);
    refused(driver.reserve(1 << 16), "CUDA_ERROR_NOT_SUPPORTED");
    refused(driver.create_physical(1 << 16), "CUDA_ERROR_NOT_SUPPORTED");
    let device = driver.device();
    let region = Region::of(&device).unwrap();
    assert!(region.is_none());
    let memory = device.within(region.as_ref()).allocate::<u8>(1 << 10).unwrap();
    assert_eq!(free(&*driver), (1 << 20) - (1 << 10));
    drop(memory);
    assert_eq!(free(&*driver), 1 << 20);
}

fn region(device: &Device) -> Arc<Region> {
    Region::of(device).unwrap().unwrap()
}

#[test]
fn what_lies_in_a_region_rounds_up_once_and_goes_with_it() {
    let (driver, piece) = device();
    let (device, all) = (driver.device(), free(&*driver));
    let region = region(&device);
    let within = device.within(Some(&region));
    assert_eq!(free(&*driver), all, "addresses take no memory");
    let small: Vec<Memory<u8>> = (0..8).map(|_| within.allocate(100).unwrap()).collect();
    assert_eq!((free(&*driver), region.bytes()), (all - piece, piece));
    assert!(small.iter().all(|memory| memory.view().pointer().0.is_multiple_of(256)));
    let large = within.allocate::<f32>(piece).unwrap();
    assert_eq!((free(&*driver), region.bytes()), (all - 5 * piece, 5 * piece));
    let ends = |memory: &Memory<u8>| memory.view().pointer().0 + 100;
    assert!(small.windows(2).all(|pair| ends(&pair[0]) <= pair[1].view().pointer().0));
    assert!(ends(&small[7]) <= large.view().pointer().0);
    refused(within.allocate::<u8>(12 * piece), "no room for");
    drop((within, region, small));
    assert_eq!(free(&*driver), all - 5 * piece, "some of it is still there");
    let (stream, at) = (device.stream().unwrap(), large.view().pointer());
    drop(large);
    assert_eq!(free(&*driver), all);
    refused(driver.fill(at, 0, 1, stream.handle()), "are not allocated");
}

/// Pieces of a kind whose boundaries lie inside what was allocated.
fn filled(within: &Device) -> Vec<Memory<u32>> {
    let values = |from: u32| (from..from + 3000).collect::<Vec<u32>>();
    (0..4).map(|index| within.upload(&values(index * 10_000)).unwrap()).collect()
}

fn sums(device: &Device, memories: &[Memory<u32>]) -> Vec<u64> {
    let stream = device.stream().unwrap();
    let sum = |memory: &Memory<u32>| memory.read(&stream).unwrap().into_iter().map(u64::from).sum();
    memories.iter().map(sum).collect()
}

#[test]
fn what_is_kept_comes_back_to_its_addresses_and_is_copied_to_the_host_once() {
    let (driver, _) = device();
    let (device, all) = (driver.device(), free(&*driver));
    let region = region(&device);
    let memories = filled(&device.within(Some(&region)));
    let (before, taken) = (sums(&device, &memories), region.bytes());
    assert_eq!(region.bytes_to_keep(), taken);
    for _ in 0..3 {
        region.keep().unwrap();
        assert_eq!((region.bytes_to_keep(), region.is_held()), (0, true));
        region.give_back().unwrap();
        assert_eq!((free(&*driver), region.is_held(), region.bytes()), (all, false, taken));
        let stream = device.stream().unwrap();
        refused(driver.fill(memories[0].view().pointer(), 0, 4, stream.handle()), "nothing is mapped there");
        refused(device.within(Some(&region)).allocate::<u8>(1), "was given back");
        region.take_back().unwrap();
        assert_eq!((free(&*driver), region.is_held()), (all - taken, true));
        assert_eq!(sums(&device, &memories), before);
    }
    let copies: usize =
        driver.issued().iter().map(|work| if let Issued::Copy(bytes) = work { *bytes } else { 0 }).sum();
    // Up and four times to be read; and whole pieces, to the host once and back three times.
    assert_eq!(copies, 5 * 4 * 12_000 + 4 * taken);
}

#[test]
fn what_is_not_kept_is_lost_and_what_is_written_since_is_kept_anew() {
    let (driver, _) = device();
    let device = driver.device();
    let region = region(&device);
    let mut memories = filled(&device.within(Some(&region)));
    let before = sums(&device, &memories);
    region.give_back().unwrap();
    region.take_back().unwrap();
    assert!(sums(&device, &memories).iter().all(|sum| !before.contains(sum)));
    region.keep().unwrap();
    memories.extend([device.within(Some(&region)).upload(&[5u32; 9000]).unwrap()]);
    assert_eq!(region.bytes_to_keep(), region.bytes());
    region.keep().unwrap();
    region.give_back().unwrap();
    region.take_back().unwrap();
    assert_eq!(sums(&device, &memories)[4], 45_000);
}

#[test]
fn a_region_that_finds_no_room_takes_none_and_tries_again() {
    let (driver, piece) = device();
    let (device, all) = (driver.device(), free(&*driver));
    let region = region(&device);
    let memories = filled(&device.within(Some(&region)));
    let before = sums(&device, &memories);
    region.keep().unwrap();
    region.give_back().unwrap();
    let other = device.allocate::<u8>(all - region.bytes() + piece).unwrap();
    let left = free(&*driver);
    refused(region.take_back(), "no room for");
    assert_eq!((free(&*driver), region.is_held()), (left, false), "not a part of it either");
    drop(other);
    region.take_back().unwrap();
    assert_eq!(sums(&device, &memories), before);
}

#[test]
fn a_graph_runs_on_with_what_lies_at_its_addresses() {
    let (driver, _) = device();
    let (device, stream) = (driver.device(), driver.device().stream().unwrap());
    let region = region(&device);
    let source = device.within(Some(&region)).upload(&[9u32; 4]).unwrap();
    let mut target = device.upload(&[0u32; 4]).unwrap();
    let graph = stream.capture(|| stream.copy(target.view_mut(), source.view())).unwrap();
    region.keep().unwrap();
    region.give_back().unwrap();
    refused(stream.launch_graph(&graph), "nothing is mapped there");
    region.take_back().unwrap();
    stream.launch_graph(&graph).unwrap();
    assert_eq!(target.read(&stream).unwrap(), [9; 4]);
    drop((source, region));
    refused(stream.launch_graph(&graph), "were freed");
}

#[test]
fn a_lost_device_keeps_nothing_and_says_so() {
    let (driver, _) = device();
    let device = driver.device();
    let region = region(&device);
    let _memories = filled(&device.within(Some(&region)));
    driver.lose_after(0, "CUDA_ERROR_ECC_UNCORRECTABLE: it has broken down");
    assert!(region.keep().unwrap_err().device_lost());
    assert!(region.take_back().unwrap_err().device_lost());
}
