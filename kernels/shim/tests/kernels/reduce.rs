//! What ranks exchange: each has a device and a thread.

use std::thread;

use half::bf16;
use windlass_cuda_shim::{HostDriver, HostMachine, Issued, Kernels};
use windlass_kernels::cuda::ops::{ExchangeSizes, Ground, PeerRank};
use windlass_kernels::cuda::{Device, Kernel, Stream};

use crate::common::{Random, poisoned};

/// Rounds that follow one another on the same buffers, by turns of four kinds.
const ROUNDS: usize = 12;
const ROWS: usize = 3;

/// A machine whose devices meet in one of the ways that there are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    Devices,
    Carried,
    Host,
}

impl Way {
    const ALL: [Way; 3] = [Way::Devices, Way::Carried, Way::Host];

    fn machine(self, seed: u64) -> HostMachine {
        let machine = HostMachine::new(Kernels::Run, seed);
        match self {
            Way::Devices => machine,
            Way::Carried => machine.without_peer_access().with_carrier(),
            Way::Host => machine.without_peer_access(),
        }
    }

    fn of(ground: &Ground) -> Way {
        match ground {
            Ground::Devices => Way::Devices,
            Ground::Carried(_) => Way::Carried,
            Ground::Host(_) => Way::Host,
        }
    }
}

/// What a rank does with its place in a group that meets in such a way; `sizes` are those of a group over devices.
fn on_ranks<T: Send>(
    ranks: usize,
    way: Way,
    sizes: &ExchangeSizes,
    seed: u64,
    task: impl Fn(usize, &Device, &Stream, &mut PeerRank) -> T + Sync,
) -> Vec<T> {
    let machine = way.machine(seed);
    let devices: Vec<Device> = (0..ranks).map(|ordinal| machine.device(ordinal, 1 << 24)).collect();
    let ground = Ground::between(&devices).unwrap();
    assert!(ranks == 1 || Way::of(&ground) == way);
    let group = PeerRank::group(&devices, &ExchangeSizes { ground, ..sizes.clone() }).unwrap();
    let (task, devices) = (&task, &devices);
    thread::scope(|scope| {
        let run = |(rank, mut member): (usize, PeerRank)| {
            scope.spawn(move || {
                let found = task(rank, &devices[rank], &devices[rank].stream().unwrap(), &mut member);
                (member, found)
            })
        };
        let threads: Vec<_> = group.into_iter().enumerate().map(run).collect();
        // Nobody's memory goes away while another still reads it.
        let ended: Vec<_> = threads.into_iter().map(|thread| thread.join().unwrap()).collect();
        ended.into_iter().map(|(_, found)| found).collect()
    })
}

