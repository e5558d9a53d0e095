//! What CUDA refuses, the shim refuses; what runs later, runs later.

use half::bf16;
use windlass_cuda_shim::{HostMachine, Issued, Kernels};
use windlass_kernels::cuda::driver::{DevicePointer, StreamHandle};
use windlass_kernels::cuda::launch::{Argument, Launch};
use windlass_kernels::cuda::{Device, DriverError, Event, Kernel, ops};

use crate::common::{device, refusal, refused};

#[test]
fn memory_is_counted_and_bounded() {
    let device = HostMachine::new(Kernels::Record, 0).device(0, 1000);
    let kept = device.allocate::<u32>(200).unwrap();
    assert_eq!(device.driver().memory().unwrap().free_bytes, 200);
    refused(device.allocate::<u8>(201), "no room for 201 bytes: 200 of 1000 are free");
    drop(kept);
    assert_eq!(device.driver().memory().unwrap().free_bytes, 1000);
}

#[test]
fn memory_that_the_host_does_not_have_is_out_of_memory_and_loses_no_device() {
    let (device, _) = device(0);
    let refused = device.pinned::<u8>(isize::MAX as usize).unwrap_err();
    assert!(refused.is_out_of_memory() && !refused.device_lost(), "{refused}");
    assert!(refused.to_string().contains("the host has no room for"), "{refused}");
    device.upload(&[0u32]).unwrap();
}

#[test]
fn copies_stay_within_one_allocation() {
    let (device, stream) = device(0);
    let (mut small, large) = (device.allocate::<u8>(16).unwrap(), device.allocate::<u8>(32).unwrap());
    let (to, from) = (small.view_mut().pointer(), large.view().pointer());
    refused(device.driver().copy_on_device(to, from, 32, stream.handle()), "not in one piece");
    refused(device.driver().fill(DevicePointer(64), 0, 1, stream.handle()), "are not allocated");
    device.driver().copy_on_device(to, from, 16, stream.handle()).unwrap();
}

#[test]
fn memory_is_freed_once_and_by_its_device() {
    let machine = HostMachine::new(Kernels::Record, 0);
    let (one, other) = (machine.device(0, 1 << 20), machine.device(1, 1 << 20));
    let at = one.driver().allocate(64).unwrap();
    refused(other.driver().free(at), "belongs to another device");
    one.driver().free(at).unwrap();
    refused(one.driver().free(at), "was freed before");
}

#[test]
fn a_device_reaches_a_peer_only_when_told() {
    let machine = HostMachine::new(Kernels::Record, 0);
    let (one, other) = (machine.device(0, 1 << 20), machine.device(1, 1 << 20));
    let mut mine = one.upload(&[1u32; 4]).unwrap();
    let theirs = other.upload(&[2u32; 4]).unwrap();
    let stream = one.stream().unwrap();
    refused(stream.copy(mine.view_mut(), theirs.view()), "does not reach");
    assert!(one.driver().reach(other.facts()).unwrap());
    stream.copy(mine.view_mut(), theirs.view()).unwrap();
    assert_eq!(mine.read(&stream).unwrap(), [2; 4]);
}

#[test]
fn devices_without_peer_access_reach_only_themselves() {
    let machine = HostMachine::new(Kernels::Record, 0).without_peer_access();
    let (one, other) = (machine.device(0, 1 << 20), machine.device(1, 1 << 20));
    assert!(!one.driver().reach(other.facts()).unwrap());
    refused(one.driver().reach(one.facts()), "CUDA_ERROR_INVALID_DEVICE");
    let mut mine = one.upload(&[1u32; 4]).unwrap();
    let theirs = other.upload(&[2u32; 4]).unwrap();
    refused(one.stream().unwrap().copy(mine.view_mut(), theirs.view()), "does not reach");
}

