//! What carries between devices that do not reach each other: what it gives, and what it refuses.

use std::sync::Arc;
use std::thread;

use windlass_cuda_shim::{HostMachine, Kernels};
use windlass_kernels::cuda::driver::Carrier;
use windlass_kernels::cuda::ops::Ground;
use windlass_kernels::cuda::{Device, DriverError, Memory, Stream};

/// Numbers of each rank.
const PART: usize = 4;
const BYTES: usize = PART * size_of::<u32>();

/// What a rank has.
type Part = (Stream, Memory<u32>);

fn devices(machine: &HostMachine) -> [Device; 2] {
    [0, 1].map(|ordinal| machine.device(ordinal, 1 << 20))
}

fn machine() -> HostMachine {
    HostMachine::new(Kernels::Run, 3).without_peer_access().with_carrier()
}

fn connected(devices: &[Device; 2]) -> Arc<dyn Carrier> {
    devices[0].driver().connect(&devices.each_ref().map(Device::facts)).unwrap()
}

/// A rank's memory, with numbers of its own everywhere.
fn part(device: &Device, rank: usize) -> Part {
    (device.stream().unwrap(), device.upload(&[rank as u32; 2 * PART]).unwrap())
}

fn refused<T>(result: Result<T, DriverError>, why: &str) {
    let error = result.map(|_| ()).unwrap_err();
    assert!(error.to_string().contains(why) && !error.device_lost(), "{error}");
}

#[test]
fn a_machine_says_what_carries_or_why_nothing_does() {
    let carried = Ground::between(&devices(&machine())).unwrap();
    assert_eq!(carried.carrier().unwrap().name(), "the shim's carrier");
    let Ground::Host(why) =
        Ground::between(&devices(&HostMachine::new(Kernels::Run, 3).without_peer_access())).unwrap()
    else {
        panic!("nothing carries")
    };
    assert_eq!(why, "dlopen failed: there is nothing that carries data between devices");
    assert!(matches!(
        Ground::between(&devices(&HostMachine::new(Kernels::Run, 3).with_carrier())),
        Ok(Ground::Devices)
    ));
}

#[test]
fn ranks_are_devices_of_the_machine_and_each_another() {
    let devices = devices(&machine());
    let facts = devices[0].facts();
    refused(devices[0].driver().connect(&[facts, facts]), "same device");
    let stranger = machine().device(7, 1 << 20);
    refused(devices[0].driver().connect(&[facts, stranger.facts()]), "not of this machine");
}

#[test]
fn every_rank_gets_the_parts_of_all_in_their_places() {
    let devices = devices(&machine());
    let carrier = connected(&devices);
    let found: Vec<Vec<u32>> = thread::scope(|scope| {
        let (carrier, devices) = (&carrier, &devices);
        let run = |rank: usize| {
            scope.spawn(move || {
                let (stream, memory) = part(&devices[rank], rank + 5);
                carrier.all_gather(rank, memory.view().pointer(), BYTES, stream.handle()).unwrap();
                memory.read(&stream).unwrap()
            })
        };
        [0, 1].map(run).into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert_eq!(found, [[5, 5, 5, 5, 6, 6, 6, 6]; 2]);
}

#[test]
fn what_nccl_refuses_is_refused() {
    let devices = devices(&machine());
    let carrier = connected(&devices);
    let (stream, memory) = part(&devices[0], 0);
    let at = memory.view().pointer();
    let gather = |stream: &Stream| carrier.all_gather(0, at, BYTES, stream.handle());
    refused(stream.capture(|| gather(&stream)), "cannot be captured");
    refused(gather(&devices[1].stream().unwrap()), "not of this device");
    refused(carrier.all_gather(0, at, 2 * BYTES, stream.handle()), "not allocated");
    let pinned = devices[0].pinned::<u32>(2 * PART).unwrap();
    refused(carrier.all_gather(0, pinned.on_device().pointer(), BYTES, stream.handle()), "memory of the host");
    carrier.abort();
    refused(gather(&stream), "was ended");
    assert_eq!(carrier.failure(), None);
}

/// Each of these would never come to an end, or give nonsense.
#[test]
fn ranks_that_do_not_ask_for_the_same_are_told() {
    let ended = |issue: &dyn Fn(&dyn Carrier, &[Part; 2])| {
        let devices = devices(&machine());
        let Ground::Carried(carrier) = Ground::between(&devices).unwrap() else { panic!("nothing carries") };
        let parts = [0, 1].map(|rank| part(&devices[rank], rank));
        issue(&*carrier, &parts);
        parts.iter().for_each(|(stream, _)| stream.synchronize().unwrap());
        carrier.failure()
    };
    let gather = |carrier: &dyn Carrier, (stream, memory): &Part, rank, bytes| {
        carrier.all_gather(rank, memory.view().pointer(), bytes, stream.handle())
    };
    let sizes = ended(&|carrier, parts| {
        gather(carrier, &parts[0], 0, BYTES).unwrap();
        gather(carrier, &parts[1], 1, BYTES / 2).unwrap();
    });
    assert_eq!(sizes.as_deref(), Some("rank 1 gathers 8 bytes where rank 0 gathers 16"));
    let graphs = ended(&|carrier, parts| {
        gather(carrier, &parts[0], 0, BYTES).unwrap();
        let graph = parts[1].0.capture(|| gather(carrier, &parts[1], 1, BYTES)).unwrap();
        parts[1].0.launch_graph(&graph).unwrap();
    });
    assert!(graphs.unwrap().contains("in a graph"));
    let fine = ended(&|carrier, parts| {
        let graphs = [0, 1].map(|rank| {
            let (stream, _) = &parts[rank];
            stream.capture(|| gather(carrier, &parts[rank], rank, BYTES)).unwrap()
        });
        parts.iter().zip(&graphs).for_each(|((stream, _), graph)| stream.launch_graph(graph).unwrap());
        parts.iter().for_each(|(stream, _)| stream.synchronize().unwrap());
    });
    assert_eq!(fine, None);
}