/// What each rank finds after every round, in f32, and what it should find.
fn exchanged(
    widths: &[usize],
    values: usize,
    two_shots_from: usize,
    way: Way,
    seed: u64,
) -> (Vec<Vec<Vec<f32>>>, Vec<Vec<f32>>) {
    let ranks = widths.len();
    let columns = widths.to_vec();
    let ground = Ground::Devices;
    let sizes = ExchangeSizes { tokens: 1, hidden: values + 8, rows: ROWS, columns, two_shots_from, ground };
    let mut random = Random::new(seed);
    let parts: Vec<Vec<Vec<bf16>>> =
        (0..ROUNDS).map(|_| (0..ranks).map(|_| random.halves(values.max(ROWS * 700), 3.0)).collect()).collect();
    let floats = |part: &[bf16]| part.iter().map(|value| value.to_f32() / 3.0).collect::<Vec<f32>>();
    let mut residual = vec![1.0_f32; values];
    let mut expected = Vec::new();
    for (round, parts) in parts.iter().enumerate() {
        let sum = |part: &dyn Fn(usize) -> Vec<f32>| -> Vec<f32> {
            let parts: Vec<Vec<f32>> = (0..ranks).map(part).collect();
            (0..values).map(|i| parts.iter().fold(0.0, |sum, part| sum + part[i])).collect()
        };
        let halves = sum(&|rank| parts[rank].iter().map(|value| value.to_f32()).collect());
        expected.push(match round % 4 {
            0 => sum(&|rank| floats(&parts[rank])),
            1 => {
                residual.iter_mut().zip(halves).for_each(|(held, sum)| *held += sum);
                residual.clone()
            }
            2 => halves.into_iter().map(|sum| bf16::from_f32(sum).to_f32()).collect(),
            _ => (0..ROWS)
                .flat_map(|row| {
                    let columns = parts.iter().zip(widths).map(move |(part, &width)| &part[row * width..][..width]);
                    columns.flatten().map(|value| value.to_f32() / 3.0)
                })
                .collect(),
        });
    }
    let found = on_ranks(ranks, way, &sizes, seed, |rank, device, stream, member| {
        let mut residual = poisoned::<f32>(device, values);
        stream.copy(residual.view_mut(), device.upload(&vec![1.0_f32; values]).unwrap().view()).unwrap();
        let mut found = Vec::new();
        for (round, parts) in parts.iter().enumerate() {
            // In every round another one lets the others go first.
            if round % ranks == rank {
                thread::yield_now();
            }
            let (own, floats) = (&parts[rank], floats(&parts[rank]));
            found.push(match round % 4 {
                0 => {
                    let mut out = poisoned::<f32>(device, values);
                    let part = device.upload(&floats[..values]).unwrap();
                    stream.copy(member.floats(values), part.view()).unwrap();
                    member.reduce_floats(stream, out.view_mut()).unwrap();
                    out.read(stream).unwrap()
                }
                1 => {
                    stream.copy(member.part(values), device.upload(&own[..values]).unwrap().view()).unwrap();
                    member.add_reduced(stream, residual.view_mut()).unwrap();
                    residual.read(stream).unwrap()
                }
                2 => {
                    let mut out = poisoned::<bf16>(device, values);
                    stream.copy(member.part(values), device.upload(&own[..values]).unwrap().view()).unwrap();
                    member.reduce(stream, out.view_mut()).unwrap();
                    out.read(stream).unwrap().iter().map(|value| value.to_f32()).collect()
                }
                _ => {
                    let mut out = poisoned::<f32>(device, ROWS * widths.iter().sum::<usize>());
                    let part = device.upload(&floats[..ROWS * widths[rank]]).unwrap();
                    stream.copy(member.columns(ROWS), part.view()).unwrap();
                    member.gather_columns(stream, out.view_mut()).unwrap();
                    out.read(stream).unwrap()
                }
            });
        }
        found
    });
    (found, expected)
}

#[test]
fn ranks_put_together_what_all_of_them_hold_round_after_round() {
    let cases: [(&[usize], usize); 6] =
        [(&[5], 8), (&[3, 2], 8), (&[161, 162], 4104), (&[1, 700, 40], 2048), (&[9, 9, 9, 9], 20_000), (&[4; 8], 4104)];
    for (seed, (widths, values)) in cases.into_iter().enumerate() {
        let ways = [usize::MAX, 0].map(|shots| Way::ALL.map(|way| (shots, way)));
        for (two_shots_from, way) in ways.concat() {
            let (found, expected) = exchanged(widths, values, two_shots_from, way, 40 + seed as u64);
            for (rank, found) in found.iter().enumerate() {
                for (round, (found, expected)) in found.iter().zip(&expected).enumerate() {
                    let ranks = widths.len();
                    let shots = if two_shots_from == 0 { "two shots" } else { "one shot" };
                    assert!(
                        found == expected,
                        "{shots}, {way:?}: rank {rank} of {ranks}, {values} values, round {round}"
                    );
                }
            }
        }
    }
}