/// A kernel that is told where memory lies: whether the device may touch it comes out when the kernel runs.
#[test]
fn a_kernel_that_follows_an_address_which_its_device_does_not_reach_loses_the_device() {
    let machine = HostMachine::new(Kernels::Record, 0);
    let other = machine.device(9, 1 << 20);
    let theirs = other.upload(&[0u32; 8]).unwrap();
    let launched = |device: &Device, at: DevicePointer| {
        let (stream, addresses) = (device.stream()?, device.upload(&[at])?);
        let (mut words, mut floats) = (device.allocate::<u32>(64)?, device.allocate::<f32>(8)?);
        let launch = Launch::new(Kernel::AddReduced, [1, 1, 1]).with(addresses.view()).with(addresses.view());
        let launch = launch.with(words.view()).with(words.view_mut()).with(floats.view_mut());
        let launch = launch.with(0u32).with(1u32).with(8u32);
        launch.check(device.facts())?;
        // SAFETY: it was checked, and nothing runs.
        unsafe { device.driver().launch(&launch, stream.handle()) }?;
        stream.synchronize()
    };
    let at = theirs.view().pointer();
    let (reaches, stranger, late) =
        (machine.device(0, 1 << 20), machine.device(1, 1 << 20), machine.device(2, 1 << 20));
    assert!([&reaches, &late].iter().all(|device| device.driver().reach(other.facts()).unwrap()));
    launched(&reaches, at).unwrap();
    let lost = |device: &Device, at: DevicePointer| {
        let lost = launched(device, at).unwrap_err();
        assert!(lost.device_lost() && lost.to_string().contains("CUDA_ERROR_ILLEGAL_ADDRESS"), "{lost}");
        assert!(device.upload(&[0u32]).is_err(), "a lost device does nothing more");
    };
    lost(&stranger, at);
    lost(&late, DevicePointer(4096));
}

#[test]
fn a_device_is_lost_when_a_test_says_so() {
    let driver = HostMachine::new(Kernels::Run, 0).driver(0, 1 << 20);
    let (device, stream) = (driver.device(), driver.device().stream().unwrap());
    let mut memory = device.upload(&[1u32; 4]).unwrap();
    driver.lose_after(2, "CUDA_ERROR_ECC_UNCORRECTABLE: it has broken down");
    for _ in 0..2 {
        stream.fill(memory.view_mut(), 0).unwrap();
        stream.synchronize().unwrap();
    }
    let _ = stream.fill(memory.view_mut(), 0);
    let lost = stream.synchronize().unwrap_err();
    assert!(lost.device_lost() && lost.to_string().contains("ECC"), "{lost}");
}

#[test]
fn handles_are_of_one_device() {
    let machine = HostMachine::new(Kernels::Record, 0);
    let (one, other) = (machine.device(0, 1 << 20), machine.device(1, 1 << 20));
    let stream = one.stream().unwrap();
    refused(other.driver().synchronize(stream.handle()), "not of this device");
    refused(other.stream().unwrap().wait(&stream.record().unwrap()), "not of this device");
    refused(one.driver().synchronize(StreamHandle(u64::MAX)), "not of this device");
}

#[test]
fn nothing_is_allocated_freed_or_waited_for_in_a_capture() {
    let (device, stream) = device(0);
    let kept = device.allocate::<u32>(4).unwrap();
    for (call, spoil) in [
        ("cuMemAlloc", &(|| device.allocate::<u32>(4).map(drop)) as &dyn Fn() -> Result<(), DriverError>),
        ("cuMemHostAlloc", &|| device.pinned::<u32>(4).map(drop)),
        ("cuMemFree", &|| device.driver().free(kept.view().pointer())),
        ("cuStreamSynchronize", &|| stream.synchronize()),
    ] {
        // Even where the caller goes on, there is no graph.
        let graph = stream.capture(|| {
            refusal(spoil());
            Ok(())
        });
        refused(graph, &format!("spoiled by {call}"));
    }
    stream.capture(|| Ok(())).unwrap();
}

#[test]
fn a_copy_in_a_capture_needs_pinned_memory() {
    let (device, stream) = device(0);
    let memory = device.allocate::<u8>(4).unwrap();
    let values = [0u8; 4];
    let copy = || {
        // SAFETY: the values outlive the call, which is refused.
        unsafe { device.driver().copy_to_device(memory.view().pointer(), values.as_ptr(), 4, stream.handle()) }
    };
    refused(stream.capture(copy), "needs pinned memory");
}

#[test]
fn a_graph_runs_again_with_what_its_memory_holds_then() {
    let (device, stream) = device(0);
    let input = device.pinned::<u32>(4).unwrap();
    let (mut first, mut second) = (device.allocate::<u32>(4).unwrap(), device.allocate::<u32>(4).unwrap());
    let graph = stream.capture(|| {
        stream.copy_to_device(first.view_mut(), &input, 0)?;
        stream.copy(second.view_mut(), first.view())
    });
    let graph = graph.unwrap();
    for values in [[1, 2, 3, 4], [5, 6, 7, 8]] {
        input.write(0, &values);
        stream.launch_graph(&graph).unwrap();
        assert_eq!(second.read(&stream).unwrap(), values);
    }
    drop(first);
    refused(stream.launch_graph(&graph), "were freed");
}