/// From the size on that is asked for, and in a group's own choice never with so few ranks that a second shot saves nothing.
#[test]
fn many_values_take_two_shots_and_few_take_one() {
    assert_eq!([1, 2, 3].map(ExchangeSizes::two_shots_from), [usize::MAX; 3]);
    assert_eq!([4, 5, 8].map(ExchangeSizes::two_shots_from), [512 << 10, 192 << 10, 157_286]);
    let machine = HostMachine::new(Kernels::Record, 1);
    let drivers = [0, 1].map(|ordinal| machine.driver(ordinal, 1 << 24));
    let devices = drivers.each_ref().map(HostDriver::device);
    let ground = Ground::between(&devices).unwrap();
    let sizes = |two_shots_from| ExchangeSizes {
        tokens: 4,
        hidden: 64,
        rows: 1,
        columns: vec![8; 2],
        two_shots_from,
        ground: ground.clone(),
    };
    // Half of the values for each of the two, in f32.
    assert_eq!(sizes(128).device_bytes(0) - sizes(264).device_bytes(0), 128 * 4);
    assert_eq!(ExchangeSizes { ground: Ground::Host("a reason".into()), ..sizes(128) }.device_bytes(0), 0);
    let mut group = PeerRank::group(&devices, &sizes(128)).unwrap();
    let stream = devices[0].stream().unwrap();
    let mut launched = |values: usize| {
        let before = drivers[0].issued().len();
        let mut residual = poisoned::<f32>(&devices[0], values);
        let mut out = poisoned::<bf16>(&devices[0], values);
        group[0].add_reduced(&stream, residual.view_mut()).unwrap();
        group[0].reduce(&stream, out.view_mut()).unwrap();
        let issued = drivers[0].issued();
        let kernel = |work: &Issued| if let Issued::Launch(kernel) = work { Some(*kernel) } else { None };
        issued[before..].iter().filter_map(kernel).collect::<Vec<_>>()
    };
    assert_eq!(launched(120), [Kernel::AddReduced, Kernel::Reduced]);
    let two = [Kernel::ReducedShare, Kernel::AddShares, Kernel::ReducedShare, Kernel::RoundShares];
    assert_eq!([launched(128), launched(256)], [two, two]);
}

#[test]
fn nobody_waits_for_a_rank_that_has_left() {
    let (columns, ground) = (vec![8; 3], Ground::Devices);
    let sizes = ExchangeSizes { tokens: 1, hidden: 8, rows: 1, columns, two_shots_from: 0, ground };
    for way in Way::ALL {
        let found = on_ranks(3, way, &sizes, 5, |rank, device, stream, member| {
            if rank == 1 {
                member.peers().leave(1, "it has broken down");
                member.peers().leave(1, "and again");
                return member.peers().why_left();
            }
            let mut residual = device.upload(&[0.0_f32; 8]).unwrap();
            // What is carried is refused once it has ended.
            let _ = (0..4).try_for_each(|_| member.add_reduced(stream, residual.view_mut()));
            stream.synchronize().unwrap();
            member.peers().why_left()
        });
        assert_eq!(found, vec![Some("rank 1 of 3 has left: it has broken down".to_owned()); 3], "{way:?}");
    }
}

#[test]
fn who_waits_for_an_event_does_not_wait_for_peers_behind_it() {
    let machine = HostMachine::new(Kernels::Run, 5);
    let drivers = [0, 1].map(|ordinal| machine.driver(ordinal, 1 << 24));
    let devices = drivers.each_ref().map(HostDriver::device);
    let (columns, ground) = (vec![8; 2], Ground::between(&devices).unwrap());
    let sizes = ExchangeSizes { tokens: 1, hidden: 8, rows: 1, columns, two_shots_from: usize::MAX, ground };
    let mut group = PeerRank::group(&devices, &sizes).unwrap();
    let streams = devices.each_ref().map(|device| device.stream().unwrap());
    let mut residuals = devices.each_ref().map(|device| device.upload(&[1.0_f32; 8]).unwrap());
    let mut issue = |rank: usize| {
        streams[rank].fill(group[rank].part(8), 0).unwrap();
        let event = streams[rank].record().unwrap();
        group[rank].add_reduced(&streams[rank], residuals[rank].view_mut()).unwrap();
        event
    };
    let event = issue(0);
    while drivers[0].pending() > 0 {
        thread::yield_now();
    }
    // The kernel runs, and will until the other rank's does.
    event.synchronize().unwrap();
    issue(1);
    for (stream, residual) in streams.iter().zip(&residuals) {
        assert_eq!(residual.read(stream).unwrap(), [1.0; 8]);
    }
}