#[test]
fn work_runs_later_than_it_is_issued() {
    // Of a hundred copies that are not waited for, some are still to come, and all have come after the event.
    let (device, stream) = device(7);
    let source = device.upload(&[9u32]).unwrap();
    let target = device.pinned::<u32>(100).unwrap();
    target.write(0, &[0; 100]);
    for i in 0..100 {
        stream.copy_to_host(&target, i, source.view()).unwrap();
    }
    let event = stream.record().unwrap();
    assert!(target.read(0..100).contains(&0));
    assert!(!event.is_done().unwrap());
    event.synchronize().unwrap();
    assert_eq!(target.read(0..100), [9; 100]);
    assert!(event.is_done().unwrap());
}

#[test]
fn a_stream_that_waits_for_an_event_sees_what_came_before_it() {
    for seed in 0..8 {
        let (device, one) = device(seed);
        let other = device.stream().unwrap();
        let (source, mut middle) = (device.upload(&[9u32]).unwrap(), device.upload(&[0u32]).unwrap());
        one.copy(middle.view_mut(), source.view()).unwrap();
        let event = Event::new(&device).unwrap();
        one.mark(&event).unwrap();
        other.wait(&event).unwrap();
        assert_eq!(middle.read(&other).unwrap(), [9]);
    }
}

fn norm(device: &Device) -> [Argument; 5] {
    let (input, weight) = (device.upload(&[0f32; 8]).unwrap(), device.upload(&[0f32; 8]).unwrap());
    let mut out = device.allocate::<bf16>(8).unwrap();
    [input.view().into(), weight.view().into(), out.view_mut().into(), 8u32.into(), 0f32.into()]
}

fn check(device: &Device, grid: [u32; 3], shared: u32, arguments: &[Argument]) -> String {
    let launch = Launch::new(Kernel::RmsNorm, grid).shared(shared);
    let launch = arguments.iter().fold(launch, |launch, &argument| launch.with(argument));
    launch.check(device.facts()).map_or_else(|error| error.to_string(), |()| "sound".into())
}

#[test]
fn a_launch_is_checked_against_the_table() {
    let (device, _) = device(0);
    let sound = norm(&device);
    assert_eq!(check(&device, [1, 1, 1], 0, &sound), "sound");
    let with = |place: usize, argument: Argument| {
        let mut arguments = sound;
        arguments[place] = argument;
        check(&device, [1, 1, 1], 0, &arguments)
    };
    let cases = [
        (check(&device, [1, 1, 1], 0, &sound[..4]), "4 arguments; it has 5 parameters"),
        (check(&device, [0, 1, 1], 0, &sound), "a grid of [0, 1, 1] blocks"),
        (check(&device, [1, 65_536, 1], 0, &sound), "a grid of [1, 65536, 1] blocks"),
        (check(&device, [1, 1, 1], 4, &sound), "4 bytes of shared memory; at most 0"),
        (with(3, 8f32.into()), "argument cols is of another kind"),
        (with(0, sound[2]), "argument input has elements of another type"),
        (with(2, Argument::none::<f32>()), "argument out has elements of another type"),
    ];
    for (found, expected) in cases {
        assert!(found.contains(expected), "{found:?} does not say {expected:?}");
    }
    let odd = Argument::Memory {
        at: DevicePointer(8),
        bytes: 32,
        element: windlass_kernels::cuda::ElementType::F32,
        writable: false,
    };
    assert!(with(0, odd).contains("input is no multiple of 16"));
    let read_only = match sound[2] {
        Argument::Memory { at, bytes, element, .. } => Argument::Memory { at, bytes, element, writable: false },
        other => other,
    };
    assert!(with(2, read_only).contains("out may only be read"));
}

#[test]
fn launches_are_recorded_in_order() {
    let driver = HostMachine::new(Kernels::Record, 0).driver(0, 1 << 20);
    let device = driver.device();
    let stream = device.stream().unwrap();
    let weight = device.upload(&[1f32; 8]).unwrap();
    let mut out = device.allocate::<bf16>(8).unwrap();
    let graph = stream.capture(|| ops::rms_norm(&stream, weight.view(), weight.view(), 0.0, out.view_mut())).unwrap();
    stream.launch_graph(&graph).unwrap();
    let expected = [Issued::Copy(32), Issued::Launch(Kernel::RmsNorm), Issued::Graph(1)];
    assert_eq!(driver.issued(), expected);
}
